"""The application in the terminal: a head, the findings, the table, and one module in detail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static

from kedge.errors import KedgeError, NoSuchSite, SelectorError
from kedge.report.findings import MARKS, STYLES
from kedge.report.live.board import Board
from kedge.report.live.detail import detail
from kedge.report.live.heading import heading
from kedge.report.live.reading import RunReader
from kedge.report.module_lines import ModuleLine, folded, matching
from kedge.report.shown_run import ShownRun
from kedge.report.verdict import headline, tally
from kedge.rules.rule import Finding, Rule

#: The least seconds between two readings, and the pause as a multiple of a reading: it takes at
#: most a fifth of the time.
PAUSE, READING_PAUSE = 0.5, 4.0


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


class LiveApp(App[KedgeError | None]):
    """The live screen of a run; its result is the error that ended it, or None.

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
    #problem { height: auto; padding: 0 1; }
    #board { height: 1fr; padding: 0; overflow-x: hidden; }
    #board { scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    #detail { display: none; height: auto; max-height: 65%; }
    #detail { padding: 0 1; border-top: solid $primary; }
    #detail.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("f", "findings", "Findings"),
        Binding("n", "next('site')", "Site"),
        Binding("m", "next('statistic')", "Measure"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, path: Path, rules: Sequence[Rule] | None = None) -> None:
        super().__init__()
        self.reader = RunReader(path, rules)
        self._pattern = ""

    def compose(self) -> ComposeResult:
        """Yield the widgets of the screen."""
        yield Static(id="head")
        with VerticalScroll(id="findings", can_focus=False):
            yield Static(id="found")
        yield Input(id="filter", placeholder="sites: attn, **.h.3.**, **{Linear}")
        yield Static(id="problem")
        yield Board()
        yield DetailPane()
        yield Footer()

    def on_mount(self) -> None:
        """Start to follow the run."""
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
        """Draw the newest state."""
        shown_run = self.reader.shown_run
        self.query_one("#head", Static).update(heading(self.reader))
        found = Text("")
        shown: Sequence[ModuleLine] = ()
        problem = ""
        marks: Mapping[str, Text] = {}
        if shown_run is not None:
            found = _found(shown_run)
            shown, problem = _chosen(shown_run, self._pattern)
            marks = shown_run.marks([*shown_run.lines, *shown])
        self.query_one("#found", Static).update(found)
        self.query_one("#findings").display = bool(found)
        note = self.query_one("#problem", Static)
        note.update(Text(problem, "yellow"))
        note.display = bool(problem)
        self.query_one(Board).show(shown, marks)
        self._refresh_detail()

    def _refresh_detail(self) -> None:
        if self.reader.shown_run is not None:
            line = self.query_one(Board).modules.line
            self.query_one(DetailPane).show(line, self.reader.shown_run.findings)

    def on_resize(self) -> None:
        """Draw the curve in its new width."""
        self._refresh_detail()

    def on_board_chosen(self) -> None:
        """Show the chosen module, its output first."""
        self.query_one(DetailPane).first_site()
        self._refresh_detail()

    def on_board_selected(self) -> None:
        """Open the detail, or close it."""
        self.query_one(DetailPane).toggle_class("open")
        self._refresh_detail()

    def action_next(self, what: str) -> None:
        """Show the next site of the module, or the next statistic of the site."""
        self.query_one(DetailPane).choose_next(what)
        self._refresh_detail()

    def action_findings(self) -> None:
        """Show more of the findings, or fewer."""
        self.query_one("#findings").toggle_class("whole")

    def action_filter(self) -> None:
        """Open the filter of modules."""
        asked = self.query_one("#filter", Input)
        asked.add_class("open")
        asked.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the modules that match the typed text."""
        self._pattern = event.value.strip()
        self.refresh_all()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self.query_one("#filter").set_class(bool(self._pattern), "open")
        self.query_one(Board).focus()

    def action_leave(self) -> None:
        """Clear the filter if it is open; otherwise close the detail."""
        asked = self.query_one("#filter", Input)
        if asked.has_class("open"):
            asked.value = ""
            asked.remove_class("open")
            self.query_one(Board).focus()
        else:
            self.query_one(DetailPane).remove_class("open")


def _chosen(shown_run: ShownRun, pattern: str) -> tuple[Sequence[ModuleLine], str]:
    """Return the lines that a filter selects.

    If it selects nothing or cannot be read, all of them are returned, and the reason.
    """
    if not pattern:
        return shown_run.folds, ""
    try:
        return folded(matching(shown_run.lines, pattern), shown_run.findings), ""
    except (SelectorError, NoSuchSite) as error:
        return shown_run.folds, str(error)


def _found(shown_run: ShownRun) -> Text:
    """Return the verdict, and a line for each finding."""
    findings = shown_run.findings
    if findings:
        lines = [Text(tally(findings), STYLES[findings[0].severity])]
    elif shown_run.is_over:
        judgement = shown_run.judgement
        style = "green" if judgement.is_passed else "dim"
        lines = [Text(headline(judgement), style)]
    else:
        lines = [Text("no findings so far", "dim")]
    for finding in findings:
        mark = (f"{MARKS[finding.severity]} {finding.code:<14} ", STYLES[finding.severity])
        lines.append(Text.assemble(mark, (f"{finding.site}  ", "bold"), finding.message))
    return Text("\n").join(lines)
