"""SPIKE: jumps of the loss and of the gradient, in any step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kedge.rules.rule import Finding
from kedge.rules.training.spike import Spike
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden

ROOTS = [{"name": "Net", "prefix": ""}, {"name": "Loss", "prefix": "Loss"}]


def losses(
    number: int = 60, jumps: dict[int, float] | None = None, *, noise: float = 0.03
) -> list[float]:
    """Return a loss that falls from 2 to 0.1, with some noise, and jumps in some steps."""
    course = [0.1 + 1.9 * 0.9**i + noise * math.sin(12.9898 * i) for i in range(number)]
    return [(jumps or {}).get(i, loss) for i, loss in enumerate(course)]


def of_loss(course: Sequence[float], *, every: int = 10, **columns: Any) -> list[Finding]:
    """Run the rule over a loss that is written in every step, in full in every tenth."""
    rows = [
        {
            "step": i,
            "site": "Loss:out",
            "count": 1,
            "sum": loss,
            "level": 2 if i % every == 0 else 1,
            **columns,
        }
        for i, loss in enumerate(course)
    ]
    site = {"site": "Loss:out", "root": 1, "shape": []}
    return list(Spike().check(Recording.build([site], rows, roots=ROOTS)))


def of_norm(course: Sequence[float], **columns: Any) -> list[Finding]:
    """Run the rule over the norm of 16 gradients."""
    rows = [
        {"step": i, "site": ":grad.norm", "count": 16, "sumsq": norm**2, "level": 1, **columns}
        for i, norm in enumerate(course)
    ]
    return list(Spike().check(Recording.build([{"site": ":grad.norm"}], rows, roots=ROOTS)))


def norms(number: int = 60, jumps: dict[int, float] | None = None) -> list[float]:
    """Return norms that wander a little, and jump in some steps."""
    return [(jumps or {}).get(i, 1.5 + 0.2 * math.sin(12.9898 * i)) for i in range(number)]


def test_a_loss_that_jumps_in_an_unsampled_step_is_reported():
    """With its height, what was usual, and whether it came back."""
    (finding,) = of_loss(losses(jumps={43: 9.0}))

    assert (finding.severity, finding.site, finding.step) == ("warning", "Loss:out", 43)
    assert finding.message == "The loss (Loss:out) jumped from 0.136 to 9 at step 43; it came back."
    assert (finding.evidence.spikes, finding.evidence.steps) == (1, [43])
    assert finding.evidence.came_back is True
    assert finding.evidence.course[6] == 9.0


@pytest.mark.parametrize(("samples", "number"), [(2, 0), (8, 0), (9, 1)])
def test_the_mean_of_a_small_batch_is_not_compared(samples, number):
    """The last batch of an epoch may have two samples of sixteen, one of them a hard one."""
    course = losses(jumps={43: 9.0})
    rows = [
        {"step": i, "site": "Loss:out", "count": 1, "sum": loss, "level": 1}
        for i, loss in enumerate(course)
    ]
    site = {"site": "Loss:out", "root": 1, "shape": []}
    event = {"kind": "small-batch", "step": 43, "loss": "loss", "samples": samples, "usual": 16}
    recording = Recording.build([site], rows, roots=ROOTS, events=[event])

    assert len(list(Spike().check(recording))) == number


def test_a_loss_that_stays_up_is_reported_as_one_jump():
    """Steps that follow are the same spike."""
    (finding,) = of_loss(losses(jumps=dict.fromkeys(range(43, 60), 9.0)))

    assert (
        finding.message
        == "The loss (Loss:out) jumped from 0.136 to 9 at step 43; it did not come back."
    )
    assert finding.evidence.spikes == 1


def test_a_jump_in_the_last_step_has_not_come_back():
    """Nothing is known of what follows."""
    (finding,) = of_loss(losses(jumps={59: 9.0}))

    assert finding.evidence.came_back is False


@pytest.mark.parametrize(("times", "number"), [(4.9, 0), (5.1, 1)])
def test_a_jump_is_measured_by_the_greatest_before_it(times, number):
    """What is not five times as far up as anything in the last hundred steps is the noise of batches."""
    course = losses(noise=0.4)
    jumps = [course[i] - sum(course[i - 10 : i]) / 10 for i in range(10, 43)]
    course[43] = sum(course[33:43]) / 10 + times * max(jumps)

    assert len(of_loss(course)) == number


def test_the_noise_of_a_falling_loss_is_that_around_its_fall():
    """How far it has come down is no measure of how far it may jump."""
    (finding,) = of_loss(losses(jumps={43: 2.5}))

    assert finding.step == 43


def test_small_batches_may_be_noisy():
    """A run whose single losses often are many times the usual one has no spike at another of them."""
    usual = [0.2 + (2.0 if i % 7 == 3 else 0.0) + 0.05 * math.sin(i) for i in range(150)]
    usual[140] = 3.4

    assert of_loss(usual) == []


@pytest.mark.parametrize(("height", "number"), [(0.4, 0), (0.5, 1)])
def test_a_jump_has_to_undo_what_was_learned(height, number):
    """A loss near its end may be many times the usual one, and little is lost."""
    tail = [1e-3 + 1e-4 * math.sin(12.9898 * i) for i in range(200)]
    course = [2.0 - i / 20 for i in range(40)] + tail
    course[220] = height

    assert len(of_loss(course)) == number


def test_losses_below_zero_can_jump_too():
    """As log-likelihoods do; the distance counts, and not the sign."""
    course = [loss - 5 for loss in losses(jumps={43: 30.0})]

    (finding,) = of_loss(course)

    assert finding.evidence.height == 25.0


def test_a_fall_is_no_spike():
    """Only getting worse is bad."""
    assert of_loss(losses(jumps={43: -9.0})) == []


@pytest.mark.parametrize(("at", "number"), [(19, 0), (20, 1)])
def test_the_first_steps_are_not_judged(at, number):
    """Twenty are asked for."""
    assert len(of_loss(losses(jumps={at: 30.0}))) == number


def test_several_spikes_are_one_finding():
    """The highest is named, the others are counted; those nearer than ten steps belong together."""
    (finding,) = of_loss(losses(200, {40: 12.0, 45: 80.0, 170: 700.0}))

    assert finding.evidence.steps == [40, 170]
    assert "at step 170, the highest of 2 spikes; it came back." in finding.message


def test_the_highest_spike_is_the_one_furthest_above_what_was_usual():
    """A loss that has come down jumps from less."""
    course = [max(1000 * 0.9**i, 1.0) + 1e-3 * math.sin(12.9898 * i) for i in range(200)]
    course[25], course[190] = 3000.0, 1500.0

    (finding,) = of_loss(course)

    assert (finding.step, finding.evidence.steps) == (190, [25, 190])


@pytest.mark.parametrize(("gap", "number"), [(9, 1), (10, 2)])
def test_ten_steps_part_two_spikes(gap, number):
    """Nearer ones are one."""
    (finding,) = of_loss(losses(200, {40: 12.0, 40 + gap: 90.0}))

    assert finding.evidence.spikes == number


@pytest.mark.parametrize(("height", "number"), [(14.9, 0), (15.2, 1)])
def test_a_jump_is_measured_by_the_usual_loss(height, number):
    """Lightning's rule: three times the mean of the last ten."""
    course = [25.0] * 10 + [5 + 0.01 * math.sin(12.9898 * i) for i in range(140)]
    course[140] = height

    assert len(of_loss(course)) == number


