"""``kedge report``: draw a recording in the terminal, or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.config import add_config, configured_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kedge.rules.rule import Finding, Rule
    from kedge.store.recording import Recording

#: How many modules a report shows where nothing else is asked for.
MOST_MODULES = 40


class Report:
    """Draw a recording: what was found, and a table of what flowed where.

    The findings come first. The table has a line for each module in the order of the
    data, with the scale of its output and of its gradient and a picture of their
    course over the steps. A recording can be read while it is being written.

    With --html it is one file that opens in any browser and needs no network.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        parser.add_argument("recording", metavar="RUN", help="the recording, as kedge run named it")
        parser.add_argument(
            "--sites",
            metavar="GLOB",
            help="only modules with these paths: * is one segment, ** any number; several with commas",
        )
        parser.add_argument(
            "--all", action="store_true", help=f"every module, not only {MOST_MODULES} and those with findings"
        )
        parser.add_argument(
            "--headroom",
            action="store_true",
            help="instead: how near each output and gradient came to the ends of its number format, and of narrower ones",
        )
        parser.add_argument(
            "--saved",
            action="store_true",
            help="instead: who holds the memory that autograd saves for backward, by module and by line, and what would free it",
        )
        parser.add_argument("--html", action="store_true", help="write a page instead, with everything in one file")
        parser.add_argument("-o", dest="output", metavar="FILE.html", help="where to write it (default: RUN.html)")
        parser.add_argument(
            "--no-source", action="store_true", help="leave source lines and their files out of the page"
        )
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Draw the report."""
        from kedge.report.page.redact import shareable
        from kedge.rules.registry import check
        from kedge.store.recording import Recording

        _check(args)
        rules = configured_rules(config=args.config)
        recording = Recording.open(args.recording)
        if args.headroom:
            _draw_headroom(recording, args.sites)
            return 0
        if args.saved:
            _draw_saved(recording, everything=args.all)
            return 0
        if args.html:
            recording = shareable(recording, source=not args.no_source)
        findings = check(recording, rules)
        if args.html:
            _write(recording, findings, args, rules)
        else:
            _draw(recording, findings, args, rules)
        return 0


def _check(args: argparse.Namespace) -> None:
    if not args.html and (args.output or args.no_source):
        args.parser.error("-o and --no-source are of pages: add --html")
    if args.headroom and (args.html or args.all):
        args.parser.error("--headroom is a table of its own: leave --html and --all out")
    if args.saved and (args.html or args.headroom or args.sites):
        args.parser.error("--saved is a table of its own: leave --html, --headroom and --sites out")
    if args.html and (args.sites or args.all):
        args.parser.error("a page has all sites and filters them itself: leave --sites and --all out")


def _draw_headroom(recording: Recording, sites: str | None) -> None:
    from kedge.report.headroom import render_headroom
    from kedge.report.terminal import console_for

    render_headroom(recording, console_for(), sites)


def _draw_saved(recording: Recording, *, everything: bool) -> None:
    from kedge.report.saved import render_saved
    from kedge.report.terminal import console_for
    from kedge.store.saved_account import MOST_ROWS

    render_saved(recording, console_for(), None if everything else MOST_ROWS)


def _draw(recording: Recording, findings: Sequence[Finding], args: argparse.Namespace, rules: Sequence[Rule]) -> None:
    from kedge.report.terminal import Extent, console_for, render

    extent = Extent(sites=args.sites, most=None if args.all or args.sites else MOST_MODULES)
    render(recording, findings, console_for(), extent, rules)


def _write(recording: Recording, findings: Sequence[Finding], args: argparse.Namespace, rules: Sequence[Rule]) -> None:
    from kedge.atomic_write import told
    from kedge.report.page.render import render_page

    file = Path(args.output) if args.output else _beside(Path(args.recording))
    page = render_page(recording, findings, rules)
    with told(f"write {file}"):
        file.write_text(page, encoding="utf-8")
    print(f"{file}: {len(page) / 1e6:.1f} MB; open it in a browser")


def _beside(folder: Path) -> Path:
    """Name the page of a recording: beside it, with another ending."""
    folder = folder if folder.name else folder.resolve()
    return folder.with_name(f"{folder.name.removesuffix('.kedge')}.html")
