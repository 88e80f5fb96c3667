"""Watching a part of a program from within: ``with kedge.watch("run.kedge"): train()``."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from torch import distributed, nn

from kedge.calls.arguments import called_as, described
from kedge.calls.missing_attributes import MissingAttributes
from kedge.errors import WatchingFailed, WrongCall
from kedge.files.given_path import given_path
from kedge.hooks.attach import refresh
from kedge.hooks.firing.schedule import every as schedule_of
from kedge.hooks.placing.own_warnings import ignore_warnings, show_warnings
from kedge.notebook import paragraph
from kedge.report.shown_run import ShownRun
from kedge.rules.rule import Rule
from kedge.sites.filters import check_watched
from kedge.sites.select import Selector, Selectors
from kedge.stderr import Shield, messenger
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.acting.orders import orders_of, with_those_of_project
from kedge.watch.run.begin import make_watch
from kedge.watch.run.block_recording import BlockRecording
from kedge.watch.run.end_clock import EndClock
from kedge.watch.run.options import BEGINNING, ENDING, WatchOptions, manifest_of
from kedge.watch.run.ranks import LaunchedRank
from kedge.watch.run.shown import Findings, run_html
from kedge.watch.run.sinks import RunSink, Sinks
from kedge.watch.totals import WatchSummary
from kedge.watch.watcher import Watcher


class WatchBlock(MissingAttributes):
    """A part of a program that is watched, from `begin` to `end` or as a ``with`` block.

    `begin` raises errors in the options themselves, such as an existing recording. Later failures
    are reported once, and the program goes on; with `strict` they are raised at the end. A block
    without an `end` ends with the program.

    Args:
        path: The recording; None for a name made of the script's and the process's.
        options: The options of the watch.
        force: Whether an old recording may be replaced.
        strict: Whether failures of Kedge are raised.

    Attributes:
        recording: The path of the recording. When the block begins again it is numbered:
            ``run-2.kedge``.
        tell: Reports to the user; assign another function to report elsewhere than on stderr, or
            None for silence.
        is_off: Whether no block watches: in a program that runs again for one of its steps, its own
            blocks would write to the recording that it is taken from.
    """

    is_off: ClassVar[bool] = False
    _instead_of = (
        dict.fromkeys(
            ("history", "loss", "losses", "results", "series", "steps"),
            "kedge.Recording.open(run.recording) has what was recorded: "
            '.series("loss", "mean"), .steps, .sites',
        )
        | dict.fromkeys(("check", "errors", "warnings"), "run.findings() returns the findings")
        | dict.fromkeys(
            ("html", "plot", "report", "show", "summary"),
            "kedge report RUN --html in a terminal draws the recording",
        )
    )

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        options: WatchOptions,
        *,
        force: bool,
        strict: bool,
    ) -> None:
        check_watched(options.sites)
        schedule_of(options.every)
        self.options = options
        self.force = force
        self.strict = strict
        if path is None:
            self._first = Path(default_name())
        else:
            self._first = given_path(path)
        self.recording = self._first
        self.tell: Callable[[str], None] | None = _tell
        self._sinks: list[RunSink] = []
        self._named: list[weakref.ref[nn.Module]] = []
        self._watch: Watcher | None = None
        self._out: BlockRecording | None = None
        self._failures: list[str] = []
        self._pid: int | None = None

    def send_to(self, *sinks: RunSink) -> Self:
        """Send the recorded data to these sinks too, from the next `begin` on; they are closed at the end."""
        self._sinks += sinks
        return self

    def naming(self, model: nn.Module) -> Self:
        """Name modules as in this model.

        This holds if the program calls them singly and never calls the model itself, too.
        """
        self._named[:] = [weakref.ref(model)]
        if self._watch is not None:
            names = self._watch.models.names.given
            names.update((module, name) for name, module in modules_in(model).items())
        return self

    def begin(self) -> Self:
        """Begin to watch; an active watch of this block is ended first.

        Raises:
            RecordingError: The recording cannot be made there.
        """
        self.end()
        if self.is_off:
            return self
        launch = launched()
        number = 1
        name = self._first
        if self._out is not None:
            number = self._out.number + 1
            name = name.with_name(f"{name.stem}-{number}{name.suffix}")
        self.recording = Path(launch.settle(str(name), self.force))

        manifest = {**manifest_of(_command(), script_name(), self.options), **launch.describe()}
        sinks: Iterable[RunSink] = ()
        if launch.leads:
            sinks = self._sinks
        self._out = BlockRecording(
            self.recording, number, launch, manifest, self.force, sinks, self._complain
        )
        self._watch = None
        self._failures.clear()
        self._pid = os.getpid()
        atexit.register(self._end_with_program)
        ignore_warnings()
        if not self.strict:
            Shield(*BEGINNING, tell=self._complain)(self._install, self._out.sinks, launch.rank)
            return self
        try:
            self._install(self._out.sinks, launch.rank)
        except Exception as error:
            self.end(error)
            raise
        return self

    def _install(self, sinks: Sinks, rank: int) -> None:
        refresh()
        watch = make_watch(sinks, self.options, sinks.recorder.folder, rank)
        with ExitStack() as undo:
            undo.push(watch)
            watch.__enter__()
            undo.pop_all()
        self._watch = watch
        for known in self._named:
            model = known()
            if model is not None:
                self.naming(model)

    def end(self, error: BaseException | None = None) -> None:
        """Remove every hook and finish the recording; a second call does nothing.

        Args:
            error: The error that ended the watched part, for the recording.

        Raises:
            WatchingFailed: Kedge failed, `strict` is set, and there is no other error.
        """
        if self._pid != os.getpid():
            return
        self._pid = None
        atexit.unregister(self._end_with_program)
        show_warnings()
        failure: Exception | None = None
        if self._out is not None:
            self._out.is_over = True
            if self._watch is not None:
                Shield(*ENDING, tell=self._complain)(self._close, self._watch, self._out, error)
                failure = self._watch.shield.failure
        if failure is not None:
            self._failures.append(f"a hook failed: {type(failure).__name__}: {failure}")
        if self.strict and self._failures and error is None:
            failures = "; ".join(self._failures)
            raise WatchingFailed(f"watching into {self.recording} failed: {failures}") from failure

    def _close(self, watch: Watcher, out: BlockRecording, error: BaseException | None) -> None:
        summary = watch.summary
        end = EndClock(summary.watching, summary.seconds)
        try:
            watch.__exit__(None, None, None)
        finally:
            # Taken first: work after the end of the program does not count as its time.
            summary = watch.summary
            if watch.record.dump is not None:
                watch.record.dump.run_again()
            out.close(summary, error)
        if self.tell is not None:
            for line in out.last_words(summary, end):
                self.tell(line)

    def findings(self, rules: Iterable[Rule] | None = None) -> Findings:
        """Run rules on the recording so far; all configured rules if none are given.

        A step is written when the next one begins: call `end` first to include the last step.
        Before the first step there are no findings.
        """
        if self._out is None:
            return Findings()
        return Findings(self._out.findings(rules))

    def __repr__(self) -> str:
        """The recording, and whether it is being written."""
        if self._out is None:
            state = "not begun"
        elif self._out.is_over:
            state = "over"
        else:
            state = "being written"
        return f"<kedge.watch into {self.recording}: {state}>"

    def _repr_html_(self) -> str:
        """The run so far for a notebook: the verdict, the curves, the findings and the modules."""
        recording = None if self._out is None else self._out.recorded
        if recording is None:
            remedy = "call begin(), or use it as a with block"
            return paragraph(f"{self.recording} is not written yet: {remedy}")
        return run_html(ShownRun(recording, self.findings()))

    @property
    def summary(self) -> WatchSummary | None:
        """The figures of the watch so far; None before it begins."""
        if self._watch is None:
            return None
        return self._watch.summary

    def _complain(self, text: str) -> None:
        self._failures.append(text)
        if self.strict or self.tell is None:
            return
        if self._out is not None:
            text = self._out.by_rank(text)
        self.tell(text)

    def _end_with_program(self) -> None:
        self.strict = False  # no caller is left to catch an error
        is_interactive = hasattr(sys, "ps1")
        self.end(None if is_interactive else getattr(sys, "last_value", None))

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.end(error)


def _tell(text: str) -> None:
    messenger()(text)


def launched() -> LaunchedRank:
    """Return this process's rank from its launcher, else from the process group.

    Not all launchers tell the rank.
    """
    launch = LaunchedRank.here()
    is_grouped = distributed.is_available() and distributed.is_initialized()
    if launch.run is not None or not is_grouped:
        return launch
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return launch
    described = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    return LaunchedRank.here({"MASTER_PORT": str(os.getppid()), **os.environ, **described})


def script_name() -> str:
    """Return the script of this process, as typed.

    It is ``notebook`` in the kernel of one, and ``python`` if there is none.
    """
    typed = sys.argv[0] if sys.argv else ""
    if Path(typed).name == "ipykernel_launcher.py":
        return "notebook"
    if typed in {"", "-c", "-m"}:
        return "python"
    return typed


def _command() -> list[str]:
    """Return the words after ``python``; those of a notebook's kernel do not tell the notebook."""
    if script_name() == "notebook":
        return ["notebook"]
    return sys.argv