@pytest.mark.parametrize(("height", "number"), [(3.4, 0), (3.6, 0), (3.9, 1), (5.1, 1)])
def test_a_loss_that_stays_large_jumps_if_all_that_was_learned_is_undone(height, number):
    """As a language model's: above where it began, by more than a quarter of what is usual."""
    course = [3.5 - 0.01 * i + 0.02 * math.sin(12.9898 * i) for i in range(60)]
    course[45] = height

    assert len(of_loss(course)) == number


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_the_unit_does_not_matter(scale):
    """A loss or a norm is small or large only against its own past."""
    assert len(of_loss([loss * scale for loss in losses(jumps={43: 9.0})])) == 1
    assert of_loss([loss * scale for loss in losses()]) == []
    assert len(of_norm([norm * scale for norm in norms(jumps={43: 200.0})])) == 1
    assert of_norm([norm * scale for norm in norms()]) == []


@pytest.mark.parametrize(("height", "number"), [(1.2, 0), (11.0, 1), (0.1, 0)])
def test_a_course_without_any_noise_can_jump_too(height, number):
    """The other conditions hold all the same."""
    constant = [1.0] * 60
    constant[43] = height

    assert len(of_norm(constant)) == number
    assert len(of_loss(constant)) == number


@pytest.mark.parametrize(("after", "back"), [(4.4, True), (4.8, False)])
def test_coming_back_means_more_than_half_of_the_way(after, back):
    """Judged by the median of the ten steps that follow."""
    jumps = {43: 9.0} | dict.fromkeys(range(44, 60), after)

    (finding,) = of_loss(losses(jumps=jumps))

    assert finding.evidence.came_back is back


