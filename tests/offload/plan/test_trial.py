"""The trial of a plan for a limit of time: what is measured, and what comes of it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import LimitOutOfReach
from kedge.offload.engine.policy import Choice
from kedge.offload.outcomes import OffloadAccount, Outcome
from kedge.offload.plan import Learner, Limit, learn, timing
from kedge.offload.plan.trial import Trial, has_room

MB = 10**6
TENSORS = 4
LEARNING = 2
WAITS = 4
"""Steps that are timed for a tensor that does not come again."""
TRIED = 13
"""Steps of a trial, with the one that does not count."""
IN_TURNS = [0, *[TENSORS, 0, 0, TENSORS] * 3]
"""How many tensors are kept in each of them."""
CPU = torch.device("cpu")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        """Return the time."""
        return self.now

    def between(self, first: float, last: float) -> float:
        """Return the seconds between two moments."""
        return last - first


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time steps by a clock that the test sets, on a machine with room."""
    clock = Clock()
    monkeypatch.setattr(timing, "clock_of", lambda _: clock)
    monkeypatch.setattr(learn, "has_room", lambda *_: True)
    return clock


def train(
    learner: Learner, clock: Clock, steps: int, cost: Callable[[int], float]
) -> list[list[Choice]]:
    """Train for some steps of a second and of what it costs to rebuild some tensors; returns the choices."""
    account = OffloadAccount()
    chosen = []
    for _ in range(steps):
        choices = []
        for number in range(TENSORS):
            choice = learner.choose("layer", number, MB)
            group, name = "rebuilt", "rule"
            if choice is Choice.KEEP:
                group, name = "kept", "planned"
            learner.took(Outcome(group, name, MB))
            choices.append(choice)
        clock.now += 1 + cost(TENSORS - choices.count(Choice.KEEP))
        learner.turn(account)
        chosen.append(choices)
    return chosen


def test_everything_is_kept_in_one_of_two_steps_of_a_trial(clock: Clock) -> None:
    """The plan is in force in the others, and afterwards; what was measured is shown."""
    learner = Learner(Limit(slowdown=1.05))
    train(learner, clock, LEARNING, lambda rebuilt: 0.01 * rebuilt)
    chosen = train(learner, clock, TRIED + 3, lambda rebuilt: 0.01 * rebuilt)

    kept = [choices.count(Choice.KEEP) for choices in chosen]
    assert kept == [*IN_TURNS, 0, 0, 0]
    assert learner.plan is not None
    assert learner.plan.measured == pytest.approx(1.04)
    assert "measured: a step of 1.04 x that with everything kept" in str(learner.plan)


def test_a_plan_that_takes_too_long_is_made_again_for_fewer_bytes(clock: Clock) -> None:
    """As many as the promise is of what was measured: half of them here, which then hold."""
    learner = Learner(Limit(slowdown=1.1))
    chosen = train(learner, clock, LEARNING + 2 * TRIED + 1, lambda rebuilt: 0.05 * rebuilt)

    assert chosen[LEARNING + TRIED].count(Choice.REBUILD) == 2
    assert chosen[-1].count(Choice.REBUILD) == 2
    assert learner.plan is not None
    assert learner.plan.measured == pytest.approx(1.1)


@pytest.mark.parametrize(("cost", "said", "freed"), [(0.2, "1.20", "2.0"), (9.0, "10.00", "4.0")])
def test_a_promise_that_cannot_be_kept_is_refused(
    clock: Clock, cost: float, said: str, freed: str
) -> None:
    """Everything is kept then, and a warning says what was measured: in two plans, if there is a second."""
    learner = Learner(Limit(slowdown=1.1))
    with pytest.warns(LimitOutOfReach, match=rf"a step takes {said} times as long with {freed} MB"):
        chosen = train(
            learner, clock, LEARNING + 2 * TRIED + 3, lambda rebuilt: cost * (rebuilt > 0)
        )

    assert chosen[-1] == [Choice.KEEP] * TENSORS


