"""A row: a capability in words, and for each tool the function that tries it and checks what came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Try = Callable[[], "str | None"]
"""Does the thing and checks it; returns a remark, or raises one of the two below."""


class Lacking(Exception):
    """The tool does not do it, or does it otherwise than plain PyTorch says."""


class Partly(Exception):
    """It does some of it; the text says what is missing."""


@dataclass(frozen=True)
class Answer:
    """What came of a try."""

    word: str
    why: str
    seconds: float

    def __str__(self) -> str:
        """Give the word, and the reason where there is one."""
        return f"{self.word}: {self.why}" if self.why else self.word


@dataclass
class Row:
    """A capability, and the tries of it by the name of the tool."""

    number: int
    title: str
    tries: dict[str, Try] = field(default_factory=dict)


ROWS: dict[int, Row] = {}
KEDGE = "Kedge"


def row(number: int, title: str) -> Callable[[Try], Try]:
    """Declare a row by the function that tries it with Kedge."""

    def declare(attempt: Try) -> Try:
        ROWS[number] = Row(number, title, {KEDGE: attempt})
        return attempt

    return declare


def beside(tool: str, number: int) -> Callable[[Try], Try]:
    """Add the function that tries a row with another tool."""

    def declare(attempt: Try) -> Try:
        ROWS[number].tries[tool] = attempt
        return attempt

    return declare


def ask(attempt: Try) -> Answer:
    """Try it once; an error of any kind is a no, with its text."""
    begun = time.perf_counter()
    try:
        word, why = "yes", attempt() or ""
    except Partly as partly:
        word, why = "partly", str(partly)
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is its answer
        word, why = "no", reason(error)
    return Answer(word, why, time.perf_counter() - begun)


def reason(error: Exception) -> str:
    """Say in one line why something failed."""
    lines = str(error).strip().splitlines() or ["without a message"]
    if isinstance(error, Lacking):
        return lines[0]
    return f"{type(error).__name__}: {lines[-1]}"


def check(holds: bool, otherwise: str) -> None:
    """Go on if something holds.

    Raises:
        Lacking: It does not; ``otherwise`` says what is the case.
    """
    if not holds:
        raise Lacking(otherwise)


def same(found: Tensor, plain: Tensor, what: str) -> None:
    """Check that two tensors are equal to the last bit."""
    check(torch.equal(found, plain), f"{what} is not that of plain PyTorch")


def close(found: Tensor, plain: Tensor, what: str) -> None:
    """Check that two tensors are equal up to rounding."""
    check(torch.allclose(found, plain, rtol=1e-4, atol=1e-5), f"{what} is wrong")
