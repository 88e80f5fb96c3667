"""Judge the rules by runs of which it is known whether something is wrong with them.

    python benchmarks/calibrate.py [--jobs N] [--seeds N ...] [--only TEXT] [--verbose] [--keep FOLDER]

Trains a grid of healthy runs, and for every rule runs with one planted fault each, all watched as
`kedge run` does without an option.
A rule's recall is the share of the runs with its fault on which it speaks; its precision, the share
of the runs on which it speaks, healthy ones and those with its fault, that have the fault. Of
NAN-BORN it is asked as well whether what it says is so: that the birth is where it was planted, or,
in a run of which most steps are not looked at, that it lies between two steps. Anything else is
misplaced: not found, and a false alarm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from nets import Run, train
from plants import healthy, planted

import kedge
from kedge.rules import ALL, check
from kedge.rules.rule import SEVERITIES, Finding
from kedge.store.recording import Recording


def watched(run: Run, seed: int, place: Path) -> Recording:
    """Train under watch, unless the recording is there already; a run that diverges is trained to its end all the same."""
    if not place.exists():
        watching = kedge.watch(place)
        watching.tell = lambda text: None
        with watching:
            for _ in train(run, seed):
                pass
    return Recording.open(place)


@dataclass(frozen=True)
class Task:
    """One run to be made and judged; ``code`` is that of the rule that is to speak, empty for a healthy run."""

    code: str
    place: int
    seed: int
    folder: Path
    verbose: bool

    @property
    def run(self) -> Run:
        """The run itself, which cannot be sent to another process."""
        return (planted()[self.code] if self.code else healthy())[self.place]


@dataclass(frozen=True)
class Verdict:
    """What the rules found in one run."""

    code: str
    found: frozenset[tuple[str, str]]
    "Pairs of a code and a severity."
    text: str
    misplaced: bool = False
    "Whether the rule that was to speak said what is not so."

    def has(self, code: str, *severities: str) -> bool:
        """Tell whether a rule spoke, and of the one that was to speak, whether what it said is so."""
        if code == self.code and self.misplaced:
            return False
        return any(
            own == code and (not severities or severity in severities)
            for own, severity in self.found
        )


def judge(task: Task) -> Verdict:
    """Make a run, and say what the rules made of it; worth telling is a fault that was missed and a false alarm."""
    torch.set_num_threads(1)
    run, began = task.run, time.perf_counter()
    title = f"{task.code or 'healthy'}: {run.name}, seed {task.seed}"
    findings = check(
        watched(run, task.seed, task.folder / f"{re.sub('[^a-z0-9.]+', '-', title.lower())}.kedge")
    )
    misplaced = any(f.code == task.code and not is_so(run, f) for f in findings)
    verdict = Verdict(task.code, frozenset((f.code, f.severity) for f in findings), "", misplaced)
    odd = not verdict.has(task.code) if task.code else any(f.severity != "info" for f in findings)
    if not odd and not task.verbose:
        return verdict
    if misplaced:
        title = f"misplaced in {title}"
    lines = [
        f"{'missed ' if task.code and odd else ''}{title} ({time.perf_counter() - began:.1f} s)"
    ]
    lines += [f"    {f.severity:7} {f.code:13} {f.message[:200]}" for f in findings]
    return replace(verdict, text="\n".join(lines))


def is_so(run: Run, finding: Finding) -> bool:
    """Tell whether a birth was planted where the finding says, or in one of the places that it leaves open."""
    evidence = finding.entry()["evidence"]
    if not run.births or "how" not in evidence:
        return True
    how, what = (
        evidence["how"],
        (evidence["module"], *evidence["also"], evidence.get("operation", {}).get("operation")),
    )
    named = {how, *(f"{how} {name}" for name in what)}
    sound = evidence.get("guarded", {}).get("sound")
    return bool(named & run.births) and (sound or 0) <= run.since <= (finding.step or 0)


def main() -> None:
    """Train everything, and print what the rules made of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="make each run with each of these seeds"
    )
    parser.add_argument("--only", default="", help="only runs whose rule or name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs are made at a time")
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep the recordings there, and judge those that are there"
    )
    args = parser.parse_args()
    started, verdicts = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(args.keep or passing)
        folder.mkdir(exist_ok=True)
        tasks = [
            Task(code, place, seed, folder, args.verbose)
            for code, runs in {"": healthy(), **planted()}.items()
            for place, run in enumerate(runs)
            for seed in args.seeds
            if args.only in f"{code or 'healthy'}: {run.name}"
        ]
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            for verdict in pool.map(judge, tasks):
                verdicts.append(verdict)
                print(verdict.text, end="\n" if verdict.text else "", flush=True)
    _print(verdicts)
    print(f"\n{len(verdicts)} runs in {time.perf_counter() - started:.0f} s, {args.jobs} at a time")


def _print(verdicts: list[Verdict]) -> None:
    """Print precision and recall of every rule, and the false alarms."""
    calm = [verdict for verdict in verdicts if not verdict.code]
    heads = f"{'rule':14} {'planted':>7} {'found':>6} {'recall':>7} {'misplaced':>9} {'alarms':>7} {'precision':>9}"
    print(f"\n{heads}  also spoke on faults of")
    for rule in ALL:
        own = [verdict for verdict in verdicts if verdict.code == rule.code]
        hits = sum(verdict.has(rule.code) for verdict in own)
        misplaced = sum(verdict.misplaced for verdict in own)
        alarms = sum(verdict.has(rule.code, "error", "warning") for verdict in calm)
        others = Counter(
            v.code for v in verdicts if v.code not in ("", rule.code) and v.has(rule.code)
        )
        also = ", ".join(f"{code} {number}" for code, number in others.most_common())
        recall, precision = _share(hits, len(own)), _share(hits, hits + misplaced + alarms)
        print(
            f"{rule.code:14} {len(own):7} {hits:6} {recall:>7} {misplaced:9} {alarms:7} {precision:>9}  {also}"
        )
    counts = (
        f"{sum(any(s == level for _, s in v.found) for v in calm)} with {level}s"
        for level in SEVERITIES
    )
    print(f"\n{len(calm)} healthy runs: {', '.join(counts)}")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


if __name__ == "__main__":
    main()
