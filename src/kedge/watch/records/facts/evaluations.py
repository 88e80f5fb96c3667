"""How the program evaluates a model: in which mode, and whether dropout is active all the same.

# Note [What counts as an evaluation]
A forward pass of a trained model in evaluation mode without gradients. In training mode several in
a row, while no model has a pass with gradients: a few programs call a model without gradients once
or twice before each step, as a generator whose samples are judged, or a target. They do not mean to
evaluate it.
"""

from __future__ import annotations

from torch import nn

from kedge.sites.modal import in_training
from kedge.store.events import EvaluationEvent
from kedge.torch_internals import dynamo, modes
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.active_dropout import DropoutLook

_IN_A_ROW = 3
"""Passes without gradients from which on they are an evaluation, in training mode."""
_NAMED = 50
"""Most names in a note."""
_LOOKS = 2
"""Most passes in which calls of dropout are looked at."""


class Evaluations:
    """Counts the evaluations of one root; see Note [What counts as an evaluation].

    Attributes:
        row: The passes without gradients in a row.
    """

    def __init__(self, root: RootModule) -> None:
        self.row = 0
        self._root = root
        self._since = self._passes = self._as_training = 0
        self._train: dict[str, None] = {}
        self._is_as_training = False
        self._looks: list[DropoutLook] = []

    def count(self, module: nn.Module, step: int) -> None:
        """Count a pass without gradients, which begins."""
        self.row += 1
        if module.training and self.row < _IN_A_ROW:
            return
        if self.row in (1, _IN_A_ROW):
            found = [self._root.label(name) for name, _ in in_training(module)]
            self._is_as_training = bool(found)
            self._train.update(dict.fromkeys(found))

        if not self._passes:
            self._since = step
        number = 1
        if module.training and self.row == _IN_A_ROW:
            number = _IN_A_ROW
        self._passes += number
        self._as_training += number * self._is_as_training
        if not module.training and not self._is_as_training:
            self._look(module)

    def notes(self) -> list[EvaluationEvent]:
        """Return the note at the end of the run, if there were evaluations."""
        if not self._passes:
            return []
        calls = {call: None for look in self._looks for call in look.found}
        note = EvaluationEvent(
            step=self._since,
            root=self._root.index,
            passes=self._passes,
            as_training=self._as_training,
            train=tuple(self._train)[:_NAMED],
            dropout=tuple(calls)[:_NAMED],
        )
        return [note]

    def close(self) -> None:
        """Remove what a pass without an end has left behind."""
        for look in self._looks:
            look.close()

    def _look(self, module: nn.Module) -> None:
        """Look at the calls of dropout in a pass that has begun in evaluation mode."""
        if len(self._looks) == _LOOKS or dynamo.has_compiled() or modes.is_transforming():
            return
        look = DropoutLook(self._root.label)
        self._looks.append(look)
        look.begin(module)
