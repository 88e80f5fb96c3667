"""The live table: only the lines that are seen are drawn, so it is as fast with ten thousand modules as with ten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from kedge.report.live.columns import Column, in_order, layout
from kedge.report.module_lines import Line

CHOSEN, CHOSEN_ELSEWHERE = Style(bgcolor="#1f4e79", bold=True), Style(bgcolor="#333333")
FALLING, RISING = "▼", "▲"


class Board(ScrollView, can_focus=True):
    """A table of modules with one line chosen, its header always in sight."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(0)", "First", show=False),
        Binding("end,G", "edge(-1)", "Last", show=False),
        Binding("enter", "select", "Detail"),
        Binding("s", "sort", "Sort by"),
        Binding("r", "turn", "Reverse"),
    ]

    class Chosen(Message):
        """Another line was chosen."""

    class Selected(Message):
        """The chosen line is to be shown in detail."""

    def __init__(self) -> None:
        super().__init__(id="board")
        self.shown: list[Line] = []
        self.chosen: str | None = None
        self.sorted_by: str | None = None
        self.turned = False
        self._lines: Sequence[Line] = ()
        self._marks: Mapping[str, Text] = {}
        self._columns: tuple[Column, ...] = ()

    def show(self, lines: Sequence[Line], marks: Mapping[str, Text]) -> None:
        """Show these lines, with marks before some of them; the chosen one stays chosen."""
        self._lines, self._marks = lines, marks
        self._lay_out()

    @property
    def line(self) -> Line | None:
        """The chosen line."""
        return next((line for line in self.shown if line.label == self.chosen), None)

    def render_line(self, y: int) -> Strip:
        """Draw one line of the widget: the header, or the module that stands there."""
        if y == 0:
            return self._strip(self._header())
        place = y - 1 + self.scroll_offset.y
        if place >= len(self.shown):
            return Strip.blank(self._width, self.rich_style)
        line = self.shown[place]
        text = Text(" ").join([self._marks.get(line.label, Text(" ")), *(c.fitted(line) for c in self._columns)])
        if line.label == self.chosen:
            text.stylize(CHOSEN if self.has_focus else CHOSEN_ELSEWHERE)
        return self._strip(text)

    def _strip(self, text: Text) -> Strip:
        segments = Segment.apply_style(text.render(self.app.console), self.rich_style)
        return Strip(segments).adjust_cell_length(self._width, self.rich_style)

    def _header(self) -> Text:
        titles = []
        for column in self._columns:
            marked = column.title == self.sorted_by and column.key is not None
            arrow = (FALLING if column.falling != self.turned else RISING) if marked else ""
            title = Text(column.title[: column.width - len(arrow)] + arrow)
            title.truncate(column.width)
            pad = title.pad_left if column.right else title.pad_right
            pad(column.width - title.cell_len)
            titles.append(title)
        return Text("  ", "bold").append_text(Text(" ").join(titles))

    def _lay_out(self) -> None:
        self._columns = layout(max(self._width - 2, 1), max((len(line.label) for line in self._lines), default=0))
        column = next((c for c in self._columns if c.title == self.sorted_by and c.key), None)
        self.shown = in_order(self._lines, column, self.turned)
        if self.line is None:
            self.chosen = self.shown[0].label if self.shown else None
            self.post_message(self.Chosen())
        self.virtual_size = Size(self._width, len(self.shown) + 1)
        self.refresh()

    def on_resize(self, _: Resize) -> None:
        """Fit the columns to the new width, and keep the chosen line in sight."""
        self._lay_out()
        self._see(self._place)

    def _choose(self, place: int) -> None:
        if not self.shown:
            return
        place = min(max(place, 0), len(self.shown) - 1)
        self.chosen = self.shown[place].label
        self._see(place)
        self.refresh()
        self.post_message(self.Chosen())

    def _see(self, place: int) -> None:
        # One line more, because the header covers the first.
        self.scroll_to_region(Region(0, place, 1, 2), animate=False, force=True)

    @property
    def _width(self) -> int:
        """How wide a line may be, beside the scrollbar."""
        return self.scrollable_content_region.width

    @property
    def _place(self) -> int:
        return next((i for i, line in enumerate(self.shown) if line.label == self.chosen), 0)

    def action_move(self, by: int) -> None:
        """Choose a line further on."""
        self._choose(self._place + by)

    def action_page(self, by: int) -> None:
        """Choose a line a page further on."""
        self._choose(self._place + by * max(self.size.height - 2, 1))

    def action_edge(self, place: int) -> None:
        """Choose the first line, or the last."""
        self._choose(place % max(len(self.shown), 1))

    def action_select(self) -> None:
        """Ask for the chosen line in detail."""
        self.post_message(self.Selected())

    def action_sort(self) -> None:
        """Sort by the next column that can be sorted by; after the last one, as the data flows."""
        titles: list[str | None] = [None, *(c.title for c in self._columns if c.key)]
        self.sort_by(
            titles[(titles.index(self.sorted_by) + 1) % len(titles)] if self.sorted_by in titles else titles[1]
        )

    def action_turn(self) -> None:
        """Reverse the order."""
        self.turned = not self.turned
        self._lay_out()

    def sort_by(self, title: str | None) -> None:
        """Sort by the column with this title; as the data flows if None."""
        self.sorted_by, self.turned = title, False
        self._lay_out()
        self._choose(0)

    def on_click(self, event: Click) -> None:
        """Choose the line that was clicked, or sort by the column whose title was."""
        if event.y == 0:
            self._sort_at(event.x)
            return
        place = event.y - 1 + self.scroll_offset.y
        if place < len(self.shown):
            again = self.shown[place].label == self.chosen
            self._choose(place)
            if again:
                self.action_select()

    def _sort_at(self, x: int) -> None:
        start = 2
        for column in self._columns:
            if start <= x < start + column.width and column.key is not None:
                if column.title == self.sorted_by:
                    self.action_turn()
                else:
                    self.sort_by(column.title)
                return
            start += column.width + 1
