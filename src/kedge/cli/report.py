"""``kedge report``: a recording in the terminal, or as a page; several in a table, or on one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.cli.config import add_config
from kedge.cli.output import print_json
from kedge.cli.page_file import write_page
from kedge.cli.progress import add_quiet, progress
from kedge.cli.recordings import SUFFIX, expanded, open_recording, recording_named
from kedge.cli.sites_option import add_sites, only_sites
from kedge.errors import NotARecording, RecordingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kedge.report.runs.summary import RunSummary
    from kedge.report.runs.table import LeftOut, RunTable
    from kedge.report.shown_run import ShownRun
    from kedge.rules.rule import Rule

#: The modules that a report shows by default.
MOST_MODULES = 40

#: The name of the page of several runs, beside the first of them.
PAGE = "runs.html"


class ReportCommand:
    """Show a recording: its findings, and a table of its modules.

    The table has a line for each module in data-flow order, with the scale of its output
    and of its gradient: now, and over the steps. You can read a recording while it is
    being written.

    --html writes one file that opens in any browser and needs no network.

    Several recordings, or a folder of them, are compared: a table of their options, findings and
    losses, and with --html their curves over each other, and any site in all of them.

    --json prints the object of kedge check --json, and three more keys:
      {..., "run": {"command", "device", "torch", "python", "started", "exit", "error", "steps",
                    "seconds", "watching", "ended", "sampled"},
       "models": [{"model", "type", "parameters"}, ...],
       "modules": [{"module", "type", "shape", "parameters", "out", "grad", "update", "zero",
                    "broken"}, ...]}
    and of several recordings:
      {"runs": [{"run", "recording", "command", "options", "findings", "judged", "ending", "steps",
                 "loss", "best", "best_step", "norm", "seconds", "seconds_per_step", "saved",
                 "started", "not_finite"}, ...],
       "differ": ["--lr", ...], "equal": {"--steps": "300", ...},
       "left_out": [{"recording", "reason"}, ...], "smoothing"}
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "recordings",
            metavar="RUN",
            nargs="*",
            help=(
                f"the recording, with or without {SUFFIX} (default: "
                "the newest one in this folder); or several to compare"
            ),
        )
        add_sites(parser, "show only these modules; with --html, begin with this filter")
        parser.add_argument(
            "--all",
            action="store_true",
            help=f"list every module (default: {MOST_MODULES}, and those with findings)",
        )
        parser.add_argument(
            "--headroom",
            action="store_true",
            help=(
                "print how far each output and gradient is from the limits "
                "of its number format and of narrower ones"
            ),
        )
        parser.add_argument(
            "--saved",
            action="store_true",
            help=(
                "print the memory that autograd saves for backward, "
                "by module and line, and how to free it"
            ),
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--html", action="store_true", help="write a page (one HTML file) instead"
        )
        parser.add_argument(
            "-o",
            dest="output",
            metavar="FILE.html",
            help="the file of the page (default: RUN.html)",
        )
        parser.add_argument(
            "--no-source",
            action="store_true",
            help="leave source lines and their files out of the page",
        )
        add_quiet(parser)
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print or write the report."""
        from kedge.report.page.redact import shareable
        from kedge.report.shown_run import ShownRun
        from kedge.report.what_ran import is_written
        from kedge.rules.project_config import configured_rules
        from kedge.rules.registry import check

        _check(args)
        rules = configured_rules(config=args.config)
        names = expanded(args.recordings)
        if len(args.recordings) > 1 or names != args.recordings:
            _check_several(args)
            report_several(names, args, rules)
            return 0
        named = names[0] if names else None
        args.recording = recording_named(named)
        recording = open_recording(args.recording)
        if args.headroom:
            from kedge.report.headroom import render_headroom
            from kedge.report.terminal import console_for

            render_headroom(recording, console_for(), args.sites)
            return 0
        if args.saved:
            from kedge.report.memory.saved import render_saved
            from kedge.report.terminal import console_for
            from kedge.store.saved_tables import MOST_ROWS

            most = None if args.all else MOST_ROWS
            render_saved(recording, console_for(), most)
            return 0

        written = is_written(recording)
        if args.html:
            recording = shareable(recording, source=not args.no_source)
        only_sites(recording, args.sites)  # a wrong filter is refused before the work
        with progress("judging"):
            findings = check(recording, rules)
        shown_run = ShownRun(recording, findings, rules, written)
        if args.html:
            _write(args, shown_run)
        elif args.json:
            _print_json(args, shown_run)
        else:
            _draw(args, shown_run)
        return 0


def _check(args: argparse.Namespace) -> None:
    if not args.html and (args.output or args.no_source):
        args.parser.refuse("-o and --no-source are for pages: add --html")
    if args.headroom and (args.html or args.all):
        args.parser.refuse("--headroom is a table of its own: leave --html and --all out")
    if args.saved and (args.html or args.headroom or args.sites):
        args.parser.refuse(
            "--saved is a table of its own: leave --html, --headroom and --sites out"
        )
    if args.json and (args.html or args.headroom or args.saved or args.all):
        args.parser.refuse(
            "--json prints every module: leave --html, --headroom, --saved and --all out"
        )
    if args.html and args.all:
        args.parser.refuse("a page has all sites: leave --all out")


def _check_several(args: argparse.Namespace) -> None:
    if args.headroom or args.saved or args.all:
        args.parser.refuse("--headroom, --saved and --all are for a single recording: name one")
    if args.sites and not args.html:
        args.parser.refuse(
            "a table of several recordings has no modules: "
            "leave --sites out, add --html, or name one"
        )


def _draw(args: argparse.Namespace, shown_run: ShownRun) -> None:
    from kedge.report.terminal import ReportExtent, console_for, render

    most = None if args.all or args.sites else MOST_MODULES
    extent = ReportExtent(sites=args.sites, most=most, folds=not args.all)
    render(shown_run, console_for(), extent)


def _print_json(args: argparse.Namespace, shown_run: ShownRun) -> None:
    from kedge.cli.documents import reported
    from kedge.report.module_lines import matching

    chosen = shown_run.lines
    if args.sites is not None:
        chosen = matching(shown_run.lines, args.sites)
    print_json(reported(args.recording, shown_run, chosen))


def _write(args: argparse.Namespace, shown_run: ShownRun) -> None:
    from kedge.report.page.render import render_page
    from kedge.report.tensors.content import is_of_tensors
    from kedge.report.tensors.page import render_tensors_page

    with progress("drawing the page"):
        if is_of_tensors(shown_run.recording):
            page = render_tensors_page(shown_run)
        else:
            page = render_page(shown_run, chosen=args.sites or "")
    file = page_beside(Path(args.recording))
    if args.output:
        file = Path(args.output)
    write_page(file, page)


def report_several(
    names: Sequence[str],
    args: argparse.Namespace,
    rules: Sequence[Rule],
) -> None:
    """Show several recordings, without those that cannot be read.

    Args:
        names: Their names, as typed.
        args: The arguments of ``kedge report``.
        rules: The rules to judge them with.

    Raises:
        NotARecording: None of them can be read.
    """
    table, read = _read(names, args, rules)
    if args.html:
        from kedge.report.runs.page import render_runs_page
        from kedge.sites.filters import chosen_sites

        if args.sites is not None:  # a wrong filter is refused before the work
            sites: list[Any] = []
            for run in table.runs:
                sites += run.shown_run.recording.sites
            chosen_sites(args.sites, sites)
        file = Path(names[0]).parent / PAGE
        if args.output:
            file = Path(args.output)
        with progress("drawing the page"):
            page = render_runs_page(table, pages_beside(read, file), args.sites or "")
        write_page(file, page)
    elif args.json:
        print_json(table.document())
    else:
        from kedge.report.runs.terminal import render_runs
        from kedge.report.terminal import console_for

        render_runs(table, console_for())


def _read(
    names: Sequence[str],
    args: argparse.Namespace,
    rules: Sequence[Rule],
) -> tuple[RunTable, list[str]]:
    """Return the table, and the names of the recordings in it, which may not be all."""
    from kedge.report.runs.summary import numbered, told_apart
    from kedge.report.runs.table import LeftOut, RunTable

    shown = numbered(names) if args.no_source else told_apart(names)
    runs: list[RunSummary] = []
    read: list[str] = []
    left: list[LeftOut] = []
    for name, said in zip(names, shown, strict=True):
        try:
            runs.append(_summary(recording_named(name), said, args, rules))
        except RecordingError as error:
            reason = LeftOut(name, str(error))
            if args.html:
                reason = LeftOut(said, str(error).replace(name, said))
            left.append(reason)
        else:
            read.append(name)
    if not runs:
        raise NotARecording("; ".join(f"{one.recording}: {one.reason}" for one in left))
    return RunTable(tuple(runs), tuple(left)), read


def _summary(
    path: str,
    name: str,
    args: argparse.Namespace,
    rules: Sequence[Rule],
) -> RunSummary:
    from kedge.report.page.redact import shareable
    from kedge.report.runs.summary import RunSummary
    from kedge.report.shown_run import ShownRun
    from kedge.report.what_ran import is_written
    from kedge.rules.registry import check

    recording = open_recording(path)
    written = is_written(recording)
    wrote = None
    if written:
        files = (Path(path), *Path(path).glob("stats-*.arrows"))
        wrote = max(file.stat().st_mtime for file in files)
    if args.html:
        recording = shareable(recording, source=not args.no_source)
    with progress(f"judging {name}"):
        findings = check(recording, rules)
    return RunSummary(name, ShownRun(recording, findings, rules, written), wrote)


def pages_beside(names: Sequence[str], page: Path) -> list[str | None]:
    """Return the file name of each recording's own page, if that is in the folder of a page."""
    found: list[str | None] = []
    for name in names:
        file = page_beside(Path(name))
        is_beside = file.parent.resolve() == page.parent.resolve()
        if is_beside and file.name != page.name and file.exists():
            found.append(file.name)
        else:
            found.append(None)
    return found


def page_beside(folder: Path) -> Path:
    """Return the file of a recording's page: beside the recording, with another ending."""
    if not folder.name:
        folder = folder.resolve()
    return folder.with_name(f"{folder.name.removesuffix('.kedge')}.html")
