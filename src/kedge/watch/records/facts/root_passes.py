"""The forward passes of each root, of which some are looked at in all kinds of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kedge.hooks.placing.concealed import KedgeHook
from kedge.store.events import RunEvent
from kedge.torch_internals import dynamo
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_tables import is_replica, modules_in
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.evaluations import Evaluations
from kedge.watch.records.facts.inputs import Inputs
from kedge.watch.records.facts.repeated_batches import RepeatedBatches
from kedge.watch.steps.shield import WatchShield


class RootPasses:
    """Looks at the passes of all roots.

    Args:
        step: Returns the number of the current step.

    Attributes:
        measured: Whether the current step is measured.
        in_row: Whether a model has had a pass without gradients since the last one with them.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.step = step
        self.measured = True
        self.in_row = False
        self._of: dict[int, PassHook] = {}

    def follow(self, called: nn.Module, root: RootModule, shield: WatchShield) -> None:
        """Hook a root's module, which is called itself or inside a wrapper.

        Compiled models are left out: their hooks are part of their code.
        """
        hooked = root.hooks.hooked
        module = root.module()
        if hooked is None or module is None:
            return
        if dynamo.unwrap(called) is not called or any(
            map(dynamo.compiles, modules_in(called).values())
        ):
            return
        known = self._of.get(root.index)
        if known is None:
            known = self._of[root.index] = PassHook(self, root, shield)
        with hooked.attaching():
            hooked.owner.installed.put_around(module, before=known, with_kwargs=True)

    def graded(self) -> None:
        """Called when a model has a pass with gradients: rows of passes without them are over."""
        if self.in_row:
            self.in_row = False
            for known in self._of.values():
                known.evaluations.row = 0

    def notes(self) -> list[RunEvent]:
        """Return the notes at the end of a run."""
        notes: list[RunEvent] = []
        for known in self._of.values():
            if known.root.optimizers:
                notes += known.evaluations.notes()
                notes += known.inputs.notes()
                notes += known.batches.notes()
            else:
                notes += known.evaluations.notes_of_untrained()
        return notes

    def close(self) -> None:
        """Remove what a pass without an end has left behind."""
        for known in self._of.values():
            known.evaluations.close()


class PassHook(KedgeHook):
    """The forward-pre hook of one root.

    Modes go on the stack and off it outside of own work; see Note [Own work] in
    `kedge.torch_internals.own_work`.
    """

    def __init__(self, passes: RootPasses, root: RootModule, shield: WatchShield) -> None:
        self.passes = passes
        self.root = root
        self.evaluations = Evaluations(root, shield)
        self.inputs = Inputs(root)
        self.batches = RepeatedBatches(root)
        self._evaluated = shield.around(self.evaluations.count, "evaluations")
        self._given = shield.around(self.inputs.take, "inputs")
        self._came = shield.around(self.batches.take, "inputs")

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """The forward-pre hook; removed in the midst of a call it gets no arguments by name."""
        passes = self.passes
        if torch.compiler.is_compiling() or in_backward() or is_replica(module):
            return
        if not torch.is_grad_enabled():
            step = passes.step()
            if self.root.optimizers or self.evaluations.may_look(module, step):
                passes.in_row = True
                self._evaluated(module, step)
                self.evaluations.put_up()
            return
        passes.graded()
        step = passes.step()
        if self.inputs.wants(step, measured=passes.measured):
            self._given(args, kwargs, step)
        if self.batches.wants(step):
            self._came((args, kwargs), step)
