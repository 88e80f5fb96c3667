"""The lines of the live table: their order, the chosen one, and the texts that are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from kedge.report.fitted_text import fit
from kedge.report.module_lines import FoldedLine, ModuleLine
from kedge.report.module_table import ModuleColumn, in_order, live_columns

FALLING, RISING = "▼", "▲"
#: Marks of a folded line.
CLOSED, OPEN = "▸", "▾"
#: The columns left of the first one: a mark and a space.
MARGIN = 2


class ModuleList:
    """The lines of the live table, sorted, with one of them chosen."""

    def __init__(self) -> None:
        self.shown: list[ModuleLine] = []
        self.chosen: str | None = None
        self.sorted_by: str | None = None
        self.turned = False
        self.unfolded: set[str] = set()
        self._lines: Sequence[ModuleLine] = ()
        self._marks: Mapping[str, Text] = {}
        self._columns: tuple[ModuleColumn, ...] = ()

    def fill(self, lines: Sequence[ModuleLine], marks: Mapping[str, Text]) -> None:
        """Replace the lines and the marks before some of them."""
        self._lines, self._marks = lines, marks

    def lay_out(self, width: int) -> bool:
        """Fit the columns to a width and sort the lines; return whether another line had to be chosen."""
        self._columns = live_columns(max(width - MARGIN, 1), self._lines)
        column = next((c for c in self._columns if c.title == self.sorted_by and c.key), None)
        self.shown = []
        for line in in_order(self._lines, column, self.turned):
            self.shown.append(line)
            if isinstance(line, FoldedLine) and line.label in self.unfolded:
                self.shown += in_order(line.members, column, self.turned)
        if self.line is not None:
            return False
        self.chosen = self.shown[0].label if self.shown else None
        return True

    def fold_or_unfold(self) -> bool:
        """Show the modules of a chosen line that is folded, or hide them again; return whether it is such a line."""
        line = self.line
        if isinstance(line, FoldedLine):
            self.unfolded ^= {line.label}
        return isinstance(line, FoldedLine)

    @property
    def line(self) -> ModuleLine | None:
        """The chosen line."""
        return next((line for line in self.shown if line.label == self.chosen), None)

    @property
    def place(self) -> int:
        """The place of the chosen line; 0 if there is none."""
        return next((i for i, line in enumerate(self.shown) if line.label == self.chosen), 0)

    def choose(self, place: int) -> int:
        """Choose the line at a place, or the nearest one; return its place."""
        place = min(max(place, 0), len(self.shown) - 1)
        self.chosen = self.shown[place].label
        return place

    def sort_by(self, title: str | None) -> None:
        """Sort by the column with this title, in data-flow order if None; the first line is chosen at the next layout."""
        self.sorted_by, self.turned, self.chosen = title, False, None

    def next_title(self) -> str | None:
        """Return the title of the next column to sort by; None, data-flow order, after the last one."""
        titles: list[str | None] = [None, *(c.title for c in self._columns if c.key)]
        if self.sorted_by not in titles:
            return titles[1]
        return titles[(titles.index(self.sorted_by) + 1) % len(titles)]

    def sort_at(self, x: int) -> None:
        """Sort by the column at a place in the header; if the lines are sorted by it already, reverse them."""
        start = MARGIN
        for column in self._columns:
            if start <= x < start + column.width and column.key is not None:
                if column.title == self.sorted_by:
                    self.turned = not self.turned
                else:
                    self.sort_by(column.title)
                return
            start += column.width + 1

    def header(self) -> Text:
        """Return the titles of the columns, with an arrow at the one that the lines are sorted by."""
        return Text("  ", "bold").append_text(
            Text(" ").join(self._title(column) for column in self._columns)
        )

    def _title(self, column: ModuleColumn) -> Text:
        arrow = ""
        if column.title == self.sorted_by and column.key is not None:
            arrow = FALLING if column.falling != self.turned else RISING
        title = Text(column.title[: column.width - len(arrow)] + arrow)
        title.truncate(column.width)
        return fit(title, column.width, right=column.right)

    def drawn(self, place: int) -> Text:
        """Return one line of the table."""
        line = self.shown[place]
        cells = (column.fitted(line) for column in self._columns)
        mark = self._marks.get(line.label, Text(" "))
        if isinstance(line, FoldedLine) and not mark.plain.strip():
            mark = Text(OPEN if line.label in self.unfolded else CLOSED, "dim")
        return Text(" ").join([mark, *cells])
