"""NEVER-INITIALISED and RATE-TOO-LARGE: what is wrong from the first steps on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kedge.rules.parameters.never_initialised import NeverInitialised
from kedge.rules.parameters.rate_too_large import RateTooLarge
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import INF, NAN, Course, steady

RANDOM = (-0.5, 0.5)


def starting(
    *ranges: tuple[float, float], still: Sequence[int] = (), first: int = 0, **entry: Any
) -> list[Finding]:
    """Judge weights that start with these smallest and largest values; the gradients of some are zero."""
    made = Course(range(first, first + 3))
    for i, (low, high) in enumerate(ranges):
        rms = abs(low) if low == high else 0.3 * max(abs(low), abs(high))
        made.weight(f"l{i}", steady(rms, 0.0 if i in still else 1e-3, 1e-4), **entry)
    for row in made.rows:
        if row["site"].endswith(":param"):
            row["min"], row["max"] = ranges[int(row["site"][1])]
    return list(NeverInitialised().check(made.recording()))


@pytest.mark.parametrize(
    ("low", "high", "number"),
    [(-0.5, 9e3, 0), (-0.5, 2e4, 1), (-2e4, 0.1, 1), (-1e-21, 1e-21, 1), (-1e-18, 1e-18, 0)],
)
def test_values_that_no_initialisation_gives_are_an_error(low, high, number):
    """Far too large, or next to nothing and not zero."""
    findings = starting(RANDOM, (low, high))

    assert [(f.severity, f.site, f.step) for f in findings] == [
        ("error", "l1.weight:param", 0)
    ] * number


def test_a_weight_that_is_not_finite_before_any_step_is_an_error():
    """NAN-BORN says where it shows; this, that nobody initialised it."""
    (finding,) = starting(RANDOM, (NAN, NAN))

    assert "l1.weight is not finite" in finding.message


@pytest.mark.parametrize(
    ("ranges", "names"),
    [
        (((1.0, 1.0), (1.0, 1.0)), ["l0.weight", "l1.weight"]),
        ((RANDOM, (0.1, 0.1), (0.2, 0.2), RANDOM), ["l1.weight", "l2.weight"]),
        (((0.0, 0.0), (0.0, 0.0)), ["l0.weight", "l1.weight"]),
        ((RANDOM, (0.0, 0.0), RANDOM), []),
        ((RANDOM, (1.0, 1.0)), []),
        ((RANDOM, (0.0, 0.0), (0.0, 0.0), RANDOM), []),
        ((RANDOM, (0.0, 0.0), (1.0, 1.0)), []),
    ],
    ids=[
        "all ones",
        "two in a row",
        "all zeros",
        "LoRA",
        "one of ones",
        "zeros that learn",
        "a zero gate and a scale",
    ],
)
def test_constant_weights_in_a_row_cannot_part(ranges, names):
    """One among others is deliberate, and so are zeros whose gradient is not zero."""
    findings = starting(*ranges)

    assert [list(finding.evidence.weights) for finding in findings] == ([names] if names else [])


@pytest.mark.parametrize(("rms", "number"), [(0.0, 1), (1.0, 0), (2e4, 1)])
def test_sizes_alone_tell_zeros_and_what_is_far_too_large(rms, number):
    """Whether other values are all alike is not known without extremes, and that is said."""
    made = Course(range(3))
    for i in range(2):
        made.weight(f"l{i}", steady(rms, 1e-3, 1e-4))

    assert len(list(NeverInitialised().check(made.recording()))) == number
    lack = NeverInitialised().lacking(made.recording())
    assert lack is not None
    assert (lack.lacks, lack.grows) == ("smallest and largest values of weights", False)


def test_zeros_in_a_row_without_gradients_stand_still():
    """Each hides the other's gradient."""
    (finding,) = starting(RANDOM, (0.0, 0.0), (0.0, 0.0), RANDOM, still=(1, 2))

    assert finding.message.startswith(
        "l1.weight, l2.weight of Net start constant, one after the other (l1.weight is 0 everywhere)"
    )


@pytest.mark.parametrize(
    "entry",
    [{"shape": [1, 8, 1, 1]}, {"type": "LayerNorm"}, {"type": "Embedding"}, {"shape": [1, 1]}],
)
def test_gains_norms_and_tables_may_be_constant(entry):
    """They are no layers of units."""
    made = Course(range(3))
    for i in range(2):
        made.weight(f"l{i}", steady(1.0, 1e-3, 1e-4), **({} if "shape" in entry else entry))
    for site in made.sites:
        if site.get("kind") and "shape" in entry:
            site["shape"] = entry["shape"]
        site.setdefault("type", entry.get("type", "Linear"))
    for row in made.rows:
        if row["site"].endswith(":param"):
            row["min"] = row["max"] = 1.0

    assert list(NeverInitialised().check(made.recording())) == []


