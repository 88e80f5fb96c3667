"""The terminal application: a head, the findings, the table, and one module in detail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static

from kedge.errors import KedgeError
from kedge.report.counts import tally
from kedge.report.findings import MARKS, STYLES
from kedge.report.live.board import Board
from kedge.report.live.detail import detail
from kedge.report.live.heading import heading
from kedge.report.live.reading import Reader, State
from kedge.report.module_lines import Line
from kedge.report.terminal import marks_of
from kedge.rules.rule import Finding, Rule

#: Between two readings, in seconds; and reading takes up at most a fifth of the time.
PAUSE, READING_PAUSE = 0.5, 4.0


class Live(App[KedgeError | None]):
    """Follows a run; ends with what made it impossible to go on, or None.

    Args:
        path: The folder of the recording.
        rules: The rules to run; all of them if None.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "kedge live"
    CSS = """
    Screen { layout: vertical; }
    #head { height: auto; padding: 0 1; background: $panel; }
    #findings { height: auto; max-height: 7; padding: 0 1; }
    #findings.whole { max-height: 60%; }
    #found, #drawn, #head { text-wrap: nowrap; text-overflow: ellipsis; }
    .whole > #found { text-wrap: wrap; }
    #filter { display: none; height: 1; border: none; padding: 0 1; background: $boost; }
    #filter.open { display: block; }
    #board { height: 1fr; padding: 0; overflow-x: hidden; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    #detail { display: none; height: auto; max-height: 65%; padding: 0 1; border-top: solid $primary; }
    #detail.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("f", "findings", "Findings"),
        Binding("n", "next_site", "Site"),
        Binding("m", "next_statistic", "Measure"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, path: Path, rules: Sequence[Rule] | None = None) -> None:
        super().__init__()
        self.reader = Reader(path, rules)
        self._pattern = ""
        self._site = self._statistic = 0

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="head")
        with VerticalScroll(id="findings", can_focus=False):
            yield Static(id="found")
        yield Input(id="filter", placeholder="a part of a path, or a pattern: *.attn")
        yield Board()
        with VerticalScroll(id="detail", can_focus=False):
            yield Static(id="drawn")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one(Board).focus()
        self.refresh_all()
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            start = clock()
            try:
                news = await asyncio.to_thread(self.reader.read)
            except KedgeError as error:
                self.exit(error)
                return
            if news:
                self.refresh_all()
            await asyncio.sleep(max(PAUSE, READING_PAUSE * (clock() - start)))

    def refresh_all(self) -> None:
        """Draw what is known now."""
        glance = self.reader.glance
        self.query_one("#head", Static).update(heading(self.reader))
        findings = glance.findings if glance else ()
        self.query_one("#found", Static).update(_found(findings))
        self.query_one("#findings").display = bool(findings)
        shown = [line for line in (glance.lines if glance else ()) if _matches(line, self._pattern)]
        self.query_one(Board).show(shown, marks_of(shown, findings))
        self._refresh_detail()

    def _refresh_detail(self) -> None:
        line, glance = self.query_one(Board).line, self.reader.glance
        if not self.query_one("#detail").has_class("open"):
            return
        text = Text("no module is chosen", "dim")
        if line is not None and glance is not None:
            text = detail(line, (self._site, self._statistic), glance.findings, self.size.width - 4)
        self.query_one("#drawn", Static).update(text)

    def on_resize(self) -> None:
        """Draw the curve in its new width."""
        self._refresh_detail()

    def on_board_chosen(self) -> None:
        """Show the module that was chosen, its output first."""
        self._site = 0
        self._refresh_detail()

    def on_board_selected(self) -> None:
        """Open the detail, or close it."""
        self.query_one("#detail").toggle_class("open")
        self._refresh_detail()

    def action_next_site(self) -> None:
        """Show the next site of the module."""
        self._opened()
        self._site += 1
        self._refresh_detail()

    def action_next_statistic(self) -> None:
        """Show the next statistic of the site."""
        self._opened()
        self._statistic += 1
        self._refresh_detail()

    def _opened(self) -> None:
        self.query_one("#detail").add_class("open")

    def action_findings(self) -> None:
        """Show more of the findings, or fewer."""
        self.query_one("#findings").toggle_class("whole")

    def action_filter(self) -> None:
        """Ask which modules to show."""
        asked = self.query_one("#filter", Input)
        asked.add_class("open")
        asked.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the modules that match what is typed so far."""
        self._pattern = event.value.strip()
        self.refresh_all()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self.query_one("#filter").set_class(bool(self._pattern), "open")
        self.query_one(Board).focus()

    def action_leave(self) -> None:
        """Take back the filter if it is being typed; close the detail otherwise."""
        asked = self.query_one("#filter", Input)
        if asked.has_class("open"):
            asked.value = ""
            asked.remove_class("open")
            self.query_one(Board).focus()
        else:
            self.query_one("#detail").remove_class("open")

    @property
    def state(self) -> State:
        """How the run is doing."""
        return self.reader.state


def _matches(line: Line, pattern: str) -> bool:
    """Tell whether a label matches a pattern, or holds it; small and capital letters are the same."""
    label, pattern = line.label.lower(), pattern.lower()
    return fnmatchcase(label, pattern) if {"*", "?"} & set(pattern) else pattern in label


def _found(findings: Sequence[Finding]) -> Text:
    lines = [Text(tally(findings), "bold")] if findings else []
    for finding in findings:
        mark = (f"{MARKS[finding.severity]} {finding.code:<14} ", STYLES[finding.severity])
        lines.append(Text.assemble(mark, (f"{finding.site}  ", "bold"), finding.message))
    return Text("\n").join(lines)
