"""What is looked at in the steps between those that are measured in full.

# Note [Looking]
In a step that is only looked at, a module's output is remembered: a large one by a weak reference, which keeps nothing
alive that autograd does not. When the root's forward ends, what the root returned is looked at. As long as that
is finite nothing else is read. If it is not, all that is still there is looked at, which is nearly everything as
long as backward has not begun and nothing worked in place; the first that is not finite is where it was born. In a
step of norms, and on a device where looking would wait, one call takes the norms of all small values when the forward
ends, and large ones are measured as they pass. A forward that is traced, or transformed by `torch.func`, or whose
operations a mode counts is let alone.
"""

from __future__ import annotations

import cmath
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge.flow import version_of
from kedge.hooks.modules import Before
from kedge.hooks.roots import KEEPS_FINITE, Gauge, Root
from kedge.hooks.schedule import Clock
from kedge.hooks.shelf import Shelf
from kedge.hooks.veil import Own, conceal
from kedge.sites import leaves
from kedge.torch_internals import modes
from kedge.torch_internals.graph_task import in_backward

SMALL = 1 << 14
"""How many elements a value may have to be held itself until the forward ends: 64 KiB of float32."""
_NAMES = "_forward_pre_hooks_with_kwargs"
_SEARCHES = 32
"""How often a root that returned something not finite is searched through: one may return infinities in every step."""


class Forward(threading.local):
    """What is known of the forward of a root that is under way in this thread.

    Attributes:
        root: Which module that is; 0 for none. Another root that is called in it belongs to it.
        asleep: Nothing is held: there is none, or it is no training.
        held: The values whose norms will be taken, in order: a site's seat, a tensor, its version.
        remembered: Those that are only to be searched: a site's seat, a tensor or a reference to one, its version.
    """

    def __init__(self) -> None:
        self.root = 0
        self.asleep = True
        self.held: list[tuple[Any, Tensor, int]] = []
        self.remembered: list[tuple[Any, Any, int]] = []

    def forget(self) -> None:
        """Let go of all values, and take in none before the next forward begins."""
        self.root, self.asleep = 0, True
        self.held.clear()
        self.remembered.clear()


class Lookout:
    """The hooks of light steps; see Note [Looking].

    Attributes:
        deep: Measure the norms of large values too.
        paced: The root's own calls are the steps, and what measures them in full steps stays up.
        spoiled: Something was found not to be finite in this step.
        now: The forward under way.
        looks: How often a hook was called.
        seconds: What measuring took.
    """

    def __init__(self, meter: Gauge, clock: Clock, trains: Callable[[], bool]) -> None:
        self.meter, self.clock, self.trains = meter, clock, trains
        self.shelf = Shelf()
        self.shelf.up = False
        self.deep = self.paced = self.spoiled = False
        self.failed = False
        self.now = Forward()
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
        self.shelf.add(module, "_forward_pre_hooks", Began(self), _NAMES)
        for path, inner in paths.items():
            if path in ins and id(inner) in befores:
                before = LookBefore(self, ins[path], befores[id(inner)], head=inner is module)
                self.shelf.add(inner, "_forward_pre_hooks", before, _NAMES)
            if path in outs:
                self.shelf.add(inner, "_forward_hooks", LookAfter(self, outs[path], head=inner is module))
                self._undo.append(conceal(inner))
        self.shelf.add(module, "_forward_hooks", Ended(self), "_forward_hooks_always_called")
        self._undo.append(conceal(module))

    def close(self) -> None:
        """Take everything down for good."""
        self.shelf.take_down()
        self.now.forget()
        while self._undo:
            self._undo.pop()()

    def hold(self, seat: Any, value: Tensor) -> None:
        """Keep what is needed of a value until the forward ends."""
        self.looks += 1
        transformed = modes.is_transforming()
        value = leaves.untransformed(value) if transformed else value
        size = value.numel()
        if value.is_cpu and (transformed or not self.deep):
            kept = value if size <= SMALL else weakref.ref(value)
            self.now.remembered.append((seat, kept, version_of(value)))
        elif 1 < size <= SMALL:
            self.now.held.append((seat, value, version_of(value)))
        elif not transformed:
            start = time.perf_counter()
            self.meter.observe(seat, value.detach(), self.clock.step)
            self.seconds += time.perf_counter() - start

    def began(self, root: int) -> None:
        """Begin a forward of a root, known by its id, unless one is under way."""
        now = self.now
        if now.root in (0, root):
            now.forget()
            now.root = root
            now.asleep = self.failed or _is_apart() or (self.trains() and not torch.is_grad_enabled())

    def ended(self, root: int, output: Any) -> None:
        """End a forward of a root: measure what was held."""
        if self.now.root == root:
            try:
                if not self.now.asleep:
                    self._measure(output)
            finally:
                self.now.forget()

    def _measure(self, output: Any) -> None:
        start = time.perf_counter()
        self.now.asleep = True
        small = [(seat, value) for seat, value, version in self.now.held if version_of(value) == version]
        bad = self.meter.add_values(self.clock.step, small) if small else False
        bad = bad or (self.paced and self.meter.spoiled())
        bad = bad or not all(is_finite(value) for _, value in leaves.find(output) if value.is_cpu)
        if bad:
            self._search()
        self.spoiled |= bad
        self.seconds += time.perf_counter() - start

    def give_up(self, error: Exception) -> None:
        """Look at nothing more: it is the user's program that runs around this."""
        self.now.forget()
        if not self.failed:
            self.failed = True
            sys.stderr.write(f"[kedge] looking failed and is off from here on: {type(error).__name__}: {error}\n")

    def _search(self) -> None:
        """Look at everything that was only remembered and is still there as it was."""
        if self._searches > 0:
            self._searches -= 1
            found = [(s, k if isinstance(k, Tensor) else k(), version) for s, k, version in self.now.remembered]
            there = [(seat, value) for seat, value, v in found if value is not None and version_of(value) == v]
            self.meter.add_values(self.clock.step, there)


