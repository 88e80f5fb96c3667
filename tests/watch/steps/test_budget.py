"""How much of a run is watched, driven by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kedge.watch.step import StepKind
from kedge.watch.steps.budget import ALLOWANCE, Budget
from kedge.watch.steps.spacing import FIRST_STEPS
from tests.marks import full


class Run:
    """A run whose steps take known times.

    Of the first measured steps each takes some seconds `once` besides.
    """

    def __init__(
        self,
        budget: Budget,
        step: float,
        costs: dict[StepKind, float],
        per_step: float = 0.0,
        once: Sequence[float] = (),
    ) -> None:
        self.budget, self.step, self.costs = budget, step, {StepKind.SKIPPED: 0.0, **costs}
        self.once = list(once)
        self.now, self.spent, self.number = 0.0, 0.0, 0
        self.kinds: list[StepKind] = []
        self.per_step = per_step
        budget.begin(0.0, per_step)

    def go(self, steps: int) -> Run:
        """Run some steps."""
        while self.number < steps:
            kind, many = self.budget.kind, self.budget.run
            cost = many * self.costs[kind]
            if kind is StepKind.MEASURED and self.once:
                cost += self.once.pop(0)
            self.now += many * (self.step + self.per_step) + cost
            self.spent += cost
            self.kinds += [kind] * many
            self.number += many
            self.budget.run = 1
            self.budget.run_ended(self.number - 1, self.now, cost)
        return self

    def measured(self) -> list[int]:
        """List the measured steps."""
        return [i for i, kind in enumerate(self.kinds) if kind is StepKind.MEASURED]


CHEAP = {StepKind.MEASURED: 1e-3, StepKind.GUARDED: 1e-5}


def test_the_first_steps_are_measured_and_a_short_run_in_full() -> None:
    """As far as the free time reaches."""
    run = Run(Budget(10, 0.03), 1e-3, CHEAP).go(FIRST_STEPS)
    assert run.measured() == [*range(FIRST_STEPS)]


@pytest.mark.parametrize("cost", [0.1, 0.22])
def test_a_short_run_of_dear_steps_has_ten_measured(cost: float) -> None:
    """Its first five, and five that are spread over it."""
    run = Run(Budget(10, 0.03), 0.2, {StepKind.MEASURED: cost, StepKind.GUARDED: 1e-3}).go(40)
    assert {0, 1, 2, 3, 4, 8, 12, 16, 24, 32} <= set(run.measured())


@pytest.mark.parametrize(("cost", "measured"), [(1.0, [0, 1, 2, 3, 4]), (4.0, [0, 1])])
def test_the_first_five_steps_are_measured_if_that_takes_no_ten_seconds(
    cost: float, measured: list[int]
) -> None:
    """No other one is, if they have spent all."""
    run = Run(Budget(10, 0.03), 0.1, {StepKind.MEASURED: cost, StepKind.GUARDED: 1e-3}).go(300)
    assert run.measured() == measured


def test_dear_steps_are_measured_in_the_whole_run() -> None:
    """The first ones do not take what later ones need, whatever the length of the run."""
    run = Run(Budget(10, 0.03), 0.25, {StepKind.MEASURED: 0.1, StepKind.GUARDED: 1e-3}).go(400)
    assert {16, 24, 32, 40, 60, 80, 120, 160, 240} <= set(run.measured())
    assert run.spent <= ALLOWANCE + 0.1


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("step", [1e-4, 1e-3, 3e-2])
def test_watching_takes_its_share_or_the_allowance(share: float, step: float) -> None:
    """Whatever the steps take and their watching costs."""
    for costs in (CHEAP, {StepKind.MEASURED: 0.05, StepKind.GUARDED: 1e-3}):
        run = Run(Budget(10, share), step, costs).go(20_000)
        assert run.spent <= max(share * run.now, ALLOWANCE) + 2 * costs[StepKind.MEASURED]
        assert run.spent >= 0.1 * min(max(share * run.now, 0.5), 20_000 * costs[StepKind.GUARDED])


@pytest.mark.parametrize("per_step", [0.0, full(1e-5), 1e-4])
def test_counting_steps_comes_first_and_leaves_a_third_for_measuring(per_step: float) -> None:
    """It takes its time in every step; if that is more than is allowed, measuring goes on all the same."""
    run = Run(Budget(10, 0.03), 1e-3, CHEAP, per_step).go(200_000)
    counting = per_step * run.number
    assert run.spent <= 0.03 * run.now - min(counting, 0.02 * run.now)
    assert run.spent >= 0.7 * (0.03 * run.now - min(counting, 0.02 * run.now))
    assert run.budget.seconds >= counting + run.spent


def test_the_steps_after_are_charged_too() -> None:
    """A measured step is charged with a quarter more than it took."""
    budget = Budget(10, 0.03)
    run = Run(budget, 1e-2, CHEAP).go(30)
    assert budget.seconds == pytest.approx(
        run.spent + 0.25 * (run.spent - CHEAP[StepKind.MEASURED])
    )


def test_what_is_too_dear_is_guarded_or_skipped() -> None:
    """All three kinds, where measuring is dear and guarding is not free."""
    run = Run(Budget(10, 0.03), 1e-4, {StepKind.MEASURED: 0.05, StepKind.GUARDED: 1e-4}).go(60_000)
    assert set(run.kinds) == set(StepKind)
    assert sum(run.budget.counts.values()) == run.number


def test_measured_steps_are_common_ones() -> None:
    """After the first, each is a multiple of `every`, and a dearer run measures some of a cheaper one's."""
    cheap, dear = (
        Run(Budget(10, 0.03), 1e-3, {StepKind.MEASURED: cost, StepKind.GUARDED: 1e-6})
        .go(20_000)
        .measured()
        for cost in (1e-4, 5e-2)
    )
    later = {step for step in dear if step >= FIRST_STEPS}
    assert later
    assert all(step % 10 == 0 for step in later)
    assert len(later & set(cheap)) >= 0.8 * len(later)


