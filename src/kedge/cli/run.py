"""``kedge run``: run a program as ``python`` would, and record what flows through its models."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kedge.cli import BEGAN
from kedge.cli.meant import no_module, no_program
from kedge.cli.progress import progress
from kedge.cli.watch_options import add_watch_options, check_watched
from kedge.cli.watching import Watching
from kedge.errors import ScriptError
from kedge.program.ending import Ending, await_threads, ended_before, text_of
from kedge.program.own_imports import OWN_IMPORTS
from kedge.program.program import Program
from kedge.program.restored import BeforeProgram
from kedge.signals import came_by_signal
from kedge.stderr import STATUS, lasting_messenger
from kedge.watch.run.end_clock import EndClock
from kedge.watch.run.options import WatchOptions, manifest_of
from kedge.watch.run.ranks import LaunchedRank
from kedge.watch.run.recorder import RecordingSink

if TYPE_CHECKING:
    from kedge.store.writing.folder import RecordingWriter
    from kedge.watch.totals import WatchSummary

NOTHING = "nothing was recorded"
NO_TORCH = "the program did not import torch"


class RunCommand:
    """Run a program as python would, and record what flows through its models.

    Arguments after the script are passed to it. The program needs no change: its output,
    exit status and results are the same as under python, unless it counts the hooks in a
    module's own table, where Kedge's are too, or the references to a parameter. You can
    read the recording while it is being written: kedge report NAME.kedge.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_program(parser)
        parser.add_argument(
            "-o",
            metavar="NAME.kedge",
            dest="output",
            help="the recording (default: SCRIPT.PID.kedge)",
        )
        add_watch_options(parser)
        parser.add_argument(
            "--dump",
            action="store_true",
            help="keep the tensors of the first call that makes a NaN or infinity (slower)",
        )
        parser.add_argument(
            "--no-rerun",
            action="store_true",
            help="run no step again in a copy of the process when its loss is NaN or jumps",
        )
        parser.add_argument(
            "--keep-steps",
            metavar="N",
            type=_count,
            help=(
                "keep the last N steps for kedge replay; 0 keeps none (default: small ones whose "
                "loss is NaN or jumps)"
            ),
        )
        parser.add_argument(
            "--saved",
            action="store_true",
            help=(
                "record every tensor that autograd saves in the first step (see: "
                "kedge report --saved)"
            ),
        )
        parser.add_argument(
            "--time",
            action="store_true",
            help="time each module in measured steps, forward and backward",
        )
        parser.add_argument(
            "--on",
            metavar="CODE=ACTION",
            action="append",
            type=_order,
            default=[],
            help=(
                "at a finding of this rule, or of this severity (error, warning), stop the program, "
                "raise an error in it, skip the optimizer's step, or keep a snapshot of its state; "
                "can be repeated"
            ),
        )
        parser.add_argument(
            "-q",
            "--quiet",
            action="store_true",
            help="print only failures",
        )
        parser.add_argument(
            "--verify",
            action="store_true",
            help="check that the program computes the same bits when it is not watched",
        )
        parser.add_argument(
            "--strict",
            action="store_true",
            help="stop the program if it cannot be recorded",
        )

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the program, finish the recording, print the last lines."""
        program = program_of(args)
        try:
            program.check()
        except ScriptError as refused:
            if args.verify:
                raise
            return program.unparsed(refused)
        launch = LaunchedRank.here()
        name = launch.settle(args.output or f"{program.name}.{launch.label}.kedge", args.force)
        if args.sites is not None:
            check_watched(args.sites)
        on = _orders(args.on)
        if args.verify:
            from kedge.verify.compare import verify

            return verify(program, args)
        account = _step_account if args.saved else None
        order = WatchOptions(
            args.sites or "**",
            args.every,
            args.budget,
            args.dump,
            account,
            on,
            rerun=not args.no_rerun,
            keep_steps=args.keep_steps,
            time=args.time,
        )
        return _run(program, order, Output(name, args.force, args.quiet, args.strict))


def _step_account(shield: Any) -> Any:
    """Return the keeper of a step's account; its rules of rebuilding are loaded only here."""
    from kedge.watch.records.step_account import StepAccount

    return StepAccount(shield)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, such as 2")
    return int(text)


def _order(text: str) -> tuple[str, str]:
    """Return the code or severity, and the action, of a text such as ``NAN-BORN=stop``."""
    key, equals, action = text.partition("=")
    if not (key and equals and action):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no action; write one behind the code, such as NAN-BORN=stop"
        )
    return key, action


