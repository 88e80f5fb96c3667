"""Gradients, parameters and updates of every optimizer.

# Note [When gradients are measured]
At the end of each backward pass, before the program clips or unscales them. If an optimizer's
gradients come from several passes, those of the last pass before its step count: by then they are
added up. If no pass was seen to end, as with parameters that are spread over processes, gradients
are measured just before the optimizer's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge import native
from kedge.actions.measure.meter import Meter
from kedge.by_identity import ByIdentity
from kedge.native import reductions
from kedge.sites.leaves import own_part
from kedge.sites.site import Site
from kedge.sites.spread import counted_once, spread_of, widest_mesh
from kedge.store.exponents import spacing
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals import kernels, modes
from kedge.watch.models.optimizers import params_of
from kedge.watch.models.parameters import ParameterSites
from kedge.watch.models.roots import RootModule
from kedge.watch.records.curves import Curves

_LARGEST = torch.finfo(torch.float32).max
_SAMPLE = 1024


@dataclass
class HeldParameters:
    """The watched parameters of one root that an optimizer holds, each with its recorded site."""

    root: RootModule
    total: Site
    params: list[nn.Parameter] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    squares: Tensor | float = math.nan
    elements: int = 0
    _seats: dict[str, dict[int, Any]] = field(default_factory=dict)

    def add(self, param: nn.Parameter, site: Site) -> None:
        """Add a parameter."""
        self.params.append(param)
        self.sites.append(site)

    def graded(self) -> dict[int, Tensor]:
        """Return the existing dense gradients, by the number of their parameter here."""
        found = ((i, p.grad) for i, p in enumerate(self.params))
        return {i: grad for i, grad in found if grad is not None and not grad.is_sparse}

    def seats(self, meter: Meter, kind: str, values: Mapping[int, Tensor]) -> list[Any]:
        """Return the meter's entries for the sites of values, keyed by the number of their parameter; cached."""
        known = self._seats.setdefault(kind, {})
        new = values.keys() - known.keys() if len(known) < len(self.params) else ()
        wide = widest_mesh(self.params) if new else None
        for i in sorted(new):
            known[i] = meter.sites.seat(replace(self.sites[i], kind=kind), values[i].detach())
            known[i].spread = spread_of(values[i], wide)
        return [known[i] for i in values]


