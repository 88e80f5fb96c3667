"""The lines of the live table: their order, the chosen one, and the texts that are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from kedge.report.fitted_text import fit
from kedge.report.module_lines import FoldedLine, ModuleLine
from kedge.report.module_table import ModuleColumn, in_order, live_columns

#: Marks of the column that the lines are sorted by.
FALLING = "▼"
RISING = "▲"
#: Marks of a folded line.
CLOSED = "▸"
OPEN = "▾"
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
        self._lines = lines
        self._marks = marks

    def lay_out(self, width: int) -> bool:
        """Fit the columns to a width, and sort the lines.

        Returns:
            Whether another line had to be chosen.
        """
        self._columns = live_columns(max(width - MARGIN, 1), self._lines)
        column = next((one for one in self._columns if one.title == self.sorted_by), None)
        self.shown = []
        for line in in_order(self._lines, column, self.turned):
            self.shown.append(line)
            if isinstance(line, FoldedLine) and line.label in self.unfolded:
                self.shown += in_order(line.members, column, self.turned)
        if self.line is not None:
            return False
        self.chosen = None
        if self.shown:
            self.chosen = self.shown[0].label
        return True

    def fold_or_unfold(self) -> bool:
        """Show the modules of a chosen line that is folded, or hide them again.

        Returns:
            Whether it is such a line.
        """
        line = self.line
        if not isinstance(line, FoldedLine):
            return False
        self.unfolded ^= {line.label}
        return True

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
        """Sort by the column with this title, or in data-flow order if it is None.

        The first line is chosen at the next layout.
        """
        self.sorted_by = title
        self.turned = False
        self.chosen = None

    def next_title(self) -> str | None:
        """Return the title of the next column to sort by; None, data-flow order, after the last."""
        titles = [column.title for column in self._columns if column.key is not None]
        choices = [None, *titles]
        if self.sorted_by not in choices:
            return titles[0]
        return choices[(choices.index(self.sorted_by) + 1) % len(choices)]

    def sort_at(self, x: int) -> None:
        """Sort by the column at a place in the header; reverse lines that are sorted by it."""
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
        """Return the titles of the columns, with an arrow at the one the lines are sorted by."""
        titles = Text(" ").join(map(self._title, self._columns))
        return Text("  ", "bold").append_text(titles)

    def _title(self, column: ModuleColumn) -> Text:
        if column.title != self.sorted_by or column.key is None:
            arrow = ""
        elif column.falling != self.turned:
            arrow = FALLING
        else:
            arrow = RISING
        title = Text(column.title[: column.width - len(arrow)] + arrow)
        title.truncate(column.width)
        return fit(title, column.width, right=column.right)

    def drawn(self, place: int) -> Text:
        """Return one line of the table."""
        line = self.shown[place]
        cells = (column.fitted(line) for column in self._columns)
        mark = self._marks.get(line.label, Text(" "))
        if isinstance(line, FoldedLine) and not mark.plain.strip():
            is_open = line.label in self.unfolded
            mark = Text(OPEN if is_open else CLOSED, "dim")
        return Text(" ").join([mark, *cells])
