"""Relations of optimizers: their kinds, what they hold, and their learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest

from kedge.compare.against.run_pair import Departure, RunPair
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.optimizers import optimizers as recorded_optimizers
from kedge.short_text import counted
from kedge.store.events import LearningRatesEvent, RecordedOptimizer
from kedge.store.recording import Recording

#: The least factor between two learning rates that count as different.
OTHER_RATE = 1.02

#: Steps after the first one of any optimizer within which another one steps from the beginning.
AT_THE_BEGINNING = 10

#: A learning rate that stays for so many times fewer steps has another pace; the batch size changes it, too.
OTHER_PACE = 4


def _pairs(pair: RunPair) -> list[tuple[RecordedOptimizer, RecordedOptimizer]]:
    """Return the optimizers of both runs that stepped, one beside the other."""
    return list(zip(_stepping(pair.good), _stepping(pair.run), strict=False))


def _stepping(recording: Recording) -> list[RecordedOptimizer]:
    return [each for each in recorded_optimizers(recording) or () if each.steps]


def kinds(pair: RunPair) -> Iterator[Departure]:
    """The classes of the optimizers that step, and the number of those that step from the beginning.

    How many come later, as for one training after another, depends on the length of each.
    """
    if pair.good.end is None or pair.run.end is None:
        return  # what steps is written at the end
    good, here = _stepping(pair.good), _stepping(pair.run)
    pairs = list(zip_longest(_from_the_beginning(good), _from_the_beginning(here)))
    pairs += zip(good[len(pairs) :], here[len(pairs) :], strict=False)
    for number, (before, after) in enumerate(pairs):
        was = before.type if before else "none"
        is_now = after.type if after else "none"
        if was != is_now:
            yield Departure(
                kind="optimizer",
                site=f"optimizer {number}",
                step=int(pair.run.steps[0]),
                message=f"optimizer {number} that steps was {was} in the good run, and is {is_now} "
                "here.",
                good=was,
                here=is_now,
                remedy="Look where the optimizer is made, and where its step() is called.",
            )


def _from_the_beginning(optimizers: Sequence[RecordedOptimizer]) -> list[RecordedOptimizer]:
    """Return those that first step near the first step of any."""
    begins = [each.first_step or 0 for each in optimizers]
    return [
        each
        for each, first in zip(optimizers, begins, strict=True)
        if first <= min(begins) + AT_THE_BEGINNING
    ]


def held(pair: RunPair) -> Iterator[Departure]:
    """The number of parameters that an optimizer holds."""
    for good, here in _pairs(pair):
        if not good.roots or not here.roots:
            continue  # of one that stepped in no measured step only the steps are known
        if good.parameters != here.parameters:
            yield Departure(
                kind="held",
                site=f"optimizer {here.index or 0}",
                step=here.first_step or 0,
                message=f"{here.type} held {counted(good.parameters, 'parameter')} in the good run, "
                f"and holds {here.parameters:,} here.",
                good=counted(good.parameters, "parameter"),
                here=counted(here.parameters, "parameter"),
                remedy="Look what the optimizer is given.",
            )


def rates(pair: RunPair) -> Iterator[Departure]:
    """The learning rates of the groups of an optimizer in its first step."""
    for good, here in _pairs(pair):
        for group, (before, after) in enumerate(zip(good.rates, here.rates, strict=False)):
            if not _is_other(before, after):
                continue
            yield _other_rate(here, group, before, after, here.first_step or 0, "begins with")
            break
        are_known = bool(good.rates) and bool(here.rates)
        if are_known and len(good.rates) != len(here.rates):
            yield Departure(
                kind="groups",
                site=f"optimizer {here.index or 0}",
                step=here.first_step or 0,
                message=f"{here.type} had {counted(len(good.rates), 'group')} with learning rates "
                f"of their own in the good run, and has {len(here.rates)} here.",
                good=counted(len(good.rates), "group"),
                here=counted(len(here.rates), "group"),
                remedy="Look what groups the optimizer is given.",
            )


def _is_other(before: float, after: float) -> bool:
    low, high = sorted((before, after))
    return high > low * OTHER_RATE


def _other_rate(
    here: RecordedOptimizer, group: int, before: float, after: float, step: int, verb: str
) -> Departure:
    times = ""
    if before > 0 and after > 0:
        times = f", {after / before:.3g} times as large"
    where = f"group {group} of {here.type}"
    if len(here.rates) == 1:
        where = here.type
    return Departure(
        kind="rate",
        site=f"optimizer {here.index or 0}",
        step=step,
        message=f"{where} {verb} a learning rate of {after:g} here{times}; in the good run it was "
        f"{before:g}.",
        good=f"{before:g}",
        here=f"{after:g}",
        remedy="If you did not change the learning rate, look at its configuration and its "
        "scheduler.",
    )


def courses(pair: RunPair) -> Iterator[Departure]:
    """The course of the learning rates: whether they ever change, and the highest one."""
    for good, here in _pairs(pair):
        before = _course(pair.good, good)
        after = _course(pair.run, here)
        if not before or not after or _is_other(before[0][1], after[0][1]):
            continue  # the relation on the first rates says so
        reached = [(step, rate) for step, rate in before if step <= pair.last_step]
        shown = [(step, rate) for step, rate in after if step <= pair.last_good_step]
        if not reached or not shown:
            continue
        changes_before = len({rate for _, rate in reached}) > 1
        changes_after = len({rate for _, rate in shown}) > 1
        if changes_before != changes_after:
            yield _other_course(here, reached, shown)
            continue
        if changes_before:
            yield from _other_pace(pair, here, reached, shown)
        highest = max(rate for _, rate in before)
        since = next(step for step, rate in before if rate == highest)
        now = max(rate for _, rate in shown)
        if since <= pair.last_step and _is_other(highest, now):
            step = next(step for step, rate in shown if rate == now)
            yield _other_rate(here, 0, highest, now, step, "reaches at most")


def _other_pace(
    pair: RunPair,
    here: RecordedOptimizer,
    before: list[tuple[int, float]],
    after: list[tuple[int, float]],
) -> Iterator[Departure]:
    """Yield a learning rate that stayed for many steps in the good run, and for few here."""
    stayed = min(_least_stay(pair.good, step, end) for (step, _), (end, _) in pairwise(before))
    now, since = min(
        (_longest_stay(pair.run, step, end), end) for (step, _), (end, _) in pairwise(after)
    )
    if now * OTHER_PACE > stayed:
        return
    yield Departure(
        kind="course",
        site=f"optimizer {here.index or 0}",
        step=since,
        message=f"the learning rate of {here.type} stayed the same for at least "
        f"{counted(stayed, 'step')} in the good run, and for at most {now} here.",
        good=f"stays for at least {counted(stayed, 'step')}",
        here=f"stays for at most {counted(now, 'step')}",
        remedy="Look whether the scheduler steps once in an epoch or once in a batch.",
    )


def _least_stay(recording: Recording, step: int, end: int) -> int:
    """Return for how many steps a rate is known to have stayed, between two changes that were seen."""
    return int(recording.steps[recording.steps < end].max(initial=step)) - step


def _longest_stay(recording: Recording, step: int, end: int) -> int:
    """Return for how many steps it can have stayed: it may have come after the measured step before."""
    before = recording.steps[recording.steps < step]
    return end - int(before.max(initial=step - 1)) - 1


def _course(recording: Recording, optimizer: RecordedOptimizer) -> list[tuple[int, float]]:
    """Return the highest learning rate of an optimizer from each step in which it changed."""
    return [
        (event.step, max(rate for rate in event.rates if rate is not None))
        for event in events_of(recording, LearningRatesEvent)
        if event.optimizer == (optimizer.index or 0)
        and any(rate is not None for rate in event.rates)
    ]


def _other_course(
    here: RecordedOptimizer, before: list[tuple[int, float]], after: list[tuple[int, float]]
) -> Departure:
    words = {True: "changes", False: "stays the same"}
    good = words[len(before) > 1]
    now = words[len(after) > 1]
    changed = (after if len(after) > 1 else before)[1]
    return Departure(
        kind="course",
        site=f"optimizer {here.index or 0}",
        step=changed[0],
        message=f"the learning rate of {here.type} {good} in the good run, and {now} here; the first "
        f"change is to {changed[1]:g} in step {changed[0]}.",
        good=good,
        here=now,
        remedy="Look whether a scheduler steps.",
    )
