"""The hooks that a session has installed, and how a pause removes and restores them.

# Note [Back in its place]
PyTorch runs the hooks of a table in the table's order. A restored hook goes behind those that
preceded it at its removal, and behind older ones that were out then, too, such as those of another
paused session. It goes before all others: they followed it, or were added during its absence. A
smaller key means an older hook.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.hooks.placing.concealed import conceal, reveal
from kedge.torch_internals.dynamo import frames
from kedge.torch_internals.torchscript import takes_hooks

K = TypeVar("K")
V = TypeVar("V")

_LEAST = 8
"""The number of hooks on graphs up to which Kedge does not check whether their graphs still exist."""


class Installed(Protocol):
    """Something installed for the length of a session."""

    def out(self) -> None:
        """Remove it temporarily, if it is installed."""

    def back(self) -> None:
        """Restore it to its place, if it is out."""

    def remove(self) -> None:
        """Remove it for good."""


class InstalledHook:
    """One hook in one of PyTorch's tables."""

    __slots__ = ("_ahead", "_beyond", "_flags", "_hook", "_removed", "handle")

    def __init__(self, handle: RemovableHandle) -> None:
        self.handle = handle
        self._hook: Any = None
        self._ahead: tuple[int, ...] = ()
        self._beyond: tuple[int, ...] = ()
        self._flags: tuple[MutableMapping[int, bool], ...] | None = None
        self._removed = False

    @property
    def hook(self) -> Any:
        """The callable, whether in the table or out; None once it was removed."""
        if self._hook is not None:
            return self._hook
        table = self.handle.hooks_dict_ref() or {}
        return table.get(self.handle.id)

    def out(self) -> None:
        """Remove the hook until `back`."""
        self.take_out()

    def back(self) -> None:
        """Restore the hook."""
        self.put_back()

    def take_out(self) -> None:
        """Remove the hook from its table until `put_back`.

        A removal that an interrupt cuts short can be repeated.
        """
        handle = self.handle
        table = handle.hooks_dict_ref()
        key = handle.id
        if table is None or key not in table:
            return
        if self._flags is None:
            flags = (ref() for ref in handle.extra_dict_ref)
            self._flags = tuple(f for f in flags if f is not None and key in f)
        self._ahead, self._beyond = _around(table, key) if len(table) > 1 else ((), ())
        self._hook = table[key]
        del table[key]
        for flag in self._flags:
            flag.pop(key, None)

    def put_back(self, cleared: Any = None) -> None:
        """Put the hook back into its table; see Note [Back in its place].

        Args:
            cleared: The callable to restore if `take_out` found none because the program had
                cleared the table.
        """
        table: Any = self.handle.hooks_dict_ref()
        hook = self._hook
        key = self.handle.id
        hook = cleared if hook is None else hook
        if hook is None or table is None or self._removed:
            return
        for flag in self._flags or ():
            flag[key] = True
        behind = self._behind(table) if table else ()
        table[key] = hook
        by_module = bool(self.handle.extra_dict_ref) and hasattr(table, "move_to_end")
        for other in behind:
            if (
                by_module
            ):  # never out of the table, because another thread may be calling the module
                table.move_to_end(other)
            else:  # autograd reads the table as a plain dictionary, where only new keys come last
                table[other] = table.pop(other)
        self._hook = None

    def _behind(self, table: MutableMapping[int, Any]) -> list[int]:
        keys = list(table)
        mine = self.handle.id
        before = (
            i
            for i, k in enumerate(keys)
            if k in self._ahead or (k < mine and k not in self._beyond)
        )
        return keys[max(before, default=-1) + 1 :]

    def remove(self) -> None:
        """Remove the hook for good."""
        self._hook = None
        self._removed = True
        self.handle.remove()


class ConcealedHook(InstalledHook):
    """One hook on a module, which is concealed; see Note [Tables without Kedge's hooks].

    It stays so while `HooksTogether` has it out of its table for a step.
    """

    __slots__ = ()

    def __init__(self, handle: RemovableHandle) -> None:
        super().__init__(handle)
        conceal(handle)

    def out(self) -> None:
        """Remove the hook until `back`.

        Without hooks of Kedge's its table is as it was.
        """
        reveal(self.handle)
        super().out()

    def back(self) -> None:
        """Restore the hook, and conceal it."""
        super().back()
        conceal(self.handle)

    def remove(self) -> None:
        """Remove the hook for good."""
        reveal(self.handle)
        super().remove()