def default_name() -> str:
    """Return a name for a recording that no other run has; the ranks of one run agree on it."""
    return f"{Path(script_name()).name}.{launched().label}.kedge"


@called_as('with kedge.watch("run.kedge"): train()')
def watch(
    path: str | os.PathLike[str] | None = None,
    *,
    sites: Selectors = "**",
    every: int = 10,
    budget: float | None = 0.03,
    force: bool = False,
    dump: bool = False,
    strict: bool = False,
    on: Mapping[str, str | Sequence[str]] | None = None,
    rerun: bool = True,
    keep_steps: int | None = None,
    time: bool = False,
) -> WatchBlock:
    """Record every model that runs in this process, and report what goes wrong.

    ``with kedge.watch("run.kedge"): train()`` watches the block; to watch without a block, call
    `begin` and `end`.

    Args:
        path: The folder of the recording, which is created; None for a name made from those of the
            script and the process.
        sites: A selector, or a list of them; outputs, gradients and parameters at the selected
            paths are measured.
        every: Measure one step in this many; every step is checked for NaN.
        budget: The share of the run's time that watching may take; None for no limit.
        force: Whether to replace an existing recording.
        dump: Whether to keep the tensors around the first non-finite value.
        strict: Whether to raise Kedge's own failures at the end, instead of reporting them and
            continuing.
        on: What to do at a finding while the program runs: ``"stop"``, ``"raise"``, ``"skip"`` or
            ``"snapshot"``, by the code of a rule or a severity (``"error"``, ``"warning"``); several
            with commas between.
        rerun: Whether a step whose loss is not finite, or jumps, runs again in a copy of the
            process; only on a CPU under Linux.
        keep_steps: How many of the last steps to keep for ``kedge replay``; None for bad ones
            alone, if they are small.
        time: Whether to time the modules in measured steps, forward and backward.

    Returns:
        The block.

    Raises:
        SelectorError: If `sites` cannot be read.
        WrongCall: If another argument cannot be used.
    """
    if not (path is None or isinstance(path, (str, os.PathLike))):
        raise WrongCall(
            f"watch({described(path)}): the first argument is the folder of the recording; "
            "every model that runs in the block is recorded, so none is given: "
            'with kedge.watch("run.kedge"): train()'
        )
    if not (budget is None or (isinstance(budget, (int, float)) and budget >= 0)):
        raise WrongCall(
            f"watch(budget={described(budget)}): budget is a share of the run's time, "
            "such as 0.03, or None"
        )
    if not (keep_steps is None or (type(keep_steps) is int and keep_steps >= 0)):
        raise WrongCall(
            f"watch(keep_steps={described(keep_steps)}): keep_steps is a number of steps, or None"
        )
    if not isinstance(sites, str):
        sites = str(Selector(sites))
    orders = with_those_of_project(orders_of(on or {}, "watch(on=...): "))
    options = WatchOptions(
        sites,
        every,
        budget,
        dump,
        on=orders,
        rerun=rerun,
        keep_steps=keep_steps,
        time=time,
    )
    return WatchBlock(path, options, force=force, strict=strict)
