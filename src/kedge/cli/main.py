"""The command line: parses the arguments, runs the command, and turns its errors into one message.

# Note [argparse]
Typer, Click and cyclopts were weighed against argparse with the subclass in ``parser.py``, by what
they would delete (November 2026, Python 3.11). The 74 arguments of the commands would stay 74
declarations in another form. Deleted would be 60 lines of ``parser.py``, 40 of `build_parser` and
its help, and the 170 of ``completion.py``, whose scripts, unlike theirs, start no Python at each
Tab; ``meant.py`` and ``recordings.py`` know recordings and programs, and would stay. Importing
takes 1 ms (argparse), 56 (click), 74 (typer) and 118 (cyclopts), each time a program is started
under ``kedge run``, and in the same process as that program, which would find their modules
imported, of versions that may not be its own. On disk, beyond rich: 0.5 MB (click), 8.6 (typer,
with pydantic), 3.0 (cyclopts). So argparse stays.
"""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Protocol

from kedge.cli.attach import AttachCommand
from kedge.cli.check import CheckCommand
from kedge.cli.completion import CompletionCommand
from kedge.cli.diff import DiffCommand
from kedge.cli.examine import ExamineCommand
from kedge.cli.explain import ExplainCommand
from kedge.cli.export import ExportCommand
from kedge.cli.extract import ExtractCommand
from kedge.cli.live import LiveCommand
from kedge.cli.meant import no_command
from kedge.cli.output import make_writable
from kedge.cli.parser import CANNOT, CommandParser
from kedge.cli.progress import heed_quiet
from kedge.cli.query import QueryCommand
from kedge.cli.replay import ReplayCommand
from kedge.cli.report import ReportCommand
from kedge.cli.run import RunCommand
from kedge.cli.serve import ServeCommand
from kedge.cli.sites import SitesCommand
from kedge.errors import KedgeError, RecordingError
from kedge.program.ending import SIGINT_STATUS, Ending
from kedge.short_text import with_short_words
from kedge.shown_text import visible
from kedge.stderr import print_error


class Command(Protocol):
    """One word after ``kedge``; its docstring is its help text, its first line the short one."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the command.

        Returns:
            The exit status, or the ending of the program that was run.

        Raises:
            KedgeError: The command cannot be carried out.
        """


COMMANDS: tuple[Command, ...] = (
    RunCommand(),
    ExamineCommand(),
    AttachCommand(),
    ReplayCommand(),
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
    CompletionCommand(),
)

SUBJECT = "Record a PyTorch training run, look at every tensor in it, and find its faults."
CLOSING = """\
kedge COMMAND --help describes a command. Without RUN, a command reads the newest
recording in this folder. kedge --version prints the version; add -v for the private
parts of PyTorch that Kedge uses."""

#: The commands by what they are for, as the help lists them.
GROUPS = {
    "record a training": ("run", "attach", "sites"),
    "try one before it runs": ("examine",),
    "run a step again": ("replay",),
    "read a recording": ("report", "check", "diff", "explain", "serve", "live"),
    "get data out": ("export", "query", "extract"),
    "set up the terminal": ("completion",),
}

#: The commands that run code of the user's, which finds its output as it is without them.
RUNS = (RunCommand, ExamineCommand, ReplayCommand, SitesCommand, ExtractCommand)

BROKEN_PIPE_STATUS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after ``kedge``; the process's own arguments if None.

    Returns:
        The exit status: 2 if the command could not be carried out.
    """
    if argv is None:
        argv = sys.argv[1:]
    typed = list(argv)
    if {*typed} in ({"--version", "-v"}, {"--version", "--verbose"}):
        return _describe()

    args = _read(typed)
    try:
        ended = _run(args.command, args)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _lacks_torch(args.parser.prog)
    if isinstance(ended, Ending):
        ended.leave()
    return ended


def build_parser() -> AllCommands:
    """Return the parser of all commands."""
    parser = AllCommands(prog="kedge", allow_abbrev=False)
    parser.add_argument(
        "-V",
        "--version",
        action=_Version,
        help=(
            "print the version and exit; with -v, also the private parts of PyTorch that Kedge uses"
        ),
    )
    words = parser.add_subparsers(dest="word", metavar="COMMAND", parser_class=CommandParser)
    for command in COMMANDS:
        text = inspect.getdoc(command) or ""
        first_line, _, _ = text.partition("\n")
        short = first_line.rstrip(".")
        name = type(command).__name__.removesuffix("Command").lower()
        own = words.add_parser(
            name,
            help=short,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        own.short = short
        command.add_arguments(own)
        own.set_defaults(command=command, parser=own, word=name, commands=words.choices)
    return parser


def _read(typed: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the command that was typed; exit if there is none."""
    parser = build_parser()
    words = parser.own
    first, *rest = _in_order(typed)
    if first in words:
        return words[first].read(rest)
    if first and first not in parser.options:
        parser.refuse(no_command(first, rest, words))
    if not first:
        parser.print_help(sys.stderr)
        parser.exit(CANNOT)
    return parser.parse_args([first])  # it prints what the option asks for, and exits


