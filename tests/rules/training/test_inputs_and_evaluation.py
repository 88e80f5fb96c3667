"""Rules that read what the program gives its models: SAME-BATCH in training, TRAIN-MODE in evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.rule import Finding, Rule
from kedge.rules.training.same_batch import SameBatch
from kedge.rules.training.train_mode import TrainMode
from kedge.rules.training.workers_alike import WorkersAlike
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, steady

CALL = {
    "function": "dropout",
    "share": 0.1,
    "module": "block",
    "file": "net.py",
    "line": 9,
    "text": "x = F.dropout(x, 0.1)",
}


def made(*events: dict[str, Any]) -> Course:
    """Make a healthy course with some events."""
    course = Course(SAMPLES[:5])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.roots[0]["trained"] = True
    course.events = list(events)
    return course


def found(rule: Rule, **event: Any) -> list[Finding]:
    """Run a rule over a course with one event."""
    return list(rule.check(made({"step": 4, "root": 0, **event}).recording()))


def evaluation(**entry: Any) -> dict[str, Any]:
    """Describe evaluations."""
    return {"kind": "evaluation", "passes": 40, "as_training": 40, "train": ["drop"], **entry}


def repeated(**entry: Any) -> dict[str, Any]:
    """Describe inputs that stay the same."""
    return {"kind": "repeated-inputs", "compared": 10, "batch": 32, "loaders": [], **entry}


def test_an_evaluation_in_training_mode_is_a_warning():
    """The modules are named, with the number of passes."""
    (finding,) = found(TrainMode(), **evaluation())

    assert (finding.severity, finding.site, finding.step) == ("warning", ":out", 4)
    assert finding.message == (
        "Net (:out) is evaluated in training mode: in 40 of 40 forward passes in a row without "
        "gradients, from step 4 on, drop worked as in training."
    )


@pytest.mark.parametrize(
    "entry", [{"passes": 5, "as_training": 5}, {"as_training": 19}, {"as_training": 0}]
)
def test_a_few_passes_as_in_training_are_no_finding(entry):
    """Some programs calibrate a model, or look at its training loss."""
    assert found(TrainMode(), **evaluation(**entry)) == []


def test_dropout_that_does_not_know_the_mode_is_a_warning():
    """Its line is named, and how it is told the mode."""
    (finding,) = found(TrainMode(), **evaluation(as_training=0, train=[], dropout=[CALL]))

    assert (finding.severity, finding.site) == ("warning", "block:out")
    assert finding.message == (
        "Dropout is active while Net is evaluated in evaluation mode: dropout drops 10% at net.py:9 "
        "(x = F.dropout(x, 0.1)), so its outputs differ from call to call."
    )
    assert "training=self.training" in finding.remedy


def test_attention_is_told_the_mode_in_another_way():
    """It has no argument for it."""
    call = {**CALL, "function": "scaled_dot_product_attention", "module": None, "text": None}

    (finding,) = found(TrainMode(), **evaluation(as_training=0, train=[], dropout=[call, CALL]))

    assert finding.site == ":out"
    assert "at net.py:9 and 1 more line" in finding.message
    assert "dropout_p=p if self.training else 0.0" in finding.remedy


def test_the_same_batch_beside_a_loader_of_several_is_a_warning():
    """All but one of them are never used."""
    (finding,) = found(SameBatch(), **repeated(loaders=[{"batch_size": 32, "batches": 8}]))

    assert (finding.severity, finding.site) == ("warning", ":in")
    assert finding.message == (
        "Net got the same inputs in step 4 and in all 10 measured steps that were compared with it; a "
        "data loader of the program has 8 batches of 32."
    )


@pytest.mark.parametrize(
    "loaders", [[], [{"batch_size": 64, "batches": 8}], [{"batch_size": 32, "batches": 1}]]
)
def test_the_same_batch_may_be_all_data(loaders):
    """A loader of other batches may be that of an evaluation."""
    assert found(SameBatch(), **repeated(loaders=loaders)) == []


def test_nine_equal_steps_are_too_few():
    """A short program may begin with a trial."""
    assert (
        found(SameBatch(), **repeated(compared=9, loaders=[{"batch_size": 32, "batches": 8}])) == []
    )


def in_groups(**entry: Any) -> dict[str, Any]:
    """Describe batches that come several times in a row."""
    workers = [{"workers": 4, "stream": True}]
    return {"kind": "repeated-batches", "times": 4, "batches": 9, "loaders": workers, **entry}


def test_batches_that_come_once_from_each_worker_are_a_warning():
    """What to do depends on the data set."""
    (finding,) = found(WorkersAlike(), **in_groups())

    assert (finding.severity, finding.site, finding.step) == ("warning", ":in", 4)
    assert finding.message == (
        "Net got each of its batches 4 times in a row, from step 4 on (all 9 that were compared), and "
        "as many workers of a data loader give them: probably all of them have the same samples."
    )
    assert finding.remedy.startswith("Give each worker its share")


@pytest.mark.parametrize(
    ("kinds", "remedy"),
    [
        ([False], "If the data set draws its samples"),
        ([None], "Of a stream, give each worker its share"),
        ([True, False], "Of a stream, give each worker its share"),
    ],
)
def test_the_remedy_is_for_the_data_set_that_is_known(kinds: list[bool | None], remedy: str):
    """A stream is divided; a generator is made anew in each worker."""
    loaders = [{"workers": 4, "stream": kind} for kind in kinds]
    (finding,) = found(WorkersAlike(), **in_groups(loaders=loaders))

    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize(
    "entry",
    [{"times": 3}, {"batches": 2}, {"loaders": []}],
    ids=["other number of workers", "few batches", "no workers"],
)
def test_batches_that_a_program_repeats_are_no_finding(entry: dict[str, Any]):
    """Some take several steps with each batch."""
    assert found(WorkersAlike(), **in_groups(**entry)) == []


@golden("WORKERS-ALIKE")
def golden_workers_alike(*, fires: bool) -> Golden:
    """Let each batch come as often as there are workers, or twice."""
    times = 2
    if fires:
        times = 4
    return written(made(in_groups(times=times, step=0, root=0)))


@golden("TRAIN-MODE")
def golden_train_mode(*, fires: bool) -> Golden:
    """Evaluate in training mode, or as it should be."""
    train = {"as_training": 40, "train": ["drop"]} if fires else {"as_training": 0, "train": []}
    return written(made({"step": 4, "root": 0, **evaluation(**train)}))


@golden("SAME-BATCH")
def golden_same_batch(*, fires: bool) -> Golden:
    """Give the same inputs in ten steps after the first, or in nine."""
    event = repeated(compared=10 if fires else 9, loaders=[{"batch_size": 32, "batches": 8}])
    return written(made({"step": 4, "root": 0, **event}))
