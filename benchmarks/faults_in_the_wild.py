"""Judge Kedge by faults that people make: training programs with one fault each, and without it, at default settings.

    python benchmarks/faults_in_the_wild.py [--only PATTERN] [--jobs N] [--output FILE.json] [--keep FOLDER]

``programs/`` has training programs as their authors would write them, each of which learns. Beside
each stands a file of its faults: a small change of its text, the kind of fault that this is, and
the codes of the rules that name it. A program is run once as it is (the repaired twin of its faulty
ones) and once with each of its faults, always by ``kedge run`` and ``kedge check`` without an
option.

The kinds are those of Humbatova et al., "Taxonomy of Real Faults in Deep Learning Systems" (ICSE
2020), the faults those of its leaves, of DeepFD's benchmark (Cao et al., ICSE 2022: loss,
optimizer, epochs, learning rate, activation) and of the operators of DeepCrime (Humbatova et al.,
ISSTA 2021), so far as they have a meaning in PyTorch. Left out is what ends the program with an
error, because then PyTorch says it: most faults of shapes, of types and of devices.

A code names a fault if what the rule says is wrong is what the fault made wrong, or if its remedy
repairs the program. The rule on training that does not learn names a fault only where nothing
nearer to it can be seen. Some faults cannot be seen in training: their ``hidden`` says why. They
count for precision, since nothing that is said of them can be right.

* recall: the faulty programs of which a code that names the fault was found, at any level, among
  those that training can show. A fault that no rule is made for has no codes, and is missed;
* precision: of all warnings and errors on faulty programs, a code once a program, those that name
  the fault;
* false alarms: the repaired programs with a warning or an error.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import trials

import kedge
from kedge.examination.result import NAMES as TRIALS
from kedge.rules import ALL

PROGRAMS = Path(__file__).parent / "programs"
KINDS = {
    "model type and properties": ("wrong network architecture", "wrong weight initialisation"),
    "layers": (
        "missing layer",
        "redundant layer",
        "missing softmax layer",
        "wrong filter size",
        "wrong number of neurons",
    ),
    "activation": ("missing activation function", "wrong activation function"),
    "tensors and inputs": ("wrong tensor shape", "wrong input"),
    "hyperparameters": (
        "suboptimal learning rate",
        "suboptimal batch size",
        "suboptimal number of epochs",
        "suboptimal hyperparameter",
    ),
    "loss": ("wrong loss function", "wrong loss calculation", "missing masking of invalid values"),
    "optimiser": ("wrong optimiser", "wrong optimiser setting"),
    "preprocessing": ("missing preprocessing", "wrong preprocessing"),
    "quality of training data": (
        "wrong labels",
        "not enough training data",
        "unbalanced training data",
        "noisy training data",
    ),
    "API": ("wrong API usage", "missing API call", "missing argument", "wrong position of call"),
}
"The kinds of faults, by the branch of the taxonomy that they belong to."
GOALS = {"recall": 0.75, "precision": 0.9, "alarms": 0.05}


@dataclass(frozen=True)
class Case:
    """A training program, repaired or with a fault.

    Attributes:
        program: The name of its file, without the suffix.
        source: Its text.
        name: The name of the fault; empty for the repaired program, as is everything below.
        kind: The kind of fault, one of ``KINDS``.
        fault: The fault in a sentence.
        codes: The codes that name it.
        hidden: Why training cannot show it, if it cannot.
        examine: What an examination before the run ought to say; see ``examine.py``.
    """

    program: str
    source: str
    name: str = ""
    kind: str = ""
    fault: str = ""
    codes: frozenset[str] = frozenset()
    hidden: str = ""
    examine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The program and its fault."""
        return f"{self.program}: {self.name or 'repaired'}"


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        case: The case.
        findings: What ``kedge check --json`` found.
        score: The number at the end of what the program printed.
        seconds: How long it took under ``kedge run``.
        failure: What went wrong with the run itself; empty if nothing did.
    """

    case: Case
    findings: tuple[dict[str, Any], ...] = ()
    score: str = ""
    seconds: float = 0.0
    failure: str = ""

    @cached_property
    def named(self) -> list[str]:
        """The codes that were found and name the fault."""
        return sorted({finding["code"] for finding in self.findings} & self.case.codes)

    @cached_property
    def loud(self) -> list[str]:
        """The codes of warnings and errors."""
        return sorted(
            {finding["code"] for finding in self.findings if finding["severity"] != "info"}
        )

    @property
    def right(self) -> list[str]:
        """The codes of warnings and errors that name the fault."""
        return [code for code in self.loud if code in self.case.codes]

    @property
    def false(self) -> list[str]:
        """The codes of warnings and errors that do not."""
        return [code for code in self.loud if code not in self.case.codes]

    @property
    def verdict(self) -> str:
        """What this counts as."""
        if self.failure:
            return "FAILED"
        if not self.case.name:
            return "ALARM" if self.loud else "quiet"
        if self.case.hidden:
            return "hidden"
        return "found" if self.named else "MISSED"

    def line(self, width: int) -> str:
        """Format the outcome in a line."""
        parts = [
            f"{self.verdict:6} {self.case.title:{width}} {self.seconds:5.1f} s  {self.score:>9}"
        ]
        parts += [" ".join(self.named)] if self.named else []
        parts += [f"false: {' '.join(self.false)}"] if self.false else []
        parts += [self.failure] if self.failure else []
        return "  ".join(parts)


def load() -> list[Case]:
    """Return every repaired program, each followed by its faults."""
    cases = []
    for script in sorted(PROGRAMS.glob("*.py")):
        source = script.read_text(encoding="utf-8")
        cases.append(Case(script.stem, source))
        for name, fault in tomllib.loads(
            script.with_suffix(".toml").read_text(encoding="utf-8")
        ).items():
            cases.append(_faulty(cases[-1].program, source, name, fault))
    return cases


def _faulty(program: str, source: str, name: str, fault: dict[str, Any]) -> Case:
    """Return a program with one of its faults, whose declaration is checked."""
    place = f"{program}.toml, [{name}]"
    if fault["kind"] not in {kind for kinds in KINDS.values() for kind in kinds}:
        raise ValueError(f"{place}: no such kind of fault: {fault['kind']}")
    if ("codes" in fault) == ("hidden" in fault):
        raise ValueError(
            f"{place}: needs either the codes that name the fault, or why it is hidden"
        )
    for old, new in fault["change"]:
        if source.count(old) != 1:
            raise ValueError(
                f"{place}: this must occur once in the program, and occurs {source.count(old)} times: {old}"
            )
        source = source.replace(old, new)
    compile(source, f"{program}.py with {name}", "exec")
    _check_examine(place, fault.get("examine", {}))
    codes = frozenset(fault.get("codes", ()))
    return Case(
        program,
        source,
        name,
        fault["kind"],
        fault["fault"],
        codes,
        fault.get("hidden", ""),
        fault["examine"],
    )


def _check_examine(place: str, expected: Mapping[str, Any]) -> None:
    """Check what an examination is expected to say of a fault."""
    says = [name for verdict in ("wrong", "look") for name in expected.get(verdict, ())]
    if bool(says) == ("nothing" in expected):
        raise ValueError(
            f"{place}: examine needs either the trials that can show the fault, or why nothing can"
        )
    unknown = {*says} - {*TRIALS}
    if unknown or not expected.keys() <= {"wrong", "look", "nothing", "optimizer"}:
        raise ValueError(f"{place}: examine has no such trial or key: {[*unknown, *expected]}")


def judge(case: Case, folder: Path) -> Outcome:
    """Run a case as a user would, unless its recording is there already, and check the recording."""
    place = folder / case.title.replace(": ", ".")
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(case.source, encoding="utf-8")
    began, failure = time.perf_counter(), ""
    if not list(place.glob("*.kedge")):
        result = trials.command("run", "train.py", place=place)
        (place / "printed.txt").write_text(result.stdout, encoding="utf-8")
        (place / "messages.txt").write_text(result.stderr, encoding="utf-8")
        if result.returncode:
            failure = f"exit status {result.returncode}: {trials.last_line(result.stderr)}"
    seconds, score = (
        time.perf_counter() - began,
        trials.last_line((place / "printed.txt").read_text(encoding="utf-8")),
    )
    recordings = list(place.glob("*.kedge"))
    if failure or len(recordings) != 1:
        return Outcome(case, seconds=seconds, failure=failure or f"{len(recordings)} recordings")
    return Outcome(
        case,
        trials.findings(recordings[0]),
        score.split()[-1] if score else "",
        seconds,
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def _table(outcomes: list[Outcome]) -> None:
    """Print a line for every kind of fault."""
    print(
        f"\n{'kind of fault':58} {'programs':>8} {'shown':>6} {'found':>6} {'recall':>7} {'right':>6} {'false':>6}"
    )
    for branch, kinds in KINDS.items():
        for kind in kinds:
            own = [outcome for outcome in outcomes if outcome.case.kind == kind]
            if not own:
                continue
            shown = [outcome for outcome in own if not outcome.case.hidden]
            found = sum(bool(outcome.named) for outcome in shown)
            right, false = (
                sum(len(getattr(outcome, side)) for outcome in own) for side in ("right", "false")
            )
            numbers = f"{len(own):8} {len(shown):6} {found:6} {_share(found, len(shown)):>7} {right:6} {false:6}"
            print(f"{f'{branch}: {kind}':58} {numbers}")


def _totals(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the figures over all cases."""
    faulty = [outcome for outcome in outcomes if outcome.case.name]
    shown = [outcome for outcome in faulty if not outcome.case.hidden]
    twins = [outcome for outcome in outcomes if not outcome.case.name]
    found, right, false = (
        sum(bool(o.named) for o in shown),
        sum(len(o.right) for o in faulty),
        sum(len(o.false) for o in faulty),
    )
    alarms = sum(bool(outcome.loud) for outcome in twins)
    return {
        "faulty": len(faulty),
        "shown": len(shown),
        "found": found,
        "recall": found / len(shown) if shown else None,
        "right": right,
        "false": false,
        "precision": right / (right + false) if right + false else None,
        "repaired": len(twins),
        "with an alarm": alarms,
        "alarms": alarms / len(twins) if twins else None,
        "failed": sum(bool(outcome.failure) for outcome in outcomes),
    }