class Updates:
    """Measures the gradients, parameters and updates of all optimizers.

    Args:
        meter: Measures.
        curves: Receives the norm of all gradients.
        step: Returns the number of the current step.
        place: Returns the sites of a parameter; None if it is not measured.

    Attributes:
        bad: Whether a gradient of this step is known to be non-finite.
        late: The optimizers, by id, whose gradients are certain only after their step.
    """

    def __init__(
        self,
        meter: Meter,
        curves: Curves,
        step: Callable[[], int],
        place: Callable[[nn.Parameter], ParameterSites | None],
    ) -> None:
        self.meter, self.curves, self.step, self.place = meter, curves, step, place
        self.bad = False
        self._held: ByIdentity[Optimizer, list[HeldParameters]] = ByIdentity()
        self._passed: set[int] = set()
        self._stepped: set[int] = set()
        self._inside: set[int] = set()
        self.late: set[int] = set()
        self._before: ByIdentity[Optimizer, list[Samples]] = ByIdentity()
        self._measured = True

    def learn(self, optimizer: Optimizer) -> list[HeldParameters]:
        """Return the watched parameters of an optimizer, by root; gradients measured in this step are kept."""
        by_root: dict[int, HeldParameters] = {}
        before = {each.root.index: each for each in self._held.get(optimizer, ())}
        for param in params_of(optimizer):
            placed = self.place(param)
            numbers = (param.is_floating_point() or param.is_complex()) and param.itemsize > 1
            if placed is not None and numbers and modes.has_data(param):
                root = placed.root
                if root.index not in by_root:
                    held = by_root[root.index] = HeldParameters(
                        root, Site(root.label(""), "grad.norm")
                    )
                    if root.index in before:
                        held.squares, held.elements = (
                            before[root.index].squares,
                            before[root.index].elements,
                        )
                by_root[root.index].add(param, placed.site)
        found = self._held[optimizer] = list(by_root.values())
        return found

    def begin(self, *, measured: bool) -> None:
        """Begin a measured or guarded step."""
        self.bad, self._measured = False, measured
        self.forget_step()

    def forget_step(self) -> None:
        """Forget the passes and updates of the step that has ended."""
        self._passed.clear()
        self._stepped.clear()
        self._inside.clear()
        self.late.clear()

    def backward_ended(self, optimizers: Iterable[Optimizer]) -> None:
        """Measure the gradients of optimizers before their update; see Note [When gradients are measured]."""
        for optimizer in optimizers:
            if id(optimizer) not in self._stepped or id(optimizer) in self._inside:
                self._gradients(optimizer)

    def was_reached(self, optimizer: Optimizer) -> bool:
        """Whether a backward pass has reached an optimizer since its last update in this step of the run."""
        return id(optimizer) in self._passed

    def before(self, optimizer: Optimizer, *, closure: bool = False) -> None:
        """Measure gradients and parameters before an optimizer changes them; a closure may yet add to the former."""
        held = self._held.get(optimizer, ())
        if id(optimizer) in self._passed:
            if self._measured and not self.bad:
                self._recheck_norms(held)
            if closure:
                self.late.add(id(optimizer))
            else:
                self._passed.discard(id(optimizer))
                self._add_norms(held)
        else:  # a closure replaces these gradients, which are those of the step before
            self._gradients(optimizer)
            self.late.add(id(optimizer))
        self._stepped.add(id(optimizer))
        self._inside.add(id(optimizer))
        if self._measured or self.bad:
            for each in held:
                self._observe(each, "param", dict(enumerate(each.params)))
        if self._measured:
            self._before[optimizer] = [Samples(each.params) for each in held]

    def after(self, optimizer: Optimizer) -> None:
        """Measure the changes of some elements of each parameter."""
        self._inside.discard(id(optimizer))
        if id(optimizer) in self.late:
            self.late.discard(id(optimizer))
            self._passed.discard(id(optimizer))
            self._add_norms(self._held.get(optimizer, ()))
        before = self._before.pop(optimizer, None)
        for each, old in zip(self._held.get(optimizer, ()), before or (), strict=False):
            counts, squares = old.changes()
            seats = each.seats(self.meter, "update", dict(enumerate(each.params)))
            self.meter.add_squares(seats, self.step(), counts, squares)

    def release(self) -> None:
        """Drop the entries of the optimizers' parameters, at the end of the watch."""
        self._held.clear()

    def _recheck_norms(self, held: Iterable[HeldParameters]) -> None:
        """Compute the norms again, in case the program wrote non-finite values after the backward pass."""
        for each in (each for each in held if each.elements):
            grads = list(each.graded().values())
            if all(own_part(grad).is_cpu for grad in grads):  # of others it would not be known
                _, squares, bad = norm_of(grads)
                if bad:
                    each.squares, self.bad = squares, True

    def _add_norms(self, held: Iterable[HeldParameters]) -> None:
        for each in held:
            if each.elements:
                seat = self.meter.sites.total_seat(each.total, each.elements, each.root.averaged)
                self.curves.add_norm(
                    self.step(), seat.id, each.elements, each.squares, measured=self._measured
                )
                each.elements = 0

    def _gradients(self, optimizer: Optimizer) -> None:
        held = self._held.get(optimizer)
        held = self.learn(optimizer) if held is None else held
        again = id(optimizer) in self._passed
        self._passed.add(id(optimizer))
        for each in held:
            graded = each.graded()
            if not graded:
                continue
            each.elements, each.squares, bad = norm_of(list(graded.values()))
            self.bad |= bad
            if self._measured or bad:
                if again:
                    self.meter.drop(each.seats(self.meter, "param.grad", graded))
                self._observe(each, "param.grad", graded)

    def _observe(self, held: HeldParameters, kind: str, values: Mapping[int, Tensor]) -> None:
        meter = self.meter
        level, meter.level = meter.level, FULL if self._measured else LIGHT
        try:
            meter.observe_all(held.seats(meter, kind, values), list(values.values()), self.step())
        finally:
            meter.level = level


