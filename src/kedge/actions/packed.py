"""The action for a user's own pair of saved-tensor hooks: `packed`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kedge.calls.arguments import called_as, described
from kedge.errors import NoSuchKind, WrongCall
from kedge.flow import Act, Event
from kedge.sites.site import Site


class _Taken(threading.local):
    """The object packed by the action's last call on each thread, until `Packed.taken`."""

    def __init__(self) -> None:
        self.packed: list[Any] = []


class Packed:
    """The action that `packed` returns.

    It packs the tensors that autograd saves, and unpacks them in the backward.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
    ) -> None:
        self._pack = pack
        self.unpack = unpack
        self._here = _Taken()

    def __repr__(self) -> str:
        """The call that makes this action."""
        names = (getattr(f, "__qualname__", repr(f)) for f in (self._pack, self.unpack))
        return f"packed({', '.join(names)})"

    def check(self, site: Site) -> None:
        """Refuse a site of another kind.

        Raises:
            NoSuchKind: If the site is not of kind ``saved``.
        """
        if site.kind != "saved":
            raise NoSuchKind(
                f'{self!r} packs tensors that autograd saves, and "{site}" is another kind of '
                f'site; hook "{Site(site.path, "saved")}", or pass an action that takes (value)'
            )

    def bind(self, site: Site) -> Act:
        """Return the function that packs the values of one site.

        Raises:
            NoSuchKind: If the site is not of kind ``saved``.
        """
        self.check(site)
        return self._take

    def taken(self) -> list[Any]:
        """Return the object packed by the last call on this thread, if any, and forget it."""
        here = self._here
        packed = here.packed
        here.packed = []
        return packed

    def _take(self, value: Tensor, event: Event) -> None:
        self._here.packed = [self._pack(value)]


@called_as('kedge.hook(model, "layer4:saved", kedge.packed(pack, unpack))')
def packed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Packed:
    """Store any object in place of each tensor that autograd saves: an action for ``:saved`` sites.

    Several of these actions at one site nest: each packs the result of the one before, as long as
    that is a tensor.

    Args:
        pack: A function that takes the tensor, detached, and returns any object. It must not change
            the tensor.
        unpack: A function that takes that object and returns a tensor of the same shape, dtype and
            device. It may be called more than once, and on another thread.

    Returns:
        The action.

    Examples:
        >>> halves = kedge.packed(lambda tensor: tensor.half(), lambda half: half.float())
        >>> with kedge.hook(model, "relu:saved", halves):
        ...     model(images).sum().backward()
    """
    for name, given in (("pack", pack), ("unpack", unpack)):
        if not callable(given):
            raise WrongCall(f"packed({name}={described(given)}): {name} must be a function")
    return Packed(pack, unpack)
