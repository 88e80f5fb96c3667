"""What `kedge examine` says of programs with one fault each, judged by a table of what it ought to say.

    python benchmarks/examine.py [--only PATTERN] [--jobs N]

The programs and faults are those of `faults_in_the_wild.py`. A program is examined once as it is,
and once with each of its faults, without an option but `--optimizer` where the fault is in a later
training. What a trial says of a fault is what it does not say of the program as it is.

Beside each fault its `.toml` says in `examine` which trials can say something true of it, as
"wrong" or as something to "look" at, judged from the fault and not from what Kedge says: or, in
`nothing`, why no trial before a run can. "wrong" is only what is certain.

* recall: the faults that such a trial speaks of, among those that a trial can show. "weaker" are
  those of which "wrong" was certain, and "look" is said;
* precision: of all trials that speak of a fault, those that the table has, with that verdict;
* alarms: the repaired programs with anything wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trials
from faults_in_the_wild import Case, load

Spoken = frozenset[tuple[str, str]]
"""Verdicts and trials."""


@dataclass(frozen=True)
class Examined:
    """What an examination said of a case.

    Attributes:
        case: The case.
        optimizer: The number of the optimizer with which the examined training begins.
        spoken: The trials that say "wrong" or "look".
        seconds: How long it took.
        failure: What went wrong with the examination itself; empty if nothing did.
    """

    case: Case
    optimizer: int
    spoken: Spoken = frozenset()
    seconds: float = 0.0
    failure: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """The program and the training."""
        return self.case.program, self.optimizer


@dataclass(frozen=True)
class Judged:
    """What the words about a fault, or about a repaired program, are worth.

    Attributes:
        found: The examination.
        word: What it counts as.
        right: What is said of the fault, and true by the table.
        false: What is said, and not in the table.
    """

    found: Examined
    word: str
    right: Spoken = field(default=frozenset())
    false: Spoken = field(default=frozenset())


def examine(case: Case, optimizer: int) -> Examined:
    """Examine a case in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(case.source, encoding="utf-8")
        began = time.perf_counter()
        try:
            said = spoken("--optimizer", str(optimizer), "train.py", place=Path(folder))
        except RuntimeError as error:
            took = time.perf_counter() - began
            return Examined(case, optimizer, seconds=took, failure=str(error))
    return Examined(case, optimizer, said, time.perf_counter() - began)


def spoken(*arguments: str, place: Path) -> Spoken:
    """Return which trials of ``kedge examine`` say "wrong" or "look" of a program in a folder.

    Raises:
        RuntimeError: The program could not be examined.
    """
    done = trials.command("examine", "--json", *arguments, place=place)
    if done.returncode not in {0, 1} or not done.stdout:
        raise RuntimeError(trials.last_line(done.stderr))
    results = json.loads(done.stdout)["results"]
    return frozenset(
        (each["verdict"], each["trial"]) for each in results if each["verdict"] in {"wrong", "look"}
    )


def judged(found: Examined, repaired: Examined) -> Judged:
    """Judge an examination by the table, and by that of the repaired program."""
    if not found.case.name:
        wrong = frozenset(said for said in found.spoken if said[0] == "wrong")
        return Judged(found, "ALARM" if wrong else "sound", false=wrong)
    word, right, false = weighed(found.case.examine, found.spoken, repaired.spoken)
    return Judged(found, word, right, false)


def weighed(
    expected: Mapping[str, Any], said: Spoken, of_repaired: Spoken
) -> tuple[str, Spoken, Spoken]:
    """Return what the words about a fault count as, those of them that are right, and the others.

    Args:
        expected: What the table has beside the fault.
        said: What is said of the program with the fault.
        of_repaired: What is said of it without.
    """
    before = {trial: verdict for verdict, trial in sorted(of_repaired)}
    new = frozenset(
        (verdict, trial) for verdict, trial in said if before.get(trial) not in {verdict, "wrong"}
    )
    listed = {
        (verdict, trial) for verdict in ("wrong", "look") for trial in expected.get(verdict, ())
    }
    weaker = {("look", trial) for trial in expected.get("wrong", ())}
    right = new & (listed | weaker)
    if not listed:
        word = "FALSE" if new else "nothing"
    elif not right:
        word = "MISSED"
    elif expected.get("wrong") and not any(verdict == "wrong" for verdict, _ in right):
        word = "weaker"
    else:
        word = "named"
    return word, right, new - right


def shown(said: Spoken) -> str:
    """Return what is said as text."""
    return " ".join(sorted(f"{verdict}:{trial}" for verdict, trial in said))


def line(each: Judged, width: int) -> str:
    """Return what is said of a case, and what that is worth."""
    parts = [f"{each.word:7} {each.found.case.title:{width}} {each.found.seconds:5.1f} s"]
    parts += [shown(each.right)] if each.right else []
    parts += [f"false: {shown(each.false)}"] if each.false else []
    parts += [each.found.failure] if each.found.failure else []
    return "  ".join(parts)


def report(every: Sequence[Judged]) -> None:
    """Print the figures."""
    counts: Mapping[str, int] = Counter(each.word for each in every)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    faults = [each for each in every if each.found.case.name]
    spoken_of = counts["named"] + counts["weaker"]
    visible = spoken_of + counts["MISSED"]
    right = sum(len(each.right) for each in faults)
    false = sum(len(each.false) for each in faults)
    print(
        f"recall {share(spoken_of, visible)}: of {visible} faults that a trial can show, {spoken_of}"
    )
    print(f"precision {share(right, right + false)}: of {right + false} trials that speak, {right}")
    print(f"alarms {counts['ALARM']} of {len(every) - len(faults)} repaired programs")
    times = sorted(each.found.seconds for each in every)
    print(
        f"median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s, PyTorch {torch.__version__}"
    )


def share(part: int, whole: int) -> str:
    """Return a part of a whole, as a figure with two digits."""
    if not whole:
        return "-"
    return f"{part / whole:.2f}"


def main() -> int:
    """Examine the programs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="*", help="programs or cases of such names")
    parser.add_argument("--jobs", type=int, default=1, help="how many are examined at a time")
    options = parser.parse_args()
    cases = load()
    repaired = {case.program: case for case in cases if not case.name}
    wanted: dict[tuple[str, str, int], Case] = {}
    for case in cases:
        if fnmatch.fnmatch(case.program, options.only) or fnmatch.fnmatch(case.title, options.only):
            optimizer = case.examine.get("optimizer", 1)
            wanted.setdefault((case.program, "", optimizer), repaired[case.program])
            wanted[case.program, case.name, optimizer] = case
    width = max(len(case.title) for case in wanted.values())
    twins: dict[tuple[str, int], Examined] = {}
    every = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda each: examine(each[1], each[0][2]), wanted.items()):
            # A repaired program comes before its faults.
            each = judged(found, twins.setdefault(found.key, found))
            every.append(each)
            print(line(each, width), flush=True)
    report(every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
