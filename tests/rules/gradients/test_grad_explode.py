"""GRAD-EXPLODE: against the run's own past, lasting, and with harm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kedge.rules.gradients.grad_explode import GradExplode
from kedge.rules.rule import Finding
from tests.rules.goldens import SAMPLES, Golden, golden, written
from tests.rules.scenes import INF, NAN, Course, size

HARMFUL = 0.05


def course(norms: Sequence[float], *, update: float | None = HARMFUL) -> Course:
    """Make a model of two weights whose gradients have these norms; its weights are 0.1 in size."""
    steps = range(0, 10 * len(norms), 10)
    made = Course(steps)
    for path, part in (("a", 0.6), ("b", 0.8)):
        made.weight(path, lambda i, p=part: (0.1, p * norms[i] / 4, update, None))
    return made


def noisy(number: int) -> list[float]:
    """Return norms that wander by a factor of four."""
    return [1.5 + math.sin(12.9898 * i) for i in range(number)]


def found(norms: Sequence[float], **how: float | None) -> list[Finding]:
    """Run the rule."""
    return list(GradExplode().check(course(norms, **how).recording()))


def test_a_norm_that_leaves_its_past_and_stays_is_an_error():
    """Ten times the largest of the last hundred samples, three samples long, and the weights are thrown about."""
    (finding,) = found([*noisy(60), 40, 60, 50, 45])

    assert (finding.severity, finding.site, finding.step) == ("error", "b.weight:param.grad", 600)
    assert finding.message == (
        "The norm of the gradients was 40 at step 600, above the limit of 25 set by the run's own past, "
        "and stayed above it (largest: 60); b.weight:param.grad has the largest share."
    )
    assert finding.evidence.update_ratio == 0.5
    assert finding.evidence.shares == {"b.weight:param.grad": 0.64, "a.weight:param.grad": 0.36}


@pytest.mark.parametrize(
    "norms",
    [
        noisy(200),
        [*noisy(60), 500, *noisy(60)],
        [*noisy(60), 500, 500, *noisy(60)],
        [100 / (i + 1) for i in range(100)],
        [0.01 * 1.3**i if i < 25 else 5.0 for i in range(100)],
        [1.05**i for i in range(100)],
    ],
    ids=["noise", "one spike", "two spikes", "decay", "first steps", "slow growth"],
)
def test_what_healthy_runs_do_is_no_finding(norms):
    """Noise, a bad batch, the first steps and slow growth are left to the eye."""
    assert found(norms) == []


def test_growth_that_takes_many_samples_is_seen():
    """A norm that doubles from sample to sample is compared with a past that it has not raised yet."""
    (finding,) = found([*noisy(60), *(2.0**i for i in range(15))])

    assert 640 <= finding.step <= 700


@pytest.mark.parametrize(("first_step", "number"), [(0, 1), (600, 0), (1200, 1)])
def test_a_new_optimizer_begins_a_new_past(first_step, number):
    """Other weights are trained then, on other data: the norms of the training before are no limit."""
    made = course([*noisy(60), *(40 * each for each in noisy(60))])
    one = {"type": "SGD", "steps": 100, "parameters": 2, "rates": [0.01], "roots": [0]}
    trained = [
        {"index": 0, "first_step": 0, **one},
        {"index": 1, "first_step": first_step, **one},
    ]
    made.events.append({"kind": "optimizers", "optimizers": trained})

    assert len(list(GradExplode().check(made.recording()))) == number


@pytest.mark.parametrize("update", [1e-4, 0.009])
def test_what_is_clipped_does_no_harm(update):
    """A large gradient that changes the weights no more than usual is the optimizer's business."""
    assert found([*noisy(60), 400, 600, 500, 450], update=update) == []


def test_without_updates_the_norm_decides():
    """Where no update was recorded, nothing shows that the gradient was tamed."""
    (finding,) = found([*noisy(60), 400, 600, 500, 450], update=None)

    assert finding.evidence.update_ratio is None


def test_a_spike_that_ends_the_run_counts():
    """Two large samples and then nothing finite any more are an explosion."""
    (finding,) = found([*noisy(60), 400, 600, NAN, NAN], update=1e-4)

    assert finding.message.endswith(
        "and was not finite at the end (largest: 600); b.weight:param.grad has the largest share."
    )


