"""``kedge query``: SQL queries over a recording."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from typing import Any

from kedge.cli.config import add_config
from kedge.cli.output import print_json
from kedge.cli.progress import add_quiet, progress
from kedge.cli.recordings import add_recording, is_recording, open_recording, recording_named
from kedge.cli.sites_option import add_sites, only_sites
from kedge.errors import required
from kedge.short_text import for_json

#: The rows that are printed by default.
MOST_ROWS = 100
#: The least width of a column; with less room, each row is printed as a list.
_NARROWEST = 6


class QueryCommand:
    """Query a recording with SQL, in DuckDB's dialect.

    There are four tables: stats (one row for each site and step), sites, findings and events;
    "DESCRIBE stats" lists the columns of one. The query only reads the recording, which may still
    be growing, and cannot access anything else.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_recording(parser)
        parser.add_argument(
            "sql", metavar="SQL", help="one query; - reads it from the standard input"
        )
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print a list of objects")
        form.add_argument(
            "--csv",
            action="store_true",
            help="print comma-separated values",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            help=f"print every row, not only the first {MOST_ROWS} (--json and --csv always do)",
        )
        add_sites(parser, "leave only these sites in the tables stats and sites")
        add_quiet(parser)
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the answer."""
        if args.recording is None and is_recording(recording_named(args.sql, may_come=True)):
            args.parser.refuse(
                "the query is missing; write it after the name of the recording, "
                'such as "SELECT * FROM stats LIMIT 9"'
            )
        with (
            required("duckdb", "query", "kedge query needs"),
            required("pyarrow", "query", "kedge query needs"),
        ):
            from kedge.store.export.sql import ask
        from kedge.rules.project_config import configured_rules
        from kedge.rules.registry import check

        recording = open_recording(recording_named(args.recording))
        rules = configured_rules(config=args.config)
        chosen = only_sites(recording, args.sites)
        sql = sys.stdin.read() if args.sql == "-" else args.sql
        with progress("querying"):
            names, rows = ask(chosen, sql, lambda: check(recording, rules))
        if args.json:
            objects = [dict(zip(names, map(for_json, row), strict=True)) for row in rows]
            print_json(objects)
        elif args.csv:
            csv.writer(sys.stdout, lineterminator="\n").writerows([names, *rows])
        else:
            most = None if args.all else MOST_ROWS
            _draw(names, rows, most)
        return 0


def _draw(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    most: int | None,
) -> None:
    from kedge.report.terminal import console_for
    from kedge.short_text import counted

    console = console_for()
    if len(names) * _NARROWEST > console.width:
        for row in rows[:most]:
            fields = list(zip(names, row, strict=True))
            console.print(_table(["", ""], fields, header=False))
    else:
        console.print(_table(names, rows[:most]))
    count = counted(len(rows), "row")
    if most is not None and len(rows) > most:
        count += f", the first {most} shown: --all shows every row"
    console.print(count)


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    header: bool = True,
) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    box = SIMPLE_HEAD if header else None
    table = Table(box=box, pad_edge=False, show_header=header)
    for i, name in enumerate(names):
        figures = all(isinstance(row[i], int | float | None) for row in rows)
        if header and rows and figures:
            table.add_column(Text(name), justify="right", overflow="fold")
        else:
            table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> Any:
    from rich.text import Text

    if value is None:
        return Text("null", "dim")
    if isinstance(value, float):
        return Text(f"{value:.6g}")
    return Text(str(value))
