"""The command line: parses the arguments, runs the command, and turns its errors into one message."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from kedge.cli.attach import AttachCommand
from kedge.cli.check import CheckCommand
from kedge.cli.command import Command
from kedge.cli.diff import DiffCommand
from kedge.cli.explain import ExplainCommand
from kedge.cli.export import ExportCommand
from kedge.cli.extract import ExtractCommand
from kedge.cli.live import LiveCommand
from kedge.cli.query import QueryCommand
from kedge.cli.report import ReportCommand
from kedge.cli.run import RunCommand
from kedge.cli.serve import ServeCommand
from kedge.cli.sites import SitesCommand
from kedge.errors import KedgeError, RecordingError
from kedge.json_input.reading import visible
from kedge.numbers import with_short_words
from kedge.program.ending import SIGINT_STATUS, Ending
from kedge.stderr import print_error

COMMANDS: tuple[Command, ...] = (
    RunCommand(),
    AttachCommand(),
    ReportCommand(),
    CheckCommand(),
    DiffCommand(),
    ExplainCommand(),
    SitesCommand(),
    ServeCommand(),
    LiveCommand(),
    ExportCommand(),
    QueryCommand(),
    ExtractCommand(),
)

#: The commands that run code of the user's, which finds its output as it is without them.
RUNS = (RunCommand, SitesCommand, ExtractCommand)

CANNOT = 2
BROKEN_PIPE_STATUS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after ``kedge``; the process's own arguments if None.

    Returns:
        The exit status: 2 if the command could not be carried out.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    if {*typed} in ({"--version", "-v"}, {"--version", "--verbose"}):
        return _describe()
    args = build_parser().parse_args(typed)
    ended = _run(args.command, args)
    if isinstance(ended, Ending):
        ended.leave()
    return ended


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kedge",
        description="See what flows through a PyTorch training run, and find what is wrong with it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action=_Version,
        help="print the version and exit; with -v, also the private parts of PyTorch that are used",
    )
    words = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        text = inspect.getdoc(command) or ""
        own = words.add_parser(
            type(command).__name__.removesuffix("Command").lower(),
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(own)
        own.set_defaults(command=command, parser=own)
    return parser


def _run(command: Command, args: argparse.Namespace) -> int | Ending:
    if not isinstance(command, RUNS) and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        ended = command.run(args)
        if not isinstance(ended, Ending) and sys.stdout is not None:
            sys.stdout.flush()
    except KedgeError as error:
        said = with_short_words(str(error)) if isinstance(error, RecordingError) else str(error)
        print_error(f"kedge: {visible(said, lines=True)}")
        return CANNOT
    except BrokenPipeError:
        # The reader of the output has closed it. Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
    except KeyboardInterrupt:
        return SIGINT_STATUS
    return ended


def _describe() -> int:
    """Print the version, and whether the installed PyTorch has the private names that are used."""
    import torch

    from kedge.native import on_device
    from kedge.torch_internals.corners import described

    print(f"PyTorch {torch.__version__}, and the private parts of it that kedge {metadata.version('kedge')} uses:")
    for line in described():
        print(f"  {line}")
    print(f"  {on_device.described()}")
    return 0


class _Version(argparse.Action):
    """The option that prints the version, which is looked up only then."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kedge {metadata.version('kedge')}")
        parser.exit()
