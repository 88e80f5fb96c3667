"""The results: lines that are printed as they come, and tables that come last."""

from __future__ import annotations

import contextlib
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

FRAMES = 3


class Table:
    """A table whose cells come one by one.

    Args:
        title: What it is about.
        corner: What its rows are.
    """

    def __init__(self, title: str, corner: str) -> None:
        self.title = title
        self.corner = corner
        self._heads: dict[str, str] = {}
        self._rows: dict[str, dict[str, str]] = {}

    def head(self, column: str, text: str) -> None:
        """Write more at the head of a column than its name, and print it."""
        self._heads[column] = text
        print(f"  {text}", flush=True)

    def put(self, row: str, column: str, text: str) -> None:
        """Fill a cell, and print it."""
        self._heads.setdefault(column, column)
        self._rows.setdefault(row, {})[column] = text
        print(f"  {column} | {row}: {text}", flush=True)

    def markdown(self) -> str:
        """Return the table; empty if it has no cell."""
        if not self._rows:
            return ""
        lines = [[self.corner, *self._heads.values()], ["---"] * (1 + len(self._heads))]
        for name, cells in self._rows.items():
            lines.append([name, *(cells.get(column, "") for column in self._heads)])
        rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{rows}\n"


class Sheet:
    """All results of a run.

    Args:
        out: A file that gets the tables after each part; None for none.
    """

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._tables: list[Table] = []
        self._about: list[str] = []
        self._errors: list[str] = []

    def about(self, text: str) -> None:
        """Print a line that also stands above the tables."""
        self._about.append(text)
        print(text, flush=True)

    def line(self, text: str) -> None:
        """Print a line."""
        print(f"  {text}", flush=True)

    def table(self, title: str, corner: str = "") -> Table:
        """Begin a table."""
        table = Table(title, corner)
        self._tables.append(table)
        return table

    @contextlib.contextmanager
    def trying(self, what: str, *more: type[BaseException]) -> Iterator[None]:
        """Print an error of a block in one line, and go on after it.

        Args:
            what: What the block does.
            more: What is printed likewise besides ordinary errors.
        """
        try:
            yield
        except (Exception, *more) as error:  # noqa: BLE001 - whatever it is, the others go on
            frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
            where = ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
            text = " ".join(str(error).split())[:400]
            told = f"{what} raised {type(error).__name__}: {text} @ {where}"
            self._errors.append(told)
            self.line(told)

    def markdown(self) -> str:
        """Return everything that is to be kept."""
        parts = ["\n".join(self._about) + "\n"]
        parts += [text for table in self._tables if (text := table.markdown())]
        if self._errors:
            parts.append("\n".join(f"* {error}" for error in self._errors) + "\n")
        return "\n".join(parts)

    def write(self) -> None:
        """Write the file, so that a run that is cut off leaves what it had."""
        if self._out is not None:
            self._out.write_text(self.markdown(), encoding="utf-8")


def spread(figures: Sequence[float], digits: int = 2) -> str:
    """Return a median with the lowest and the highest of some figures."""
    if not figures:
        return "not measured"
    low, middle, high = min(figures), statistics.median(figures), max(figures)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def rounds(seconds: float, least: int, most: int) -> Iterator[int]:
    """Count rounds until the seconds are up: at least some, at most some."""
    begun = time.perf_counter()
    for number in range(most):
        if number >= least and time.perf_counter() - begun > seconds:
            return
        yield number
