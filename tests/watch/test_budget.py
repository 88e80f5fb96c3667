"""How a budget is kept: what each step may cost."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from kedge.watch.budget import Level, Pace

COSTS = {Level.OFF: 2e-6, Level.LOOK: 2e-4, Level.NORM: 6e-4, Level.FULL: 2e-3}


def run(pace: Pace, steps: int, bare: float, costs: dict[Level, float], seed: int = 0) -> tuple[float, float]:
    """Let a program with steps of some length be watched; return its time without and with watching."""
    random_ = random.Random(seed)
    now = cost = plain = 0.0
    pace.begin(now, cost)
    for step in range(steps):
        own = bare * random_.uniform(0.9, 1.1)
        spent = costs[pace.level]
        plain, now, cost = plain + own, now + own + spent, cost + spent
        if now >= pace.wake:
            pace.ended(step, now, cost)
    return plain, now


@pytest.mark.parametrize("bare", [3e-4, 5e-3, 0.2])
@pytest.mark.parametrize("budget", [0.01, 0.03, 0.1])
def test_a_run_is_slowed_down_by_no_more_than_its_budget(bare: float, budget: float) -> None:
    """Whatever a step of the program takes, watching takes its share and not more."""
    plain, watched = run(Pace(10, budget), 20_000, bare, COSTS)
    assert watched / plain - 1 < budget * 1.05 + COSTS[Level.OFF] / bare


def test_the_budget_is_used() -> None:
    """Where looking is dear, most of what is allowed is spent, on every kind of looking."""
    pace = Pace(10, 0.03)
    plain, watched = run(pace, 20_000, 3e-4, COSTS)
    assert watched / plain - 1 > 0.02
    assert min(pace.counts[level] for level in (Level.LOOK, Level.NORM, Level.FULL)) > 20


def doze(
    pace: Pace, steps: int, bare: float, costs: dict[Level, float], glance: float
) -> tuple[float, float, list[int]]:
    """Let a program be watched whose steps an optimizer ends; return its times, and the gaps between what was looked at."""
    now = cost = plain = looked = 0.0
    pace.begin(now, cost)
    seen = [0]
    for step in range(steps):
        spent = costs[pace.level]
        looked = looked if pace.level is Level.OFF else spent
        late = 0.4 * looked if pace.settling == 2 else 0.0  # what a look leaves behind
        plain, now, cost = plain + bare, now + bare + spent + late, cost + spent
        if pace.level is not Level.OFF:
            seen.append(step)
        if now < pace.wake:
            continue
        if pace.settling:
            pace.settled(now, cost)
        elif pace.glancing and pace.level is Level.OFF:
            risen = pace.rise(step, now)
            if risen is Level.GLANCE:
                pace.glanced(step, now, now + glance)
                now += glance
                seen.append(step)
            elif risen is not Level.OFF:
                pace.ended(step, now, cost, (now, cost))
        else:
            pace.heard = pace.glancing = True
            pace.ended(step, now, cost, (now, cost))
    return plain, now, [b - a for a, b in itertools.pairwise(seen)]


def test_short_steps_are_glanced_at_often() -> None:
    """Where hooks would take longer than the step, gradients are glanced at every few steps, within the budget."""
    costs = {Level.OFF: 2e-6, Level.LOOK: 6e-4, Level.NORM: 1.5e-3, Level.FULL: 4e-3}
    pace = Pace(10, 0.03)
    plain, watched, gaps = doze(pace, 20_000, 4e-4, costs, 5e-5)
    assert 0.02 < watched / plain - 1 < 0.03 * 1.1 + costs[Level.OFF] / 4e-4
    assert statistics.median(gaps) <= 20
    assert pace.counts[Level.GLANCE] > 30 * pace.counts[Level.LOOK] > 0
    assert min(pace.counts[Level.NORM], pace.counts[Level.FULL]) > 5
    assert sum(pace.counts.values()) == pytest.approx(20_000, rel=0.02)


def test_the_first_step_is_paid_for_over_time() -> None:
    """Attaching the hooks takes as long as hundreds of small steps; less is looked at until that is made good."""
    costs, spent = {**COSTS, Level.OFF: 0.0}, []
    for start in (0.0, 0.05):
        pace = Pace(10, 0.03)
        pace.begin(0.0, 0.0)
        now, cost = 4e-4 + start, start
        pace.ended(0, now, cost)
        for step in range(1, 25_000):
            now, cost = now + 4e-4 + costs[pace.level], cost + costs[pace.level]
            if now >= pace.wake:
                pace.ended(step, now, cost)
        spent.append(cost)
    assert min(spent) > 0.03 * 10 * 0.9
    assert max(spent) < 0.03 * 10 * 1.05
    assert abs(spent[1] - spent[0]) < 0.015


def test_a_step_that_is_roused_counts_alone() -> None:
    """What was asleep before it is counted as that, and a full step that was asked for comes after it."""
    pace = Pace(10, 0.03)
    doze(pace, 2000, 4e-4, {level: 1e-3 * level for level in Level}, 5e-5)
    while pace.level is not Level.OFF:
        pace.ended(sum(pace.counts.values()), 2.0, 2.0)
    before, off = dict(pace.counts), pace.counts[Level.OFF]
    pace.wish()
    pace.rouse(2100, Level.LOOK, 3.0, 2.0)
    assert pace.level is Level.LOOK
    assert pace.counts[Level.OFF] > off
    assert sum(pace.counts.values()) == 2100
    assert pace.ended(2100, 3.001, 2.001) is Level.FULL
    assert pace.counts[Level.LOOK] == before[Level.LOOK] + 1


def test_longer_steps_are_not_glanced_at() -> None:
    """Where a light step can often be paid for it is made: it sees what a module returned, too."""
    costs = {Level.OFF: 2e-6, Level.LOOK: 2e-4, Level.NORM: 6e-4, Level.FULL: 2e-3}
    pace = Pace(10, 0.03)
    doze(pace, 3000, 5e-3, costs, 5e-5)
    assert pace.counts[Level.LOOK] > 500
    assert pace.counts[Level.GLANCE] == 0


def test_what_a_step_leaves_behind_is_charged_to_it() -> None:
    """The two steps that follow one that was looked at take longer for it, and nothing else times that."""
    costs = {Level.OFF: 0.0, Level.LOOK: 1e-3, Level.NORM: 1e-3, Level.FULL: 1e-3}
    pace = Pace(10, 0.03)
    doze(pace, 20_000, 4e-4, costs, 5e-5)
    assert pace.cost(Level.NORM) == pytest.approx(1.4e-3, rel=0.02)


def test_every_step_is_looked_at_where_that_costs_little() -> None:
    """With steps of a fifth of a second nothing is left out, and one in ten is measured in full."""
    pace = Pace(10, 0.03)
    run(pace, 500, 0.2, COSTS)
    assert pace.counts[Level.OFF] == 0
    assert pace.counts[Level.FULL] == 50


def test_two_runs_measure_common_steps_in_full() -> None:
    """Runs of different speed, as two ranks are, measure the same steps, or one half of the other's."""

    def full_steps(bare: float, seed: int) -> set[int]:
        pace, found = Pace(10, 0.03), set()
        random_ = random.Random(seed)
        now = cost = 0.0
        pace.begin(now, cost)
        for step in range(4000):
            if pace.level is Level.FULL:
                found.add(step)
            spent = 3 * COSTS[pace.level] * random_.uniform(0.7, 1.4)
            now, cost = now + bare * random_.uniform(0.8, 1.3) + spent, cost + spent
            pace.ended(step, now, cost)
        return found

    shares = []
    for seed in range(0, 12, 2):
        fewer, more = sorted((full_steps(9e-3, seed), full_steps(1.2e-2, seed + 1)), key=len)
        assert len(fewer) > 20
        shares.append(len(fewer & more) / len(fewer))
    assert statistics.mean(shares) > 0.6  # of the multiples of ten each measures one in five


