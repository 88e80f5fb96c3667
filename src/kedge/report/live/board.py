"""The live table.

Only visible lines are drawn, so it is as fast with ten thousand modules as with ten.
"""

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

from kedge.report.live.module_list import ModuleList
from kedge.report.module_lines import ModuleLine

#: The styles of the chosen line: where the table has the keys, and where another part has them.
CHOSEN = Style(bgcolor="#1f4e79", bold=True)
CHOSEN_ELSEWHERE = Style(bgcolor="#333333")


class Board(ScrollView, can_focus=True):
    """A table of modules with one line chosen; its header is always visible."""

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
        """The user asked for the chosen line in detail."""

    def __init__(self) -> None:
        super().__init__(id="board")
        self.modules = ModuleList()

    def show(self, lines: Sequence[ModuleLine], marks: Mapping[str, Text]) -> None:
        """Show these lines, with marks before some of them; the chosen one stays chosen."""
        self.modules.fill(lines, marks)
        self._lay_out()

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget: the header, or a module."""
        place = y - 1 + self.scroll_offset.y
        if y == 0:
            text = self.modules.header()
        elif place >= len(self.modules.shown):
            return Strip.blank(self._width, self.rich_style)
        else:
            text = self.modules.drawn(place)
            if self.modules.shown[place].label == self.modules.chosen:
                text.stylize(CHOSEN if self.has_focus else CHOSEN_ELSEWHERE)
        segments = Segment.apply_style(text.render(self.app.console), self.rich_style)
        return Strip(segments).adjust_cell_length(self._width, self.rich_style)

    def _lay_out(self) -> None:
        other = self.modules.lay_out(self._width)
        self.virtual_size = Size(self._width, len(self.modules.shown) + 1)
        if other:
            self._keep_visible(self.modules.place)
            self.post_message(self.Chosen())
        self.refresh()

    def on_resize(self, _: Resize) -> None:
        """Fit the columns to the new width, and keep the chosen line visible."""
        self._lay_out()
        self._keep_visible(self.modules.place)

    def _choose(self, place: int) -> None:
        if self.modules.shown:
            self._keep_visible(self.modules.choose(place))
            self.refresh()
            self.post_message(self.Chosen())

    def _keep_visible(self, place: int) -> None:
        # One line more, because the header covers the first.
        self.scroll_to_region(Region(0, place, 1, 2), animate=False, force=True)

    @property
    def _width(self) -> int:
        """The width of a line, without the scrollbar."""
        return self.scrollable_content_region.width

    def action_move(self, by: int) -> None:
        """Choose a line further on."""
        self._choose(self.modules.place + by)

    def action_page(self, by: int) -> None:
        """Choose a line a page further on."""
        self._choose(self.modules.place + by * max(self.size.height - 2, 1))

    def action_edge(self, place: int) -> None:
        """Choose the first line, or the last."""
        self._choose(place % max(len(self.modules.shown), 1))

    def action_select(self) -> None:
        """Show the chosen line in detail; of a folded one its modules."""
        if self.modules.fold_or_unfold():
            self._lay_out()
            return
        self.post_message(self.Selected())

    def action_sort(self) -> None:
        """Sort by the next column that can be sorted by; after the last one, in data-flow order."""
        self.modules.sort_by(self.modules.next_title())
        self._lay_out()

    def action_turn(self) -> None:
        """Reverse the order."""
        self.modules.turned = not self.modules.turned
        self._lay_out()

    def on_click(self, event: Click) -> None:
        """Choose the clicked line, or sort by the column whose title was clicked."""
        if event.y == 0:
            self.modules.sort_at(event.x)
            self._lay_out()
            return
        place = event.y - 1 + self.scroll_offset.y
        if place < len(self.modules.shown):
            again = self.modules.shown[place].label == self.modules.chosen
            self._choose(place)
            if again:
                self.action_select()
