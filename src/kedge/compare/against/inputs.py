"""Relations of what models are given: whether it changes from step to step, and whether its batches fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from kedge.compare.against.run_pair import Departure, RunPair
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.short_text import listed
from kedge.store.events import BatchSizesEvent, RepeatedInputsEvent
from kedge.store.recording import Recording

#: So many measured steps with the inputs of the first one do not have them by chance.
REPEATED = 10

Note = TypeVar("Note", RepeatedInputsEvent, BatchSizesEvent)


def repeats(pair: RunPair) -> Iterator[Departure]:
    """The models whose inputs change from step to step, and those whose inputs are the same in every step."""
    for here in _in_the_run_alone(pair, RepeatedInputsEvent):
        if here.compared < REPEATED:
            continue
        model = names_of(pair.run, [here.root])
        yield Departure(
            kind="repeats",
            site=f"{root_path(pair.run, here.root)}:in",
            step=here.step,
            message=f"{model} was given other inputs from step to step in the good run, and is given "
            f"the same ones in all {here.compared + 1} measured steps that were compared here.",
            good="other inputs from step to step",
            here="the same inputs in every step",
            remedy="Look whether the batch is drawn, or the data loader begun, once or in each step.",
        )


def batches(pair: RunPair) -> Iterator[Departure]:
    """The inputs that have as many samples as the others of a model, and those with a single one."""
    for here in _in_the_run_alone(pair, BatchSizesEvent):
        model = names_of(pair.run, [here.root])
        yield Departure(
            kind="batch",
            site=f"{root_path(pair.run, here.root)}:in",
            step=here.step,
            message=f"all inputs of {model} had as many samples as each other in the good run; here "
            f"it gets one sample of input {here.input}, and {here.batch:,} of "
            f"{listed(list(here.others), 3)}.",
            good="as many samples in all inputs",
            here=f"one of {here.input} for {here.batch:,} of the others",
            remedy="Look what the tokenizer or the collate function returns for a batch.",
        )


def _in_the_run_alone(pair: RunPair, kind: type[Note]) -> Iterator[Note]:
    """Yield the notes on models of the run, for which the good run has none."""
    known = _by_root(pair.good, kind)
    found = _by_root(pair.run, kind)
    for root, other in pair.roots.items():
        if other in found and root not in known:
            yield found[other]


def _by_root(recording: Recording, kind: type[Note]) -> dict[int, Note]:
    return {event.root: event for event in events_of(recording, kind)}
