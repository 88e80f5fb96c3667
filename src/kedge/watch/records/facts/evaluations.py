"""How the program evaluates its models: in which mode, and whether dropout is active all the same.

# Note [What counts as an evaluation]
A forward pass of a trained model in evaluation mode without gradients. In training mode several in
a row, while no model has a pass with gradients: a few programs call a model without gradients once
or twice before each step, as a generator whose samples are judged, or a target. They do not mean to
evaluate it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kedge.hooks.placing.concealed import KedgeHook
from kedge.sites.modal import in_training
from kedge.store.events import EvaluationEvent
from kedge.torch_internals import dynamo, modes
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_tables import is_replica, modules_in
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.active_dropout import DropoutLook
from kedge.watch.steps.shield import WatchShield

_IN_A_ROW = 3
"""Passes without gradients from which on they are an evaluation, in training mode."""
_NAMED = 50
"""Most names in a note."""
_LOOKS = 2
"""Most passes of a root in which calls of dropout are looked at."""


class Evaluations:
    """Counts the evaluations of trained models; see Note [What counts as an evaluation].

    Args:
        step: Returns the number of the current step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.step = step
        self._of: dict[int, RootEvaluations] = {}

    def follow(self, module: nn.Module, root: RootModule, shield: WatchShield) -> None:
        """Count the passes of a root's module, in all steps.

        Compiled models are left out: their hooks are part of their code.
        """
        hooked = root.hooks.hooked
        if hooked is None or any(map(dynamo.compiles, modules_in(module).values())):
            return
        known = self._of.get(root.index)
        if known is None:
            known = self._of[root.index] = RootEvaluations(self, root, shield)
        with hooked.attaching():
            hooked.owner.installed.put_around(module, before=known)

    def end_row(self) -> None:
        """Called when a model has a pass with gradients."""
        for known in self._of.values():
            known.row = 0

    def notes(self) -> list[EvaluationEvent]:
        """Return the notes at the end of a run."""
        return [known.note() for known in self._of.values() if known.passes]

    def close(self) -> None:
        """Remove what a pass without an end has left behind."""
        for known in self._of.values():
            for look in known.looks:
                look.close()


class RootEvaluations(KedgeHook):
    """Forward-pre hook that counts the evaluations of one root.

    Attributes:
        root: The root.
        since: The step of the first one.
        row: The passes without gradients in a row.
        passes: All passes of evaluations.
        as_training: Those of them with modules that computed as in training.
        train: The paths of these modules.
        looks: The passes in which calls of dropout were looked at.
    """

    def __init__(self, evaluations: Evaluations, root: RootModule, shield: WatchShield) -> None:
        self.evaluations = evaluations
        self.root = root
        self.since = self.row = self.passes = self.as_training = 0
        self.train: dict[str, None] = {}
        self.looks: list[DropoutLook] = []
        self._is_as_training = False
        self._counted = shield.around(self._count, "evaluations")

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            self.evaluations.end_row()
        elif self.root.optimizers and not in_backward() and not is_replica(module):
            self._counted(module)

    def note(self) -> EvaluationEvent:
        """Return the note at the end of the run."""
        calls = {call: None for look in self.looks for call in look.found}
        return EvaluationEvent(
            step=self.since,
            root=self.root.index,
            passes=self.passes,
            as_training=self.as_training,
            train=tuple(self.train)[:_NAMED],
            dropout=tuple(calls)[:_NAMED],
        )

    def _count(self, module: nn.Module) -> None:
        """Count a pass without gradients."""
        self.row += 1
        if module.training and self.row < _IN_A_ROW:
            return
        if self.row in (1, _IN_A_ROW):
            found = [self.root.label(name) for name, _ in in_training(module)]
            self._is_as_training = bool(found)
            self.train.update(dict.fromkeys(found))

        if not self.passes:
            self.since = self.evaluations.step()
        number = 1
        if module.training and self.row == _IN_A_ROW:
            number = _IN_A_ROW
        self.passes += number
        self.as_training += number * self._is_as_training
        if not module.training and not self._is_as_training:
            self._look(module)

    def _look(self, module: nn.Module) -> None:
        """Look at the calls of dropout in a pass that has begun in evaluation mode."""
        if len(self.looks) == _LOOKS or dynamo.has_compiled() or modes.is_transforming():
            return
        look = DropoutLook(self.root.label)
        self.looks.append(look)
        look.begin(module)