def test_without_a_budget_the_schedule_alone_decides() -> None:
    """One step in so many is measured in full, and of all others the norms are taken."""
    pace = Pace(4, None)
    run(pace, 41, 1e-5, COSTS)
    assert {level: n for level, n in pace.counts.items() if n} == {Level.FULL: 11, Level.NORM: 30}


def test_a_long_pause_buys_no_burst() -> None:
    """What a program does between two steps, such as a validation, is not spent all at once afterwards."""
    pace = Pace(10, 0.03)
    run(pace, 2000, 3e-4, COSTS)
    pace.ended(2000, 1e6, 1.0)
    levels = [pace.ended(2001 + i, 1e6 + 3e-4 * i, 1.0 + 1e-3 * i) for i in range(20)]
    assert levels.count(Level.FULL) <= 1
    assert Level.OFF in levels


def test_a_step_costs_what_it_was_longer_than_others() -> None:
    """What the program loses around our code, and no clock of ours sees, is counted."""
    hidden = {**COSTS, Level.LOOK: 4e-4}
    pace = Pace(10, 0.03)
    now = cost = 0.0
    pace.begin(now, cost)
    for step in range(5000):
        now, cost = now + 3e-4 + hidden[pace.level], cost + COSTS[pace.level]
        if now >= pace.wake:
            pace.ended(step, now, cost)
    assert pace.cost(Level.LOOK) == pytest.approx(4e-4, rel=0.1)
    assert pace.total(cost) > cost


