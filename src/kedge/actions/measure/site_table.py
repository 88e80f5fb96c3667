"""The measured sites, with the facts about each that its first value shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge import native
from kedge.actions.measure.saturation import Saturation, saturation
from kedge.sites.language import single
from kedge.sites.names import kind_meant, site_named
from kedge.sites.site import Site
from kedge.sites.spread import Spread, spread_of
from kedge.torch_internals.autograd_nodes import sequence_number

_ROLES = {
    "out": native.AS_OUTPUT,
    "in": native.AS_INPUT,
    **dict.fromkeys(("param", "param.grad", "param.acc", "grad", "acc"), native.AS_LASTING),
}


def role_of(site: Site) -> int:
    """Return the role of a site's values in the native measurer."""
    return _ROLES.get(site.kind, native.AS_VALUE)


@dataclass
class MeasuredSite:
    """One measured site.

    Attributes:
        site: The site.
        id: Its number, in the order of first firing.
        shape: The shape of the first value.
        dtype: The dtype of the first value, as "float32".
        channels: The number of channels where activity is tracked, else None.
        sources: The numbers of the sites whose outputs were its inputs; None stands for a tensor of
            no site.
        node: The name of the autograd node that made its first value; None without one.
        number: The number of that node in the order of execution; 0 if that is not known.
        is_special: Whether it needs more than statistics and drawn elements, such as channel
            activity.
        spread: How its values are spread over the ranks of the run; None if they are ordinary
            tensors.
    """

    site: Site
    id: int
    shape: tuple[int, ...]
    dtype: str
    channels: int | None
    sources: tuple[int | None, ...]
    node: str | None
    number: int = 0
    is_special: bool = False
    spread: Spread | None = None


class SiteTable:
    """All sites that have fired.

    Args:
        on_saturation: Called with the number of a site whose activation can saturate, and how.

    Attributes:
        seats: The entry of each site.
        channel_dims: The channel dimension of three-dimensional values, for the paths where
            channels are tracked.
        wires: How many sources of inputs are known, of all sites together.
    """

    def __init__(self, on_saturation: Callable[[int, Saturation], None]) -> None:
        self.seats: dict[Site, MeasuredSite] = {}
        self.channel_dims: dict[str, int | None] = {}
        self.wires = 0
        self._on_saturation = on_saturation
        self._saturations: dict[str, Saturation] = {}

    def seat(self, site: Site, value: Tensor) -> MeasuredSite:
        """Return a site's entry, made from its first value."""
        known = self.seats.get(site)
        if known is not None:
            return known
        seat = MeasuredSite(
            site=site,
            id=len(self.seats),
            shape=(),
            dtype=str(value.dtype).removeprefix("torch."),
            channels=None,
            sources=(),
            node=None,
            spread=spread_of(value),
        )
        if not value.is_nested:
            seat.shape = tuple(value.shape)
        dim = self._channel_dim(site, value)
        if dim is not None:
            seat.channels = value.shape[dim]
        if value.grad_fn is not None:
            seat.node = value.grad_fn.name()
            seat.number = sequence_number(value.grad_fn)
        self.seats[site] = seat
        self._learn_specials(seat)
        return seat

    def total_seat(self, site: Site, size: int, spread: Spread | None) -> MeasuredSite:
        """Return the entry of a site that stands for many tensors with `size` elements in all."""
        seat = self.seats.get(site)
        if seat is None:
            seat = MeasuredSite(
                site=site,
                id=len(self.seats),
                shape=(size,),
                dtype="float32",
                channels=None,
                sources=(),
                node=None,
                spread=spread,
            )
            self.seats[site] = seat
        return seat

    def saturates(self, path: str, how: str, numbers: Sequence[float]) -> None:
        """Set how the activation at a path saturates; see `saturation`."""
        self._saturations[path] = saturation(how, numbers)
        for seat in self.seats.values():
            if seat.site.path == path:
                self._learn_specials(seat)

    def _learn_specials(self, seat: MeasuredSite) -> None:
        """Determine which extra figures the site needs: saturation, and the activity of channels."""
        seat.is_special = seat.channels is not None
        known = self._saturations.get(seat.site.path)
        if known is not None and seat.site.kind == "out":
            known = known.rounded(getattr(torch, seat.dtype))
            self._on_saturation(seat.id, known)
            if known.dim is not None:
                seat.is_special = True

    def tracked_dim(self, seat: MeasuredSite, value: Tensor) -> int | None:
        """Return the channel dimension of a value; None where channel activity is not tracked."""
        dim = self._channel_dim(seat.site, value)
        if dim is None or seat.channels != value.shape[dim]:
            return None
        return dim

    def _channel_dim(self, site: Site, value: Tensor) -> int | None:
        if site.kind != "out" or site.path not in self.channel_dims or value.dim() < 2:
            return None
        if value.is_complex():  # above zero has no meaning
            return None
        if value.dim() == 3:
            return self.channel_dims[site.path]
        return 1

    def connect(self, seat: MeasuredSite, source: int | None) -> None:
        """Record the site whose output an input is; None if it is no site's output."""
        if source not in seat.sources and seat.site.kind == "in":
            seat.sources = (*seat.sources, source)
            self.wires += 1

    def named(self, name: str) -> list[MeasuredSite]:
        """Return the entries of the sites that a name stands for.

        If there is one of exactly this name, it is the only one.
        """
        term = single(name)
        exact = self.seats.get(site_named(name))
        if exact is not None:
            return [exact]
        named = [seat for seat in self.seats.values() if term.names(seat.site)]
        kind = kind_meant(term, {seat.site.kind for seat in named})
        found = []
        for seat in named:
            site = seat.site
            is_leaf = term.leaf in (None, site.leaf)
            if site.kind == kind and is_leaf and term.call in (None, site.call):
                found.append(seat)
        return found
