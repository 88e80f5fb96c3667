"""The trials, in the order in which they are made, and their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from kedge.examination import step_time, sweep
from kedge.examination.result import VERDICTS, Result, Verdict, in_short
from kedge.examination.step import ExaminedStep
from kedge.examination.text import as_text
from kedge.examination.trials import (
    batch,
    data_used,
    functions,
    logits,
    loss_at_start,
    memory,
    modes,
    optimizer,
    padding,
    parameters,
    positions,
    precision,
    repeated,
    samples,
)

Trial = Callable[[ExaminedStep], Iterable[Result]]

TRIALS: dict[str, Trial | None] = {
    loss_at_start.TRIAL: loss_at_start.loss_at_start,
    logits.TRIAL: logits.logits,
    batch.TRIAL: batch.batch,
    data_used.TRIAL: data_used.data_used,
    samples.TRIAL: samples.samples,
    positions.TRIAL: positions.positions,
    padding.TRIAL: padding.padding,
    modes.TRIAL: modes.modes,
    repeated.TRIAL: repeated.repeated,
    parameters.TRIAL: parameters.parameters,
    optimizer.TRIAL: optimizer.optimizer,
    functions.TRIAL: functions.functions,
    precision.TRIAL: precision.precision,
    memory.TRIAL: memory.memory,
    step_time.TRIAL: None,
    sweep.TRIAL: None,
}
"""The trials by name; those without a function take steps: see `kedge.examination.steps`."""


@dataclass(frozen=True)
class Examination:
    """The results of an examination; prints as a report.

    Attributes:
        models: The names of the examined models.
        results: The results, in the order of the trials.
        notes: What else is to be said, such as the files that the program has written.
    """

    models: tuple[str, ...]
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all trials."""
        found = [result.verdict for result in self.results]
        return min(found, key=VERDICTS.index, default="untried")

    def of(self, trial: str) -> tuple[Result, ...]:
        """Return the results of one trial."""
        return tuple(result for result in self.results if result.trial == trial)

    def __str__(self) -> str:
        return as_text(self.models, self.results, self.notes)


def examined(step: ExaminedStep, skip: Collection[str] = ()) -> Iterator[Result]:
    """Make the trials that need no further step, and yield their results.

    A trial that the program's code does not let run to its end is untried, with the error.

    Args:
        step: The step.
        skip: Names of trials to leave out.
    """
    for name, trial in TRIALS.items():
        if trial is None or name in skip:
            continue
        try:
            results = list(trial(step))
        except Exception as error:  # noqa: BLE001 - the program's own code, with inputs that it does not expect
            results = [Result(name, "untried", "ran the model", in_short(error))]
        for result in results:
            yield replace(result, model=step.name)
