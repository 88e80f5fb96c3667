"""``kedge export``: a recording as one file for other programs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kedge.cli.progress import add_quiet, progress
from kedge.cli.recordings import add_recording, open_recording, recording_named
from kedge.cli.sites_option import add_sites, only_sites
from kedge.errors import RecordingExists, required


class ExportCommand:
    """Write a recording as one Parquet file.

    It has a row for each site and step, in data-flow order, with the name of the site and the
    derived statistics beside the measured ones. A value that was not measured is null. The file's
    metadata describe the run, as JSON under the key kedge.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_recording(parser)
        form = parser.add_mutually_exclusive_group(required=True)
        form.add_argument(
            "--parquet",
            action="store_true",
            help="write Parquet, the only format",
        )
        parser.add_argument(
            "-o",
            metavar="FILE",
            help="the file to write (default: RUN's name, ending in .parquet)",
        )
        add_sites(parser, "write only these sites")
        parser.add_argument(
            "--force",
            action="store_true",
            help="replace an existing file",
        )
        add_quiet(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Write the file."""
        with required("pyarrow", "export", "kedge export needs"):
            from kedge.store.export.parquet import is_other, write_parquet
        from kedge.short_text import sized

        whole = open_recording(recording_named(args.recording))
        recording = only_sites(whole, args.sites)
        path = Path(args.o) if args.o else _beside(recording.path)
        if os.path.lexists(path):
            exists = f"cannot write {path}: it exists already"
            remedy = "name another file with -o"
            if is_other(path):
                raise RecordingExists(f"{exists}, and is not a regular file; {remedy}")
            if not args.force:
                raise RecordingExists(f"{exists}; replace it with --force, or {remedy}")
        with progress(f"writing {path}"):
            rows = write_parquet(recording, path)
        size = sized(path.stat().st_size)
        print(f"{path}: {rows:,} rows of {len(recording.sites):,} sites, {size}")
        return 0


def _beside(recording: Path) -> Path:
    """Return the file with the name of the recording, in the working directory."""
    return Path(recording.resolve().name).with_suffix(".parquet")
