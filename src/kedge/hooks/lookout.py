"""What is looked at in the steps between those that are measured in full.

# Note [Looking]
In a step that is only looked at, a module's output is remembered: a large one by a weak reference, which keeps nothing
alive that autograd does not. When the root's forward ends, what the root returned is looked at. As long as that
is finite nothing else is read. If it is not, all that is still there is looked at, which is nearly everything as
long as backward has not begun; the first that is not finite is where it was born. In a step of norms, and on
a device where looking would wait, one call takes the norms of all small values when the forward ends, and large ones
are measured as they pass.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge.flow import version_of
from kedge.hooks import compiled
from kedge.hooks.modules import Before, Own, conceal
from kedge.hooks.roots import KEEPS_FINITE, Gauge, Root
from kedge.hooks.schedule import Clock
from kedge.hooks.shelf import Shelf
from kedge.sites import leaves

SMALL = 1 << 14
"""How many elements a value may have to be held itself until the forward ends: 64 KiB of float32."""
_SEARCHES = 32
"""How often a root that returned something not finite is searched through: one may return infinities in every step."""


class Lookout:
    """The hooks of light steps; see Note [Looking].

    Attributes:
        deep: Measure the norms of large values too.
        paced: The root's own calls are the steps, and what measures them in full steps stays up.
        spoiled: Something was found not to be finite in this step.
        asleep: Nothing is held at this time: the pass is no training.
        held: The values of the forward under way, in order: a site's seat, then a tensor and its version, or a
            reference and -1.
        looks: How often a hook was called.
        seconds: What measuring took.
    """

    def __init__(self, meter: Gauge, clock: Clock, trains: Callable[[], bool]) -> None:
        self.meter, self.clock, self.trains = meter, clock, trains
        self.shelf = Shelf()
        self.shelf.up = False
        self.deep = self.paced = self.spoiled = False
        self.asleep = True
        self.held: list[tuple[Any, Any, int]] = []
        self.looks = 0
        self.seconds = 0.0
        self._searches = _SEARCHES
        self._undo: list[Callable[[], None]] = []

    def place(self, root: Root, module: nn.Module, befores: Mapping[int, Before]) -> None:
        """Prepare the hooks of one root, whose sites have all been seen once.

        Args:
            root: The root.
            module: Its module.
            befores: What stands before its modules in full steps, and knows their arguments' names.
        """
        paths = {root.label(name): m for name, m in module.named_modules() if name in root.types}
        outs, ins = _by_path(self.meter.seats.values(), root, paths)
        self.shelf.add(module, "_forward_pre_hooks", Began(self))
        for path, inner in paths.items():
            if path in ins and id(inner) in befores:
                before = LookBefore(self, ins[path], befores[id(inner)], head=inner is module)
                self.shelf.add(inner, "_forward_pre_hooks", before)
            if path in outs:
                self.shelf.add(inner, "_forward_hooks", LookAfter(self, outs[path], head=inner is module))
                self._undo.append(conceal(inner))
        self.shelf.add(module, "_forward_hooks", Ended(self))
        self._undo.append(conceal(module))

    def close(self) -> None:
        """Take everything down for good."""
        self.shelf.take_down()
        self.held.clear()
        while self._undo:
            self._undo.pop()()

    def hold(self, seat: Any, value: Tensor) -> None:
        """Keep what is needed of a value until the forward ends."""
        self.looks += 1
        if not self.deep and value.is_cpu:
            self.held.append((seat, value if value.numel() <= SMALL else weakref.ref(value), -1))
        elif 1 < value.numel() <= SMALL:
            self.held.append((seat, value, version_of(value)))
        else:
            start = time.perf_counter()
            self.meter.observe(seat, value.detach(), self.clock.step)
            self.seconds += time.perf_counter() - start

    def began(self) -> None:
        """Begin a forward of a root."""
        self.asleep = compiled.in_backward() or (self.trains() and not torch.is_grad_enabled())
        if not self.asleep:
            self.held.clear()

    def ended(self, output: Any) -> None:
        """End a forward of a root: measure what was held."""
        if self.asleep:
            return
        self.asleep = True
        start = time.perf_counter()
        small = [(seat, value) for seat, value, version in self.held if version >= 0 and version_of(value) == version]
        bad = self.meter.add_values(self.clock.step, small) if small else False
        bad = bad or (self.paced and self.meter.spoiled())
        bad = bad or not all(is_finite(value) for _, value in leaves.find(output) if value.is_cpu)
        if bad:
            self._search()
        self.spoiled |= bad
        self.held.clear()
        self.seconds += time.perf_counter() - start

    def _search(self) -> None:
        """Look at everything that was only remembered and is still there."""
        if self._searches > 0:
            self._searches -= 1
            remembered = [(seat, value) for seat, value, version in self.held if version < 0]
            found = [(seat, value if isinstance(value, Tensor) else value()) for seat, value in remembered]
            self.meter.add_values(self.clock.step, [(seat, value) for seat, value in found if value is not None])


class Began(Own):
    """The hook by which a root's forward is seen to begin."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Be a forward-pre hook."""
        self.lookout.began()


class Ended(Own):
    """The hook by which a root's forward is seen to end."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        self.lookout.ended(output)


class LookAfter(Own):
    """Holds what a module returns."""

    def __init__(self, lookout: Lookout, seat: Any, *, head: bool) -> None:
        self.lookout, self.seat, self.head = lookout, seat, head

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        lookout = self.lookout
        if lookout.asleep or (self.head and lookout.paced):
            return
        if type(output) is Tensor:
            lookout.hold(self.seat, output)
            return
        for _, value in leaves.find(output):
            lookout.hold(self.seat, value)


class LookBefore(Own):
    """Holds what a module is given, where no watched module made it."""

    def __init__(self, lookout: Lookout, seat: Any, names: Before, *, head: bool) -> None:
        self.lookout, self.seat, self.names, self.head = lookout, seat, names, head

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Be a forward-pre hook."""
        if self.lookout.asleep or (self.head and self.lookout.paced):
            return
        for _, value in self.names.find(args, kwargs or {}):
            self.lookout.hold(self.seat, value)


def _by_path(seats: Iterable[Any], root: Root, paths: Mapping[str, nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find a root's seats that can tell something new, by module: of outputs, and of inputs that nothing watched made.

    Outputs of what makes finite values of finite ones, such as ReLU, tell nothing that their inputs do not.
    """
    outs: dict[str, Any] = {}
    ins: dict[str, Any] = {}
    for seat in seats:
        path, kind = seat.site.path, seat.site.kind
        if path not in paths:
            continue
        if kind == "out" and (type(paths[path]).__name__ not in KEEPS_FINITE or path == root.prefix):
            outs[path] = seat
        elif kind == "in" and (not seat.sources or None in seat.sources):
            ins[path] = seat
    return outs, ins


def is_finite(value: Tensor) -> bool:
    """Look whether every element of a value on the host is finite; whole numbers are."""
    if not (value.is_floating_point() or value.is_complex()):
        return True
    return math.isfinite(value.detach().sum().item())
