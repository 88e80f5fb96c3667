"""``kedge run``: run a program as ``python`` would, and record what flows through its models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.ending import Ending
from kedge.cli.program import Program
from kedge.cli.recorder import Recorder, check_place, manifest_of
from kedge.cli.watching import Watching

if TYPE_CHECKING:
    from kedge.hooks.roots import Summary

NO_MODULE = "the program called no module in this process, outside of functions that are compiled as a whole"
#: How many rules the last lines name.
NAMED_RULES = 3


class Run:
    """Run a program as python would, and record what flows through its models.

    Everything after the script belongs to it. The program needs no change; its output,
    its exit status and what it computes are those it has under python. The recording can
    be read while it is being written: kedge report NAME.kedge.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        add_program(parser)
        parser.add_argument("-o", metavar="NAME.kedge", dest="output", help="the recording (default: SCRIPT.PID.kedge)")
        parser.add_argument("--force", action="store_true", help="replace the recording if it exists")
        parser.add_argument("--sites", metavar="SELECTOR", help="what to watch, such as 'encoder.**' (default: all)")
        parser.add_argument(
            "--every", metavar="N", type=_positive, default=10, help="measure one step in N in full (default: 10)"
        )
        parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but what went wrong")

    def run(self, args: argparse.Namespace) -> Ending:
        """Run the program, finish the recording, tell what was seen."""
        program = program_of(args)
        program.check()
        output = args.output or f"{program.name}.{os.getpid()}.kedge"
        check_place(output, args.force)
        if args.sites is not None:
            _check_selector(args.sites)
        return _run(program, Order(output, args.sites or "**", args.every, args.force, args.quiet))


@dataclass(frozen=True)
class Order:
    """What was asked for besides the program itself."""

    output: str
    sites: str
    every: int
    force: bool
    quiet: bool


def add_program(parser: argparse.ArgumentParser) -> None:
    """Take a script or ``-m`` and a module, and everything after it."""
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) [ARGS ...]"
    rest = argparse.REMAINDER
    parser.add_argument("-m", metavar="MODULE [ARGS ...]", dest="module", nargs=rest, help="run a module")
    parser.add_argument("script", metavar="SCRIPT [ARGS ...]", nargs=rest, help="the script, and what belongs to it")


def program_of(args: argparse.Namespace) -> Program:
    """Make the program that was typed; exit with the usage if there is none."""
    words = list(args.module if args.module is not None else args.script)
    if words[:1] == ["--"]:
        del words[0]
    if not words:
        args.parser.error("name the program to run: a script, or -m and a module")
    return Program(words[0], args.module is not None, words[1:])


def messenger() -> Callable[[str], None]:
    """Make what tells the user something, on the stderr that this process has now."""
    stream = sys.stderr

    def tell(text: str) -> None:
        # The program may have closed it; there is nobody left to tell that to.
        with suppress(OSError, ValueError):
            print(f"[kedge] {text}", file=stream, flush=True)

    return tell


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; 1 measures every step, 10 one in ten")
    return int(text)


def _check_selector(text: str) -> None:
    """See whether a selector can be read; this has to import torch before the program does."""
    from kedge.sites.language import parse

    parse(text)


def _run(program: Program, order: Order) -> Ending:
    pid, tell = os.getpid(), messenger()
    place = Path(order.output).absolute()
    recorder = Recorder(place, manifest_of(program, order.sites, order.every), order.force, tell)
    watching = Watching(recorder, order.sites, order.every, tell)
    watching.begin()
    ending = program.run()
    if os.getpid() != pid:  # a fork of the program: the recording and the last words are its parent's
        return ending
    with suppress(KeyboardInterrupt):
        summary = watching.finish()
        if summary is not None:
            recorder.event(_end(ending, summary))
        recorder.close()
        if not order.quiet:
            for line in _last_words(order.output, recorder, summary):
                tell(line)
    return ending


def _end(ending: Ending, summary: Summary) -> dict[str, object]:
    uncaught = None if isinstance(ending.error, SystemExit) else ending.error
    return {
        "kind": "end",
        "exit": ending.status,
        "steps": summary.steps,
        "sampled": summary.sampled,
        "seconds": summary.seconds,
        "watching": summary.watching,
        "error": f"{type(uncaught).__name__}: {uncaught}".removesuffix(": ") if uncaught else None,
    }


def _last_words(output: str, recorder: Recorder, summary: Summary | None) -> Iterator[str]:
    """Tell how much was seen, what was found, and what to type next."""
    from kedge.report.numbers import counted, percent, seconds

    if summary is None:
        yield "nothing was recorded: the program did not import torch"
        return
    if recorder.writer is None:
        yield "nothing was recorded" + ("" if recorder.failed else f": {NO_MODULE}")
        return
    cost = percent(summary.watching / summary.seconds) if summary.seconds else "nothing"
    yield (
        f"{counted(summary.sites, 'site')}, {counted(summary.steps, 'step')}, {summary.sampled:,} sampled; "
        f"watching took {cost} of {seconds(summary.seconds)}"
    )
    yield _findings(recorder.place)
    yield f"see more with: kedge report {output}"


def _findings(place: Path) -> str:
    try:
        from kedge.report.tally import tally
        from kedge.rules.registry import check
        from kedge.store.recording import Recording

        findings = check(Recording.open(place))
    except Exception as error:  # noqa: BLE001 - a rule that fails must not change how the program ends
        return f"the recording could not be checked: {error!r}"
    places: dict[str, list[str]] = {}
    for finding in findings:
        places.setdefault(finding.code, []).append(finding.site)
    named = [_named(code, sites) for code, sites in list(places.items())[:NAMED_RULES]]
    return tally(findings) + (f": {'; '.join(named)}" if named else "")


def _named(code: str, sites: Sequence[str]) -> str:
    return f"{code} at {sites[0]}" + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")