class Began(Own):
    """The hook by which a root's forward is seen to begin."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Be a forward-pre hook."""
        if not torch.compiler.is_compiling():
            self.lookout.began(id(module))


class Ended(Own):
    """The hook by which a root's forward is seen to end."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        if torch.compiler.is_compiling():
            return
        try:
            self.lookout.ended(id(module), output)
        except Exception as error:  # noqa: BLE001 - see there
            self.lookout.give_up(error)


class LookAfter(Own):
    """Holds what a module returns."""

    def __init__(self, lookout: Lookout, seat: Any, *, head: bool) -> None:
        self.lookout, self.seat, self.head = lookout, seat, head

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        if torch.compiler.is_compiling():
            return
        lookout = self.lookout
        if lookout.now.asleep or (self.head and lookout.paced):
            return
        try:
            if type(output) is Tensor:
                lookout.hold(self.seat, output)
                return
            for _, value in leaves.find(output):
                lookout.hold(self.seat, value)
        except Exception as error:  # noqa: BLE001 - see there
            lookout.give_up(error)


class LookBefore(Own):
    """Holds what a module is given, where no watched module made it."""

    def __init__(self, lookout: Lookout, seat: Any, names: Before, *, head: bool) -> None:
        self.lookout, self.seat, self.names, self.head = lookout, seat, names, head

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Be a forward-pre hook."""
        if torch.compiler.is_compiling() or self.lookout.now.asleep or (self.head and self.lookout.paced):
            return
        try:
            for _, value in self.names.find(args, kwargs or {}):
                self.lookout.hold(self.seat, value)
        except Exception as error:  # noqa: BLE001 - see there
            self.lookout.give_up(error)


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
    numbers = value.is_floating_point() or value.is_complex()
    if not numbers or value.layout is not torch.strided or value.is_nested:
        return True
    value = value.detach()
    if value.itemsize == 1:  # PyTorch does not add these up
        value = value.float()
    return cmath.isfinite((value.sum(dtype=torch.float32) if value.itemsize == 2 else value.sum()).item())


def _is_apart() -> bool:
    """Whether this forward is not one of the program's own numbers: see Note [Looking]."""
    counted = modes.dispatch_modes() > 0 or modes.is_transforming()
    return counted or modes.is_under_jit() or in_backward()
