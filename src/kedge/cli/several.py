"""Several recordings for ``kedge report``: read, judged, and shown as a table or as one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.output import print_json
from kedge.cli.page_file import write_page
from kedge.cli.progress import progress
from kedge.cli.recordings import open_recording, recording_named
from kedge.errors import NotARecording, RecordingError

if TYPE_CHECKING:
    from kedge.report.runs.summary import RunSummary
    from kedge.report.runs.table import LeftOut, RunTable
    from kedge.rules.rule import Rule

#: The name of the page of several runs, beside the first of them.
PAGE = "runs.html"


def report_several(names: Sequence[str], args: argparse.Namespace, rules: Sequence[Rule]) -> None:
    """Show several recordings, without those that cannot be read.

    Args:
        names: Their names, as typed.
        args: The arguments of ``kedge report``.
        rules: The rules to judge them with.

    Raises:
        NotARecording: None of them can be read.
    """
    file = Path(args.output) if args.output else Path(names[0]).parent / PAGE
    table = _read(names, args, rules)
    if args.html:
        from kedge.report.runs.page import render_runs_page
        from kedge.sites.filters import chosen_sites

        if args.sites is not None:  # a wrong filter is refused before the work
            sites = [site for run in table.runs for site in run.shown_run.recording.sites]
            chosen_sites(args.sites, sites)
        with progress("drawing the page"):
            page = render_runs_page(table, pages_beside(names, file), args.sites or "")
        write_page(file, page)
    elif args.json:
        print_json(table.document())
    else:
        from kedge.report.runs.terminal import render_runs
        from kedge.report.terminal import console_for

        render_runs(table, console_for())


def _read(names: Sequence[str], args: argparse.Namespace, rules: Sequence[Rule]) -> RunTable:
    from kedge.report.runs.summary import numbered, told_apart
    from kedge.report.runs.table import LeftOut, RunTable

    source = not args.no_source
    runs: list[RunSummary] = []
    left: list[LeftOut] = []
    for name, said in zip(names, told_apart(names) if source else numbered(names), strict=True):
        try:
            runs.append(_summary(recording_named(name), said, args, rules))
        except RecordingError as error:
            reason = str(error)
            left.append(
                LeftOut(said, reason.replace(name, said)) if args.html else LeftOut(name, reason)
            )
    if not runs:
        raise NotARecording("; ".join(f"{one.recording}: {one.reason}" for one in left))
    return RunTable(tuple(runs), tuple(left))


def _summary(path: str, name: str, args: argparse.Namespace, rules: Sequence[Rule]) -> RunSummary:
    from kedge.report.head import is_written
    from kedge.report.page.redact import shareable
    from kedge.report.runs.summary import RunSummary
    from kedge.report.shown_run import ShownRun
    from kedge.rules.registry import check

    recording = open_recording(path)
    written, wrote = is_written(recording), None
    if written:
        files = (Path(path), *Path(path).glob("stats-*.arrows"))
        wrote = max(file.stat().st_mtime for file in files)
    if args.html:
        recording = shareable(recording, source=not args.no_source)
    with progress(f"judging {name}"):
        findings = check(recording, rules)
    return RunSummary(name, ShownRun(recording, findings, rules, written), wrote)


def pages_beside(names: Sequence[str], page: Path) -> list[str | None]:
    """Return the file name of each recording's own page, if that stands in the folder of another page."""
    found = []
    for name in names:
        file = page_beside(Path(name))
        beside = (
            file.parent.resolve() == page.parent.resolve()
            and file.exists()
            and file.name != page.name
        )
        found.append(file.name if beside else None)
    return found


def page_beside(folder: Path) -> Path:
    """Return the file of a recording's page: beside the recording, with another ending."""
    folder = folder if folder.name else folder.resolve()
    return folder.with_name(f"{folder.name.removesuffix('.kedge')}.html")