def test_a_step_that_other_work_delays_breaks_no_promise(clock: Clock) -> None:
    """One pair of neighbours may differ by chance."""
    learner = Learner(Limit(slowdown=1.05))
    train(learner, clock, LEARNING, lambda _: 0.0)
    lengths = iter([0.0] * 6 + [9.0] + [0.0] * 6)
    train(learner, clock, TRIED, lambda _: next(lengths))

    assert learner.plan is not None
    assert learner.plan.measured == pytest.approx(1.0)


@pytest.mark.parametrize("limit", [Limit(slowdown=1.05), Limit(memory=MB)])
def test_without_room_or_promise_nothing_is_tried(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, limit: Limit
) -> None:
    """A limit of memory holds in every step; and what may not fit is not kept to measure a time."""
    monkeypatch.setattr(learn, "has_room", lambda *_: False)
    learner = Learner(limit)
    train(learner, clock, LEARNING, lambda _: 0.0)
    chosen = train(learner, clock, TRIED, lambda _: 0.0)

    assert all(one == other for one, other in pairwise(chosen))
    assert learner.plan is not None
    assert learner.plan.measured is None


def test_other_sizes_in_a_trial_are_learned_first(clock: Clock) -> None:
    """A larger tensor needs another plan; if it does not come again, the trial of the former begins anew."""
    learner = Learner(Limit(slowdown=1.05))
    train(learner, clock, LEARNING + 4, lambda _: 0.0)
    learner.choose("layer", 0, 2 * MB)
    learner.took(Outcome("rebuilt", "rule", 2 * MB))
    learner.turn(OffloadAccount())

    assert learner.plan is None
    chosen = train(learner, clock, WAITS + TRIED, lambda _: 0.0)
    assert [each.count(Choice.KEEP) for each in chosen] == [0] * WAITS + IN_TURNS


def test_a_process_that_may_not_take_what_is_free_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its limit is what counts, and how much of it is left is not known."""
    assert has_room(1, CPU)
    assert not has_room(1 << 60, CPU)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    assert not has_room(1, CPU)


def test_a_trial_compares_neighbours() -> None:
    """So other load, which lasts for some steps, meets both alike."""
    clock = Clock()
    tried = Trial(clock)
    lengths = [1.0, 1.2, 6.0, 5.0, 2.0, 2.4, 1.2, 1.0, 3.0, 3.6, 1.2, 1.0]
    tried.turn()
    for length in lengths:
        clock.now += length
        tried.turn()

    assert tried.is_over
    assert tried.measured().median == pytest.approx(1.2)
    assert tried.measured().exceeded == pytest.approx(1.2)


@pytest.mark.parametrize("first", [1.0, 4.0])
def test_steps_that_alternate_by_themselves_are_not_taken_for_the_plan(first: float) -> None:
    """As where two networks are trained in turns, or every second step evaluates."""
    clock = Clock()
    tried = Trial(clock)
    tried.turn()
    while not tried.is_over:
        length = 1.1
        if tried.keeps:
            length = 1.0
        clock.now += length * first
        first = 4.0 / first
        tried.turn()

    assert tried.measured().median == pytest.approx(1.1)
    assert tried.measured().exceeded < 1.1


def test_gradients_keep_their_bits_through_a_trial() -> None:
    """In steps of either kind."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    inputs = torch.randn(512, 64)
    model(inputs).square().mean().backward()
    plain = [param.grad.clone() for param in model.parameters()]

    with kedge.offload(model, max_slowdown=3.0) as account:
        for _ in range(LEARNING + TRIED + 2):
            model.zero_grad()
            model(inputs).square().mean().backward()
            pairs = zip(plain, model.parameters(), strict=True)
            assert all(torch.equal(grad, param.grad) for grad, param in pairs)
    assert account.plan
    assert account.module("0.1").kept["planned"].number