def test_a_start_that_was_not_measured_is_not_judged():
    """After the first update nothing is known of it."""
    assert starting((1.0, 1.0), (1.0, 1.0), first=1) == []


def test_models_that_are_not_trained_are_left_alone():
    """A teacher may hold what it likes."""
    made = Course(range(3))
    for i in range(2):
        made.weight(f"T.l{i}", steady(1.0, 1e-3, 1e-4), root=1)
    made.roots = [
        {"name": "Net", "prefix": "", "trained": True},
        {"name": "T", "prefix": "T", "trained": False},
    ]
    for row in made.rows:
        if row["site"].endswith(":param"):
            row["min"] = row["max"] = 1.0

    assert list(NeverInitialised().check(made.recording())) == []


Course4 = Callable[[int], tuple[float, float]]


def stepping(
    *courses: Course4, loss: Sequence[float] | None = None, steps: range = range(12)
) -> list[Finding]:
    """Judge weights given by size and update in each step, with a loss."""
    made = Course(steps)
    for i, course in enumerate(courses):
        made.weight(f"l{i}", lambda n, c=course: (c(n)[0], 1e-3, c(n)[1], None))
    if loss is not None:
        made.loss(loss)
    made.events = [
        {
            "kind": "optimizers",
            "optimizers": [{"index": 0, "type": "AdamW", "roots": [0], "rates": [1.0]}],
        }
    ]
    return list(RateTooLarge().check(made.recording()))


def calm(_step: int) -> tuple[float, float]:
    """A healthy weight."""
    return 0.1, 1e-4


def thrown(step: int) -> tuple[float, float]:
    """A weight whose first step is ten times its size."""
    return (0.1, 1.0) if step == 0 else (1.0 + 0.1 * step, 0.3)


def doubled(step: int) -> tuple[float, float]:
    """A weight that changes by its size in the second step."""
    return 0.1, 0.1 if step == 1 else 0.01


def growing(step: int) -> tuple[float, float]:
    """A weight that is three times what it was after four steps, each of half its first size."""
    return 0.1 + 0.05 * step, 0.05


def reset(step: int) -> tuple[float, float]:
    """A healthy weight that the program writes anew in between, eight times as large."""
    return 0.1 if step < 5 else 0.8, 1e-3


FLAT = [2.3] * 12
RISEN, FALLEN = [2.3, *[20.0] * 11], [2.3, 2.2, *[2.0 - 0.1 * n for n in range(10)]]


def test_weights_that_are_thrown_away_are_an_error():
    """The step, the weights, the rate and the loss are named."""
    (finding,) = stepping(thrown, thrown, calm, loss=RISEN)

    assert (finding.severity, finding.site, finding.step) == ("error", "l0.weight:update", 1)
    assert finding.message == (
        "By step 1 the optimizer (AdamW with a learning rate of 1) had overwritten 2 of 3 weights of Net, l0.weight, "
        "l1.weight: a step changed l0.weight by 10 times its size, and the loss went from 2.3 to 20."
    )
    assert finding.evidence.rates == [1.0]


@pytest.mark.parametrize(
    ("courses", "loss", "number"),
    [
        ((thrown, thrown), FALLEN, 0),
        ((thrown, thrown), [2.3, 4.0, *[INF] * 10], 1),
        ((thrown, thrown), [2.3, *[NAN] * 11], 1),
        ((thrown, calm), RISEN, 0),
        ((thrown,), RISEN, 1),
        ((doubled, doubled), FLAT, 1),
        ((growing, growing), FLAT, 1),
        ((growing, growing), FALLEN, 0),
        ((doubled, doubled), FALLEN, 0),
        ((thrown, thrown, *[calm] * 6), RISEN, 1),
        ((thrown, thrown, *[calm] * 7), RISEN, 0),
        ((thrown, thrown), None, 1),
        ((calm, calm), RISEN, 0),
        ((reset, reset), RISEN, 0),
    ],
    ids=["learns", "diverges", "NaN", "one of two", "the only one", "second step", "growth", "growth, learns", "second step, learns", "a quarter", "less than a quarter", "no loss", "only the loss", "written by the program"],
)  # fmt: skip
def test_two_weights_and_a_loss_that_does_not_fall_are_asked_for(courses, loss, number):
    """A loss that falls excuses the weights, and calm weights the loss."""
    assert len(stepping(*courses, loss=loss)) == number


