"""Whether the same batch gives the same output twice: in evaluation mode it has to, in training it may not.

Cannot see: a difference that comes in less than one run of two.
"""

from __future__ import annotations

from collections.abc import Iterator

from kedge.examination.differences import differ, numbers_in
from kedge.examination.places import Place, first_place
from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.torch_internals.torchscript import is_training

TRIAL = "repeated"


def repeated(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether the output is the same twice, in `eval()` and in the modes of the program."""
    did = "ran the same batch twice in eval(), with other random numbers"
    first = numbers_in(step.run.outputs(seed=1))
    if not differ(first, numbers_in(step.run.outputs(seed=2))):
        yield Result(TRIAL, "ok", did, "the outputs are the same")
    else:
        place = _first_difference(step, training=False)
        means = (
            "Evaluations of one model on the same data will differ. Dropout that is called as a "
            "function needs training=self.training; noise is for training alone, unless the model "
            "draws samples."
        )
        yield Result(TRIAL, "look", did, f"the outputs differ{place.text}", means, place.line)

    if not any(map(is_training, step.model.modules())):
        return
    did = "ran the same batch twice as the program does, with other random numbers"
    first = numbers_in(step.run.outputs(training=True, seed=1))
    if differ(first, numbers_in(step.run.outputs(training=True, seed=2))):
        place = _first_difference(step, training=True)
        yield Result(TRIAL, "ok", did, f"the outputs differ{place.text}", "", place.line)


def _first_difference(step: ExaminedStep, *, training: bool) -> Place:
    one = step.run.passed(training=training, seed=1)
    other = step.run.passed(training=training, seed=2)
    return first_place(step.model, one, other, lambda changes: bool(changes.any()))
