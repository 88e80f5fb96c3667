"""One's own pair of saved-tensor hooks: `packed`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kedge.errors import NoSuchKind
from kedge.flow import Act, Event
from kedge.sites.site import Site


class _Taken(threading.local):
    """What was packed in a call of the action that is not over yet, each thread for itself."""

    def __init__(self) -> None:
        self.packed: list[Any] = []


class Packed:
    """The action that `packed` makes: it packs what autograd saves, and unpacks it when backward asks."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self.unpack = pack, unpack
        self._here = _Taken()

    def __repr__(self) -> str:
        """As one would write it."""
        names = (getattr(f, "__qualname__", repr(f)) for f in (self._pack, self.unpack))
        return f"packed({', '.join(names)})"

    def bind(self, site: Site) -> Act:
        """Return what packs the values of one site.

        Raises:
            NoSuchKind: If that is not of kind ``saved``.
        """
        if site.kind != "saved":
            raise NoSuchKind(
                f'{self!r} packs what autograd saves, and "{site}" is something else; '
                f'hook "{Site(site.path, "saved")}", or give an action that takes (value)'
            )
        return self._take

    def taken(self) -> list[Any]:
        """Return what the last call on this thread has packed, and forget it."""
        packed, self._here.packed = self._here.packed, []
        return packed

    def _take(self, value: Tensor, event: Event) -> None:
        self._here.packed = [self._pack(value)]


def packed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Packed:
    """Make the action that puts something of one's own in the place of what autograd saves, at ``:saved`` sites.

    Several at one site work inside each other: each packs what the one before made, as long as that is a tensor.

    Args:
        pack: Takes the tensor, detached, and returns anything. It must not change it.
        unpack: Takes that and returns a tensor of the same shape, dtype and device. It may be called more than
            once, and in another thread.
    """
    return Packed(pack, unpack)