def norm_of(gradients: list[Tensor]) -> tuple[int, Tensor | float, bool]:
    """Return how many elements of gradients this rank counts, the sum of their squares, and whether any is known to be bad.

    The counts and sums of all ranks add up to those of the model; see Note [Spread values] in
    `kedge.sites.spread`.
    """
    counted, others = counted_once(gradients)
    squares, bad = squares_of(counted) if counted else (0.0, False)
    return sum(g.numel() for g in counted), squares, bad or bool(others and squares_of(others)[1])


def squares_of(values: list[Tensor]) -> tuple[Tensor | float, bool]:
    """Return the sum of squares of many tensors, and whether it is known that they are not finite.

    On a device the sum stays there and nothing is known, since reading it would wait.
    """
    if all(value.is_cpu for value in values):
        squares, nonfinite = native.all_finite_and_norm(values)
        return squares, bool(nonfinite)
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        by_device.setdefault(value.device, []).append(reductions.real(value.detach()))
    sums = [_squares_on_device(some) for some in by_device.values()]
    gathered = next(each.device for each in sums if not each.is_cpu)
    return sum(each.to(gathered, non_blocking=True) for each in sums), False


def _squares_on_device(values: list[Tensor]) -> Tensor:
    norms = kernels.norms(values)
    return torch.stack([norm.float() for norm in norms]).square().sum()


class Samples:
    """Copies of some elements of each of many parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        wide = any(param.itemsize > 4 for param in params)
        self.numbers = np.empty(_SAMPLE * len(params), dtype=np.float64 if wide else np.float32)
        self.counts = native.draw_many(self.numbers, params, _SAMPLE)
        self.tensors: list[Tensor] = []
        if not all(self.counts):
            self.tensors = [sample(param).clone() for param in params]

    def changes(self) -> tuple[Sequence[int], Sequence[float | Tensor]]:
        """Return for each parameter how many elements were compared, and the sum of squares of their changes.

        The sum of a parameter on a device stays there, since reading it would wait.
        """
        if native.squared_changes is not None and not self.tensors:
            return native.squared_changes(self.numbers, self.params, self.counts, _SAMPLE)
        changes = [
            (sample(p) - was).abs() for p, was in zip(self.params, self.tensors, strict=True)
        ]
        return [c.numel() for c in changes], _sums_of_squares(changes)


def _sums_of_squares(changes: list[Tensor]) -> list[float | Tensor]:
    sums: list[float | Tensor] = [
        float(c.double().square().sum()) if c.is_cpu else 0.0 for c in changes
    ]
    for device in {c.device for c in changes if not c.is_cpu}:
        there = [i for i, c in enumerate(changes) if c.device == device]
        for i, total in zip(there, _on_device([changes[i].float() for i in there]), strict=True):
            sums[i] = total
    return sums


def _on_device(changes: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the sums in float32, since not every device has float64; a finite one too large for it becomes its largest."""
    squares = torch.stack([c.square().sum() for c in changes])
    largest = torch.stack([c.amax() if c.numel() else c.sum() for c in changes])
    return torch.where(largest < math.inf, squares.clamp(max=_LARGEST), squares).unbind()


def sample(param: Tensor) -> Tensor:
    """Return up to 1,024 elements of a parameter, evenly spread and always the same."""
    flat = own_part(param).detach().reshape(-1)
    return flat[:: spacing(flat.numel(), _SAMPLE)]
