"""Where in a model something is first seen, by comparing what its modules passed on in two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kedge.examination.differences import changed
from kedge.examination.model_runs import Passed

_WORDS = {"in": "input", "out": "output"}


@dataclass(frozen=True)
class Place:
    """A place in a model.

    Attributes:
        text: The place in words, to follow others: ", first in the output of fc1".
        line: The line that called the module there; "" if none is known.
    """

    text: str
    line: str


NOWHERE = Place("", "")
"""No place is known."""


def first_place(
    model: nn.Module,
    one: Sequence[Passed],
    other: Sequence[Passed],
    is_there: Callable[[Tensor], bool],
) -> Place:
    """Return the first place at which two runs differ in a certain way.

    Args:
        model: The model.
        one: What its modules passed on in one run.
        other: The same in the other run.
        is_there: Whether it is seen in a tensor, which is true where two values differ.

    Returns:
        The place; `NOWHERE` if there is none, or the runs called other modules.
    """
    if [each.key for each in one] != [each.key for each in other]:
        return NOWHERE
    before = ""
    for first, second in zip(one, other, strict=True):
        if not first.value.is_floating_point() or first.value.shape != second.value.shape:
            continue
        if is_there(changed(first.value, second.value)):
            return _described(model, first, before)
        before = first.path or before
    return NOWHERE


def _described(model: nn.Module, at: Passed, before: str) -> Place:
    name = at.path or type(model).__name__
    if at.kind == "out" and not any(True for _ in model.get_submodule(at.path).children()):
        return Place(f", first in the output of {name}", at.line)
    text = f", first in the code that leads to the {_WORDS[at.kind]} of {name}"
    if before and before != at.path:
        text += f", after {before}"
    return Place(text, at.line)
