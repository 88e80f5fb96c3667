"""``kedge live``: follow a run in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kedge.cli.config import add_config
from kedge.cli.recordings import add_recording, recording_named
from kedge.errors import KedgeError, required


class LiveCommand:
    """Follow a run in the terminal, while it runs or after its end.

    The command reads the recording as it grows, and waits for one that does not exist yet.
    Keys: arrows choose a module, Enter shows it in detail, / filters, s sorts by the next
    column, r reverses the order, n and m go through the sites and the statistics of the
    module, f shows more findings, q quits.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_recording(parser)
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Follow until the user quits."""
        with required("textual", "live", "kedge live needs"):
            from kedge.report.live.app import LiveApp
        from kedge.rules.project_config import configured_rules

        if not sys.stdout.isatty():
            raise KedgeError(
                "kedge live needs a terminal, and its output is not one; "
                "kedge report prints a recording as text"
            )
        name = recording_named(args.recording, may_come=True)
        ended = LiveApp(Path(name), configured_rules(config=args.config)).run()
        if ended is not None:
            raise ended
        return 0
