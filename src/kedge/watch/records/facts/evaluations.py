"""How the program evaluates a model: in which mode, and whether dropout is active all the same.

# Note [What counts as an evaluation]
A forward pass of a trained model in evaluation mode without gradients. In training mode several in
a row, while no model has a pass with gradients: a few programs call a model without gradients once
or twice before each step, as a generator whose samples are judged, or a target. They do not mean to
evaluate it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.installed import ConcealedHook
from kedge.sites.modal import in_training
from kedge.store.events import EvaluatedOutputsEvent, EvaluationEvent
from kedge.torch_internals import dynamo, modes
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.active_dropout import DropoutLook
from kedge.watch.records.facts.evaluated_outputs import EvaluatedOutputs
from kedge.watch.steps.shield import WatchShield

_IN_A_ROW = 3
"""Passes without gradients from which on they are an evaluation, in training mode."""
_NAMED = 50
"""Most names in a note."""
_LOOKS = 2
"""Most passes in which calls of dropout are looked at."""
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules with a fused path, of other bits, which PyTorch does not take while a mode is on."""


class _PassEnds(KedgeHook):
    """The forward hook at the end of the passes that are looked at."""

    def __init__(self, evaluations: Evaluations, shield: WatchShield) -> None:
        self.evaluations = evaluations
        self._ended = shield.around(evaluations.ended, "evaluations")

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook."""
        self.evaluations.take_down()
        self._ended(module, output)


class Evaluations:
    """Looks at the evaluations of one root; see Note [What counts as an evaluation].

    Attributes:
        row: The passes without gradients in a row.
    """

    def __init__(self, root: RootModule, shield: WatchShield) -> None:
        self.row = 0
        self._root = root
        self._pass_ends = _PassEnds(self, shield)
        self._hook: ConcealedHook | None = None
        self._outputs = EvaluatedOutputs(root)
        self._taken_at: int | None = None
        self._since = self._passes = self._as_training = 0
        self._train: dict[str, None] = {}
        self._is_as_training = False
        self._looks: list[DropoutLook] = []
        self._looks_left = _LOOKS
        self._next: DropoutLook | None = None

    def may_look(self, module: nn.Module, step: int) -> bool:
        """Whether a pass without gradients of a model that is not trained yet may be looked at."""
        return not module.training and self._outputs.wants(step)

    def count(self, module: nn.Module, step: int) -> None:
        """Count a pass without gradients, which begins; what is not trained yet may be later."""
        if not self._root.optimizers:
            self._look_at_output(module, step)
            return

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
        if not self._is_as_training:
            self._look_at_dropout(module)
        if self.row == 1:
            self._look_at_output(module, step)

    def put_up(self) -> None:
        """Begin the look at a pass, if it is wanted; outside of own work."""
        if self._next is not None:
            self._next.put_up()

    def take_down(self) -> None:
        """End the look at a pass; outside of own work."""
        if self._next is not None:
            self._next.take_down()
            self._next = None

    def ended(self, module: nn.Module, output: Any) -> None:
        """Take the output of a pass that has ended, if it is wanted."""
        if self._taken_at is not None and output is not None:
            self._outputs.take(module, output, self._taken_at)
        self._taken_at = None

    def notes_of_untrained(self) -> list[EvaluatedOutputsEvent]:
        """Return the note on a model that no optimizer trains, if it has statistics that nothing has updated."""
        return [note for note in self._outputs.notes() if note.initial]

    def notes(self) -> list[EvaluationEvent | EvaluatedOutputsEvent]:
        """Return the notes at the end of the run, if there were evaluations."""
        outputs = self._outputs.notes()
        if not self._passes:
            return [*outputs]
        calls = {call: None for look in self._looks for call in look.found}
        note = EvaluationEvent(
            step=self._since,
            root=self._root.index,
            passes=self._passes,
            as_training=self._as_training,
            train=tuple(self._train)[:_NAMED],
            dropout=tuple(calls)[:_NAMED],
        )
        return [note, *outputs]

    def close(self) -> None:
        """Remove all that is left behind, also by a pass without an end."""
        self.take_down()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _look_at_dropout(self, module: nn.Module) -> None:
        """Look at the calls of dropout in a pass that has begun, if it is in evaluation mode."""
        if not self._looks_left or not self._can_look(module):
            return
        if any(isinstance(each, _FUSED) for each in modules_in(module).values()):
            self._looks_left = 0
            return
        self._looks_left -= 1
        look = DropoutLook(self._root.label)
        self._looks.append(look)
        look.begin(module)
        self._next = look

    def _look_at_output(self, module: nn.Module, step: int) -> None:
        """Look at the output of a pass that has begun, if it is in evaluation mode."""
        if self._outputs.wants(step) and self._can_look(module):
            self._taken_at = step

    def _can_look(self, module: nn.Module) -> bool:
        """Whether a pass that has begun can be looked at; then its end is hooked."""
        if module.training or dynamo.has_compiled() or modes.is_transforming():
            return False
        if self._hook is None:
            handle = module.register_forward_hook(self._pass_ends, always_call=True)
            self._hook = ConcealedHook(handle)
        return True
