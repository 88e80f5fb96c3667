"""Taking the hooks of measured steps out of PyTorch's tables for the steps between.

# Note [Parked hooks]
A hook that does nothing still costs a microsecond at each call of its module, and the slower way through
`nn.Module.__call__` besides: small models take that long for a layer. So the hooks of modules that were seen in a
measured step are taken out until the next one. Those of modules that have not been called yet stay: they cost
nothing, and a module that is used in other steps alone is not taken for unused. Compiled code keeps all of them,
as it would be compiled again for each change. Where no optimizer makes the steps, a root's own call does, in the
midst of which its hooks cannot change: they stay too. Where new roots are looked for, what tells that a root runs
stays, as what a root calls is none.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.errors import ActionDisabled
from kedge.hooks.modules import Begin, End, Gate
from kedge.hooks.schedule import Clock
from kedge.hooks.session import Session
from kedge.sites.site import escape
from kedge.stderr import say
from kedge.torch_internals import dynamo
from kedge.torch_internals.hook_tables import around_forward
from kedge.watch.roots import Root


class WatchSession(Session):
    """A session inside somebody's program: it complains on stderr, where ``-W error`` does not reach."""

    def __init__(self) -> None:
        super().__init__(on_error="warn")
        self.fired = deque(maxlen=0)  # nobody reads the timeline, and the values in it would be kept

    def complain(self, warning: ActionDisabled) -> None:
        """Say it without raising."""
        say(str(warning))

    def hook_each(self, module: nn.Module, paths: list[str], kind: str, action: Any) -> None:
        """Hook one kind of site at some paths, if there are any."""
        if paths:
            self.hook(module, ", ".join(f"{escape(p)}:{kind}" for p in paths), action)

    def refresh(self) -> None:
        """Nothing: a root gets its hooks before its first forward, so before it is compiled."""


_KINDS = (Gate, Begin, End)


class ParkedHooks:
    """Hooks that are put into PyTorch's tables and taken out together.

    Taking one out leaves its handle alone, which still removes it for good. The tables are known by weak references:
    a model may be in what hooks of its own refer to, and must not be kept alive.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Any], int, Any]] = []
        self.up = True

    def clear(self) -> None:
        """Forget all of them, wherever they are."""
        self._entries.clear()

    def add(self, handle: RemovableHandle) -> None:
        """Take over one hook."""
        table = handle.hooks_dict_ref()
        if table is not None:
            self._entries.append((weakref.ref(table), handle.id, table[handle.id]))

    def gather(self, modules: Iterable[nn.Module], clock: Clock, *kinds: type, called: bool = False) -> None:
        """Take over the hooks on some modules of the session with this clock.

        Args:
            modules: The modules.
            clock: The clock.
            kinds: The kinds of hooks.
            called: Only those of modules that have been called.
        """
        for module in modules:
            for table_of_hooks, flags in around_forward(module):
                own = {i: hook for i, hook in table_of_hooks.items() if isinstance(hook, kinds) and _is_of(hook, clock)}
                mine = [i for i, hook in own.items() if not (called and _waits(hook))]
                for table in (table_of_hooks, *flags):
                    self._entries += [(weakref.ref(table), i, table[i]) for i in mine if i in table]

    def put(self, *, up: bool) -> None:
        """Put all of them up, or take them down."""
        if up == self.up:
            return
        for reference, key, hook in self._entries:
            table = reference()
            if table is None:
                continue
            if up:
                table[key] = hook
            else:
                table.pop(key, None)
        self.up = up


class StepHooks:
    """Puts up the hooks that each kind of step needs; see Note [Parked hooks].

    Attributes:
        scouting: New roots are looked for in this step.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._inner, self._heads, self._scouts = ParkedHooks(), ParkedHooks(), ParkedHooks()
        self._calls = ParkedHooks()
        self.scouting = True
        self._seen = (-1, -1)
        self._waiting: list[Any] = []
        self._changing = threading.RLock()

    def close(self) -> None:
        """Take out what has no handle, or stands where its handle does not reach."""
        self._inner.put(up=False)

    def take_scout(self, handle: RemovableHandle) -> None:
        """Take over the hook that finds roots."""
        self._scouts.add(handle)

    def gather(self, roots: Iterable[Root]) -> None:
        """Take over the hooks of roots that have been seen in a measured step; call it at its end."""
        size = len(self.session.taps), len(self.session.targets)
        if size == self._seen and not any(tap.fired for tap in self._waiting):
            return
        with self._changing:
            self._seen = size
            self._inner.clear()
            self._heads.clear()
            self._calls.clear()
            for root in roots:
                self._gather(root)
            self._waiting = [tap for tap in self.session.taps if not tap.fired and tap.site.kind == "out"]

    def _gather(self, root: Root) -> None:
        module, clock = root.module(), self.session.clock
        if module is None:
            return
        inner = [m for n, m in module.named_modules() if n in root.types and m is not module]
        fused = _fused(module)
        self._inner.gather([m for m in inner if m in fused], clock, *_KINDS)
        self._inner.gather([m for m in inner if m not in fused], clock, *_KINDS, called=True)
        self._heads.gather([module], clock, Gate, called=module not in fused)
        self._calls.gather([module], clock, Begin, End)

    def prepare(self, *, measured: bool, scouting: bool) -> None:
        """Put up the hooks that the next step needs, and take down the others.

        Args:
            measured: Whether every value is measured in it.
            scouting: Whether new roots are looked for in it.
        """
        with self._changing:
            up = measured or dynamo.has_compiled()
            self.scouting = scouting or measured
            self._inner.put(up=up)
            by_calls = self.session.clock.optimizer is None
            self._heads.put(up=up or by_calls)
            self._calls.put(up=up or by_calls or scouting)
            if not self._calls.up:  # the end of a call under way would not be seen
                for target in list(self.session.targets.values()):
                    target.passes.end()
            self._scouts.put(up=up or scouting)


def _is_of(hook: Any, clock: Clock) -> bool:
    if isinstance(hook, Gate):
        return hook.session.clock is clock
    return isinstance(hook, (Begin, End)) and _passes(hook).clock is clock


def _waits(hook: Any) -> bool:
    """Whether it stands at a module that has not been called."""
    return isinstance(hook, Gate) and not hook.called


def _passes(hook: Begin | End) -> Any:
    return hook.passes if isinstance(hook, Begin) else hook.begin.passes


def _fused(module: nn.Module) -> set[nn.Module]:
    """The parts of modules that look for hooks on their parts, and compute another way where there are some."""
    return {part for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer) for part in m.modules()}