def test_without_a_limit_one_step_in_so_many_is_measured_and_the_others_are_guarded() -> None:
    """No step is skipped."""
    run = Run(Budget(7, None), 1e-3, CHEAP).go(50)
    assert run.measured() == [*range(0, 50, 7)]
    assert StepKind.SKIPPED not in run.kinds


def test_a_wish_is_granted_a_few_times() -> None:
    """The next step is measured then, budget or not; one that never ends to wish does not spend all."""
    budget = Budget(1000, None)
    run = Run(budget, 1e-3, CHEAP)
    for step in range(1, 40):
        run.go(step)
        budget.wish()
    assert run.measured() == [0, *range(2, 10)] or run.measured() == [0, *range(1, 9)]


def test_an_interrupted_run_goes_on_guarded() -> None:
    """What was skipped before it counts as skipped, and the step under way is guarded."""
    budget = Budget(10, 0.03)
    budget.begin(0.0)
    budget.run_ended(0, 1.0, 0.1)
    budget.kind, budget.run, budget._planned = StepKind.SKIPPED, 5, 8
    before = dict(budget.counts)
    budget.interrupt(2.0)
    assert (budget.kind, budget.run, budget.done) == (StepKind.GUARDED, 1, 0)
    assert budget.counts[StepKind.SKIPPED] - before[StepKind.SKIPPED] == 3


def test_guarded_steps_before_an_interruption_are_charged() -> None:
    """Each with its share of what was timed, so that what one costs stays known."""
    budget = Budget(10, 0.03)
    budget.begin(0.0)
    budget.run_ended(0, 1.0, 0.1)
    budget.kind, budget.run, budget._planned = StepKind.GUARDED, 1, 16
    before = budget.seconds
    budget.interrupt(2.0, lambda: 15e-4)
    assert budget.counts[StepKind.GUARDED] == 15
    assert budget.seconds - before == pytest.approx(1.25 * 15e-4)


def test_new_optimizers_do_not_spend_more_than_there_is() -> None:
    """Of many that step once, some are granted a measured step; the others get it where it can be paid."""
    budget = Budget(10, 0.01)
    budget.begin(0.0)
    now, measured = 0.0, 0
    for step in range(1000):
        budget.wish()
        is_measured = budget.kind is StepKind.MEASURED
        measured += is_measured
        now += 0.03 if is_measured else 0.01
        budget.run_ended(step, now, 0.02 if is_measured else 0.0)
    assert 8 < measured < 100


ONCE = [[2.0], [0.0, 2.0], [1.0, 1.0, 0.5, 0.5], [3.0, 2.0]]
"""What attaching and compiling take, in the first steps."""


@pytest.mark.parametrize("once", ONCE)
@pytest.mark.parametrize(
    ("step", "cost", "steps", "least"),
    [(1.4e-3, 4e-3, 1000, 100), (4e-2, 6e-2, 120, 20), (4e-3, 2e-2, 3600, 40)],
)
def test_what_happens_once_takes_nothing_from_looking(
    once: list[float], step: float, cost: float, steps: int, least: int
) -> None:
    """As many steps are measured as without it, in the whole run; it is counted, and allowed besides."""
    costs = {StepKind.MEASURED: cost, StepKind.GUARDED: 5e-5}
    without = Run(Budget(10, 0.03), step, costs).go(steps)
    run = Run(Budget(10, 0.03), step, costs, once=once).go(steps)
    assert len(run.measured()) >= max(least, 0.9 * len(without.measured()))
    assert {0, 1, 2, 3, 4} <= set(run.measured())
    assert run.measured()[-1] >= steps // 2
    assert run.budget.seconds >= run.spent
    assert run.spent <= ALLOWANCE + sum(once) + 2 * cost


def test_steps_that_stay_dear_are_not_taken_for_what_happens_once() -> None:
    """What each measured step takes is what looking costs, and is limited."""
    costs = {StepKind.MEASURED: 0.3, StepKind.GUARDED: 1e-3}
    run = Run(Budget(10, 0.03), 5e-3, costs).go(2000)
    assert run.spent <= ALLOWANCE + 2 * 0.3


def test_a_step_that_is_dear_for_once_later_is_paid_from_the_budget() -> None:
    """Only early ones are allowed besides: something that happens again and again is no exception."""
    budget = Budget(10, 0.03)
    run = Run(budget, 1e-2, CHEAP).go(400)
    for _ in range(20):
        run.once = [1.0]
        run.go(run.number + 400)
    assert run.spent <= max(0.03 * run.now, ALLOWANCE) + 2 * 1.0


def test_in_a_long_run_all_of_it_is_in_the_share() -> None:
    """What happens once is a part of it then."""
    run = Run(Budget(10, 0.03), 1.0, CHEAP, once=[5.0, 2.0]).go(2000)
    assert run.budget.seconds <= 0.031 * run.now


def test_what_the_checks_of_skipped_steps_take_is_paid_besides() -> None:
    """As counting is: it takes nothing from looking, and is in what is printed."""
    costs = {StepKind.MEASURED: 0.06, StepKind.GUARDED: 6e-3}
    without = Run(Budget(10, 0.03), 2e-2, costs).go(2000)
    run = Run(Budget(10, 0.03), 2e-2, {**costs, StepKind.SKIPPED: 2e-3}).go(2000)
    assert len(run.measured()) >= 0.8 * len(without.measured())
    assert max(run.measured()) > 1000
    assert run.budget.seconds >= run.spent