def _orders(typed: list[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    """Return what is to be done at findings, as typed and as the project has it.

    The rules, and numpy with them, are loaded before the program only if there is something.
    """
    from kedge.program.project_file import project_table

    _, table = project_table()
    if not typed and "on" not in table:
        return {}
    from kedge.watch.acting.orders import orders_of, with_those_of_project

    given: dict[str, str] = {}
    for key, action in typed:
        given[key] = ",".join(part for part in (given.get(key), action) if part)
    return with_those_of_project(orders_of(given, "--on "))


@dataclass(frozen=True)
class Output:
    """The place of the recording, and what `kedge run` does beside it.

    Attributes:
        name: The place.
        force: Whether an existing recording is replaced.
        quiet: Whether the last lines are left out.
        strict: Whether a failure of Kedge ends the program.
    """

    name: str
    force: bool
    quiet: bool
    strict: bool


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the program: a script, or ``-m`` and a module, and everything after it."""
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) [ARGS ...]"
    rest = argparse.REMAINDER
    parser.add_argument(
        "-m",
        metavar="MODULE [ARGS ...]",
        dest="module",
        nargs=rest,
        help="run a module",
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT [ARGS ...]",
        nargs=rest,
        help="the script, and its arguments",
    )


def program_of(args: argparse.Namespace) -> Program:
    """Return the program that was typed; exit with the usage if there is none."""
    words = list(args.module if args.module is not None else args.script)
    if words[:1] == ["--"]:
        del words[0]
    if not words:
        args.parser.refuse("name the program to run: a script, or -m and a module")
    word = args.word
    first, *rest = words
    is_module = args.module is not None
    said = no_module(word, words) if is_module else no_program(word, first, rest)
    if said is not None:
        args.parser.refuse(said)
    return Program(first, is_module, rest)


def _run(program: Program, order: WatchOptions, output: Output) -> Ending:
    get_pid = os.getpid  # the program may replace it
    pid = get_pid()
    launch = LaunchedRank.here()
    report = lasting_messenger()
    if not launch.leads:
        report = _signed(report, launch.rank)
    recorder = recorder_of(program, order, output, report)
    watching = Watching(recorder, order, report, strict=output.strict)
    watching.place = recorder.folder
    recorder.begun = lambda folder: watching.note_position(folder, launch.rank, launch.world)
    before = BeforeProgram()
    folder = Path.cwd()
    watching.begin()
    starting = perf_counter() - BEGAN
    ending = program.run()
    # In a fork of the program: the recording and the last words are its parent's.
    if pid != get_pid():
        return ending
    await_threads()
    end = RunEnd(watching, recorder, output, launch, folder, report, starting)
    try:
        with before.restored():
            return end.conclude(ending)
    except SystemExit as left:
        # A handler of the program's that ends it, which has ended already.
        if came_by_signal(left):
            return ending
        # Strict, and the last rows were lost.
        return replace(ending, error=left, status=STATUS)
    except KeyboardInterrupt:
        return ending
    except BaseException as error:  # noqa: BLE001 - the program's exit status is decided
        report(f"could not finish the recording: {text_of(error)}; its end may be missing")
        if output.strict and not ending.status:
            return replace(ending, status=STATUS)
        return ending


@dataclass(frozen=True)
class RunEnd:
    """The work after the program: the end of the recording, and the last words.

    `starting` is how many seconds Kedge took before the program began.
    """

    watching: Watching
    recorder: RecordingSink
    output: Output
    launch: LaunchedRank
    folder: Path
    report: Callable[[str], None]
    starting: float

    def conclude(self, ending: Ending) -> Ending:
        """Finish the recording of a program that has ended; returns how this process ends.

        Raises:
            SystemExit: The recording failed, and a failure ends the program.
        """
        end = EndClock(self.starting + self.watching.took, perf_counter() - BEGAN)
        if self.output.quiet or not self.launch.leads:
            self._finish(ending)
        else:
            with progress(f"judging {self.output.name}"):
                summary = self._finish(ending)
                self.launch.await_others(self.recorder.place)
                lines = list(self._last_words(summary, ending.error, end))
            for line in lines:
                self.report(line)
        failed = self.recorder.failed or self.watching.failed
        if self.output.strict and failed and not ending.status:
            return replace(ending, status=STATUS)
        return ending

    def _finish(self, ending: Ending) -> WatchSummary | None:
        position = self.watching.position_of(ending.error)
        summary = self.watching.finish()
        if summary is not None:
            from kedge.watch.run.end_event import end_of

            self.recorder.event(end_of(summary, ending.status, ending.error, position))
        self.recorder.close()
        return summary

    def _last_words(
        self, summary: WatchSummary | None, error: BaseException | None, end: EndClock
    ) -> Iterable[str]:
        if summary is None:
            if self.watching.failed:
                return [NOTHING]
            why = ended_before("it imported torch", error) or NO_TORCH
            return [f"{NOTHING}: {why}"]
        from kedge.watch.run.summary import last_words

        return last_words(self.output.name, self.recorder, summary, self.folder, error, end)


def _signed(report: Callable[[str], None], rank: int) -> Callable[[str], None]:
    return lambda text: report(f"rank {rank}: {text}")


def recorder_of(
    program: Program, order: WatchOptions, output: Output, report: Callable[[str], None]
) -> RecordingSink:
    """Return what writes the recording of a program."""
    place = Path(output.name).absolute()
    manifest = {
        **manifest_of(program.command, program.target, order),
        "folder": os.getcwd(),
        "digest": program.digest,
    }

    # With the first step: numpy and torch are the program's to import first.
    def begin() -> RecordingWriter | None:
        with OWN_IMPORTS.in_force():
            from kedge.watch.run.begin import begin_recording

        return begin_recording(place, manifest, output.force)

    return RecordingSink(
        place, begin, report, strict=output.strict, waits=LaunchedRank.here().meets
    )
