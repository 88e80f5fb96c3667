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
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge import native
from kedge.actions.measure.meter import Meter
from kedge.by_identity import ByIdentity
from kedge.native import reductions
from kedge.sites.site import Site
from kedge.sites.spread import counted_once, spread_of, widest_mesh
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals import kernels, modes
from kedge.watch.models.optimizers import params_of
from kedge.watch.models.parameters import ParameterSites
from kedge.watch.models.roots import RootModule
from kedge.watch.records.curves import Curves
from kedge.watch.records.facts.used_gradients import ComparedNorms
from kedge.watch.records.samples import Samples

Source: TypeAlias = Optimizer | nn.Module
"""What changes parameters: an optimizer, or the program itself, for which the root's module stands."""

_LARGEST_COPY = 2**24
"""Most elements of a sparse gradient that is measured."""


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

    def densified(self) -> dict[int, Tensor]:
        """Return dense copies of the sparse gradients, by the number of their parameter here.

        So they are measured as those of an embedding without ``sparse=True`` are. A larger one is
        left out, as its copy would take more memory than the step itself.
        """
        dense = {}
        for i, param in enumerate(self.params):
            grad = param.grad
            if grad is not None and grad.is_sparse and grad.numel() <= _LARGEST_COPY:
                dense[i] = grad.detach().to_dense()
        return dense

    def seats(self, meter: Meter, kind: str, values: Mapping[int, Tensor]) -> list[Any]:
        """Return the meter's entries for the sites of values, keyed by their parameter's number.

        They are cached.
        """
        known = self._seats.setdefault(kind, {})
        new: list[int] = []
        if len(known) < len(self.params):
            new = sorted(values.keys() - known.keys())
        if new:
            wide = widest_mesh(self.params)
            for i in new:
                site = replace(self.sites[i], kind=kind)
                known[i] = meter.sites.seat(site, values[i].detach())
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
        self.meter = meter
        self.curves = curves
        self.step = step
        self.place = place
        self.bad = False
        self._held: ByIdentity[Source, list[HeldParameters]] = ByIdentity()
        self._passed: set[int] = set()
        self._stepped: set[int] = set()
        self._inside: set[int] = set()
        self.late: set[int] = set()
        self._before: ByIdentity[Optimizer, list[Samples]] = ByIdentity()
        self._measured = True

    def learn(self, optimizer: Optimizer) -> list[HeldParameters]:
        """Return the watched parameters of an optimizer, by root.

        Gradients measured in this step are kept.
        """
        return self._learn(optimizer, params_of(optimizer))

    def _learn(self, source: Source, params: Iterable[nn.Parameter]) -> list[HeldParameters]:
        by_root: dict[int, HeldParameters] = {}
        before = {each.root.index: each for each in self._held.get(source, ())}
        for param in params:
            placed = self.place(param)
            is_number = param.is_floating_point() or param.is_complex()
            if not is_number or param.itemsize == 1:
                continue
            if placed is None or not modes.has_data(param):
                continue

            root = placed.root
            held = by_root.get(root.index)
            if held is None:
                held = HeldParameters(root, Site(root.label(""), "grad.norm"))
                by_root[root.index] = held
                old = before.get(root.index)
                if old is not None:
                    held.squares = old.squares
                    held.elements = old.elements
            held.add(param, placed.site)
        found = self._held[source] = list(by_root.values())
        return found

    def begin(self, *, measured: bool) -> None:
        """Begin a measured or guarded step."""
        self.bad = False
        self._measured = measured
        self.forget_step()

    def forget_step(self) -> None:
        """Forget the passes and updates of the step that has ended."""
        self._passed.clear()
        self._stepped.clear()
        self._inside.clear()
        self.late.clear()

    def backward_ended(self, optimizers: Iterable[Optimizer]) -> None:
        """Measure gradients before the update; see Note [When gradients are measured]."""
        for optimizer in optimizers:
            if id(optimizer) not in self._stepped or id(optimizer) in self._inside:
                self._gradients(optimizer)

    def was_reached(self, optimizer: Optimizer) -> bool:
        """Whether a backward pass has reached an optimizer since its last update in this step."""
        return id(optimizer) in self._passed

    def hold(self, module: nn.Module, params: Sequence[nn.Parameter]) -> HeldParameters | None:
        """Return the watched ones of a root's parameters, which no optimizer holds; None if there are none."""
        held = next(iter(self._held.get(module, ())), None)
        known: list[nn.Parameter] = []
        if held is not None:
            known = held.params
        if len(known) != len(params) or any(map(is_not, known, params)):
            held = next(iter(self._learn(module, params)), None)
        return held

    def by_hand(self, module: nn.Module, held: HeldParameters) -> None:
        """Measure gradients and parameters that no optimizer holds, at the end of a backward pass."""
        self._gradients(module)
        self._add_norms([held])
        if self._measured or self.bad:
            self._observe(held, "param", dict(enumerate(held.params)))

    def before(self, optimizer: Optimizer, *, closure: bool = False) -> ComparedNorms | None:
        """Measure gradients and parameters before an optimizer changes them.

        A closure may yet add to the former.

        Returns:
            The norm of the gradients beside that which the backward passes left, in measured steps
            as far as both are known.
        """
        norms = None
        held = self._held.get(optimizer, ())
        if id(optimizer) in self._passed:
            if self._measured and not self.bad:
                norms = self._recheck_norms(held)
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
        return norms

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

    def check(self, places: Iterable[ParameterSites]) -> None:
        """Add the norms of a few gradients on a device, which are read later."""
        params = ((place, place.param()) for place in places)
        found = [
            (place, p.grad.detach()) for place, p in params if p is not None and p.grad is not None
        ]
        if not found:
            return
        sites = self.meter.sites
        seats = [sites.seat(replace(place.site, kind="param.grad"), grad) for place, grad in found]
        with torch.no_grad():
            norms = kernels.wide_norms([grad for _, grad in found])
        counts = [grad.numel() for _, grad in found]
        ids = [seat.id for seat in seats]
        self.curves.add_check(self.step(), zip(ids, counts, norms, strict=True))

    def release(self) -> None:
        """Drop the entries of the optimizers' parameters, at the end of the watch."""
        self._held.clear()

    def _recheck_norms(self, held: Iterable[HeldParameters]) -> ComparedNorms | None:
        """Compute the norms again, as the program may have clipped gradients since, or written bad values.

        On a device it stays unknown whether they are bad.

        Returns:
            The sums before and now; None if there are none, or on several devices.
        """
        arrived: list[Tensor | float] = []
        used: list[Tensor | float] = []
        for each in held:
            if not each.elements:
                continue
            grads = list(each.graded().values())
            _, squares, bad = norm_of(grads)
            arrived.append(each.squares)
            used.append(squares)
            if bad:
                each.squares = squares
                self.bad = True
        devices = {str(s.device) for s in (*arrived, *used) if isinstance(s, Tensor)}
        if not arrived or len(devices) > 1:
            return None
        return ComparedNorms(sum(arrived), sum(used))

    def _add_norms(self, held: Iterable[HeldParameters]) -> None:
        for each in held:
            count = each.elements
            if count:
                seat = self.meter.sites.total_seat(each.total, count, each.root.averaged)
                self.curves.add_norm(
                    self.step(), seat.id, count, each.squares, measured=self._measured
                )
                each.elements = 0

    def _gradients(self, source: Source) -> None:
        held = self._held.get(source)
        if held is None:
            held = self._learn(source, params_of(source))
        again = id(source) in self._passed
        self._passed.add(id(source))
        for each in held:
            graded = each.graded()
            bad = False
            if graded:
                each.elements, each.squares, bad = norm_of(list(graded.values()))
                self.bad |= bad
            if self._measured:
                graded |= each.densified()
            if graded and (self._measured or bad):
                if again:
                    self.meter.drop(each.seats(self.meter, "param.grad", graded))
                self._observe(each, "param.grad", graded)

    def _observe(self, held: HeldParameters, kind: str, values: Mapping[int, Tensor]) -> None:
        meter = self.meter
        level = meter.level
        meter.level = FULL if self._measured else LIGHT
        try:
            seats = held.seats(meter, kind, values)
            meter.observe_all(seats, list(values.values()), self.step())
        finally:
            meter.level = level


def norm_of(gradients: list[Tensor]) -> tuple[int, Tensor | float, bool]:
    """Return the number of elements of gradients, the sum of their squares, and if any is bad.

    Elements are those that this rank counts, and bad ones those that are known to be. The counts
    and sums of all ranks add up to those of the model; see Note [Spread values] in
    `kedge.sites.spread`.
    """
    counted, others = counted_once(gradients)
    squares: Tensor | float = 0.0
    bad = False
    if counted:
        squares, bad = squares_of(counted)
    if others and not bad:
        _, bad = squares_of(others)
    return sum(g.numel() for g in counted), squares, bad


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
