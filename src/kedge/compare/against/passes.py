"""Relations of a step: its passes, their modes, and what happens to gradients before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kedge.compare.against.run_pair import LEAST_STEPS, Departure, RunPair, last_modes
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.short_text import listed
from kedge.store.events import EvaluationEvent, GradsKeptEvent
from kedge.store.recording import Recording, SiteInfo

#: A number of calls that so many of the steps have is that of a step.
USUAL = 0.9


def modes(pair: RunPair) -> Iterator[Departure]:
    """The modules that are trained in training mode, and those in evaluation mode."""
    for root, other in pair.roots.items():
        good = last_modes(pair.good, root)
        here = last_modes(pair.run, other)
        if not good or not here:
            continue
        trained = {pair.names.get(path, path) for event in good for path in event.train}
        fixed = {pair.names.get(path, path) for event in good for path in event.eval}
        for event in here:
            evaluated = [path for path in event.eval if path in trained - fixed]
            training = [path for path in event.train if path in fixed - trained]
            words = (("training", "evaluation", evaluated), ("evaluation", "training", training))
            for before, after, paths in words:
                if paths:
                    step = event.step
                    if event is here[0]:  # noted only once an optimizer has stepped
                        step = int(pair.run.steps[0])
                    yield _other_mode(pair.run, other, step, before, after, paths)
            if evaluated or training:
                break


def _other_mode(
    run: Recording, root: int, step: int, before: str, after: str, paths: list[str]
) -> Departure:
    model = names_of(run, [root])
    names = listed([path or model for path in paths], 3)
    return Departure(
        kind="modes",
        site=f"{paths[0]}:out",
        step=step,
        message=f"{names}: always trained in {before} mode in the good run, and in {after} mode "
        "here.",
        good=f"{before} mode",
        here=f"{after} mode",
        paths=tuple(paths),
        remedy="Look where the program calls train() and eval().",
    )


def evaluations(pair: RunPair) -> Iterator[Departure]:
    """The passes of evaluation, and whether modules compute in them as in training."""
    for root, other in pair.roots.items():
        good = _evaluation(pair.good, root)
        here = _evaluation(pair.run, other)
        if good is None or good.passes < LEAST_STEPS or good.step > pair.last_step:
            continue
        if here is None and pair.run.end is not None and not good.as_training:
            yield _without_evaluation(pair, good, other)
        if here is None:
            continue
        if not good.as_training and not good.dropout and (here.as_training or here.dropout):
            names = listed([*here.train, *(each.function for each in here.dropout)], 3)
            yield Departure(
                kind="evaluation",
                site=f"{here.train[0] if here.train else ''}:out",
                step=here.step,
                message=f"{names}: computed as in evaluation in all {good.passes} evaluation passes "
                f"of the good run, and as in training in {here.as_training or here.passes} of "
                f"{here.passes} here.",
                good="as in evaluation",
                here="as in training",
                paths=here.train,
                remedy="Call model.eval() before each evaluation.",
            )


def _without_evaluation(pair: RunPair, good: EvaluationEvent, root: int) -> Departure:
    model = names_of(pair.run, [root])
    return Departure(
        kind="evaluation",
        site=f"{root_path(pair.run, root)}:out",
        step=good.step,
        message=f"{model}: {good.passes} passes without gradients of the good run were in evaluation "
        "mode, and none is here.",
        good=f"{good.passes} passes in evaluation mode",
        here="none",
        remedy="Look whether the program still evaluates, and calls model.eval() before.",
    )


def _evaluation(recording: Recording, root: int) -> EvaluationEvent | None:
    for event in events_of(recording, EvaluationEvent):
        if event.root == root:
            return event
    return None


def kept_gradients(pair: RunPair) -> Iterator[Departure]:
    """The gradients that an optimizer uses, and whether they still hold those of its last step."""
    good = _kept(pair.good)
    here = _kept(pair.run)
    for number in sorted(here.keys() - good.keys()):
        event = here[number]
        yield Departure(
            kind="zero_grad",
            site=f"optimizer {number}",
            step=event.step,
            message="each step of the good run began with new gradients; here those of the step "
            f"before are still added, in {event.kept} of {event.checked} steps that were looked at.",
            good="new gradients in each step",
            here="the gradients of the step before are kept",
            remedy="Call zero_grad() before each backward pass, or after each step.",
        )
    for number in sorted(good.keys() - here.keys()):
        yield Departure(
            kind="zero_grad",
            site=f"optimizer {number}",
            step=int(pair.run.steps[0]),
            message="the good run kept the gradients of the step before; here they are new in each "
            "step.",
            good="the gradients of the step before are kept",
            here="new gradients in each step",
            remedy="Look where zero_grad() is called.",
        )


def _kept(recording: Recording) -> dict[int, GradsKeptEvent]:
    """Return the optimizers that used gradients of their last step."""
    events = events_of(recording, GradsKeptEvent)
    return {event.optimizer: event for event in events if event.kept}


def calls(pair: RunPair) -> Iterator[Departure]:
    """The number of calls of a module, and of backward passes, in a step."""
    seen = set()
    for same in sorted(pair.of_kind("loss", "out"), key=lambda same: same.kind != "loss"):
        good = _usual_calls(pair.good, same.a)
        here = _usual_calls(pair.run, same.b)
        if good is None or here is None or good == here or (good, here) in seen:
            continue
        seen.add((good, here))
        rows = pair.run.rows(same.b)
        what = "is called"
        if same.kind == "loss":
            what = "starts a backward pass"
        name = same.b.site.removesuffix(":out") or "the model"
        yield Departure(
            kind="calls",
            site=same.b.site,
            step=int(rows.step[np.argmax(rows.calls != good)]),
            message=f"{name} {what} {_times(good)} in a step of the good run, {_times(here)} here.",
            good=f"{_times(good)} in a step",
            here=f"{_times(here)} in a step",
            paths=(same.b.site,),
            remedy="Look at the accumulation of gradients, and at what calls the model in a step.",
        )


def _usual_calls(recording: Recording, site: SiteInfo) -> int | None:
    """Return the number of calls in a step; None if it varies, or was seen too seldom."""
    amounts = recording.rows(site).calls
    if len(amounts) < LEAST_STEPS:
        return None
    usual = int(np.median(amounts))
    if np.mean(amounts == usual) < USUAL:
        return None
    return usual


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
