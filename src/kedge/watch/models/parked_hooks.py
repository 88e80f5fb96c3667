"""Takes the hooks of measured steps out of PyTorch's tables for the steps between.

# Note [Parked hooks]
A hook that does nothing still costs a microsecond at each call of its module, besides the slower
path through `nn.Module.__call__`: small models need no longer for a layer. So the hooks of modules
that ran in a measured step are taken out until the next one. Hooks of modules that have not been
called yet stay: they cost nothing, and a module that only runs in other steps must not count as
unused. With compiled code the hooks stay for some time, as it compiles once more without them; see
Note [Two variants] in `kedge.watch.steps.compiled_steps`. Where no optimizer ends the steps, a
root's own call does, and its hooks cannot change during the call: they stay too. While new roots
are searched for, the hooks that show that a root runs stay, as the modules that a root calls are
not roots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.errors import ActionDisabled
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.schedule import StepClock
from kedge.hooks.gates.passes import PassBegins, PassEnds
from kedge.hooks.placing.installed import HooksTogether, InstalledHook
from kedge.hooks.placing.strict_export import spare_export
from kedge.hooks.session import Session
from kedge.sites.select import ModulesSelector
from kedge.stderr import say
from kedge.torch_internals import dynamo, operators
from kedge.torch_internals.module_tables import named_modules
from kedge.watch.step import Step


class WatchSession(Session):
    """A session inside the user's program: it warns on stderr, where ``-W error`` does not reach.

    Args:
        clock: Counts the steps. The kind of step decides when a site fires, not a schedule.
        lose: Reports that a site cannot be watched.
    """

    # Hooks of modules that were not called yet stay; see Note [Parked hooks].
    while_hooked = "in the run"

    def __init__(self, clock: StepClock, lose: Callable[[str, Exception], None]) -> None:
        super().__init__(on_error="warn")
        self.clock = clock
        self.lose = lose
        self.fired = None  # the timeline has no reader and would keep its values alive

    def complain(self, warning: ActionDisabled) -> None:
        """Print a warning without raising."""
        say(str(warning))

    def hook_each(
        self, model: nn.Module, modules: Mapping[str, nn.Module], kind: str, action: Any
    ) -> None:
        """Hook one kind of site of some modules of a model, if there are any."""
        if not modules:
            return
        try:
            self.hook(model, ModulesSelector(modules, kind), action)
        except Exception as error:  # noqa: BLE001 - of a class of the program
            if len(modules) == 1:
                (path,) = modules
                self.lose(f"{path or 'the model'} in {type(model).__name__}", error)
                return
            for path, module in modules.items():
                self.hook_each(model, {path: module}, kind, action)

    def release(self) -> None:
        """Drop its taps and gates, which hold each other, when it has ended and nobody reads it."""
        for tap in self.taps:
            # Another thread may be in its hook.
            tap.gate.taps = dict.fromkeys(tap.gate.taps, ())
        self.taps = []
        self.targets = {}

    def refresh(self, *models: nn.Module) -> None:
        """Does nothing: a root is hooked before its first forward, so before it is compiled."""


class StepHooks:
    """Installs the hooks that each kind of step needs; see Note [Parked hooks].

    Attributes:
        finding: Whether the current step searches for new roots.
    """

    def __init__(self, session: WatchSession) -> None:
        self.session = session
        self.finding = True
        self._finder = HooksTogether()
        self._calls = HooksTogether()
        self._root_gates = HooksTogether()
        self._inner_gates = HooksTogether()
        self._seen = (-1, -1)
        self._waiting: list[Any] = []
        self._undo: Callable[[], None] = lambda: None
        self._wanted = (True, True)
        self._changing = threading.RLock()

    def take_finder(self, handle: RemovableHandle) -> None:
        """Take over the hook that finds roots."""
        installed = InstalledHook(handle)
        self._finder.take_over([(installed, installed.hook)])
        self._undo = spare_export(self._finder)

    def close(self) -> None:
        """Remove the hook that finds roots for good; the others are the session's to remove."""
        self._undo()
        self._finder.remove()
        for hooks in (self._calls, self._root_gates, self._inner_gates):
            hooks.take_over(())
        self._waiting = []

    def gather(self) -> None:
        """Take over the hooks of modules that were called in a measured step.

        To be called at its end.
        """
        session = self.session
        size = (len(session.taps), len(session.targets))
        if size == self._seen and not any(tap.fired for tap in self._waiting):
            return

        targets = session.targets.values()
        fused = {id(target.passes): _fused(target.model()) for target in targets}
        calls: list[tuple[InstalledHook, Any]] = []
        root_gates: list[tuple[InstalledHook, Any]] = []
        inner_gates: list[tuple[InstalledHook, Any]] = []
        for installed, hook in session.installed.hooks():
            if isinstance(hook, (PassBegins, PassEnds)):
                calls.append((installed, hook))
            if not isinstance(hook, Gate):
                continue
            if hook.called or hook.path in fused.get(id(hook.passes), ()):
                gates = inner_gates if hook.path else root_gates
                gates.append((installed, hook))

        with self._changing:
            self._seen = size
            self._inner_gates.take_over(inner_gates)
            self._root_gates.take_over(root_gates)
            self._calls.take_over(calls)
            outputs = (tap for tap in session.taps if tap.site.kind == "out")
            self._waiting = [tap for tap in outputs if not tap.fired]

    def begin_step(self, step: Step) -> None:
        """Install the hooks that a step needs, and remove the others."""
        with self._changing:
            if not step.hooked:
                operators.leave_graphs_whole()
            self.finding = step.finding or step.is_measured
            self._wanted = (step.finding, step.by_passes)
            self.place(step.hooked)

    def place(self, hooked: bool) -> None:
        """Install the hooks of measured steps, or remove them, in the middle of a step, too."""
        with self._changing:
            finding, by_passes = self._wanted
            # In the order in which they came first: hooks in another order would be a third variant
            # for Dynamo.
            _place(self._calls, up=hooked or by_passes or finding)
            _place(self._root_gates, up=hooked or by_passes)
            _place(self._inner_gates, up=hooked)
            if self._calls.are_out:  # the end of an active call would not be seen
                for target in list(self.session.targets.values()):
                    target.passes.end()
            # Dynamo also checks for hooks on all modules: they stay, so that they make no third
            # variant.
            _place(self._finder, up=hooked or finding or dynamo.has_compiled())


def _place(hooks: HooksTogether, *, up: bool) -> None:
    if up:
        hooks.back()
    else:
        hooks.out()


def _fused(model: nn.Module | None) -> set[str]:
    """Return the paths of fused modules and of their parts.

    Such modules compute differently if their parts have hooks.
    """
    if model is None:
        return set()
    found: set[str] = set()
    for name, module in named_modules(model).items():
        if isinstance(module, nn.TransformerEncoderLayer):
            found.update(f"{name}.{part}".strip(".") for part in named_modules(module))
    return found
