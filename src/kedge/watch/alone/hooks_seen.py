"""The hooks that a program sets itself: when each was called, with what, and what it returned.

# Note [Between the program's hooks]
PyTorch keeps the hooks of a tensor, or of a node, in a table, and calls them in its order. Kedge
puts a hook of its own before the first of them and one behind each. Each sees the value as the
program's hook before it has left it. They return nothing, so that the value stays as it is, and are
taken out at the end. The program's hooks keep their keys, so its handles remove them as ever.

# Note [A new hook]
PyTorch numbers all hooks of a process. If the number has grown between two operations, one was
registered meanwhile, and the tables of the tensors that were seen are looked through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kedge.inspection.owners import library_of, name_of, source_of
from kedge.sites import leaves
from kedge.store.events import HookFiring, TensorValue
from kedge.torch_internals import modes
from kedge.torch_internals.own_work import own_work
from kedge.watch.alone.values import value_of

_FIRST = 4
"""The first calls of a hook are recorded, and the last one."""


@dataclass
class HookCalls:
    """The calls of a hook in passes that are alike.

    Attributes:
        times: How many they are.
        firings: The first ones, and the last one.
    """

    times: int = 0
    firings: list[HookFiring] = field(default_factory=list)


@dataclass
class SeenHook:
    """A hook of the program.

    Attributes:
        kind: As `kedge.audit` names it.
        on: What it is on: the number of an autograd node, or what `leaf_key` returns.
        name: The name of the function.
        owner: Its file and line, or its library.
        calls: Its calls, by the number of the graph whose passes made them.
        removed: Whether the program has removed it.
    """

    kind: str
    on: Hashable
    name: str
    owner: str
    calls: dict[int, HookCalls] = field(default_factory=dict)
    removed: bool = False

    def add(self, firing: HookFiring, graph: int) -> None:
        """Note a call."""
        calls = self.calls.setdefault(graph, HookCalls())
        calls.times += 1
        if len(calls.firings) > _FIRST:
            calls.firings[-1] = firing
        else:
            calls.firings.append(firing)


class PassClock:
    """Counts the backward passes, and the calls of hooks in each.

    Attributes:
        passes: How many passes have begun before the current one.
        calls: How many hooks the current one has called.
        graph: The number of the current one's graph.
    """

    def __init__(self) -> None:
        self.graph = 0
        self.passes = 0
        self.calls = 0


class _Between:
    """A hook of Kedge's in a table of the program's; see Note [Between the program's hooks]."""

    __torch_unserializable__ = True

    def __init__(self, seen: Callable[[int | None, Any], None], behind: int | None) -> None:
        self.seen = seen
        self.behind = behind

    def __call__(self, *values: Any) -> None:
        """Look at the value."""
        self.seen(self.behind, values[0])


class SeenTable:
    """One table of the program's hooks.

    Args:
        table: The table.
        kind: The kind of its hooks.
        on: What they are on.
        clock: Counts the calls.
        attempt: Runs work that must not end the program.
    """

    def __init__(
        self,
        table: Any,
        kind: str,
        on: Hashable,
        clock: PassClock,
        attempt: Callable[..., Any],
    ) -> None:
        self._table = weakref.ref(table)
        self.kind = kind
        self.on = on
        self.clock = clock
        self.attempt = attempt
        self.hooks: dict[int, SeenHook] = {}
        self._there: set[int] = set()
        self._now: TensorValue | None = None
        self._is_under_way = False
        # Autograd keeps a gradient as it is only where nobody else holds it.
        self._before: weakref.ref[Tensor] | None = None
        self._waiting: list[int] = []

    @property
    def table(self) -> Any:
        """The table; an empty one if the tensor, or the node, and all that could call its hooks are gone."""
        table = self._table()
        if table is None:
            return {}
        return table

    def renew(self) -> None:
        """Put Kedge's hooks around those that are new."""
        table = self.table
        own = {key: hook for key, hook in table.items() if library_of(hook) != "kedge"}
        for key, seen in self.hooks.items():
            seen.removed = key not in own
        if own.keys() <= self.hooks.keys():
            return
        for key, hook in own.items():
            if key not in self.hooks:
                owner = library_of(hook) or source_of(hook) or "built in"
                self.hooks[key] = SeenHook(self.kind, self.on, name_of(hook), owner)
        table.clear()
        self._put(table, None)
        for key, hook in own.items():
            table[key] = hook
            self._put(table, key)

    def _put(self, table: Any, behind: int | None) -> None:
        handle = RemovableHandle(table)
        table[handle.id] = _Between(self._seen, behind)

    def _seen(self, behind: int | None, value: Any) -> None:
        with own_work(), modes.without_subclasses():
            self.attempt("the hooks of its tensors", self._look, behind, value)

    def _look(self, behind: int | None, value: Any) -> None:
        if self.kind == "post-accumulate":
            value = value.grad
        now = _first(value)
        known = None if now is None else value_of(now)
        if behind is None:
            self._there = set(self.table)
            self._waiting = [key for key in self.hooks if key in self._there]
            self._remember(now, known)
            self._is_under_way = True
            return
        if behind not in self._there or not self._is_under_way:
            return
        given = self._now
        before = None
        if self._before is not None:
            before = self._before()
        self._remember(now, known)
        if behind in self._waiting:
            self._waiting.remove(behind)
        did = "nothing"
        result = None
        if now is not before:
            did = "returned"
            result = known
        elif known != given:
            did = "changed"
            result = known
        self._add(behind, given, did, result)

    def _remember(self, value: Tensor | None, known: TensorValue | None) -> None:
        self._now = known
        self._before = None
        if value is not None:
            self._before = weakref.ref(value)

    def _add(
        self, key: int, given: TensorValue | None, did: Any, result: TensorValue | None
    ) -> None:
        firing = HookFiring(
            at=self.clock.passes, order=self.clock.calls, given=given, did=did, result=result
        )
        self.clock.calls += 1
        self.hooks[key].add(firing, self.clock.graph)

    def pass_ended(self, *, failed: bool) -> None:
        """Note that a pass has ended; one that fails may have ended in the first hook not called."""
        if failed and self._waiting and self._is_under_way:
            self._add(self._waiting[0], self._now, "raised", None)
        self._waiting = []
        self._is_under_way = False
        self._remember(None, None)

    def take_out(self) -> None:
        """Take Kedge's hooks out."""
        table = self._table()
        if table is None:
            return
        for key, hook in list(table.items()):
            if isinstance(hook, _Between):
                del table[key]
        for key, seen in self.hooks.items():
            seen.removed = key not in table


def _first(value: Any) -> Tensor | None:
    """Return the first tensor of what a hook is called with."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, Sequence):
        return next((each for each in value if isinstance(each, Tensor)), None)
    found = leaves.find(value)
    return found[0][1] if found else None