def _print_totals(outcomes: list[Outcome], totals: dict[str, Any]) -> None:
    """Print what it all comes to, and what each rule has to do with it."""
    _table([outcome for outcome in outcomes if outcome.case.name])
    false = Counter(code for outcome in outcomes if outcome.case.name for code in outcome.false)
    alarms = Counter(code for outcome in outcomes if not outcome.case.name for code in outcome.loud)
    known = {rule.code for rule in ALL}
    unknown = sorted({code for outcome in outcomes for code in outcome.case.codes} - known)
    print(
        f"\nfalse on faulty programs: {_counts(false)}\nalarms on repaired ones:  {_counts(alarms)}"
    )
    if unknown:
        print(f"codes that name faults and that this Kedge does not have: {', '.join(unknown)}")
    print(
        f"\n{totals['faulty']} faulty programs, of which training can show {totals['shown']}; {totals['repaired']} repaired"
    )
    for name, text, met in (
        ("recall", f"{totals['found']} of {totals['shown']}", lambda value, goal: value >= goal),
        (
            "precision",
            f"{totals['right']} of {totals['right'] + totals['false']}",
            lambda value, goal: value >= goal,
        ),
        (
            "alarms",
            f"{totals['with an alarm']} of {totals['repaired']}",
            lambda value, goal: value <= goal,
        ),
    ):
        if totals[name] is not None:
            reached = "reached" if met(totals[name], GOALS[name]) else "not reached"
            print(f"{name:10} {totals[name]:.3f} ({text}); goal {GOALS[name]}: {reached}")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{code} {number}" for code, number in counts.most_common()) or "none"


