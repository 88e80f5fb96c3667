"""The roles of sites in the native measurer."""

from __future__ import annotations

from kedge import native
from kedge.sites.site import Site

_ROLES = {
    "out": native.AS_OUTPUT,
    "in": native.AS_INPUT,
    **dict.fromkeys(("param", "param.grad", "param.acc", "grad", "acc"), native.AS_LASTING),
}


def role_of(site: Site) -> int:
    """Return the role of a site's values, as `kedge.native` calls it."""
    return _ROLES.get(site.kind, native.AS_VALUE)