def test_a_young_run_that_runs_away_is_seen():
    """Before there is a past to compare with, steady growth into the infinite tells."""
    (finding,) = found([1.0, 2.0, 1.5, 30.0, 5e3, 1e7, 1e12, INF, NAN, NAN])

    assert (finding.step, finding.confidence) == (40, 0.7)


def test_a_young_run_that_ends_without_growth_is_not():
    """A NaN out of the blue is another rule's."""
    assert found([1.0, 2.0, 1.5, 1.2, 1.1, 1.7, NAN, NAN]) == []
    assert found([1.0, 2.0, 1.5, 1.2, 1.1, 900.0, NAN, NAN]) == []


def test_skipped_steps_are_no_end():
    """Loss scaling tries large scales and skips the steps that overflow; the run goes on."""
    norms = noisy(100)
    norms[0] = norms[40] = norms[80] = INF

    assert found(norms) == []


def test_thawed_layers_do_not_count_as_growth():
    """Gradients that were not there before cannot have grown."""
    made = course(noisy(80))
    made.sites.append(
        {"site": "c.weight:param.grad", "path": "c.weight", "owner": "c", "shape": [4, 4]}
    )
    made.rows += [size(step, "c.weight:param.grad", 100.0) for step in range(600, 800, 10)]

    assert list(GradExplode().check(made.recording())) == []


def test_a_gradient_that_is_absent_now_and_then_counts_as_nothing():
    """Neither a step without it nor a last step that was written in part is an end in NaN."""
    made = course([1.0, 1.5, *[1.2] * 14, 10.0, 100.0, 1e3, 1e4])
    made.rows = [
        row for row in made.rows if (row["step"], row["site"]) != (190, "b.weight:param.grad")
    ]

    assert list(GradExplode().check(made.recording())) == []


def test_off_schedule_steps_are_not_compared():
    """There gradients are seen after clipping and accumulation: only what is not finite counts."""
    made = course(noisy(60), update=None)
    made.rows += [size(step, "a.weight:param.grad", 1e3) | {"level": 1} for step in range(301, 306)]

    assert list(GradExplode().check(made.recording())) == []


def test_roots_are_judged_one_by_one():
    """The finding is of the model whose gradients grew."""
    made = course([1.0] * 64)
    grown = Course(made.steps)
    grown.weight("G.a", lambda i: (0.1, 1.0 if i < 60 else 50.0, HARMFUL, None), root=1)
    made.sites, made.rows = made.sites + grown.sites, made.rows + grown.rows

    (finding,) = GradExplode().check(made.recording())

    assert finding.site == "G.a.weight:param.grad"


def taken(
    norms: Sequence[float], *, after: float = 0.1, every: int = 10, count: int = 32
) -> list[Finding]:
    """Run the rule where every step has the norm of the gradients, and every tenth the weights.

    What comes out of backward in the measured steps is calm; after the first third of the last ten
    steps the weights have another size.
    """
    made = Course(range(0, len(norms), every))
    made.weight("a", lambda i: (0.1 if i < len(made.steps) - 1 else after, 1.0, 1e-4, None))
    made.sites.append({"site": ":grad.norm", "shape": [count]})
    made.rows += [
        {"step": i, "site": ":grad.norm", "count": count, "sumsq": norm**2, "level": 1}
        for i, norm in enumerate(norms)
    ]
    return list(GradExplode().check(made.recording()))


def test_what_explodes_and_is_over_between_two_samples_is_seen():
    """Three steps that only the optimizer's norm shows, and weights that have another size after them."""
    (finding,) = taken([*noisy(153), 40, 900, 60, *[0.1] * 5], after=7.0)

    assert (finding.site, finding.step) == ("a.weight:param.grad", 153)
    assert finding.evidence.largest == 900.0
    assert finding.confidence == 0.9


@pytest.mark.parametrize(
    ("after", "number"), [(0.15, 0), (0.19, 0), (0.21, 1), (0.0, 0), (10.0, 1)]
)
def test_weights_that_pass_through_it_unharmed_do_not_count(after, number):
    """They have to double at least."""
    assert len(taken([*noisy(153), 40, 900, 60, *[0.1] * 5], after=after)) == number


