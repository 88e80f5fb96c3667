"""The measured sites, with the facts about each that its first value shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.actions.measure.saturation import Saturation, saturation
from kedge.sites.language import single
from kedge.sites.names import kind_meant, site_named
from kedge.sites.site import Site
from kedge.sites.spread import Spread, spread_of


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
        dim = self._channel_dim(site, value)
        node = value.grad_fn.name() if value.grad_fn is not None else None
        dtype = str(value.dtype).removeprefix("torch.")
        shape, channels = (
            () if value.is_nested else tuple(value.shape),
            None if dim is None else value.shape[dim],
        )
        seat = MeasuredSite(
            site, len(self.seats), shape, dtype, channels, (), node, spread=spread_of(value)
        )
        self.seats[site] = seat
        self._learn_specials(seat)
        return seat

    def total_seat(self, site: Site, size: int, spread: Spread | None) -> MeasuredSite:
        """Return the entry of a site that stands for many tensors with `size` elements in all, spread over the ranks."""
        seat = self.seats.get(site)
        if seat is None:
            seat = MeasuredSite(
                site, len(self.seats), (size,), "float32", None, (), None, spread=spread
            )
            self.seats[site] = seat
        return seat

    def saturates(self, path: str, how: str, numbers: Sequence[float]) -> None:
        """Set how the activation at a path saturates; see `kedge.actions.measure.saturation.saturation`."""
        self._saturations[path] = saturation(how, numbers)
        for seat in self.seats.values():
            if seat.site.path == path:
                self._learn_specials(seat)

    def _learn_specials(self, seat: MeasuredSite) -> None:
        """Determine which extra figures the site needs: saturation, and the activity of channels."""
        known = self._saturations.get(seat.site.path) if seat.site.kind == "out" else None
        if known is not None:
            known = known.rounded(getattr(torch, seat.dtype))
            self._on_saturation(seat.id, known)
        seat.is_special = seat.channels is not None or (known is not None and known.dim is not None)

    def tracked_dim(self, seat: MeasuredSite, value: Tensor) -> int | None:
        """Return the channel dimension of a value; None where channel activity is not tracked."""
        dim = self._channel_dim(seat.site, value)
        return dim if dim is not None and seat.channels == value.shape[dim] else None

    def _channel_dim(self, site: Site, value: Tensor) -> int | None:
        if site.kind != "out" or site.path not in self.channel_dims or value.dim() < 2:
            return None
        return 1 if value.dim() != 3 else self.channel_dims[site.path]

    def connect(self, seat: MeasuredSite, source: int | None) -> None:
        """Record the site whose output an input is; None if it is no site's output."""
        if source not in seat.sources and seat.site.kind == "in":
            seat.sources = (*seat.sources, source)
            self.wires += 1

    def named(self, name: str) -> list[MeasuredSite]:
        """Return the entries of the sites that a name stands for; only the one of exactly this name, if it is there."""
        term = single(name)
        exact = self.seats.get(site_named(name))
        if exact is not None:
            return [exact]
        seats = [s for s in self.seats.values() if term.names(s.site)]
        kind = kind_meant(term, {s.site.kind for s in seats})
        seats = [s for s in seats if s.site.kind == kind and term.leaf in (None, s.site.leaf)]
        return [s for s in seats if term.call in (None, s.site.call)]
