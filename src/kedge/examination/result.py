"""What a trial of an examination found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kedge.short_text import shortened

Verdict = Literal["wrong", "look", "ok", "untried"]
"""How a trial ended.

Something is ``wrong``; it was seen, and the result says what. Or there is something to ``look`` at,
which is wrong in some programs and meant in others. Or all is as expected, ``ok``. Or the trial
could not be made, ``untried``; `Result.came` says why.
"""

VERDICTS: tuple[Verdict, ...] = ("wrong", "look", "ok", "untried")
"""All verdicts, in the order in which results are shown."""


NAMES = (
    *("loss-at-start", "logits", "batch", "data-used", "samples", "positions", "padding", "modes"),
    *("repeated", "parameters", "optimizer", "functions", "precision", "memory", "time"),
    "one-batch",
)
"""The names of the trials, in the order in which they are made."""

OWN = 1.0
"""The factor of the program's own learning rate."""


@dataclass(frozen=True)
class Grid:
    """Which outputs (columns) changed with which input (rows).

    Attributes:
        of: What the rows and columns count: "samples" or "positions".
        rows: For each changed input, whether each output changed.
    """

    of: str
    rows: tuple[tuple[bool, ...], ...]

    def off_diagonal(self) -> list[int]:
        """Return, for each changed input, how many outputs of another number changed."""
        return [sum(row) - row[i] for i, row in enumerate(self.rows)]


@dataclass(frozen=True)
class Rates:
    """The loss of one batch over repeated steps, at several learning rates.

    Attributes:
        curves: The losses by step, for each factor on the program's own rate.
        rate: The program's own learning rate.
    """

    curves: Mapping[float, tuple[float, ...]]
    rate: float


@dataclass(frozen=True)
class Result:
    """The result of one trial.

    Attributes:
        trial: The name of the trial, which leaves it out after ``--skip``.
        verdict: How it ended.
        did: What was done.
        came: What came of it, with figures.
        means: What follows, and what to do; "" if all is as expected.
        where: The line of the program that it is about, ``net.py:31``; "" if none is known.
        model: The model that it is about; "" if it is about all.
        figure: What a picture of it shows; None without one.
        numbers: Its figures by name, for programs: bytes, seconds and counts.
    """

    trial: str
    verdict: Verdict
    did: str
    came: str
    means: str = ""
    where: str = ""
    model: str = ""
    figure: Grid | Rates | None = field(default=None, compare=False)
    numbers: Mapping[str, float] = field(default_factory=dict, compare=False)


def in_short(error: Exception) -> str:
    """Return an error of the program's code as one line of at most 160 characters."""
    reason = str(error).strip().partition("\n")[0]
    return shortened(f"{type(error).__name__}: {reason}", 160)
