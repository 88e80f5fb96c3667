"""``kedge run --verify``: compares the bits that a program computes with and without watching."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from kedge.errors import ScriptError
from kedge.program.program import Program
from kedge.short_text import counted, seconds
from kedge.stderr import messenger

EQUAL = 0
DIFFERS = 1
UNDECIDED = 2
_OF_PARAMETERS = "parameter"
_OF_OUTPUTS = "output of "


@dataclass(frozen=True)
class TrialRun:
    """One run of the program: its exit status, and the files of its output and its digests."""

    status: int
    stdout: Path
    stderr: Path
    digests: Path

    def ending(self) -> str:
        """Return the exit status and the last line of stderr after a failure."""
        ending = f"exit status {self.status}"
        if not self.status:
            return ending
        _, _, last = _text(self.stderr).rstrip().rpartition("\n")
        if last:
            ending += f" ({last})"
        return ending


@dataclass(frozen=True)
class DigestLine:
    """A line of the digest log: its step, its subject, and the digests by the names of tensors."""

    step: int
    subject: str
    digests: dict[str, str]


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    step: int
    text: str


def verify(program: Program, args: argparse.Namespace) -> int:
    """Run a program without and with watching, and print whether they agree.

    Only if they do not, it runs a third time, unwatched: the program may differ from itself.

    Args:
        program: The program; it runs in processes of its own, in this folder.
        args: The parsed arguments of `kedge run`, which decide how the program is watched.

    Returns:
        0 if all is equal, 1 if watching changes something, 2 if the program differs from itself.

    Raises:
        ScriptError: The digest log could not follow the program.
    """
    with tempfile.TemporaryDirectory(prefix="kedge-verify-") as folder:
        tell = (lambda _: None) if args.quiet else messenger()
        trials = _Trials(program, Path(folder), tell)
        plain = trials.run("without watching", ["plain"])
        watched = trials.run("with watching", ["watched", *_options(args, folder)])
        for line in _text(watched.stderr).splitlines():
            if line.startswith("[kedge] "):
                print(f"message of the watched run: {line.removeprefix('[kedge] ')}")
        if _same(plain, watched):
            return _print_equal(program, plain)
        again = trials.run("once more without watching, because the two runs differ", ["plain"])
        return _print_different(program, plain, watched, again)


def _options(args: argparse.Namespace, folder: str) -> list[str]:
    """Return the arguments of `kedge run` as words.

    Without an output path the recording is temporary.
    """
    words = ["-q", "-o", args.output or str(Path(folder) / "watched.kedge")]
    flags = ("force", "strict", "dump", "saved")
    words += [f"--{name}" for name in flags if getattr(args, name, False)]
    for name in ("sites", "every", "budget"):
        value = getattr(args, name, None)
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


class _Trials:
    """Runs the program in a process of its own, each time with the same digest log."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self.program = program
        self.folder = folder
        self.tell = tell
        # A program may rely on the order of its sets: this makes it the same in each run.
        self.environment = {"PYTHONHASHSEED": "0", **os.environ}
        self.number = 0

    def run(self, how: str, words: Sequence[str]) -> TrialRun:
        """Run the program once.

        Args:
            how: How it runs, for the messages.
            words: Arguments of `kedge.cli.verify_process` that come after the file of the digests.
        """
        program = self.program
        self.number += 1
        self.tell(f"running {program.name} {how}")
        stdout = self.folder / f"stdout{self.number}"
        stderr = self.folder / f"stderr{self.number}"
        digests = self.folder / f"digests{self.number}"
        command = [sys.executable, "-m", "kedge.cli.verify_process", str(digests), *words]
        command.append("-m" if program.is_module else "--")
        command += [program.target, *program.args]

        began = time.perf_counter()
        with stdout.open("wb") as out, stderr.open("wb") as err:
            ended = subprocess.run(  # noqa: S603 - running the program is the job
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment,
                check=False,
            )
        trial = TrialRun(ended.returncode, stdout, stderr, digests)
        self.tell(f"it took {seconds(time.perf_counter() - began)}: {trial.ending()}")
        return trial


# -- printing
# ----------------------------------------------------------------------------------------


def _print_equal(program: Program, plain: TrialRun) -> int:
    print(f"{program.name}: {_tally(plain)}: bit-equal with and without watching")
    print(f"standard output ({counted(_lines(plain), 'line')}) and {plain.ending()}: equal")
    return EQUAL


