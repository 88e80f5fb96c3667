"""The measuring of one root: the meter for its sites, and facts about its modules that the meter needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from kedge.actions.measure.meter import Meter
from kedge.flow import Act
from kedge.hooks.firing.contract import Measure
from kedge.hooks.session import Session
from kedge.hooks.unfired import explaining_many
from kedge.sites.site import Site
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.models.root_hooks import silent_entry
from kedge.watch.models.roots import RootModule

_EXACT_ZERO = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.RReLU)
_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d)


class PrefixedMeter:
    """The meter for one root's sites: their recorded paths begin with the root's prefix."""

    observes = True
    recomputes = False

    def __init__(self, meter: Meter, root: RootModule) -> None:
        self.meter, self.root = meter, root

    def __repr__(self) -> str:
        """Return the meter's text."""
        return repr(self.meter)

    def bind(self, site: Site) -> Act:
        """Return a function that measures one site of this root."""
        return self.meter.bind(site.moved(self.root.label(site.path)))

    def bind_value(self, site: Site) -> Measure | None:
        """Return a function that measures values of one site; see `kedge.hooks.firing.contract.Measuring`."""
        return self.meter.bind_value(site.moved(self.root.label(site.path)))

    def note_leaf(self, site: Site) -> None:
        """Note, in the forward, that a leaf comes at one site."""
        self.meter.note_leaf(site.moved(self.root.label(site.path)))


def channel_dims(
    model: nn.Module, modules: Mapping[str, nn.Module], root: RootModule
) -> dict[str, int | None]:
    """Return the channel dimension of three-dimensional values: 1 in convolutional models, else -1."""
    first = any(isinstance(m, _CHANNELS_FIRST) for m in modules_in(model).values())
    return {
        root.label(n): 1 if first else -1 for n, m in modules.items() if isinstance(m, _EXACT_ZERO)
    }


def saturations(
    modules: Mapping[str, nn.Module], root: RootModule
) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Return how each activation among some modules saturates, by its recorded path."""
    return {
        root.label(n): _SATURATING[type(m)](m) for n, m in modules.items() if type(m) in _SATURATING
    }


_SATURATING: dict[type[nn.Module], Callable[[Any], tuple[str, tuple[float, ...]]]] = {
    nn.Tanh: lambda m: ("tanh", ()),
    nn.Sigmoid: lambda m: ("sigmoid", ()),
    nn.Softsign: lambda m: ("softsign", ()),
    nn.Softmax: lambda m: ("softmax", (-1 if m.dim is None else m.dim,)),
    nn.Hardtanh: lambda m: ("between", (m.min_val, m.max_val)),
    nn.Hardsigmoid: lambda m: ("between", (0.0, 1.0)),
    nn.ReLU6: lambda m: ("between", (-math.inf, 6.0)),
}


def silent_sites(roots: Iterable[RootModule], session: Session) -> list[dict[str, Any]]:
    """Return an entry with the cause for each site that never fired, including sites of deleted modules."""
    silent = [entry for root in roots for entry in root.hooks.silent]
    with explaining_many(session):
        for tap in session.taps:
            action: Any = tap.action
            if isinstance(action, PrefixedMeter) and action.root.hooks.is_silent(tap):
                silent.append(silent_entry(tap, action.root.label(tap.site.path), session))
    return silent
