"""Second runs of two recorded programs, up to the end of the step in which they first differ.

# Note [Second runs]
A second run is the recorded command in the recorded folder, in a process of its own. It is watched as
the recorded one was, so that its values can be compared with the recorded ones: only if those of all
common steps are equal is it the same run again, and its operations say something of the recorded one.
It ends with the step, without the program's own end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from kedge.compare.comparison import Comparison, Parting, compare
from kedge.compare.operations.finding import OperationFinding, finding_of
from kedge.compare.operations.seen import SeenStep
from kedge.errors import CannotCompare, ScriptError
from kedge.program.program import Program
from kedge.short_text import counted, seconds
from kedge.shown_text import typed
from kedge.store.recording import Recording

#: The process that a second run is.
PROCESS = "kedge.cli.second_run_process"
#: The kinds of sites before a forward, and after a backward pass: no operation of the forward makes them.
BEFORE, AFTER = "param", "update"

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class RecordedProgram:
    """The program of a recording.

    Attributes:
        name: The name of the recording.
        recording: The recording.
        program: The program.
        folder: The folder that it ran in.
    """

    name: str
    recording: Recording
    program: Program
    folder: Path

    @classmethod
    def of(cls, name: str, recording: Recording) -> RecordedProgram:
        """Return the program of a recording, if it can run again.

        Raises:
            ScriptError: The recording does not say how, the program is not there any more, or it was
                changed.
        """
        manifest = recording.manifest
        folder = manifest.get("folder")
        command = manifest.get("command")
        if not isinstance(folder, str) or not isinstance(command, list) or not command:
            raise ScriptError(
                f"cannot run the program of {name} again: the recording has no folder to run it in, "
                "as one of kedge.watch, of an attached watch, or of an earlier version; record it "
                "again with kedge run"
            )
        if manifest.get("world", 1) != 1:
            raise ScriptError(
                f"cannot run the program of {name} again: it ran as "
                f"{counted(int(manifest['world']), 'rank')}; --deep runs one process"
            )
        words = list(map(str, command))
        is_module = words[0] == "-m"
        target, *args = words[is_module:]
        program = Program(target, is_module, args)
        found = cls(name, recording, program, Path(folder))
        found.check()
        return found

    def check(self) -> None:
        """Check that the program is there, as it was.

        Raises:
            ScriptError: It is not.
        """
        if not self.folder.is_dir():
            raise ScriptError(
                f"cannot run the program of {self.name} again: its folder {self.folder} is not there"
            )
        if self.program.is_module:
            return
        script = self.folder / self.program.target
        if not script.exists():
            raise ScriptError(
                f"cannot run the program of {self.name} again: {script} is not there any more"
            )
        digest = self.recording.manifest.get("digest")
        if digest is not None and replace(self.program, target=str(script)).digest != digest:
            raise ScriptError(
                f"cannot run the program of {self.name} again: {script} was changed since; "
                "record both runs again, or bring the file back"
            )

    def announced(self, step: int) -> str:
        """Return what is about to be run, and how long its recorded run took."""
        text = f"running {typed(*self.program.command)} of {self.name} again, up to step {step}"
        end = self.recording.end
        if end is not None and end.seconds is not None and end.steps:
            text += f" (it took {seconds(end.seconds)} for {counted(end.steps, 'step')})"
        return text


@dataclass(frozen=True)
class SecondRun:
    """A second run that has ended.

    Attributes:
        of: The program.
        recording: Its recording; None if it has recorded nothing.
        seen: What it has seen of the step.
        ending: How it ended, if that was before the end of the step; empty otherwise.
    """

    of: RecordedProgram
    recording: Recording | None
    seen: SeenStep | None
    ending: str

    def unlike(self) -> str:
        """Return how it is another run than the recorded one; empty if it repeats it."""
        if self.recording is None or self.seen is None:
            return self.ending
        try:
            found = compare(self.of.recording, self.recording)
        except CannotCompare as error:
            return str(error)
        first = found.first
        if first is None:
            return ""
        return f"{first.same.text} differs from the recorded one at step {first.step}"

    def written_since(self) -> str:
        """Return a file of the program that was written after the recorded run began; empty without one.

        The script is known to be the same.
        """
        if self.seen is None:
            return ""
        started = self.of.recording.manifest.get("started")
        try:
            began = datetime.fromisoformat(str(started)).timestamp()
        except ValueError:
            return ""
        known = ""
        if self.of.recording.manifest.get("digest") is not None:
            known = self.of.program.target
        files = {each.file for each in self.seen.operations if each.file not in ("", known)}
        for file in sorted(files):
            place = self.of.folder / file
            if place.exists() and place.stat().st_mtime > began + 1:
                return file
        return ""


def find_operation(
    comparison: Comparison,
    programs: tuple[RecordedProgram, RecordedProgram],
    tell: Callable[[str], None],
    progress: Progress,
) -> OperationFinding | None:
    """Run both programs again up to the first step that differs, and return the operation that parts them.

    Args:
        comparison: The comparison of the recordings.
        programs: Their programs.
        tell: Says what is about to run.
        progress: Shows that a run goes on.

    Returns:
        What was found; None if the recordings do not differ.
    """
    first = comparison.first
    if first is None:
        return None
    nothing = _before_and_after(first)
    if nothing is not None:
        return nothing
    with tempfile.TemporaryDirectory(prefix="kedge-second-run-") as folder:
        runs = []
        for side, program in zip("ab", programs, strict=True):
            tell(program.announced(first.step))
            with progress(f"running {program.program.name} up to step {first.step}"):
                runs.append(_run(program, first.step, Path(folder, side)))
        a, b = runs
        found = _judged(a, b, first.step)
        written = [name for run in runs if run.seen is not None for name in run.seen.written]
        return replace(found, written=tuple(dict.fromkeys(written)))


def _before_and_after(first: Parting) -> OperationFinding | None:
    """Return why no operation of the step can be the reason; None if one can."""
    text = f"{first.same.text} differs at step {first.step}"
    if first.same.kind == BEFORE:
        return OperationFinding(
            "not-seen",
            "no operation was looked for: they differ before the forward",
            f"{text}, as the program or an earlier step has set it; "
            "if steps before were not measured, record both with --every 1 --budget none",
        )
    if first.same.kind == AFTER:
        return OperationFinding(
            "not-seen",
            "no operation was looked for: they differ after the backward pass",
            f"{text}, and the forward and the gradients do not; see the cause above",
        )
    return None


def _judged(a: SecondRun, b: SecondRun, step: int) -> OperationFinding:
    for side, run in (("A", a), ("B", b)):
        unlike = run.unlike()
        if unlike:
            return _not_repeated(side, run, unlike)
    for side, run in (("A", a), ("B", b)):
        assert run.seen is not None  # noqa: S101 - else it would be unlike
        if run.seen.failure:
            return OperationFinding(
                "not-seen",
                f"the operations of {side} could not be seen",
                run.seen.failure,
            )
    assert a.recording and b.recording and a.seen and b.seen  # noqa: PT018, S101 - as above
    first = compare(a.recording, b.recording).first
    if first is None or first.step != step:
        return OperationFinding(
            "not-seen",
            f"step {step} is not the first that differs in the second runs",
            "steps before it were not measured: record both with --every 1 --budget none",
        )
    found = _before_and_after(first) or finding_of(first, a.seen.operations, b.seen.operations)
    evidence = (
        f"{found.evidence}; seen in second runs up to step {step}, equal to the recorded ones"
    )
    return replace(found, evidence=evidence)


def _not_repeated(side: str, run: SecondRun, unlike: str) -> OperationFinding:
    evidence = unlike
    since = run.written_since()
    if since:
        evidence += f"; {since} was written after the recorded run had begun"
    elif not run.ending:
        evidence += (
            "; set all seeds, and see whether two runs of the same program are equal, "
            "as in kedge run --verify"
        )
    return OperationFinding(
        "not-repeated", f"no operation is named: the second run of {side} is another run", evidence
    )


def _run(program: RecordedProgram, step: int, folder: Path) -> SecondRun:
    folder.mkdir()
    place, result = folder / "again.kedge", folder / "seen.json"
    sites = str(program.recording.manifest.get("sites") or "**")
    command = [sys.executable, "-m", PROCESS, str(result), str(step), str(place), sites]
    command += ["-m" if program.program.is_module else "--", program.program.target]
    command += program.program.args
    output = folder / "output"
    with output.open("wb") as out:
        ended = subprocess.run(  # noqa: S603 - running the program is the job
            command,
            cwd=program.folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seen = None
    if result.exists():
        seen = SeenStep.of_entry(json.loads(result.read_text(encoding="utf-8")))
    recording = None
    if place.exists():
        recording = Recording.open(place)
    ending = ""
    if seen is None or recording is None:
        ending = f"it ended before the end of step {step}: {_ending(ended.returncode, output)}"
    return SecondRun(program, recording, seen, ending)


def _ending(status: int, output: Path) -> str:
    """Return the exit status, and the last line of the output after a failure."""
    text = f"exit status {status}"
    lines = output.read_bytes().decode(errors="replace").strip().splitlines()
    if status and lines:
        text += f" ({lines[-1]})"
    return text