@pytest.mark.parametrize(("ratio", "losses", "number"), [(0.2, (1.0, 4.0, 4.0), 1), (0.2, (1.0, 4.0, 1.0), 0), (0.05, (1.0, 4.0, 4.0), 0), (0.2, (1.0, 2.9, 2.9), 0)])  # fmt: skip
def test_a_loss_that_multiplies_is_enough_with_large_updates(ratio, losses, number):
    """Twice three times the first one, while weights change by a tenth."""
    later = [0.9] * (12 - len(losses))

    findings = stepping(*[lambda n: (0.1, 0.1 * ratio)] * 2, loss=[*losses, *later])

    assert [finding.step for finding in findings] == [2] * number


def judged(gradient: float, rates: Sequence[float] = (0.1,)) -> list[Finding]:
    """Judge weights that are thrown away while the loss falls, with gradients of some size after that."""
    made = Course(range(40))
    for name in ("l0", "l1"):
        made.weight(name, lambda n: (thrown(n)[0], 1e-3 if n < 2 else gradient, thrown(n)[1], None))
    made.loss([100.0, *[1.0] * 39])
    entry = {"index": 0, "type": "SGD", "roots": [0], "rates": [rates[0]]}
    made.events = [{"kind": "optimizers", "optimizers": [entry]}]
    for step, rate in enumerate(rates):
        event = {"kind": "learning-rates", "step": step, "optimizer": 0, "rates": [rate]}
        made.events.append(event)
    return list(RateTooLarge().check(made.recording()))


def test_a_rate_that_kills_all_units_is_too_large_although_the_loss_falls():
    """From that of unscaled targets to that of their mean; a loss that falls with gradients is another case."""
    (finding,) = judged(0.0)

    assert "the gradient of l0.weight, l1.weight has been exactly zero since" in finding.message
    assert judged(1e-3) == []


def test_a_rate_that_a_schedule_has_raised_is_said():
    """The optimizer was made with the first one."""
    (finding,) = judged(0.0, rates=(0.004, 0.1))

    assert "(SGD with a learning rate of 0.004, raised to 0.1 by then)" in finding.message


@pytest.mark.parametrize(
    ("courses", "number"), [([thrown, thrown, calm], 1), ([thrown, thrown, calm, calm, calm], 0)]
)
def test_the_loss_of_a_policy_is_no_measure(courses, number):
    """It changes its sign again and again, so that weights alone tell; most of them have to."""
    wavering = [(-1.0) ** i * (2.0 - 0.05 * i) for i in range(30)]

    assert len(stepping(*courses, loss=wavering)) == number


def test_weights_that_start_at_zero_are_left_out():
    """Whatever they become is large against that."""
    born: Course4 = lambda n: (0.0, 0.1) if n == 0 else (0.1 * n, 0.1)

    assert stepping(born, born, calm, loss=RISEN) == []


def test_later_steps_are_for_other_rules():
    """From the eleventh on."""
    late: Course4 = lambda n: (0.1, 1.0 if n > 10 else 1e-4)

    assert stepping(late, late, loss=[2.0] * 16, steps=range(16)) == []


def test_a_start_that_was_not_seen_is_not_judged():
    """The first size is not known then."""
    assert stepping(thrown, thrown, steps=range(5, 17)) == []


@golden("NEVER-INITIALISED")
def golden_never_initialised(*, fires: bool) -> Golden:
    """Start two layers in a row from ones, or the second alone."""
    course = Course(SAMPLES[:3])
    for i in range(3):
        course.weight(f"l{i}", steady(1.0, 1e-3, 1e-4))
    alike = {"l1.weight:param", "l2.weight:param"} if fires else {"l2.weight:param"}
    course.rows = [
        row | ({"min": 1.0, "max": 1.0} if row["site"] in alike else {"min": -1.5, "max": 1.5})
        if row["site"].endswith(":param")
        else row
        for row in course.rows
    ]
    return written(course)


@golden("RATE-TOO-LARGE", lacks=(1, 3))
def golden_rate_too_large(*, fires: bool) -> Golden:
    """Take steps of ten times the weights' size that raise the loss, or ones of a hundredth that lower it."""
    course = Course(range(12))
    for i in range(3):
        course.weight(
            f"l{i}",
            lambda n: (
                (0.1 if n == 0 else 1 + 0.1 * n, 1e-2, 1.0 / (1 + n), None)
                if fires
                else (0.1, 1e-2, 1e-3, None)
            ),
        )
    course.loss([2.3] + [20.0 - n if fires else 2.2 - 0.1 * n for n in range(11)])
    return written(course)
