"""The pane below the live table that shows one module in detail."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from kedge.report.live.detail import detail
from kedge.report.module_lines import ModuleLine
from kedge.rules.rule import Finding


class DetailPane(VerticalScroll, can_focus=False):
    """One module in detail: one statistic of one of its sites, chosen by keys."""

    def __init__(self) -> None:
        super().__init__(id="detail")
        self._site = self._statistic = 0

    def compose(self) -> ComposeResult:
        """Yield the text of the pane."""
        yield Static(id="drawn")

    def show(self, line: ModuleLine | None, findings: Sequence[Finding]) -> None:
        """Draw a module, if the pane is open."""
        if not self.has_class("open"):
            return
        text = Text("no module is chosen", "dim")
        if line is not None:
            text = detail(line, (self._site, self._statistic), findings, self.app.size.width - 4)
        self.query_one("#drawn", Static).update(text)

    def first_site(self) -> None:
        """Choose the module's output."""
        self._site = 0

    def choose_next(self, what: str) -> None:
        """Open the pane with the next site of the module, or with the next statistic of the site."""
        self.add_class("open")
        if what == "site":
            self._site += 1
        else:
            self._statistic += 1