def _around(table: MutableMapping[int, Any], key: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    keys = list(table)
    at = keys.index(key)
    return tuple(keys[:at]), tuple(keys[at + 1 :])


class HooksTogether:
    """Hooks that are removed from PyTorch's tables and restored together, as `InstalledHooks` does with all of a session.

    Attributes:
        are_out: Whether they are out.
    """

    def __init__(self, hooks: Iterable[tuple[InstalledHook, Any]] = ()) -> None:
        self.are_out = False
        self._hooks = list(hooks)

    def take_over(self, hooks: Iterable[tuple[InstalledHook, Any]]) -> None:
        """Replace the hooks by others."""
        self._hooks = list(hooks)

    def out(self) -> None:
        """Remove the hooks until `back`, unless they are out."""
        if not self.are_out:
            self.are_out = True
            for installed, _ in self._hooks:
                installed.take_out()

    def remove(self) -> None:
        """Remove the hooks for good."""
        for installed, _ in self._hooks:
            installed.remove()

    def back(self) -> None:
        """Restore the hooks, if they are out, also if the program had cleared a table."""
        if self.are_out:
            self.are_out = False
            for installed, hook in self._hooks:
                installed.put_back(hook)


class Removal:
    """Removes, when it is called, one of several things that are installed.

    A large model has tens of thousands: an object of its own is a tenth of what a closure is, with
    what `ExitStack.callback` would put around it.
    """

    __slots__ = ("_among", "_what")

    def __init__(self, among: dict[int, Installed], what: Installed) -> None:
        self._among = among
        self._what = what

    def __call__(self, *_error: object) -> None:
        """Remove it, as the last thing in an `ExitStack`, too."""
        self._among.pop(id(self._what), None)
        self._what.remove()


class InstalledHooks:
    """All that one session has installed, in the order of installation.

    Attributes:
        paused: Whether all of it is out.
        cleanup: The undo functions, run when the session ends.
    """

    def __init__(self) -> None:
        self.paused = False
        self.cleanup = ExitStack()
        self._standing: dict[int, Installed] = {}
        self._passing: deque[InstalledHook] = deque()
        self._room = _LEAST
        self._compiled = -1
        self._failed: ExitStack | None = None
        self._lock = threading.Lock()

    def add(self, what: Installed) -> Callable[..., None]:
        """Add something installed; returns the function that removes it."""
        self._standing[id(what)] = what
        return Removal(self._standing, what)

    def install(self, what: Installed) -> None:
        """Add something installed, to be removed when the session ends."""
        self.cleanup.push(self.add(what))

    def put_around(
        self,
        module: nn.Module,
        before: Callable[..., Any] | None = None,
        behind: Callable[..., Any] | None = None,
        *,
        with_kwargs: bool = False,
    ) -> None:
        """Register hooks on a module until the session ends, and conceal them; none on one that calls no hooks.

        Args:
            module: The module.
            before: The forward-pre hook.
            behind: The forward hook, which PyTorch also calls when the module's call raises.
            with_kwargs: Whether the forward-pre hook receives the keyword arguments.
        """
        if not takes_hooks(module):
            return
        if before is not None:
            self.put(module.register_forward_pre_hook(before, with_kwargs=with_kwargs))
        if behind is not None:
            self.put(module.register_forward_hook(behind, always_call=True))

    def put(self, handle: RemovableHandle) -> None:
        """Keep a hook on a module until the session ends, and conceal it."""
        self.install(ConcealedHook(handle))

    def hooks(self) -> list[tuple[InstalledHook, Any]]:
        """Return the hooks of modules and optimizers, each with its callable."""
        hooks = (
            standing
            for standing in list(self._standing.values())
            if isinstance(standing, InstalledHook)
        )
        return [(each, hook) for each in hooks if (hook := each.hook) is not None]

    def keep(self, handle: RemovableHandle) -> None:
        """Add the hook of a tensor or node, which lives as long as a graph."""
        installed = InstalledHook(handle)
        self._passing.append(installed)
        if len(self._passing) > self._room:
            self._forget_gone()
        if self.paused:  # a forward on another thread has continued
            installed.out()

    def _forget_gone(self) -> None:
        """Drop hooks of released graphs.

        The next such check comes when twice the remaining number is reached.
        """
        with self._lock:  # forwards of several threads, which add more at the same time
            for _ in range(len(self._passing)):
                installed = self._passing.popleft()
                if installed.handle.hooks_dict_ref() is not None:
                    self._passing.append(installed)
            self._room = max(_LEAST, 2 * len(self._passing))

    def out(self) -> None:
        """Remove everything until `back`, the last first.

        Anything already out stays out.
        """
        if not self.paused:
            self._compiled = frames()
        self.paused = True
        for installed in self._kept()[::-1]:
            installed.out()
        for standing in reversed(list(self._standing.values())):
            standing.out()

    def back(self) -> bool:
        """Restore everything, the first first.

        Returns whether code was compiled meanwhile, which lacks these hooks.
        """
        if not self.paused:
            return False
        for standing in list(self._standing.values()):
            standing.back()
        for installed in self._kept():
            installed.back()
        self.paused = False
        return self._compiled not in (now := frames(), -1) and now > 0

    def _kept(self) -> list[InstalledHook]:
        with self._lock:
            return list(self._passing)

    @contextmanager
    def attaching(self) -> Iterator[None]:
        """Keep what the block installs if it succeeds; else remove it, and call what `on_failure` has collected.

        In a pause everything is restored for the length of the block, so that hooks attached there
        come after it.
        """
        paused = self.paused
        outer = self.cleanup
        around = self._failed
        attached = ExitStack()
        self.back()
        try:
            with ExitStack() as failed:
                self.cleanup = attached
                self._failed = failed
                failed.callback(attached.close)
                try:
                    yield
                finally:
                    self.cleanup = outer
                    self._failed = around
                undo = failed.pop_all()
            outer.callback(attached.close)
            if around is not None:  # an action that hooks more when it is attached
                around.callback(undo.close)
        finally:
            if paused:
                self.out()

    def on_failure(self, undo: Callable[..., Any], *args: Any) -> None:
        """Call a function if the current `attaching` fails.

        Outside of one there is nothing to undo.
        """
        if self._failed is not None:
            self._failed.callback(undo, *args)

    def enter(self, table: dict[K, V], key: K, value: V) -> None:
        """Set an entry of a table of gates, which becomes what it was if the current `attaching` fails."""
        if key in table:
            self.on_failure(table.__setitem__, key, table[key])
        else:
            self.on_failure(table.pop, key)
        table[key] = value

    def clear(self) -> None:
        """Remove everything."""
        for installed in self._kept():
            installed.remove()
        self._passing.clear()
        self.cleanup.close()