def test_where_every_step_is_looked_at_a_full_one_costs_what_it_was_longer_than_a_light_one() -> None:
    """What is lost around our code is counted also where no step is let alone."""
    pace = Pace(10, 0.03)
    now = cost = 0.0
    pace.begin(now, cost)
    for step in range(300):
        hidden = 2e-3 if pace.level is Level.FULL else 0.0
        now, cost = now + 0.5 + COSTS[pace.level] + hidden, cost + COSTS[pace.level]
        pace.ended(step, now, cost)
    assert pace.counts[Level.OFF] == 0
    assert pace.cost(Level.FULL) == pytest.approx(4e-3, rel=0.1)
    assert pace.cost(Level.NORM) == pytest.approx(6e-4, rel=0.1)


def compared(pace: Pace, steps: int, took: dict[Level, float], timed: dict[Level, float], heard: bool) -> list[Level]:
    """Let a program with steps of 0.1 s be watched, which takes more than is timed; return the level of each step."""
    now = cost = 0.0
    pace.begin(now, cost)
    levels = []
    for step in range(steps):
        levels.append(pace.level)
        now, cost = now + 0.1 + took[pace.level], cost + timed[pace.level]
        if pace.settling:
            pace.settled(now, cost)
        elif now >= pace.wake:
            pace.heard = heard
            pace.ended(step, now, cost)
    return levels


@pytest.mark.parametrize("heard", [True, False])
def test_where_every_step_could_be_paid_for_what_hides_is_found(heard: bool) -> None:
    """Some steps are let alone to compare with, so that a budget is kept also where no clock of ours sees what is lost."""
    took = {Level.OFF: 0.0, Level.LOOK: 7.5e-4, Level.NORM: 1.9e-3, Level.FULL: 3.8e-3}
    pace = Pace(10, 0.01)
    levels = compared(pace, 4000, took, {level: seconds / 2.5 for level, seconds in took.items()}, heard)
    lost = sum(took[level] for level in levels)
    assert lost / 400 == pytest.approx(0.01, rel=0.1)
    assert pace.seconds == pytest.approx(lost, rel=0.1)
    assert pace.counts[Level.LOOK] > 1000


@pytest.mark.parametrize("heard", [True, False])
def test_few_steps_are_let_alone_to_compare_with(heard: bool) -> None:
    """Where each step could be paid for, those let alone are few, however long other purses are in debt."""
    costs = {Level.OFF: 0.0, Level.LOOK: 1.2e-4, Level.NORM: 1.2e-3, Level.FULL: 4e-3}
    pace = Pace(10, 0.01)
    levels = compared(pace, 1000, costs, costs, heard)
    seen = [step for step, level in enumerate(levels) if level is not Level.OFF]
    assert max(b - a for a, b in itertools.pairwise(seen)) == (4 if heard else 2)
    assert pace.counts[Level.OFF] < 60


def test_what_devices_took_is_charged_to_full_steps() -> None:
    """Time on a device, known only later, delays the next full step and is in the total."""
    paces = [Pace(10, 0.03), Pace(10, 0.03)]
    for pace in paces:
        run(pace, 3000, 5e-3, COSTS)
    paces[1].charge(5.0)
    paces[1].charge(5.0)
    assert paces[1].seconds - paces[0].seconds == pytest.approx(5.0)
    before = [pace.counts[Level.FULL] + (pace.level is Level.FULL) for pace in paces]  # what is chosen already is made
    for pace in paces:
        pace.begin(0.0, 0.0)
        for step in range(3000, 3800):
            pace.ended(step, (step - 2999) * 5e-3, (step - 2999) * 1e-6)
    assert paces[0].counts[Level.FULL] > before[0]
    assert paces[1].counts[Level.FULL] == before[1]