def test_losses_that_are_not_finite_are_left_out():
    """They are another rule's."""
    assert of_loss(losses(jumps={43: math.nan, 47: math.inf})) == []
    assert of_loss(losses(jumps={43: 9.0}), nonfinite=1) == []


@pytest.mark.parametrize(
    ("entry", "number"),
    [
        ({}, 1),
        ({"shape": [1]}, 1),
        ({"shape": [8]}, 0),
        ({"site": "Loss.inner:out"}, 0),
        ({"site": "Loss:in"}, 0),
    ],
)
def test_only_what_a_root_returns_as_a_single_number_is_a_loss(entry, number):
    """Anything else may jump as it likes."""
    site = {"site": "Loss:out", "root": 1, "shape": [], **entry}
    rows = [
        {"step": i, "site": 0, "count": 1, "sum": loss}
        for i, loss in enumerate(losses(jumps={43: 9.0}))
    ]

    assert len(list(Spike().check(Recording.build([site], rows, roots=ROOTS)))) == number


def test_a_gradient_that_jumps_is_reported():
    """From the norms at the end of backward, whether there is a loss or not."""
    (finding,) = of_norm(norms(jumps={43: 200.0}))

    assert (finding.site, finding.step) == (":grad.norm", 43)
    assert finding.message.startswith(
        "The norm of the gradients (:grad.norm) jumped from 1.49 to 200 at step 43"
    )
    assert finding.message.endswith("to 200 at step 43; it came back.")
    assert finding.evidence.height == 200.0


@pytest.mark.parametrize(("height", "number"), [(16.9, 0), (17.1, 1)])
def test_a_norm_is_measured_by_the_greatest_before_it(height, number):
    """Ten times the greatest of the last hundred."""
    assert len(of_norm(norms(jumps={43: height}))) == number


def test_norms_that_wander_over_magnitudes_may_do_so():
    """Near the end of a training some batches give nothing and others something."""
    wild = [10.0 ** (2 * math.sin(12.9898 * i)) for i in range(100)]
    wild[80] = 700.0

    assert of_norm(wild) == []


@pytest.mark.parametrize("course", [[0.0] * 60, [0.0] * 40 + [1.0] * 20])
def test_gradients_that_were_zero_have_no_usual_norm(course):
    """A part of a model that begins to train is no spike."""
    assert of_norm(course) == []


def test_only_the_last_hundred_steps_are_the_past():
    """A bad start does not hide a jump later."""
    course = [50.0] * 30 + norms(150, {120: 30.0})

    assert len(of_norm(course)) == 1


