"""``kedge attach``: watch a program that runs already, and let it go again."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.cli.watch_options import add_watch_options, check_watched
from kedge.short_text import listed
from kedge.stderr import say

if TYPE_CHECKING:
    from kedge.running.attached_program import AttachedProgram

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PATIENCE = 30.0


class AttachCommand:
    """Watch a training that is already running, then detach from it.

    The training needs no change, and continues when the command ends: on Ctrl-C, after the
    time given with --for, or in any other way. Access is by Python itself (if both run 3.14
    or newer) or by gdb. Linux only, as the same user or as root. The environment of the
    training needs only PyTorch: if it has no Kedge, the command lends it its own.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "pid", metavar="PID", type=_process, help="the process ID of the training"
        )
        parser.add_argument(
            "-o",
            metavar="NAME.kedge",
            dest="output",
            help="the recording (default: SCRIPT.PID.kedge)",
        )
        parser.add_argument(
            "--for",
            metavar="TIME",
            dest="duration",
            type=_duration,
            help="how long to watch, such as 90s, 5m or 2h",
        )
        parser.add_argument(
            "--wait",
            metavar="TIME",
            type=_duration,
            default=_PATIENCE,
            help="how long to keep trying to reach the program (default: 30s)",
        )
        add_watch_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Attach, report what the watch says until it is over, and judge the recording."""
        from kedge.running.attached_program import attach
        from kedge.running.process import RunningProcess

        process = RunningProcess.found(args.pid)
        name = args.output or _free_name(f"{process.script}.{process.pid}", force=args.force)
        if args.sites is not None:
            check_watched(args.sites)
        wishes = {
            "recording": os.path.abspath(name),
            "force": args.force,
            "sites": args.sites or "**",
            "every": args.every,
            "budget": args.budget,
        }
        program = attach(process, wishes, args.wait)
        say(_found(process.pid, program.found))
        try:
            return _follow(program, name, args.duration)
        finally:
            program.close()


def _follow(program: AttachedProgram, name: str, duration: float | None) -> int:
    heard = _Heard(program, name, duration)
    while True:
        try:
            for event in program.events():
                heard.hear(event)
            break
        except KeyboardInterrupt:
            # The second time: the watch ends by itself, when it can.
            if heard.is_leaving:
                say("stopped at once; the program detaches at its next step")
                return 0
            heard.is_leaving = True
            say("detaching at the next step of the program")
            program.leave()
    for line in heard.last_words():
        say(line)
    return 0


class _Heard:
    def __init__(
        self,
        program: AttachedProgram,
        name: str,
        duration: float | None,
    ) -> None:
        self.program = program
        self.name = name
        self._duration = duration
        self.is_leaving = False
        self._count_time()
        self._over: str | None = None
        self._summary: Mapping[str, Any] | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        """Print an event of the watch, or keep it for the end."""
        kind = event["event"]
        if kind == "began":
            self._count_time()
            say(f"recording to {self.name}; Ctrl-C stops the recording, not the program")
        elif kind == "says":
            say(event["text"])
        elif kind == "summary":
            self._summary = event
        else:
            self._over = event["why"]

    def _count_time(self) -> None:
        """Let the time of the watch count from now on; it counts anew when the watch begins."""
        if self._duration is not None:
            self.program.until = time.monotonic() + self._duration

    def last_words(self) -> Iterator[str]:
        """Yield what the user has to know at the end."""
        pid = self.program.process.pid
        if self._over is None:
            yield f"process {pid} was killed; the recording can be read up to that point"
        elif self._over == "the command left":
            yield f"process {pid} runs on without hooks; Kedge's modules stay imported in it"
        else:
            yield f"{self._over}; its recording is complete"
        yield from self._about_recording()

    def _about_recording(self) -> Iterable[str]:
        from kedge.watch.run.end_clock import EndClock
        from kedge.watch.run.summary import words_on
        from kedge.watch.totals import WatchSummary

        if self._summary is None and os.path.exists(self.name):
            return []
        if self._summary is None:
            return ["nothing was recorded: no module was called in this time"]
        if not self._summary["made"]:
            return ["nothing was recorded: no step ended in this time"]
        summary = WatchSummary(**self._summary["figures"])
        end = EndClock(summary.watching, summary.seconds, elsewhere=True)
        return words_on(self.name, Path(self.name), summary, end=end)


def _found(pid: int, event: Mapping[str, Any]) -> str:
    optimizers = listed(event["optimizers"])
    models = listed(event["models"])
    if not optimizers:
        return (
            f"attached to process {pid}: it has no optimizer, "
            "so forward passes count as steps. Waiting for one"
        )
    trained = models or "tensors that belong to no module"
    return f"attached to process {pid}: {optimizers} trains {trained}. Waiting for a forward pass"


def _free_name(stem: str, *, force: bool) -> str:
    """Return a name that no recording has; the first one if it may be replaced."""
    name = f"{stem}.kedge"
    number = 1
    while os.path.lexists(name) and not force:
        number += 1
        name = f"{stem}-{number}.kedge"
    return name


def _process(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the number of a process; list the Python processes: pgrep -a python"
        )
    return int(text)


def _duration(text: str) -> float:
    """Return seconds: ``90``, ``90s``, ``5m``, ``1.5h``, ``2d``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write one such as 90s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2]]