def _as_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as an object of JSON."""
    case = outcome.case
    findings = [
        {key: finding[key] for key in ("code", "severity", "site", "step", "message")}
        for finding in outcome.findings
    ]
    declared = (
        {"kind": case.kind, "fault": case.fault, "codes": sorted(case.codes), "hidden": case.hidden}
        if case.name
        else {}
    )
    return {
        "program": case.program, "name": case.name, **declared, "verdict": outcome.verdict, "named": outcome.named,
        "right": outcome.right, "false": outcome.false, "score": outcome.score, "seconds": round(outcome.seconds, 1),
        "failure": outcome.failure, "findings": findings,
    }  # fmt: skip


def _select(cases: Iterable[Case], pattern: str) -> list[Case]:
    """Return the cases whose title, kind or codes match a pattern; a plain text matches what holds it."""
    wanted = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    return [
        case
        for case in cases
        if any(fnmatch.fnmatch(text, wanted) for text in (case.title, case.kind, *case.codes))
    ]


def main() -> int:
    """Run and judge all cases; return 1 if a run itself failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="only cases whose title, kind or code matches this",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="how many cases are run at a time"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write all outcomes there, as JSON"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the recordings there, and judge those that are there",
    )
    args = parser.parse_args()
    began, cases = time.perf_counter(), _select(load(), args.only)
    width = max((len(case.title) for case in cases), default=0)
    with tempfile.TemporaryDirectory() as passing, ThreadPoolExecutor(args.jobs) as pool:
        folder = (args.keep or Path(passing)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = []
        for outcome in pool.map(lambda case: judge(case, folder), cases):
            outcomes.append(outcome)
            print(outcome.line(width), flush=True)
    totals = _totals(outcomes)
    _print_totals(outcomes, totals)
    print(
        f"{len(outcomes)} runs in {time.perf_counter() - began:.0f} s, {args.jobs} at a time, PyTorch {torch.__version__}"
    )
    if args.output:
        versions = {
            "kedge": kedge.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        result = {
            "versions": versions,
            "totals": totals,
            "cases": [_as_json(outcome) for outcome in outcomes],
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(bool(totals["failed"]))


if __name__ == "__main__":
    sys.exit(main())
