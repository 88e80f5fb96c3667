"""Taking hooks down between the steps that need them.

A hook that does nothing still costs a microsecond at each call of its module, and the slower way through
`nn.Module.__call__` besides. Small models take that long for a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.hooks.autograd import Station
from kedge.hooks.modules import FLAG_TABLES, HOOK_TABLES, Begin, End, Gate
from kedge.hooks.schedule import Clock

Entry = tuple[MutableMapping[int, Any], int, Any]


class Shelf:
    """Hooks that are put up and taken down together.

    Taking one down leaves its handle alone, which still removes it for good.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.params: list[tuple[weakref.ref[nn.Parameter], MutableMapping[int, Any], int, Any]] = []
        self.up = True

    def clear(self) -> None:
        """Let go of all of them, wherever they are."""
        self.entries.clear()
        self.params.clear()

    def gather(self, modules: Iterable[nn.Module], clock: Clock) -> None:
        """Take over the hooks of the session with this clock on some modules."""
        for module in modules:
            tables = vars(module)
            for name in HOOK_TABLES:
                mine = [i for i, hook in tables[name].items() if _is_of(hook, clock)]
                for table in (tables[name], *(tables[flags] for flags in FLAG_TABLES if flags in tables)):
                    self.entries += [(table, i, table[i]) for i in mine if i in table]

    def gather_stations(self, stations: Iterable[tuple[Station, nn.Parameter]]) -> None:
        """Take over the hooks of one session on parameters."""
        for station, param in stations:
            table = param._backward_hooks
            if station.handle is not None and table is not None and station.handle.id in table:
                self.params.append((weakref.ref(param), table, station.handle.id, table[station.handle.id]))

    def add(self, module: nn.Module, table: str, hook: Any) -> None:
        """Take in a hook of our own, to be put up with the others; one before the call gets keyword arguments too."""
        hooks = vars(module)[table]
        handle = RemovableHandle(hooks)
        self.entries.append((hooks, handle.id, hook))
        if table == "_forward_pre_hooks":
            self.entries.append((vars(module)["_forward_pre_hooks_with_kwargs"], handle.id, True))

    def hang(self) -> None:
        """Put all of them up."""
        if not self.up:
            for table, key, hook in self.entries:
                table[key] = hook
            for reference, table, key, hook in self.params:
                param = reference()
                if param is not None and param._backward_hooks is None:
                    param._backward_hooks = cast("dict[int, Any]", table)
                if param is not None and param._backward_hooks is table:
                    table[key] = hook
            self.up = True

    def take_down(self) -> None:
        """Take all of them down."""
        if self.up:
            for table, key, _ in self.entries:
                table.pop(key, None)
            for reference, table, key, _ in self.params:
                param = reference()
                table.pop(key, None)
                # Autograd calls into Python for every parameter that has a table, even an empty one.
                if param is not None and not table and param._backward_hooks is table:
                    param._backward_hooks = None
            self.up = False


def _is_of(hook: Any, clock: Clock) -> bool:
    if isinstance(hook, Gate):
        return hook.session.clock is clock
    return isinstance(hook, (Begin, End)) and _passes(hook).clock is clock


def _passes(hook: Begin | End) -> Any:
    return hook.passes if isinstance(hook, Begin) else hook.begin.passes