def _print_different(
    program: Program,
    plain: TrialRun,
    watched: TrialRun,
    again: TrialRun,
) -> int:
    own = first_difference(plain.digests, again.digests)
    if own is not None or plain.status != again.status:
        where = f"at the end ({plain.ending()}, then {again.ending()})"
        if own is not None:
            where = f"from step {own.step} on ({own.text})"
        print(
            f"{program.name} is not deterministic: "
            f"two runs without watching differ {where}, "
            "so --verify cannot compare it"
        )
        print(
            "set a seed (torch.manual_seed(0)), "
            "and torch.use_deterministic_algorithms(True) if operations vary"
        )
        return UNDECIDED

    difference = first_difference(plain.digests, watched.digests)
    if difference is not None:
        first = f"from step {difference.step} on: {difference.text}"
        print(f"{program.name}: watching changes the program {first}")
    if plain.status != watched.status:
        print(f"{program.name}: {plain.ending()} without watching, {watched.ending()} with it")
    if difference is not None or plain.status != watched.status:
        return DIFFERS

    print(f"{program.name}: {_tally(plain)}: bit-equal with and without watching")
    if plain.stdout.read_bytes() != again.stdout.read_bytes():
        print(
            "standard output was not compared: "
            "it also differs between two runs without watching, for example in times"
        )
        return EQUAL
    print(f"watching changes standard output, {_first_line(plain.stdout, watched.stdout)}")
    return DIFFERS


def _tally(trial: TrialRun) -> str:
    steps = 0
    parameters = 0
    outputs = 0
    for entry in entries(trial.digests):
        if entry.subject == _OF_PARAMETERS:
            steps += 1
            parameters = max(parameters, len(entry.digests))
        elif entry.subject.startswith(_OF_OUTPUTS):
            outputs += 1
    if not steps and not outputs:
        return "no optimizer step and no module call in this process"
    found = (
        counted(steps, "step"),
        counted(parameters, "parameter"),
        f"{counted(outputs, 'output')} of models",
    )
    return ", ".join(found)


def _lines(trial: TrialRun) -> int:
    return len(trial.stdout.read_bytes().splitlines())


def _first_line(one: Path, other: Path) -> str:
    lines = zip_longest(_text(one).splitlines(), _text(other).splitlines(), fillvalue="(nothing)")
    unlike = ((number, *pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
    number, mine, theirs = next(unlike)
    return f"first in line {number}:\n  without: {mine}\n  with:    {theirs}"


def _text(place: Path) -> str:
    return place.read_bytes().decode(errors="replace")


# -- comparing
# ---------------------------------------------------------------------------------------


def _same(one: TrialRun, other: TrialRun) -> bool:
    same_output = one.stdout.read_bytes() == other.stdout.read_bytes()
    return (
        same_output
        and one.status == other.status
        and first_difference(one.digests, other.digests) is None
    )


def entries(place: Path) -> Iterator[DigestLine]:
    """Yield the lines of a digest log, up to the last complete one.

    There are none if the program never imported torch.

    Raises:
        ScriptError: The log reports a failure.
    """
    names: dict[int, list[str]] = {}
    if not place.exists():
        return
    with place.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            content = json.loads(line)
            if "failed" in content:
                raise ScriptError(
                    f"cannot verify the program: in step {content['step']} {content['failed']}"
                )
            if "names" in content:
                names[content["table"]] = content["names"]
            else:
                yield _entry(content, names[content["table"]])


def _entry(content: dict[str, object], names: Sequence[str]) -> DigestLine:
    digests = str(content["digests"])
    length = len(digests) // max(1, len(names))
    by_name = {name: digests[i * length : (i + 1) * length] for i, name in enumerate(names)}
    return DigestLine(int(str(content["step"])), str(content["what"]), by_name)


def first_difference(one: Path, other: Path) -> Difference | None:
    """Return the first difference between two digest logs, None if there is none."""
    for mine, theirs in zip_longest(entries(one), entries(other)):
        if mine != theirs:
            return _difference(mine, theirs)
    return None


def _difference(mine: DigestLine | None, theirs: DigestLine | None) -> Difference:
    if mine is None or theirs is None:
        alone = mine or theirs
        assert alone is not None  # noqa: S101 - two that are missing are equal
        return Difference(alone.step, f"{alone.subject} exists in one run only")
    if (mine.step, mine.subject) != (theirs.step, theirs.subject):
        text = f"one run continues with {mine.subject}, the other with {theirs.subject}"
        return Difference(mine.step, text)

    names = {**mine.digests, **theirs.digests}
    unlike = [name for name in names if mine.digests.get(name) != theirs.digests.get(name)]
    text = _thing(mine.subject, unlike[0])
    if len(unlike) > 1:
        text += f" and {len(unlike) - 1} more"
    return Difference(mine.step, text)


def _thing(subject: str, name: str) -> str:
    if not name:
        return subject
    if subject.startswith(_OF_OUTPUTS):
        return f"{subject}[{name}]"
    return f"{subject} {name}"
