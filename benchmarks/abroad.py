"""Judge Kedge on programs that were written elsewhere, after faults that people reported, at default settings.

    python benchmarks/abroad.py PROGRAMS [--table FILE.toml] [--only PATTERN] [--load N] [--keep FOLDER]

``PROGRAMS`` is a folder with a local copy of the programs; ``abroad.toml`` says which they are,
what is wrong with each, and what has to be said of it. A program whose file is not there is left
out, and counted. Each runs alone, by ``kedge run`` and ``kedge check`` without an option; with
``--load N``, N processes that do nothing but compute run beside it.

* named: a finding of one of the rules that name the fault says what it has to;
* partly: a true symptom of it was found;
* missed: neither;
* FALSE: a sentence was said that is false of this program, whatever else was found;
* quiet, ALARM: a program without a fault got neither warning nor error, or got one.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trials

TABLE = Path(__file__).with_name("abroad.toml")
GOAL = 0.75
"""The share of the faults that training can show which are to be named."""


@dataclass(frozen=True)
class Case:
    """A program, and what has to be said of it: a row of the table."""

    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    fault: str = ""
    codes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    only_diff: str = ""

    @property
    def title(self) -> str:
        """The program and its arguments."""
        return " ".join((self.program.removesuffix(".py"), *self.arguments))

    def verdict(self, findings: Sequence[dict[str, Any]]) -> str:
        """Return what the findings of a run count as."""
        if any(re.search(pattern, told(each)) for each in findings for pattern in self.never):
            return "FALSE"
        if not self.fault:
            loud = any(each["severity"] != "info" for each in findings)
            return "ALARM" if loud else "quiet"
        if any(self.is_named_by(each) for each in findings):
            return "named"
        if any(each["code"] in (*self.codes, *self.partly) for each in findings):
            return "partly"
        return "hidden" if self.only_diff else "missed"

    def is_named_by(self, finding: dict[str, Any]) -> bool:
        """Whether a finding names the fault."""
        text = told(finding)
        return finding["code"] in self.codes and all(
            re.search(pattern, text) for pattern in self.says
        )


def told(finding: dict[str, Any]) -> str:
    """Return all that a finding says."""
    return " ".join((finding["site"], finding["message"], finding["remedy"]))


def cases(table: Path, pattern: str) -> list[Case]:
    """Return the cases of a table whose title or code matches a pattern; plain text matches what holds it."""
    wanted = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["run"]
    lists = ("arguments", "codes", "says", "partly", "never")
    every = [
        Case(**{key: tuple(value) if key in lists else value for key, value in row.items()})
        for row in rows
    ]
    return [
        case
        for case in every
        if any(fnmatch.fnmatch(text, wanted) for text in (case.title, *case.codes))
    ]


def recorded(case: Case, programs: Path, place: Path) -> Path:
    """Run a case as a user would, in a folder of its own, and return its recording."""
    if not place.exists():
        shutil.copytree((programs / case.program).parent, place)
    recording = place / "run.kedge"
    if recording.exists():
        return recording

    arguments = ("run", "-o", recording.name, Path(case.program).name, *case.arguments)
    if case.ranks > 1:
        result = trials.on_ranks(case.ranks, arguments, place)
    else:
        result = trials.command(*arguments, place=place)
    (place / "printed.txt").write_text(result.stdout, encoding="utf-8")
    (place / "messages.txt").write_text(result.stderr, encoding="utf-8")
    if result.returncode:
        raise RuntimeError(f"exit status {result.returncode}: {trials.last_line(result.stderr)}")
    return recording


def line(case: Case, verdict: str, findings: Sequence[dict[str, Any]], seconds: float) -> str:
    """Format what came of a case."""
    codes = Counter(f"{each['code']} ({each['severity']})" for each in findings)
    counted = [f"{code} x{count}" if count > 1 else code for code, count in codes.items()]
    return f"{verdict:7} {case.title:48} {seconds:5.1f} s  {', '.join(counted) or '-'}"


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep some processes busy beside the block."""
    busy = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def _compute() -> None:
    torch.set_num_threads(1)
    square = torch.ones(256, 256)
    while True:
        square @ square


def main() -> int:
    """Run and judge all cases; return 1 if a run itself failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", type=Path, help="a folder with a copy of the programs")
    parser.add_argument("--table", type=Path, default=TABLE, help="what is to be said of each")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only what matches this")
    parser.add_argument(
        "--load", type=int, default=0, metavar="N", help="compute in N processes beside it"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings there")
    args = parser.parse_args()

    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as passing, load(args.load):
        for case in cases(args.table, args.only):
            if not (args.programs / case.program).is_file():
                verdicts["absent"] += 1
                continue
            began = time.perf_counter()
            place = (args.keep or Path(passing)).resolve() / re.sub(r"\W+", "-", case.title)
            try:
                findings = trials.findings(recorded(case, args.programs, place))
            except RuntimeError as error:
                verdicts["FAILED"] += 1
                print(f"FAILED  {case.title}: {error}", flush=True)
                continue
            verdict = case.verdict(findings)
            verdicts[verdict] += 1
            print(line(case, verdict, findings, time.perf_counter() - began), flush=True)

    summarise(verdicts, args.load)
    return int(bool(verdicts["FAILED"]))


def summarise(verdicts: Counter[str], beside: int) -> None:
    """Print what the verdicts come to."""
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    shown = sum(verdicts[each] for each in ("named", "partly", "missed", "FALSE"))
    if shown:
        share = verdicts["named"] / shown
        reached = "reached" if share >= GOAL else "not reached"
        print(f"named {share:.2f} of {shown} that training can show; goal {GOAL}: {reached}")
    print(f"{beside} busy processes beside it, PyTorch {torch.__version__}")


if __name__ == "__main__":
    sys.exit(main())
