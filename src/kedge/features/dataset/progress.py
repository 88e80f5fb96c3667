"""How far an extraction is: a bar with the rate and the time left, where somebody can see it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

#: The bar is drawn anew after so many seconds, by the thread that computes.
PACE = 0.2


class Advance(Protocol):
    """Takes note of samples that were computed."""

    def __call__(self, samples: int) -> None:
        """Draw the bar anew, if it is time."""


class Rate(ProgressColumn):
    """Samples a second."""

    def render(self, task: Task) -> Text:
        """Give it as text."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


@contextmanager
def progress(total: int | None, shown: bool | None, console: Console | None = None) -> Iterator[Advance]:
    """Show how far an extraction is.

    Args:
        total: How many samples there are to be computed, if that is known.
        shown: Whether to show it; None: if it is seen, on a terminal.
        console: Where; stderr if None.
    """
    console = console or Console(stderr=True)
    if shown is False or (shown is None and not console.is_terminal):
        yield lambda samples: None
        return
    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("features", total=total)
        drawn = 0.0

        def advance(samples: int) -> None:
            nonlocal drawn
            bar.advance(task, samples)
            if time.monotonic() - drawn >= PACE:
                bar.refresh()
                drawn = time.monotonic()

        yield advance
        bar.refresh()