@pytest.mark.parametrize(
    "norms", [[*noisy(153), 900, 60, *[0.1] * 6], noisy(161)], ids=["two steps", "none"]
)
def test_a_change_of_the_weights_alone_does_not_count(norms):
    """Nor does one bad batch: three steps in a row are asked for."""
    assert taken(norms, after=7.0) == []


def test_what_the_weights_became_has_to_be_seen():
    """An explosion in the very last steps has no measured step after it."""
    assert taken([*noisy(153), 40, 900, 60], after=7.0) == []


def test_steps_in_which_the_optimizer_got_more_gradients_are_not_compared():
    """A layer that is thawed raises the norm."""
    made = Course(range(0, 160, 10))
    made.weight("a", lambda i: (0.1 if i < 15 else 7.0, 1.0, 1e-4, None))
    made.sites.append({"site": ":grad.norm", "shape": [64]})
    made.rows += [
        {
            "step": i,
            "site": ":grad.norm",
            "count": 64 if i > 140 else 32,
            "sumsq": 1e6 if i > 140 else 1.0,
            "level": 1,
        }
        for i in range(160)
    ]

    assert list(GradExplode().check(made.recording())) == []


def test_history_and_lag_are_counted_in_steps():
    """However many of them are sampled, the last fifty are no past."""
    growth = [1.5] * 100 + [1.5 * 1.15 ** (i - 100) for i in range(100, 160)]
    made = Course(range(160))
    made.weight("a", lambda i: (0.1, growth[i] / 4, HARMFUL, None))

    (finding,) = GradExplode().check(made.recording())

    assert finding.step == 117


def test_harm_that_was_done_before_does_not_count():
    """The first steps of a run may throw the weights about; what matters is what the growth does."""
    made = Course(range(0, 640, 10))
    norms = [*noisy(60), 400, 600, 500, 450]
    made.weight("a", lambda i: (0.1, norms[i] / 4, 0.05 if i < 60 else 1e-4, None))

    assert list(GradExplode().check(made.recording())) == []


def test_harm_that_comes_later_counts():
    """As where Adam's second moments take a while to follow."""
    made = Course(range(0, 700, 10))
    norms = [*noisy(60), 400, 600, 500, *[450] * 7]
    made.weight("a", lambda i: (0.1, norms[i] / 4, 0.05 if i == 68 else 1e-4, None))

    (finding,) = GradExplode().check(made.recording())

    assert (finding.step, finding.confidence) == (600, 0.9)


@pytest.mark.parametrize(("young", "number"), [(24, 0), (25, 1)])
def test_a_past_has_twenty_samples(young, number):
    """Before the fifty steps that are left out."""
    assert len(found([*noisy(young), 40, 60, 50])) == number


@pytest.mark.parametrize(("last", "number"), [([NAN], 1), ([1.0, NAN], 0), ([1.0], 0)])
def test_two_large_samples_count_if_nothing_finite_follows(last, number):
    """Not if the norm came down before, nor if the run went on."""
    assert len(found([*noisy(52), 400, 600, *last], update=1e-4)) == number


@pytest.mark.parametrize(("height", "number"), [(140, 0), (160, 1)])
def test_a_young_run_has_to_rise_far(height, number):
    """To more than a hundred times the median of what came before."""
    assert len(found([1.0, 2.0, 1.5, 1.4, 15.0, 100.0, height, NAN, NAN])) == number


@pytest.mark.parametrize(("rise", "number"), [([900.0, 1e4], 0), ([15.0, 900.0, 1e4], 1)])
def test_a_young_run_has_to_rise_for_three_samples(rise, number):
    """A single jump into the infinite is for NAN-BORN."""
    assert len(found([1.0, 2.0, 1.5, 1.4, *rise, NAN])) == number


def test_a_layer_that_is_there_in_nearly_all_steps_counts():
    """Nine tenths of them are enough; what is there in fewer may have been thawed."""
    for missing, site in ((5, "c.weight:param.grad"), (7, "b.weight:param.grad")):
        made = course([*noisy(60), 40, 60, 50, 45])
        made.weight(
            "c",
            lambda i, m=missing: (
                (0.1, 100.0 if i > 59 else 1.0, HARMFUL, None)
                if i >= m
                else (0.1, None, 1e-4, None)
            ),
        )

        (finding,) = GradExplode().check(made.recording())

        assert finding.site == site


