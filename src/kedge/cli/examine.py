"""``kedge examine``: trials of a program's model, batch, loss and optimizer, before it is trained."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kedge.cli.output import make_writable, print_json
from kedge.cli.run import add_program, program_of
from kedge.errors import ScriptError
from kedge.examination.result import NAMES
from kedge.program.after_import import AfterImport
from kedge.program.ending import Ending, text_of
from kedge.program.program import Program
from kedge.stderr import lasting_messenger
from kedge.watch.run.ranks import LaunchedRank

if TYPE_CHECKING:
    from kedge.examination.capture import Capture
    from kedge.examination.examination import Examination

CANNOT = 2
WRONG = 1


class ExamineCommand:
    """Try a program's model, batch, loss and optimizer before it is trained.

    Runs the program up to its second training step, takes over, tries what careful people try by
    hand, and prints what was done, what came of it and what it means: the first loss, whether
    the data is used, whether samples and positions are apart, what the loss reaches, what the
    optimizer holds, precision, memory and time, and whether one batch is learned, at several
    rates. Then the
    process ends: the program does not go on, and saves nothing more. Its output goes to
    stderr, so that stdout contains only the report.

    Exits with 1 if something is wrong.

    --json prints one object:
      {"models": [NAME, ...], "verdict": VERDICT, "notes": [TEXT, ...],
       "results": [{"trial", "verdict", "did", "came", "means", "where", "model", "numbers"}, ...]}
    A verdict is "wrong", "look", "ok" or "untried". The numbers are those of memory (bytes,
    samples) and time (seconds), by name.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_program(parser)
        parser.add_argument(
            "--skip",
            metavar="TRIALS",
            default="",
            help="leave out these trials (names separated by commas)",
        )
        parser.add_argument(
            "--optimizer",
            metavar="N",
            type=int,
            default=1,
            help=(
                "examine the training of the N-th optimizer that steps, for a program that trains "
                "one model after another (default: 1)"
            ),
        )
        parser.add_argument("--json", action="store_true", help="print one object")
        parser.add_argument(
            "--picture",
            metavar="FILE",
            help="also draw what depends on what, and the losses at several rates (.svg, .png, .pdf)",
        )

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the program, and examine it."""
        program = program_of(args)
        program.check()
        skip = _names(args)
        if LaunchedRank.here().world > 1:
            raise ScriptError(
                "kedge examine looks at one process, and this is one of several ranks; "
                "run the program by itself: kedge examine SCRIPT"
            )
        if args.picture is not None:
            from kedge.examination.picture import check_picture

            check_picture(args.picture)
        if args.optimizer < 1:
            args.parser.refuse(f"--optimizer {args.optimizer}: optimizers are counted from 1")
        report = Report(args.json, args.picture)
        return _examine(program, skip, args.optimizer, report)


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the trials to leave out; exit with the usage for a name that none has."""
    names = tuple(name.strip() for name in args.skip.split(",") if name.strip())
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        args.parser.refuse(f"there is no trial {unknown[0]}: they are {', '.join(NAMES)}")
    return names


class Report:
    """Prints an examination to the stdout that was there before the program.

    Args:
        as_json: Whether it prints JSON.
        picture: The file of the picture; None without one.
    """

    def __init__(self, as_json: bool, picture: str | None) -> None:
        self._as_json = as_json
        self._picture = picture
        self._out = sys.stdout

    def print(self, examination: Examination) -> int:
        """Print an examination; returns the exit status."""
        if self._as_json:
            print_json(_document(examination), self._out)
        else:
            print(examination, file=self._out)
        self._out.flush()
        if self._picture is not None:
            from kedge.examination.picture import draw

            draw(examination, self._picture)
        if examination.verdict == "wrong":
            return WRONG
        return 0


def _document(examination: Examination) -> dict[str, Any]:
    names = ("trial", "verdict", "did", "came", "means", "where", "model", "numbers")
    return {
        "models": list(examination.models),
        "verdict": examination.verdict,
        "notes": list(examination.notes),
        "results": [{n: getattr(each, n) for n in names} for each in examination.results],
    }


def _examine(program: Program, skip: tuple[str, ...], phase: int, report: Report) -> int | Ending:
    found: list[Capture] = []
    tell = lasting_messenger()

    def done(examination: Examination) -> NoReturn:
        status = report.print(examination)
        # Without the program's own end, which would save what the trials have left.
        os._exit(status)

    def failed(error: Exception) -> NoReturn:
        tell(f"this program could not be examined: {text_of(error)}")
        os._exit(CANNOT)

    def begin() -> None:
        from kedge.examination.capture import Capture

        capture = Capture(skip, phase, _silence, failed, done)
        capture.begin()
        found.append(capture)

    AfterImport("torch", begin).install()
    with redirect_stdout(sys.stderr):
        ending = program.run()
    make_writable()
    why = "the program did not import torch"
    if found:
        examination = found[0].conclude(failed=ending.error is not None)
        if examination is not None:
            return report.print(examination)
        why = "the program ended before a backward pass"
    tell(f"nothing was examined: {why}")
    if ending.status:
        return ending
    return CANNOT


def _silence() -> None:
    """Let what the models print in the trials go nowhere."""
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    sys.stdout = sys.stderr = nowhere
