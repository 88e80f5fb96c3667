"""Taking hooks down between the steps that need them.

A hook that does nothing still costs a microsecond at each call of its module, and the slower way through
`nn.Module.__call__` besides. Small models take that long for a layer.

# Note [Tables]
Autograd calls into Python for every parameter that has a table of hooks, even an empty one, so an empty one is taken away
as well. Autograd reads whether there is one without a lock: it must not change while another thread is in a backward.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.hooks.autograd import Station
from kedge.hooks.modules import Begin, End, Gate
from kedge.hooks.schedule import Clock
from kedge.hooks.veil import FLAG_TABLES, HOOK_TABLES


class Shelf:
    """Hooks that are put up and taken down together.

    Taking one down leaves its handle alone, which still removes it for good. The tables are known by weak references,
    as a model may be in what hooks of its own refer to, and must not be kept alive.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[weakref.ref[Any], int, Any]] = []
        self.params: list[tuple[weakref.ref[nn.Parameter], int, Any]] = []
        self.up = True

    def clear(self) -> None:
        """Let go of all of them, wherever they are."""
        self.entries.clear()
        self.params.clear()

    def gather(self, modules: Iterable[nn.Module], clock: Clock, *, called: bool = False) -> None:
        """Take over the hooks of the session with this clock on some modules.

        Args:
            modules: The modules.
            clock: The clock.
            called: Only of those that have been called.
        """
        for module in modules:
            tables = vars(module)
            for name in HOOK_TABLES:
                mine = [i for i, hook in tables[name].items() if _is_of(hook, clock) and not (called and _waits(hook))]
                for table in (tables[name], *(tables[flags] for flags in FLAG_TABLES if flags in tables)):
                    self.entries += [(weakref.ref(table), i, table[i]) for i in mine if i in table]

    def gather_stations(self, stations: Iterable[tuple[Station, nn.Parameter]]) -> None:
        """Take over the hooks of one session on parameters that got a gradient."""
        for station, param in stations:
            table = param._backward_hooks or {}
            if station.handle is not None and station.handle.id in table and any(t.fired for t in station.taps):
                self.params.append((weakref.ref(param), station.handle.id, table[station.handle.id]))

    def add(self, module: nn.Module, table: str, hook: Any, flag: str | None = None) -> None:
        """Take in a hook of our own, to be put up with the others, and its flag if it has one."""
        hooks = vars(module)[table]
        handle = RemovableHandle(hooks)
        self.entries.append((weakref.ref(hooks), handle.id, hook))
        if flag is not None:
            self.entries.append((weakref.ref(vars(module)[flag]), handle.id, True))

    def hang(self, *, alone: bool = True) -> None:
        """Put all of them up.

        Args:
            alone: No other thread can be in a backward, so that parameters may get tables; see Note [Tables].
        """
        if not self.up:
            for reference, key, hook in self.entries:
                table = reference()
                if table is not None:
                    table[key] = hook
            for owner, key, hook in self.params:
                param = owner()
                if param is not None and param._backward_hooks is None and alone:
                    param._backward_hooks = OrderedDict()
                if param is not None and param._backward_hooks is not None:
                    param._backward_hooks[key] = hook
            self.up = True

    def take_down(self, *, alone: bool = False) -> None:
        """Take all of them down.

        Args:
            alone: No other thread can be in a backward, so that parameters may lose tables; see Note [Tables].
        """
        if self.up:
            for reference, key, _ in self.entries:
                table = reference()
                if table is not None:
                    table.pop(key, None)
            for owner, key, _ in self.params:
                param = owner()
                if param is not None and param._backward_hooks is not None:
                    param._backward_hooks.pop(key, None)
                    if alone and not param._backward_hooks:
                        param._backward_hooks = None
            self.up = False


def _is_of(hook: Any, clock: Clock) -> bool:
    if isinstance(hook, Gate):
        return hook.session.clock is clock
    return isinstance(hook, (Begin, End)) and _passes(hook).clock is clock


def _waits(hook: Any) -> bool:
    """Whether it stands at a module that has not been called."""
    return isinstance(hook, Gate) and not hook.called


def _passes(hook: Begin | End) -> Any:
    return hook.passes if isinstance(hook, Begin) else hook.begin.passes