BURST = (40.0, 60.0, 50.0)


@pytest.mark.parametrize(("before", "number"), [(24, 0), (25, 1)])
def test_twenty_samples_before_the_lag_are_a_past(before, number):
    """A run that has one fewer is too young to be held against itself."""
    assert len(found([*noisy(before), *BURST, *noisy(10)])) == number


@pytest.mark.parametrize(("before", "number"), [(105, 0), (106, 1)])
def test_the_past_is_a_thousand_steps_long(before, number):
    """A large first gradient raises the bar for that long and for the lag, and then no more."""
    assert len(found([100.0, *noisy(before)[1:], *BURST, *noisy(10)])) == number


@pytest.mark.parametrize(("at", "number"), [(54, 0), (55, 1)])
def test_the_last_fifty_steps_are_no_past(at, number):
    """What is as near as that may be the growth itself."""
    norms = [*noisy(60), *BURST, *noisy(10)]
    norms[at] = 100.0

    assert len(found(norms)) == number


@pytest.mark.parametrize(("highest", "number"), [(24.9, 0), (25.1, 1)])
def test_the_bar_is_ten_times_the_past(highest, number):
    """The largest of the past counts, here 2.5."""
    norms = [2.5, *[1.0] * 59]

    assert len(found([*norms, *[highest] * 3, *norms])) == number


@pytest.mark.parametrize(("update", "number"), [(0.0099, 0), (0.0101, 1)])
def test_harm_is_a_tenth_of_a_weight(update, number):
    """In one step, in the median over the weights."""
    assert len(found([*noisy(60), *BURST, *noisy(10)], update=update)) == number


@pytest.mark.parametrize(
    ("norms", "at"),
    [
        ([1.0, 2.0, 1.5, 1e3, 1e6, 1e9], 30),
        ([1.0, 2.0, 1.5, 1e3, 1e6], None),
        ([1.0, 2.0, 1.5, 2.0, 50.0, 151.0], 50),
        ([1.0, 2.0, 1.5, 2.0, 50.0, 149.0], None),
        ([1.0, 10.0, 1e3, 1e5], 20),
        ([1.0, 10.0, 1e3], None),
    ],
)
def test_a_young_run_rises_three_times_to_a_hundred_times_its_usual(norms, at):
    """Both are asked for, up to the last norm that is finite; the usual is the median before the rise."""
    assert [finding.step for finding in found([*norms, INF, NAN])] == ([] if at is None else [at])


@pytest.mark.parametrize(("first", "number"), [(10, 1), (11, 0)])
def test_a_gradient_counts_that_is_there_nine_times_out_of_ten(first, number):
    """One that came later may have been thawed."""
    made = course(noisy(100))
    made.sites.append(
        {"site": "c.weight:param.grad", "path": "c.weight", "owner": "c", "shape": [4, 4]}
    )
    made.rows += [
        size(10 * i, "c.weight:param.grad", 100.0 if i >= 97 else 0.1) for i in range(first, 100)
    ]

    assert len(list(GradExplode().check(made.recording()))) == number


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_the_unit_of_a_gradient_does_not_matter(scale):
    """A scaled loss scales all norms: a gradient is large only against its own past."""
    assert [finding.step for finding in found([norm * scale for norm in (*noisy(60), *BURST)])] == [
        600
    ]
    assert found([norm * scale for norm in noisy(80)]) == []


def test_gradients_that_were_zero_are_no_past():
    """A part of a model that begins to train late has nothing to be held against."""
    assert found([*[0.0] * 60, *BURST]) == []


@golden("GRAD-EXPLODE", lacks=(1, 30))
def golden_grad_explode(*, fires: bool) -> Golden:
    """Make the norm of the gradients leave its past range for good, or for one bad batch."""
    course = Course(SAMPLES)
    high = range(26, 30) if fires else range(26, 27)
    course.weight(
        "fc",
        lambda i: (
            0.1,
            9.0 if i in high else 0.1 + 0.01 * (i % 3),
            0.02 if i in high else 1e-4,
            None,
        ),
    )
    return written(course)
