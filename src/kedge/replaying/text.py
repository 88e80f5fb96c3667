"""A step that ran again as text: a table of what came, and what it says."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from kedge.replaying.step import Replayed, StepOutcome
from kedge.replaying.what_if import WhatIf
from kedge.repro.kept.kept_pass import KeptPass
from kedge.short_text import listed
from kedge.store.events import ProducerEvent

_WIDTH = 100
_NAME, _COLUMN = 34, 14


def as_text(kept: KeptPass, what_if: WhatIf, result: Replayed) -> str:
    """Return the text: the line of the step, the table, and what follows from it."""
    line = kept.inputs.line
    head = f"step {kept.step}, at {line}"
    if line.text:
        head += f": {line.text}"
    said = [part for each in _said(result, what_if) for part in _wrapped(each)]
    return "\n".join([head, "", *_table(what_if, result), "", *said])


def words_of_origin(origin: ProducerEvent | None) -> str | None:
    """Return what was seen of the operation that made a value not finite; None without one."""
    if origin is None:
        return None
    place = origin.module or "the program"
    where = ""
    if origin.file is not None:
        where = f" ({origin.file}:{origin.line}: {origin.text})"
    way = ""
    if origin.where == "backward":
        way = "the backward of "
    return f"{way}{origin.operation} in {place}{where}: {origin.detail}"


def _table(what_if: WhatIf, result: Replayed) -> Iterator[str]:
    names = ["recorded", "again"]
    outcomes = [StepOutcome(result.recorded), result.again]
    if result.other is not None:
        names.append("what if")
        outcomes.append(result.other)
    yield " " * _NAME + "".join(f"{name:>{_COLUMN}}" for name in names)
    rows = (
        ("loss", [each.loss for each in outcomes]),
        ("norm of the gradients", [each.gradient for each in outcomes]),
        ("loss of this batch after the step", [each.loss_after for each in outcomes]),
    )
    for name, values in rows:
        if any(value is not None for value in values):
            yield f"{name:<{_NAME}}" + "".join(f"{_number(value):>{_COLUMN}}" for value in values)
    if result.other is not None:
        yield f"what if: {what_if}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.6g}"


def _said(result: Replayed, what_if: WhatIf) -> Iterator[str]:
    if result.is_same and math.isnan(result.recorded):
        yield "The step ran again, and its loss is NaN again: other values may give a NaN, too."
    elif result.is_same:
        yield "The step ran again with the same loss, to the bit."
    else:
        yield "The step did not run again as it was: its loss is another one than recorded."
    if result.lacking:
        yield (
            f"Not as in the recorded step: {listed(list(result.lacking), 4)}, which "
            "could not be kept or is not in the program."
        )
    for outcome, name in ((result.again, "as it was"), (result.other, str(what_if))):
        if outcome is not None and outcome.error is not None:
            yield f"Run {name}, it failed: {outcome.error}"
    if result.needs_closure:
        yield (
            "No optimizer has stepped: one of them computes the loss itself, several times, as LBFGS "
            "does."
        )
    if result.leads_on:
        yield "After it the parameters are those of the next kept step, to the bit."
    elif result.leads_on is not None:
        yield (
            "After it the parameters are not those of the next kept step: what the program does to "
            "its gradients or parameters between backward and the next step is not run again."
        )
    origin = words_of_origin(result.origin)
    if origin is not None:
        yield f"The first value that is not finite: {origin}."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
