"""A table of lines that are drawn one by one: its columns, each fitted to a width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from kedge.report.fitted_text import fit, joined

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table.

    Attributes:
        title: The title.
        width: The width in characters.
        cell: Returns the cell of a row.
        right: Whether cells are aligned to the right.
        key: Returns the key that a row is sorted by; None if the column cannot be sorted.
        falling: Whether the largest keys come first.
    """

    title: str
    width: int
    cell: Callable[[Row], str | Text]
    right: bool = False
    key: Callable[[Row], float | str] | None = None
    falling: bool = True

    def fitted(self, row: Row) -> Text:
        """Return the cell of one row in exactly the column's width."""
        return fit(self.cell(row), self.width, right=self.right)

    @property
    def head(self) -> Text:
        """The title in exactly the column's width."""
        return fit(self.title, self.width, right=self.right)


def widest(
    title: str,
    rows: Iterable[Row],
    cell: Callable[[Row], str | Text],
    *,
    least: int = 0,
    most: int | None = None,
    right: bool = False,
) -> Column[Row]:
    """Return a column that has room for its title and all its cells, within two limits.

    Args:
        title: The title.
        rows: The rows.
        cell: Returns the cell of a row.
        least: The least width.
        most: The largest width; none if None.
        right: Whether cells are aligned to the right.
    """
    width = max([least, len(title), *(len(cell(row)) for row in rows)])
    if most is not None:
        width = min(width, most)
    return Column(title, width, cell, right)


def header(columns: Sequence[Column[Row]]) -> Text:
    """Return the titles of the columns."""
    text = joined([column.head for column in columns])
    text.stylize("bold")
    return text


def drawn(row: Row, columns: Sequence[Column[Row]]) -> Text:
    """Return one line of the table."""
    return joined([column.fitted(row) for column in columns])
