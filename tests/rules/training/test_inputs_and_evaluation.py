"""Rules that read what the program gives its models, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.rule import Finding, Rule
from kedge.rules.training.batch_sizes import BatchSizes
from kedge.rules.training.eval_apart import EvalApart
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
    """A loader of other batches may be that of an evaluation; a power of two is the size of most batches."""
    (finding,) = found(SameBatch(), **repeated(loaders=loaders))

    assert finding.severity == "info"
    assert "they are 32 samples, which may be one batch or all data" in finding.message


@pytest.mark.parametrize("batch", [2, 30, 150, 1024])
def test_other_numbers_of_samples_are_taken_for_all_data(batch):
    """As the 150 flowers of iris."""
    assert found(SameBatch(), **repeated(batch=batch)) == []


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


def sized(*sizes: tuple[int, float], estimates: tuple[str, ...] = ("bn",)) -> dict[str, Any]:
    """Describe the outputs of evaluations, each by its step and size; those of training have 0.1."""
    return {
        "kind": "evaluated-outputs",
        "sizes": [{"step": step, "site": "fc:out", "rms": rms} for step, rms in sizes],
        "estimates": list(estimates),
    }


def evaluated(event: dict[str, Any]) -> list[Finding]:
    """Run EVAL-APART over a training of forty steps with outputs of 0.1."""
    return list(EvalApart().check(training(event).recording()))


def training(event: dict[str, Any]) -> Course:
    """Make a healthy training, with a note on its evaluations."""
    course = Course(range(41))
    course.weight("fc", steady(0.1, 1e-3, 1e-4), out=0.1)
    course.roots[0]["trained"] = True
    course.events = [{"step": 0, "root": 0, **event}]
    return course


def test_outputs_that_are_far_larger_in_evaluation_are_a_warning():
    """The last evaluation decides, when training has settled."""
    (finding,) = evaluated(sized((0, 0.1), (40, 3.1)))

    assert (finding.severity, finding.site, finding.step) == ("warning", "fc:out", 40)
    assert (
        "its output (fc:out) had an rms of 3.1, where the nearest measured steps of training have 0.1"
        in finding.message
    )
    assert "estimated in training, at bn" in finding.message


def test_an_evaluation_before_the_training_is_info():
    """Its numbers say nothing, and do no harm."""
    (finding,) = evaluated(sized((0, 200.0), (40, 0.1)))

    assert (finding.severity, finding.step) == ("info", 0)
    assert "before its first step of training" in finding.message


@pytest.mark.parametrize(
    "event",
    [
        sized((0, 2.9), (40, 2.9)),
        sized((30, 9.0), (40, 0.1)),
        sized((10, 9.0)),
        sized((40, 9.0), estimates=()),
    ],
)
def test_other_outputs_of_evaluation_are_no_finding(event):
    """Thirty times is little, one evaluation is past, ten steps are few; without estimates it is meant so."""
    assert evaluated(event) == []


def of_statistics(
    initial: tuple[str, ...], at: int = 40, train: tuple[str, ...] = ("fc",)
) -> Course:
    """Make a training with a module in training mode, and running statistics of the beginning at some step."""
    event = sized((at, 0.1), estimates=("fc", "other"))
    course = training({**event, "initial": list(initial)})
    modes = {"kind": "modes", "step": 0, "root": 0, "training": True, "train": list(train)}
    course.events.append(modes)
    return course


def test_statistics_that_training_never_updated_are_a_warning():
    """Those of modules that ran in training mode."""
    (finding,) = EvalApart().check(of_statistics(("fc", "other")).recording())

    assert (finding.severity, finding.site, finding.step) == ("warning", "fc:out", 40)
    assert finding.message == (
        "Net was evaluated at step 40 with running statistics that were never updated: fc has a "
        "mean of 0 and a variance of 1, though it was in training mode while the model was trained."
    )
    assert (finding.evidence.modules, finding.evidence.of) == (["fc"], 2)


@pytest.mark.parametrize(
    "course",
    [
        of_statistics(()),
        of_statistics(("other",), train=("fc", "other")),
        of_statistics(("fc",), train=()),
        of_statistics(("fc",), at=19),
    ],
    ids=["updated", "never called", "in evaluation mode", "before the training has settled"],
)
def test_other_statistics_of_the_beginning_are_no_finding(course):
    """A module that was not trained cannot have updated them, and EVAL-MODE tells one in evaluation mode."""
    assert list(EvalApart().check(course.recording())) == []


def copied(
    unchanged: list[str], types: tuple[str, ...] = ("Copy", "Net", "Norm"), **own: Any
) -> Any:
    """Check a copy of a trained model, which no optimizer trains."""
    course = of_statistics(())
    course.events[0] = {**course.events[0], **own}
    course.roots[0]["modules"] = [{"path": "", "type": "Net"}, {"path": "fc", "type": "Norm"}]
    modules = [{"path": f"Copy.{at}", "type": kind} for at, kind in enumerate(types)]
    course.roots.append({"name": "Copy", "prefix": "Copy", "trained": False, "modules": modules})
    event = {**sized((40, 0.1), estimates=("Copy.2",)), "initial": unchanged, "step": 0, "root": 1}
    course.events.append(event)
    return list(EvalApart().check(course.recording()))


def test_a_copy_whose_buffers_were_not_copied_is_a_warning():
    """Its parameters are those of a trained model, whose statistics follow the training."""
    (finding,) = copied(["Copy.2"])

    assert finding.message == (
        "Copy, a copy of Net that no optimizer trains, was evaluated at step 40 with running "
        "statistics that were never updated: Copy.2 has a mean of 0 and a variance of 1, though "
        "those of Net were updated in training."
    )
    assert finding.remedy.startswith("Copy the buffers with the parameters")


def test_other_models_that_are_not_trained_are_no_copies():
    """One of other modules is on its own; and beside a model whose statistics are initial, the copy is no news."""
    assert copied([]) == []
    assert copied(["Copy.2"], ("Copy", "Net")) == []
    assert [finding.evidence.copy_of for finding in copied(["Copy.2"], initial=["fc"])] == [""]


def test_one_sample_beside_a_batch_is_info():
    """Whether it is broadcast cannot be seen from outside."""
    event = {"kind": "batch-sizes", "input": "ids", "batch": 50, "others": ["pixels"]}
    (finding,) = found(BatchSizes(), **event)

    assert (finding.severity, finding.site) == ("info", ":in")
    assert finding.message == (
        "Net got one sample of input ids, and 50 of pixels, and this input changes from step to "
        "step: if it is broadcast, all 50 samples are computed with the same one."
    )


@golden("EVAL-APART")
def golden_eval_apart(*, fires: bool) -> Golden:
    """Return outputs that are a hundred times larger, or as large."""
    return written(training(sized((40, 10.0 if fires else 0.1))))


@golden("BATCH-SIZES")
def golden_batch_sizes(*, fires: bool) -> Golden:
    """Give one sample of one input, or no such note."""
    event = {"kind": "batch-sizes", "input": "ids", "batch": 50, "others": ["pixels"]}
    events = [{"step": 4, "root": 0, **event}] if fires else []
    return written(made(*events))
