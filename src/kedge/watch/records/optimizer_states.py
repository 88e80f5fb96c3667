"""What optimizers keep of their parameters, as far as the selector of a watch asks for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from kedge.actions.measure.meter import Meter
from kedge.sites import leaves
from kedge.sites.site import Site
from kedge.sites.spread import spread_of, widest_mesh
from kedge.watch.models.optimizers import params_of
from kedge.watch.models.parameters import WatchedParameters


class OptimizerStates:
    """Measures the tensors that optimizers keep of parameters, after their steps.

    Args:
        meter: Measures.
        step: Returns the number of the current step.
        places: The watched parameters.
    """

    def __init__(self, meter: Meter, step: Callable[[], int], places: WatchedParameters) -> None:
        self._meter = meter
        self._step = step
        self._places = places
        self._names: dict[str, None] = {}

    def after(self, optimizer: Optimizer) -> None:
        """Measure what an optimizer keeps, after its step."""
        params = list(params_of(optimizer))
        found: list[tuple[Site, Tensor]] = []
        for param in params:
            place = self._places.of(param)
            if place is None or not place.states:
                continue
            for name, value in leaves.find(optimizer.state.get(param, {})):
                self._names[name] = None
                if place.measures_state(name):
                    found.append((Site(place.site.path, "state", name), value.detach()))
        if not found:
            return

        wide = widest_mesh(params)
        known = self._meter.sites.seats
        seats = []
        for site, value in found:
            is_new = site not in known
            seat = self._meter.sites.seat(site, value)
            if is_new:
                seat.spread = spread_of(value, wide)
            seats.append(seat)
        self._meter.observe_all(seats, [value for _, value in found], self._step())

    def idle(self) -> str:
        """Return what to say, at the end, of states that were asked for and not there; empty if there is nothing."""
        terms = {term for place in self._places for term in place.states}
        asked = {term.leaf for term in terms if not term.excluded}
        if not asked:
            return ""
        if not self._names:
            return (
                "nothing was there at the :state that --sites asks for: no optimizer stepped in a "
                "measured step, or it keeps nothing, as SGD without momentum"
            )
        missing = [name for name in asked if name is not None and name not in self._names]
        if not missing:
            return ""
        said = ", ".join(f":state[{name}]" for name in sorted(missing))
        known = ", ".join(f"[{name}]" for name in self._names)
        return f"no optimizer keeps {said}, which --sites asks for; they keep {known}"
