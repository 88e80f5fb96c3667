"""Rules that read facts of the training off events: in which mode it is, how large its batches are, and what the loss is of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kedge.rules.evidence import Evidence
from kedge.rules.gradients.grad_zero import GradZeroEvidence
from kedge.rules.parameters.unused_param import CutPathEvidence
from kedge.rules.rule import Finding, Rule
from kedge.rules.training.batch_of_one import BatchOfOne
from kedge.rules.training.double_softmax import DoubleSoftmax
from kedge.rules.training.eval_mode import EvalMode, EvalModeEvidence
from kedge.rules.training.loss_below_zero import LossBelowZero
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import Course, size, steady, trained

SOURCE = {"file": "train.py", "line": 12, "function": "fit", "text": "loss.backward()"}


def found(rule: Rule, *events: dict[str, Any], steps: range = range(12)) -> list[Finding]:
    """Run a rule over a trained model of two weights and some events."""
    return list(rule.check(trained(*events, steps=steps)))


def modes(
    step: int, training: bool, on: list[str], off: list[str], root: int = 0
) -> dict[str, Any]:
    """Describe the modes of a root."""
    return {
        "kind": "modes",
        "step": step,
        "root": root,
        "training": training,
        "eval": off,
        "train": on,
    }


def test_a_model_trained_in_evaluation_mode_is_a_warning():
    """Its dropout and its batch normalisation are named."""
    (finding,) = found(EvalMode(), modes(2, False, [], ["drop", "norm"]))

    assert (finding.severity, finding.step) == ("warning", 2)
    assert (
        "since step 2, in 10 of 12 measured steps of its training: drop, norm do not work as in training."
        in finding.message
    )


@pytest.mark.parametrize(
    "events",
    [
        [modes(0, True, ["drop"], ["norm"])],
        [modes(0, False, ["drop"], ["norm"])],
        [modes(0, False, [], [])],
        [modes(0, True, [], ["norm"])],
        [modes(0, False, [], ["drop"], root=1)],
    ],
    ids=[
        "part of it",
        "a frozen statistic",
        "neither dropout nor statistics",
        "frozen",
        "another root",
    ],
)
def test_what_is_put_into_evaluation_mode_on_purpose_is_no_finding(events):
    """A part of a model that trains; a model that has nothing that differs."""
    assert found(EvalMode(), *events) == []


@pytest.mark.parametrize(("until", "number"), [(2, 0), (3, 1), (9, 1)])
def test_a_mode_that_ends_counts_for_as_long_as_it_lasted(until, number):
    """Three measured steps, and a quarter of all."""
    events = [modes(0, False, [], ["drop"]), modes(until, True, ["drop"], [])]

    assert len(found(EvalMode(), *events)) == number


def test_a_phase_that_is_short_beside_the_run_is_no_finding():
    """A quarter of the measured steps is asked for."""
    events = [modes(0, False, [], ["drop"]), modes(3, True, ["drop"], [])]

    assert found(EvalMode(), *events, steps=range(13)) == []


def test_train_forgotten_after_the_first_evaluation_is_found():
    """The mode was right at first."""
    (finding,) = found(EvalMode(), modes(0, True, ["drop"], []), modes(6, False, [], ["drop"]))

    assert (finding.step, finding.evidence.steps) == (6, 6)


def phases(*lengths: int) -> list[dict[str, Any]]:
    """Describe phases of so many steps, in evaluation mode first, and then in training mode in turns."""
    made, step = [], 0
    for i, length in enumerate(lengths):
        training = bool(i % 2)
        made.append(modes(step, training, ["drop"] * training, ["drop"] * (not training)))
        step += length
    return made


def test_a_mode_that_is_interrupted_counts_from_its_first_phase():
    """A short training phase between does not hide what was before it."""
    (finding,) = found(EvalMode(), *phases(5, 1, 4, 1, 1))

    assert finding.step == 0
    assert "since step 0 with 1 interruption, in 9 of 12 measured steps" in finding.message
    assert (finding.evidence.steps, finding.evidence.interruptions) == (9, 1)


def test_several_interruptions_are_counted():
    """One fewer than the phases that count."""
    (finding,) = found(EvalMode(), *phases(3, 1, 3, 1, 4))

    assert "with 2 interruptions, in 10 of 12" in finding.message


@pytest.mark.parametrize(
    ("lengths", "number"),
    [((2, 2, 2, 2, 2, 2), 0), ((3, 2, 2, 2, 2, 1), 1), ((2, 1, 3, 6), 1)],
    ids=["phases of two", "one of three", "the second of three"],
)
def test_a_phase_of_fewer_than_three_steps_is_a_check(lengths, number):
    """It counts neither as a phase nor as an interruption."""
    findings = found(EvalMode(), *phases(*lengths))

    assert len(findings) == number
    assert all(f.evidence.interruptions == 0 and f.evidence.steps == 3 for f in findings)


@pytest.mark.parametrize(("steps", "number"), [(24, 1), (25, 0)])
def test_the_share_is_of_all_phases_together(steps, number):
    """Two phases of three steps are a quarter of 24."""
    events = [*phases(3, 2, 3), modes(8, True, ["drop"], [])]

    assert len(found(EvalMode(), *events, steps=range(steps))) == number


def trained_until(end: int, *, stale: bool) -> list[Finding]:
    """Judge a model that is trained first, and is a teacher in evaluation mode from then on, which may keep gradients."""
    made = Course(range(12))
    made.weight(
        "fc", lambda i: (0.1, 1e-3 if i < end or stale else None, 1e-4 if i < end else None, None)
    )
    made.weight(
        "Student.fc",
        lambda i: (0.1, 1e-3, 1e-4, None) if i >= end else (None, None, None, None),
        root=1,
    )
    made.roots = [
        {"name": name, "prefix": name * at, "trained": True}
        for at, name in enumerate(("Net", "Student"))
    ]
    made.events = [modes(0, True, ["drop"], []), modes(4, False, [], ["drop"])]
    return list(EvalMode().check(made.recording()))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(("end", "number"), [(4, 0), (6, 0), (7, 1)])
def test_a_model_that_is_not_trained_any_more_may_be_in_evaluation_mode(end, number, stale):
    """Steps count in which it had gradients and its optimizer stepped."""
    findings = trained_until(end, stale=stale)

    assert len(findings) == number
    assert all(
        finding.evidence.steps == 3 and "in 3 of 7 measured steps" in finding.message
        for finding in findings
    )


def test_without_any_gradients_recorded_all_steps_count():
    """As where only outputs are watched."""
    made = Course(range(12))
    made.weight("fc", lambda i: (None, None, None, None), out=1.0)
    made.roots[0]["trained"] = True
    made.events = [modes(0, False, [], ["drop"])]

    assert len(list(EvalMode().check(made.recording()))) == 1


def of_batches(
    *samples: int, kind: str = "BatchNorm2d", frozen: tuple[str, ...] = ()
) -> list[Finding]:
    """Judge batches of so many samples, of which each has four channels of two by two."""
    made = Course(range(len(samples)))
    made.sites.append({"site": "norm:out", "type": kind, "shape": [samples[0], 4, 2, 2]})
    made.sites.append({"site": "head:out", "type": "Linear", "shape": [samples[0], 10]})
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.rows += [size(step, "head:out", 1.0, 10 * n) for step, n in enumerate(samples)]
    made.rows += [size(step, "norm:out", 1.0, 16 * n) for step, n in enumerate(samples)]
    made.events = [modes(0, True, ["drop"], [*frozen])]
    return list(BatchOfOne().check(made.recording()))


@pytest.mark.parametrize(
    ("samples", "severity", "first"),
    [((32, 32, 1), "info", 2), ((32, 1, 32, 1), "warning", 1), ((1, 1), "warning", 0)],
)
def test_a_batch_of_one_sample_is_a_warning_unless_it_came_once(samples, severity, first):
    """What is left of an epoch comes again after the next one."""
    (finding,) = of_batches(*samples)

    assert (finding.severity, finding.site, finding.step) == (severity, "norm:out", first)
    assert finding.message.startswith(
        "norm (BatchNorm2d) normalised over a batch of one sample in training"
    )
    assert ("in 2 measured steps" in finding.message) == (severity == "warning")


@pytest.mark.parametrize(
    "how", [{"frozen": ("norm",)}, {"kind": "SyncBatchNorm"}, {"kind": "InstanceNorm2d"}]
)
def test_one_sample_is_enough_where_no_statistics_of_a_batch_are_taken(how):
    """In evaluation mode, over all processes, and for each sample by itself."""
    assert of_batches(1, 1, 1, **how) == []


@pytest.mark.parametrize(("samples", "number"), [((4, 4, 4, 4), 0), ((4, 1, 4, 1), 1)])
def test_smaller_images_are_no_smaller_batch(samples, number):
    """What has samples and channels alone tells one from the other."""
    made = Course(range(4))
    made.sites.append({"site": "norm:out", "type": "BatchNorm2d", "shape": [4, 8, 2, 2]})
    made.sites.append({"site": "head:out", "type": "Linear", "shape": [4, 10]})
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.rows += [size(step, "norm:out", 1.0, 128 if step % 2 == 0 else 32) for step in range(4)]
    made.rows += [size(step, "head:out", 1.0, 10 * n) for step, n in enumerate(samples)]

    assert len(list(BatchOfOne().check(made.recording()))) == number


def test_two_samples_are_a_batch():
    """However few."""
    assert of_batches(2, 2, 2) == []


def of_loss(*values: float, nodes: tuple[str, ...], others: int = 0) -> list[tuple[str, str]]:
    """Judge the values of a loss with these nodes, of a program that has some other losses too."""
    made = Course(range(len(values)))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.loss(values)
    for i in range(others):
        made.loss(values, site=f"loss_{i + 2}", path=f"loss_{i + 2}")
    made.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": list(nodes)}]
    return [
        (finding.severity, finding.message) for finding in LossBelowZero().check(made.recording())
    ]


@pytest.mark.parametrize(
    ("nodes", "severity", "says"),
    [
        (
            ("NllLossBackward0", "SoftmaxBackward0"),
            "warning",
            "nll_loss, which cannot be below zero, but was in 2 of 3",
        ),
        (("NllLoss2DBackward0", "AddmmBackward0"), "warning", "first in step 1, lowest value -4"),
        (
            ("DivBackward0", "MeanBackward0", "NllLossBackward0"),
            "warning",
            "must be log-probabilities",
        ),
        (
            ("BinaryCrossEntropyBackward0", "SigmoidBackward0"),
            "warning",
            "targets must be between 0 and 1",
        ),
        (("BinaryCrossEntropyWithLogitsBackward0",), "warning", "targets must be between 0 and 1"),
        (
            ("NegBackward0", "BinaryCrossEntropyBackward0"),
            "info",
            "the optimizer increases binary_cross_entropy",
        ),
    ],
)
def test_a_loss_below_the_least_it_can_be_is_reported(nodes, severity, says):
    """Also behind a mean and a division."""
    ((told, message),) = of_loss(0.5, -0.5, -4.0, nodes=nodes)

    assert told == severity
    assert says in message


def test_a_loss_of_the_wrong_sign_that_runs_away_is_a_warning():
    """Adversarial training, which turns it on purpose, does not end in NaN."""
    ((told, message),) = of_loss(
        -0.5, -90.0, -4e9, float("nan"), nodes=("NegBackward0", "BinaryCrossEntropyBackward0")
    )

    assert told == "warning"
    assert message.endswith(
        "It was below zero in 3 of 3 steps (first in step 0, lowest value -4e+09), and it is not finite at the end."
    )


@pytest.mark.parametrize(
    ("values", "nodes", "others"),
    [
        ((0.5, 0.0, 0.1), ("NllLossBackward0",), 0),
        ((0.5, -1e-5, 0.1), ("NllLossBackward0",), 0),
        ((0.5, -4.0, -9.0), ("MeanBackward0", "MulBackward0", "NllLossBackward0"), 0),
        ((0.5, -4.0, -9.0), ("NegBackward0", "MeanBackward0"), 0),
        ((0.5, -4.0, -9.0), ("SubBackward0", "NllLossBackward0"), 0),
        ((0.5, -4.0, -9.0), ("NegBackward0", "BinaryCrossEntropyBackward0"), 1),
        ((0.5, -4.0, -9.0), ("NllLossBackward0", "MulBackward0", "LogSoftmaxBackward0"), 0),
        ((0.5, -4.0, -9.0), (), 0),
    ],
    ids=[
        "at zero",
        "rounding",
        "policy gradients",
        "likelihood",
        "difference",
        "one of two, as in a GAN",
        "rewards",
        "no graph",
    ],
)
def test_a_loss_that_may_be_below_zero_is_no_finding(values, nodes, others):
    """Weights, differences and likelihoods of densities have any sign."""
    assert of_loss(*values, nodes=nodes, others=others) == []


NLL, LOG, SOFT, SIG, LINEAR = (
    "NllLossBackward0",
    "LogSoftmaxBackward0",
    "SoftmaxBackward0",
    "SigmoidBackward0",
    "AddmmBackward0",
)
CTC = "CtcLossBackward0"
LOGITS = "BinaryCrossEntropyWithLogitsBackward0"


def of_graph(*nodes: str) -> list[tuple[str, str]]:
    """Judge the nodes of a loss."""
    event = {"kind": "loss-graph", "step": 0, "site": "loss", "nodes": list(nodes)}
    return [(finding.severity, finding.message) for finding in found(DoubleSoftmax(), event)]


@pytest.mark.parametrize(
    ("nodes", "severity", "says"),
    [
        ((NLL, LOG, SOFT, LINEAR), "warning", "applies log_softmax to the output of softmax"),
        ((NLL, LOG, "ViewBackward0", "TBackward0", SOFT), "warning", "to the output of softmax"),
        (
            ("MeanBackward0", "DivBackward0", NLL, LOG, SOFT, LINEAR),
            "warning",
            "to the output of softmax",
        ),
        (
            ("NllLoss2DBackward0", LOG, SOFT, "ConvolutionBackward0"),
            "warning",
            "to the output of softmax",
        ),
        ((NLL, LOG, SIG, LINEAR), "warning", "applies log_softmax to the output of sigmoid"),
        ((LOGITS, SIG, LINEAR), "warning", "applies a sigmoid to the output of sigmoid"),
        (
            (LOGITS, "SqueezeBackward1", SOFT, LINEAR),
            "warning",
            "applies a sigmoid to the output of softmax",
        ),
        ((NLL, LINEAR), "warning", "is nll_loss of logits"),
        ((CTC, "ViewBackward0", LINEAR), "warning", "is ctc_loss of logits"),
        ((CTC, SOFT, LINEAR), "warning", "is ctc_loss of the output of softmax"),
        ((NLL, SOFT, LINEAR), "warning", "is nll_loss of the output of softmax"),
        ((NLL, LOG, LOG, LINEAR), "info", "which changes nothing"),
        ((NLL, LOG, "LogBackward0", SOFT), "info", "which changes nothing"),
    ],
)
def test_a_loss_of_what_it_does_not_take_is_reported(nodes, severity, says):
    """Whatever only changes the shape lies between."""
    ((told, message),) = of_graph(*nodes)

    assert told == severity
    assert says in message


@pytest.mark.parametrize(
    "nodes",
    [
        (NLL, LOG, LINEAR),
        (CTC, LOG, "ViewBackward0", LINEAR),
        (NLL, LOG, "MmBackward0", SOFT),
        (NLL, LOG, "MulBackward0", SOFT),
        (NLL, "LogBackward0", SOFT, LINEAR),
        (NLL, "LogBackward0", "AddBackward0", SOFT, LINEAR),
        (LOGITS, LINEAR),
        ("BinaryCrossEntropyBackward0", SIG, LINEAR),
        ("MseLossBackward0", SOFT, LINEAR),
        ("MseLossBackward0", SIG, LINEAR),
        ("MeanBackward0",),
        (),
    ],
)
def test_a_loss_of_what_it_takes_is_no_finding(nodes):
    """Softmax in an attention, probabilities into a mean squared error, log of softmax into nll_loss."""
    assert of_graph(*nodes) == []


def test_rows_and_columns_that_are_normalised_in_turns_are_no_finding() -> None:
    """A log_softmax over the other dimension changes log-probabilities, so nothing is done twice."""
    read = {"by": "log_softmax", "softmax": "log_softmax", "dim": 1, "classes": [0]}
    event = {
        "kind": "loss-graph",
        "step": 0,
        "site": "loss",
        "nodes": [NLL, LOG, LOG, LINEAR],
        "softmaxes": [read | {"shape": [32, 32]}],
    }
    course = Course(range(3))
    course.events = [event]
    assert not list(DoubleSoftmax().check(course.recording()))


@golden("DOUBLE-SOFTMAX", lacks=(0, 1))
def golden_double_softmax(*, fires: bool) -> Golden:
    """Pass what softmax returned to cross-entropy, or logits."""
    course = Course(SAMPLES[:3])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([2.3, 2.2, 2.1], every=10, source=SOURCE)
    nodes = [
        "NllLossBackward0",
        "LogSoftmaxBackward0",
        *(["SoftmaxBackward0"] if fires else []),
        "AddmmBackward0",
    ]
    course.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": nodes}]
    return written(course)


def explained_by_the_mode(
    code: str,
    *,
    kind: str,
    share: float = 0.98,
    path: str = "norm",
    evidence: Evidence | None = None,
) -> bool:
    """Whether evaluation mode of a module of a kind can be the cause of another finding."""
    course = Course(SAMPLES[:3])
    course.roots[0]["trained"] = True
    course.sites += [
        {"site": "norm:out", "path": "norm", "kind": "out", "owner": "norm", "type": kind},
        {"site": f"{path}.weight:param", "path": f"{path}.weight", "kind": "param", "owner": path},
    ]
    mode = EvalModeEvidence(modules=["norm"], of=1, since=1, interruptions=0, steps=50, share=share)
    cause = Finding(EvalMode.code, "warning", ":out", 1, "", mode)
    other = Finding(code, "warning", f"{path}.weight:param.grad", 0, "", evidence or Evidence())
    return EvalMode().explains(course.recording(), cause, other)


def test_norms_in_evaluation_mode_explain_the_scale_at_the_start() -> None:
    """Dropout in it does not change the scale."""
    assert explained_by_the_mode("INIT-SCALE", kind="BatchNorm2d")
    assert not explained_by_the_mode("INIT-SCALE", kind="Dropout")


@pytest.mark.parametrize(
    ("path", "share", "explained"),
    [("norm", 0.98, True), ("fc", 0.98, False), ("norm", 0.5, False)],
)
def test_only_a_module_that_is_always_in_evaluation_mode_explains_its_unused_parameters(
    path: str, share: float, explained: bool
) -> None:
    """What got no gradient in training mode either is not used at all."""
    cut = CutPathEvidence(sites=[f"{path}.weight:param.grad"], cause="", last=path, next=None)
    found = explained_by_the_mode("UNUSED-PARAM", kind="Gate", share=share, path=path, evidence=cut)

    assert found is explained


@pytest.mark.parametrize(
    ("kind", "idle", "explained"),
    [
        ("Gate", ["norm.1", "norm.2"], True),
        ("Gate", ["norm.1", "fc"], False),
        ("Gate", [], False),
        ("Dropout", ["norm.1"], False),
    ],
    ids=["its experts", "another module", "called with samples", "a dropout"],
)
def test_a_mixture_in_evaluation_mode_explains_experts_that_no_sample_reaches(
    kind: str, idle: list[str], explained: bool
) -> None:
    """Noise that it adds in training may choose them; gradients that are zero otherwise have another cause."""
    zero = GradZeroEvidence(
        kind="some", parameters=["norm.1.weight"], of=4, next_with_gradient=None, idle=idle
    )

    assert explained_by_the_mode("GRAD-ZERO", kind=kind, evidence=zero) is explained


@golden("EVAL-MODE", lacks=(0, 1))
def golden_eval_mode(*, fires: bool) -> Golden:
    """Train the whole model in evaluation mode, or its frozen statistics alone."""
    course = Course(SAMPLES[:5])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    modes = {
        "kind": "modes",
        "step": 0,
        "root": 0,
        "training": not fires,
        "eval": ["norm"],
        "train": [] if fires else ["drop"],
    }
    course.events = [modes]
    return written(course)


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ([-4.0 * 1.1**step for step in range(80)], 1),
        ([4.0 - 1.3**step for step in range(80)], 1),
        ([-1.0 - 0.1 * step for step in range(80)], 0),
        ([2.0 - 20.0 * (1 - 0.95**step) for step in range(80)], 0),
        ([-4.0 * 1.1**step for step in range(30)], 0),
        ([2.0] * 20 + [-0.1, -1.0, -10.0, -1e3, -1e9], 1),
        ([2.0] * 20 + [-0.1, -1.0, -10.0, -1e3, -1e9, math.nan], 1),
        ([2.0] * 20 + [-0.1, -1.0, -10.0, -9.0, -1e9], 0),
        ([2.0] * 20 + [-0.1, -0.2, -0.3, -0.4, -0.5], 0),
        ([-1e-4] * 10 + [-20.0 * (1 - 0.9**step) for step in range(70)], 0),
        ([-1e-4 * 3.0**step for step in range(12)], 0),
        ([-1e-4 * 3.0**step for step in range(18)], 1),
    ],
)
def test_a_loss_that_falls_below_zero_ever_faster_is_asked_for_its_sign(
    values: list[float], number: int
) -> None:
    """Not one that falls in a straight line, or ever more slowly, or for a few steps."""
    course = Course(range(len(values)))
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss(values, source=SOURCE)
    nodes = ["NegBackward0", "MseLossBackward0"]
    course.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": nodes}]
    said = list(LossBelowZero().check(course.recording()))

    assert len(said) == number
    assert all(each.message.endswith("Is its sign right?") for each in said)


def of_reads(*reads: tuple[str, str, int, Sequence[int], Sequence[int]]) -> list[str]:
    """Judge what is read of softmaxes behind a loss of a model that takes 32 samples."""
    names = ("by", "softmax", "dim", "classes", "shape")
    event = {
        "kind": "loss-graph",
        "step": 0,
        "site": "loss",
        "softmaxes": [dict(zip(names, read, strict=True)) for read in reads],
    }
    course = Course(range(3))
    course.roots = [{"name": "Net", "parameters": 64, "trained": True, "optimizers": [0]}]
    course.sites.append({"site": ":in", "shape": [32, 5]})
    course.events = [event]
    return [each.message for each in DoubleSoftmax().check(course.recording())]


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (("nll_loss", "log_softmax", 0, [1], [32, 5]), "log_softmax over dimension 0, the batch"),
        (("nll_loss", "softmax", 0, [1], [32, 5]), "applies softmax over dimension 0, the batch"),
        (
            ("nll_loss", "log_softmax", 2, [1], [8, 5, 9]),
            "dimension 2 of (8, 5, 9), but nll_loss takes the classes from dimension 1",
        ),
        (
            ("nll_loss", "log_softmax", 1, [0], [5, 32]),
            "dimension 1 of (5, 32), but nll_loss takes the classes from dimension 0",
        ),
        (
            ("ctc_loss", "log_softmax", 1, [2], [26, 32, 11]),
            "dimension 1 of (26, 32, 11), but ctc_loss takes the classes from dimension 2",
        ),
        (
            ("gather", "softmax", 0, [1], [32, 5]),
            "along dimension 1 of a softmax over dimension 0",
        ),
        (("softmax", "softmax", 1, [1], [8, 5]), "applies softmax to the output of softmax"),
        (("softmax", "softmax", 1, [0], [32, 5]), "over dimension 0, the batch, to the output"),
    ],
)
def test_a_softmax_over_other_dimensions_than_the_classes_is_named(read: Any, says: str) -> None:
    """What reads the result tells where it has the classes."""
    (message,) = of_reads(read)

    assert says in message


@pytest.mark.parametrize(
    "reads",
    [
        [("nll_loss", "log_softmax", 1, [1], [32, 5])],
        [("nll_loss", "log_softmax", 0, [0, 1], [32, 5])],
        [("nll_loss", "log_softmax", 0, [1], [1, 5])],
        [("nll_loss", "log_softmax", 0, [0], [5])],
        [("nll_loss", "log_softmax", 0, [1], [32, 32])],
        [("gather", "softmax", 0, [1], [5, 5])],
        [("nll_loss", "log_softmax", 1, [2], [8, 5, 5])],
        [("ctc_loss", "log_softmax", 2, [2], [26, 32, 11])],
        [("gather", "softmax", 1, [1], [32, 5])],
        [("gather", "softmax", 1, [0], [32, 5])],
        [("gather", "log_softmax", 2, [1], [32, 9, 5])],
        [("softmax", "softmax", 1, [0], [8, 5])],
        [("softmax", "softmax", 2, [1], [32, 5, 5])],
        [("softmax", "log_softmax", 1, [0], [32, 5])],
        [("log_softmax", "log_softmax", 1, [0], [32, 5])],
        [
            ("nll_loss", "log_softmax", 0, [1], [32, 8]),
            ("log_softmax", "log_softmax", 1, [0], [32, 8]),
        ],
        [
            ("gather", "log_softmax", 0, [1], [32, 48]),
            ("gather", "log_softmax", 1, [1], [32, 48]),
        ],
    ],
)
def test_a_softmax_that_may_be_over_the_classes_is_no_finding(reads: Any) -> None:
    """Nor is a choice of time steps from one, nor rows and columns that take turns, nor pairs of samples."""
    assert of_reads(*reads) == []


@golden("LOSS-BELOW-ZERO", lacks=(0, 1))
def golden_loss_below_zero(*, fires: bool) -> Golden:
    """Make nll_loss fall below zero, or the squared error that a program subtracts from something."""
    course = Course(SAMPLES[:3])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([0.1, -0.2, -0.9], every=10, source=SOURCE)
    nodes = ["NllLossBackward0", "LogBackward0"] if fires else ["SubBackward0", "MseLossBackward0"]
    course.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": nodes}]
    return written(course)


@golden("BATCH-OF-ONE")
def golden_batch_of_one(*, fires: bool) -> Golden:
    """Pass a single sample to batch normalisation twice, or never fewer than two."""
    course = Course(SAMPLES[:5])
    course.sites.append({"site": "norm:out", "type": "BatchNorm2d", "shape": [32, 4, 2, 2]})
    course.sites.append({"site": "head:out", "type": "Linear", "shape": [32, 10]})
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    samples = [32, 1, 32, 1, 32] if fires else [32, 2, 32, 2, 32]
    course.rows += [
        size(step, "head:out", 1.0, 10 * n) for step, n in zip(course.steps, samples, strict=True)
    ]
    course.rows += [
        size(step, "norm:out", 1.0, 16 * n) for step, n in zip(course.steps, samples, strict=True)
    ]
    return written(course)