@pytest.mark.parametrize(("at", "number"), [(119, 0), (120, 1)])
def test_the_hundredth_step_before_is_the_last_that_counts(at, number):
    """A norm as large as the jump hides it for a hundred steps, and no longer."""
    assert len(of_norm(norms(150, {19: 30.0, at: 30.0}))) == number


@pytest.mark.parametrize(("at", "number"), [(19, 0), (20, 1)])
def test_the_first_norms_are_not_judged(at, number):
    """Twenty are asked for."""
    assert len(of_norm(norms(60, {at: 300.0}))) == number


@pytest.mark.parametrize(("at", "number"), [(115, 0), (116, 1)])
def test_the_hundredth_jump_of_a_loss_is_the_last_that_counts(at, number):
    """A loss that jumped in the first steps as well does so with every bad batch, for a hundred steps."""
    assert len(of_loss(losses(200, {15: 30.0, at: 9.0}))) == number


def test_a_course_of_one_number_more_than_is_asked_for_is_judged():
    """With twenty losses before it, the last one can be a jump."""
    assert len(of_loss(losses(21, {20: 30.0}))) == 1
    assert of_loss(losses(20, {19: 30.0})) == []


@pytest.mark.parametrize(("every", "severity"), [(5, "info"), (15, "info"), (50, "warning")])
def test_a_jump_beside_a_loss_of_changing_sign_is_for_information(every, severity):
    """What a policy is trained on weighs rewards against their mean: its gradients differ by orders of magnitude."""
    signs = [-1.0 if i // every % 2 else 1.0 for i in range(200)]
    course = [sign * (1 + i % 3) for i, sign in enumerate(signs)]
    course[150] = 5.0
    rows = [
        {"step": i, "site": "Loss:out", "count": 1, "sum": loss, "level": 1}
        for i, loss in enumerate(course)
    ]
    rows += [
        {"step": i, "site": ":grad.norm", "count": 16, "sumsq": norm**2, "level": 1}
        for i, norm in enumerate([1.0] * 150 + [90.0] + [1.0] * 49)
    ]
    sites = [{"site": "Loss:out", "root": 1, "shape": []}, {"site": ":grad.norm"}]

    (finding,) = Spike().check(Recording.build(sites, rows, roots=ROOTS))

    assert (finding.severity, finding.site) == (severity, ":grad.norm")
    assert ("changes its sign again and again" in finding.message) == (severity == "info")


@pytest.mark.parametrize(
    ("risen", "severity"), [([], "info"), ([43], "warning"), (range(44, 60), "warning")]
)
def test_a_jump_of_the_gradient_that_no_loss_follows_is_for_information(risen, severity):
    """Under Adam the step is hardly longer; if the loss is higher in that step or after it, it did harm."""
    course = [2.0 - 0.02 * i + (0.5 if i in risen else 0.0) for i in range(80)]
    rows = [
        {"step": i, "site": "Loss:out", "count": 1, "sum": loss, "level": 1}
        for i, loss in enumerate(course)
    ]
    rows += [
        {"step": i, "site": ":grad.norm", "count": 16, "sumsq": norm**2, "level": 1}
        for i, norm in enumerate(norms(80, {43: 200.0}))
    ]
    sites = [{"site": "Loss:out", "root": 1, "shape": []}, {"site": ":grad.norm"}]

    (finding,) = Spike().check(Recording.build(sites, rows, roots=ROOTS))

    assert (finding.severity, finding.site) == (severity, ":grad.norm")
    assert ("The loss went on as before" in finding.message) == (severity == "info")


def starting_anew(first_step: int, *, root: int = 0) -> list[Finding]:
    """Judge a loss and a norm that jump in step 43, where an optimizer made its first step in some step."""
    rows = [
        {"step": i, "site": "Loss:out", "count": 1, "sum": x, "level": 1}
        for i, x in enumerate(losses(jumps={43: 9.0}))
    ]
    rows += [
        {"step": i, "site": ":grad.norm", "count": 16, "sumsq": norm**2, "level": 1}
        for i, norm in enumerate(norms(jumps={43: 90.0}))
    ]
    entries = [
        {"index": 0, "roots": [0], "first_step": 0},
        {"index": 1, "roots": [root], "first_step": first_step},
    ]
    events = [{"kind": "optimizers", "optimizers": entries}]
    sites = [{"site": "Loss:out", "root": 1, "shape": []}, {"site": ":grad.norm"}]
    return list(Spike().check(Recording.build(sites, rows, roots=ROOTS, events=events)))


@pytest.mark.parametrize(
    ("first_step", "number"), [(0, 2), (20, 2), (30, 0), (42, 0), (43, 0), (44, 2)]
)
def test_a_new_optimizer_begins_a_new_training(first_step, number):
    """A head that is trained from there on makes another loss; what came twenty steps later is a spike again."""
    assert len(starting_anew(first_step)) == number


def test_a_new_optimizer_of_another_root_leaves_the_norm_its_history():
    """The loss may be of both."""
    assert [finding.site for finding in starting_anew(42, root=1)] == [":grad.norm"]


def trained(name: str, *optimizers: int, parameters: int = 64) -> dict[str, Any]:
    """A root that some optimizers train; none if they are not given."""
    prefix = {"prefix": name} if optimizers != (0,) else {"prefix": ""}
    return {
        "name": name,
        **prefix,
        "trained": bool(optimizers),
        "optimizers": optimizers,
        "parameters": parameters,
    }


@pytest.mark.parametrize(
    ("roots", "number_of_losses", "severity"),
    [
        ([trained("Generator", 0), trained("Discriminator", 1)], 2, "info"),
        (
            [trained("Generator", 0), trained("Discriminator", 1)],
            1,
            "warning",
        ),  # one loss trains both
        ([trained("Encoder", 0), trained("Decoder", 0)], 2, "warning"),
        ([trained("Net", 0), trained("Net")], 1, "info"),  # a target network
        ([trained("Net", 0), trained("Net", parameters=32)], 1, "warning"),
        ([trained("Net", 0), trained("Teacher")], 1, "warning"),
    ],
)
def test_a_loss_whose_goal_moves_may_jump(
    roots: list[dict[str, Any]], number_of_losses: int, severity: str
) -> None:
    """Where models are trained against each other, or a copy of the model runs untrained."""
    names = ["loss", "loss_2"][:number_of_losses]
    sites = [{"site": name, "path": name, "kind": "loss", "shape": []} for name in names]
    rows = [
        {"step": i, "site": name, "count": 1, "sum": loss, "level": 1}
        for i, loss in enumerate(losses(jumps={43: 9.0}))
        for name in names
    ]
    found = list(Spike().check(Recording.build(sites, rows, roots=roots)))
    assert [finding.severity for finding in found] == [severity] * number_of_losses
    assert all(("Its goal moves" in finding.message) is (severity == "info") for finding in found)


@golden("SPIKE", lacks=(1, 21))
def golden_spike(*, fires: bool) -> Golden:
    """Make the loss of one unsampled step unlike any before it, or only double it."""
    jump = {33: 9.0 if fires else 0.55}
    losses = [2.0 / (1 + i / 4) + 0.01 * (i % 3) if i not in jump else jump[i] for i in range(50)]
    rows = [
        {"step": i, "site": "Loss:out", "count": 1, "sum": x, "level": 1 + (i % 10 == 0)}
        for i, x in enumerate(losses)
    ]
    return {
        "roots": [{"name": "Net", "prefix": ""}, {"name": "Loss", "prefix": "Loss"}],
        "sites": [{"site": "Loss:out", "root": 1, "shape": []}],
        "rows": rows,
    }