def _in_order(typed: Sequence[str]) -> list[str]:
    """Return the words with the command first, also for `kedge help run` and `kedge version`.

    If there are none, returns an empty one.
    """
    if not typed:
        return [""]
    if list(typed) == ["version"]:
        return ["--version"]
    if typed[0] not in ("help", "-h", "--help"):
        return list(typed)
    about = next((word for word in typed[1:] if not word.startswith("-")), "help")
    if about == "help":
        return ["--help"]
    return [about, "--help"]


def _run(command: Command, args: argparse.Namespace) -> int | Ending:
    if not isinstance(command, RUNS):
        make_writable()
    heed_quiet(args)
    try:
        ended = command.run(args)
        if not isinstance(ended, Ending) and sys.stdout is not None:
            sys.stdout.flush()
    except KedgeError as error:
        said = str(error)
        if isinstance(error, RecordingError):
            said = with_short_words(said)
        print_error(f"kedge: {visible(said, lines=True)}")
        return CANNOT
    except BrokenPipeError:
        _drop_output()  # its reader has closed it
        return BROKEN_PIPE_STATUS
    except OSError as error:
        told = _about_surroundings(error, command)
        if told is None:
            raise
        print_error(f"kedge: {told}")
        return CANNOT
    except KeyboardInterrupt:
        return SIGINT_STATUS
    return ended


def _drop_output() -> None:
    """Write to nowhere from here on.

    Python would report again, when it flushes at exit, that the output cannot be written.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _about_surroundings(error: OSError, command: Command) -> str | None:
    """Return the message about an output or a working directory that cannot be used.

    Returns:
        None for an error of a file.
    """
    if error.filename is not None:
        return None
    if error.errno == errno.ENOENT:  # from os.getcwd()
        return "the working directory does not exist any more; change to another one"
    if isinstance(command, RUNS):
        return None
    _drop_output()
    return f"the output cannot be written: {error.strerror or error}"


def _lacks_torch(what: str) -> int:
    print_error(f"kedge: {what} needs PyTorch, and {sys.executable} has none; pip install torch")
    return CANNOT


def _describe() -> int:
    """Print the version, and whether the installed PyTorch has the private names that are used."""
    try:
        import torch
    except ModuleNotFoundError:
        return _lacks_torch("kedge --version -v")

    from kedge.native import on_device
    from kedge.torch_internals.corners import described

    print(
        f"PyTorch {torch.__version__}, "
        f"and the private parts of it that kedge {metadata.version('kedge')} uses:"
    )
    for line in described():
        print(f"  {line}")
    print(f"  {on_device.described()}")
    return 0


class AllCommands(CommandParser):
    """The parser of the first word, whose help lists the commands in groups."""

    @property
    def own(self) -> dict[str, CommandParser]:
        """The parser of each command."""
        words = next(
            action
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - the class has no other name
        )
        return dict(words.choices)

    def format_help(self) -> str:
        """Return the list of the commands."""
        own = self.own
        lines = ["usage: kedge COMMAND [ARGUMENTS]", "", SUBJECT]
        for title, names in GROUPS.items():
            lines += ["", f"{title}:"]
            lines += [f"  {name:<11}{own[name].short}" for name in names if name in own]
        return "\n".join([*lines, "", CLOSING, ""])


class _Version(argparse.Action):
    """The option that prints the version, which is looked up only then."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kedge {metadata.version('kedge')}")
        parser.exit()
