"""The sites and roots of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from kedge.errors import NoSuchSite
from kedge.frames import SourceLine
from kedge.short_text import counted
from kedge.sites.site import escape


@dataclass(frozen=True)
class SiteInfo:
    """One site of a recording.

    ``sources`` are the ids of the sites that made the input tensors, None for a tensor that no
    watched site made. ``owner`` is the path of the module that owns a parameter, and the path
    itself for a module's site. ``shape`` is the first one seen. ``source`` is the program's line
    that calls the module. ``copies`` are the ranks that hold the same elements of a distributed
    value as this one; None for an ordinary value.
    ``partial`` says that its elements are still to be added up over those ranks.

    It is one entry of ``sites.json``, which is why it has so many fields.
    """

    id: int
    site: str
    path: str
    kind: str
    type: str
    root: int
    shape: tuple[int, ...]
    dtype: str
    channels: int | None
    sources: tuple[int | None, ...]
    owner: str
    node: str | None
    source: SourceLine | None = None
    copies: tuple[int, ...] | None = None
    partial: bool = False

    @property
    def name(self) -> str:
        """The path as it is shown: in the site language, as in ``site``."""
        return escape(self.path)


@dataclass(frozen=True)
class Root:
    """One module that the program calls itself; its paths begin with ``prefix``.

    ``name`` is that of the variable that holds it where there are several models, else that of its
    class, which is ``type``. ``modules`` describes it and all its submodules: ``path``, ``type``, ``file``, ``line``,
    ``parameters`` and ``trainable``. ``trained`` says whether an optimizer that has stepped holds a
    parameter of it, or the program changes one by hand, which is ``by_hand``; None in a recording
    without that information. ``steps`` counts the steps of its own optimizer.
    """

    name: str
    prefix: str
    parameters: int
    modules: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    trained: bool | None = None
    optimizers: tuple[int, ...] = ()
    steps: int = 0
    by_hand: bool | None = None
    type: str = ""

    @property
    def title(self) -> str:
        """Its name, and its class if that has another: ``G (Sequential)``."""
        if self.type in ("", self.name):
            return self.name
        return f"{self.name} ({self.type})"


class SitesByText:
    """The sites of a recording by their texts.

    Args:
        sites: The sites.
        owner: The name of the recording, for messages.
    """

    def __init__(self, sites: Iterable[SiteInfo], owner: str) -> None:
        self._owner = owner
        self._by_text = {site.site: site for site in sites}

    def get(self, text: str) -> SiteInfo | None:
        """Return the site with exactly this text; None if there is none."""
        return self._by_text.get(text)

    def find(self, text: str) -> SiteInfo:
        """Return a site by its text; ``layer4`` is ``layer4:out``.

        Raises:
            NoSuchSite: There is no such site.
        """
        found = self.get(text) or self.get(f"{text}:out")
        if found is None:
            raise NoSuchSite(self._unknown(text))
        return found

    def _unknown(self, text: str) -> str:
        near = get_close_matches(text, self._by_text, n=3, cutoff=0.4)
        if not near:
            hint = "none is near it"
        elif len(near) == 1:
            hint = f"the nearest is {near[0]}"
        else:
            hint = f"the nearest are {', '.join(near)}"
        known = counted(len(self._by_text), "site")
        return f"{self._owner} has no site {text!r}: it holds {known}, {hint}"


def site_from(entry: Mapping[str, Any]) -> SiteInfo:
    """Return one site of ``sites.json``, as the check of its shape has kept it.

    Only ``id`` and ``site`` are required: what says no more than the default is left out.
    """
    path, _, kind = entry["site"].rpartition(":")
    path = entry.get("path", path)
    return SiteInfo(
        id=entry["id"],
        site=entry["site"],
        path=path,
        kind=entry.get("kind", kind),
        type=entry.get("type", ""),
        root=entry.get("root", 0),
        shape=entry.get("shape", ()),
        dtype=entry.get("dtype", "float32"),
        channels=entry.get("channels"),
        sources=entry.get("from", ()),
        owner=entry.get("owner", path),
        node=entry.get("node"),
        source=entry.get("source"),
        copies=entry.get("copies"),
        partial=entry.get("partial", False),
    )


def root_from(entry: Mapping[str, Any]) -> Root:
    """Return one root of ``sites.json``."""
    return Root(
        entry["name"],
        entry.get("prefix", ""),
        entry.get("parameters", 0),
        tuple(entry.get("modules", ())),
        entry.get("trained"),
        tuple(entry.get("optimizers", ())),
        entry.get("steps", 0),
        entry.get("by_hand"),
        entry.get("type", entry["name"]),
    )
