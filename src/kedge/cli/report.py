"""``kedge report``: draw a recording in the terminal."""

from __future__ import annotations

import argparse

#: How many modules a report shows where nothing else is asked for.
MOST_MODULES = 40


class Report:
    """Draw a recording: what was found, and a table of what flowed where.

    The findings come first. The table has a line for each module in the order of the
    data, with the scale of its output and of its gradient and a picture of their
    course over the steps. A recording can be read while it is being written.
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

    def run(self, args: argparse.Namespace) -> int:
        """Draw the report."""
        from kedge.report.terminal import Extent, console_for, render
        from kedge.rules.registry import check
        from kedge.store.recording import Recording

        recording = Recording.open(args.recording)
        extent = Extent(sites=args.sites, most=None if args.all or args.sites else MOST_MODULES)
        render(recording, check(recording), console_for(), extent)
        return 0
