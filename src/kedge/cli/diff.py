"""``kedge diff``: the first difference of two runs, its size, and its cause."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from kedge.cli.output import print_json
from kedge.cli.page_file import write_page
from kedge.cli.progress import add_quiet, progress
from kedge.cli.recordings import open_recording, recording_named
from kedge.cli.sites_option import add_sites
from kedge.stderr import messenger

if TYPE_CHECKING:
    from kedge.compare.comparison import Comparison
    from kedge.compare.verdict import Verdict
    from kedge.report.compare.head import Names
    from kedge.store.recording import Recording


class DiffCommand:
    """Compare two runs: where they first differ, by how much, and why.

    Renamed modules are recognized. The exit status is 0 if there is no difference beyond
    the tolerance, 1 if the runs diverge, 2 if they cannot be compared. Only steps that both
    runs measured are compared: record both with kedge run --every 1 --budget none.

    --ranks compares two ranks of one run. They diverge if their parameters, updates or
    gradient norms differ; their data may differ.

    --deep runs the recorded commands again, in the folders that they ran in, up to the end of
    the first step that differs. There it compares operation by operation, and names the line
    and the operation in each program. The programs run as any programs do: they write their
    files again. Recordings of kedge run alone can be run again, and those of one process.

    --sites shows some modules alone. The verdict and the exit status are still those of all
    modules, since the cause of a difference may lie in others.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument("a", metavar="A", help="a recording")
        parser.add_argument(
            "b", metavar="B", nargs="?", help="the other recording (not with --ranks)"
        )
        parser.add_argument(
            "--ranks",
            metavar=("R", "S"),
            nargs=2,
            type=int,
            help="compare two ranks of A",
        )
        parser.add_argument(
            "--tolerance",
            metavar="R",
            type=_share,
            default=0.0,
            help=(
                "largest relative difference that counts as equal, "
                "such as 1e-5 (default: 0, every bit counts)"
            ),
        )
        parser.add_argument(
            "--all",
            action="store_true",
            help="list every module that differs, not only the first ones",
        )
        parser.add_argument(
            "--deep",
            action="store_true",
            help=(
                "run both programs again, up to the first step that differs, and name the "
                "operation and the line from which they do"
            ),
        )
        add_sites(
            parser,
            "show only the differences of these modules; with --html, begin with this filter",
        )
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print one JSON object")
        form.add_argument(
            "--html", action="store_true", help="write a page (one HTML file) instead"
        )
        parser.add_argument(
            "-o",
            dest="output",
            metavar="FILE.html",
            help="the file of the page (default: A-B.html)",
        )
        add_quiet(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Compare, and print or write the result."""
        from kedge.compare.comparison import chosen_part, compare
        from kedge.compare.operations.second_run import RecordedProgram, find_operation
        from kedge.compare.verdict import judge, judge_ranks

        a, b, names = _sides(args)
        programs = None
        if args.deep:
            programs = RecordedProgram.of(names.a, a), RecordedProgram.of(names.b, b)
        with progress("comparing"):
            comparison = compare(a, b, args.tolerance)
            part = comparison
            if args.sites is not None:
                part = chosen_part(comparison, args.sites)
            verdict = judge_ranks(comparison) if args.ranks else judge(comparison)
        if programs is not None:
            tell = _silent if args.quiet else messenger()
            found = find_operation(comparison, programs, tell, progress)
            verdict = replace(verdict, operation=found)
        if args.html:
            _write(comparison, verdict, names, args)
        else:
            _print(part, verdict, names, args)
        return int(verdict.parted)


def _silent(_: str) -> None:
    return None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a relative difference; "
            "1e-5 tolerates a relative difference of 0.001 %"
        )
    return value


def _sides(args: argparse.Namespace) -> tuple[Recording, Recording, Names]:
    from kedge.report.compare.head import Names

    if args.output and not args.html:
        args.parser.refuse("-o names a page: add --html")
    if args.deep and args.ranks:
        args.parser.refuse("--deep runs two programs again, not the ranks of one")
    if args.deep and args.tolerance:
        args.parser.refuse("--deep compares bits: leave --tolerance out")
    if (args.b is None) != bool(args.ranks):
        args.parser.refuse("name two recordings, or one with --ranks and two numbers")
    args.a = recording_named(args.a)
    if args.b is not None:
        args.b = recording_named(args.b)
    a = open_recording(str(args.a))
    if not args.ranks:
        return a, open_recording(str(args.b)), Names(str(args.a), str(args.b))
    one, other = args.ranks
    names = Names(f"{args.a} rank {one}", f"{args.a} rank {other}")
    return a.of_rank(one), a.of_rank(other), names


def _print(
    comparison: Comparison, verdict: Verdict, names: Names, args: argparse.Namespace
) -> None:
    if args.json:
        from kedge.report.compare.document import document

        print_json(document(comparison, verdict, names))
    else:
        from kedge.report.compare.module_lines import MOST_MODULES
        from kedge.report.compare.terminal import render
        from kedge.report.terminal import console_for

        most = None if args.all else MOST_MODULES
        render(comparison, verdict, names, console_for(), most)


def _write(
    comparison: Comparison, verdict: Verdict, names: Names, args: argparse.Namespace
) -> None:
    from pathlib import Path

    from kedge.report.compare.page import render_difference

    page = render_difference(comparison, verdict, names, args.sites or "")
    other = args.b or f"ranks-{args.ranks[0]}-{args.ranks[1]}"
    write_page(Path(args.output or _beside(args.a, other)), page)


def _beside(a: str, b: str) -> str:
    """Return the file of the page: beside the first recording, with the names of both."""
    folder, other = (os.path.normpath(name).removesuffix(".kedge") for name in (a, b))
    return f"{folder}-{os.path.basename(other)}.html"
