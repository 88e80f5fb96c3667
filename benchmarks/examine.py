"""What `kedge examine` says of programs with one fault each, beside what it says of them without it.

    python benchmarks/examine.py [--only PATTERN] [--jobs N]

The programs and faults are those of `faults_in_the_wild.py`. A program is examined once as it is,
and once with each of its faults, without an option. A fault is

* wrong: a trial ends with "wrong" that does not on the program as it is;
* look: the same of "look", and none is wrong;
* quiet: every trial ends as on the program as it is. Many faults are such that no trial can see
  them: a training that is too short, labels that are shuffled, a mode that changes after an epoch.

A repaired program with anything wrong is an alarm.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import trials
from faults_in_the_wild import Case, load


@dataclass(frozen=True)
class Examined:
    """What an examination said of a case.

    Attributes:
        case: The case.
        wrong: The trials with something wrong.
        look: The trials with something to look at.
        seconds: How long it took.
        failure: What went wrong with the examination itself; empty if nothing did.
    """

    case: Case
    wrong: frozenset[str] = frozenset()
    look: frozenset[str] = frozenset()
    seconds: float = 0.0
    failure: str = ""


def examine(case: Case) -> Examined:
    """Examine a case in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(case.source, encoding="utf-8")
        began = time.perf_counter()
        done = trials.command("examine", "--json", "train.py", place=Path(folder))
        took = time.perf_counter() - began
    if done.returncode not in {0, 1} or not done.stdout:
        return Examined(case, seconds=took, failure=trials.last_line(done.stderr))
    results = json.loads(done.stdout)["results"]
    by_verdict = {
        verdict: frozenset(each["trial"] for each in results if each["verdict"] == verdict)
        for verdict in ("wrong", "look")
    }
    return Examined(case, by_verdict["wrong"], by_verdict["look"], took)


def verdict(found: Examined, repaired: Examined) -> tuple[str, frozenset[str]]:
    """Return what a case counts as, with the trials that say it."""
    if not found.case.name:
        return ("ALARM", found.wrong) if found.wrong else ("sound", found.look)
    wrong = found.wrong - repaired.wrong
    if wrong:
        return "wrong", wrong
    look = found.look - repaired.look - repaired.wrong
    return ("look", look) if look else ("quiet", frozenset())


def report(examined: Sequence[Examined]) -> None:
    """Print a line for each case, and the counts."""
    repaired = {each.case.program: each for each in examined if not each.case.name}
    width = max(len(each.case.title) for each in examined)
    counts: dict[str, int] = {}
    for each in examined:
        word, said = verdict(each, repaired[each.case.program])
        counts[word] = counts.get(word, 0) + 1
        named = each.failure or " ".join(sorted(said))
        print(f"{word:6} {each.case.title:{width}} {each.seconds:5.1f} s  {named}")
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    times = sorted(each.seconds for each in examined)
    print(
        f"median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s, PyTorch {torch.__version__}"
    )


def main() -> int:
    """Examine the programs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="*", help="programs of such names")
    parser.add_argument("--jobs", type=int, default=1, help="how many are examined at a time")
    options = parser.parse_args()
    cases = [case for case in load() if fnmatch.fnmatch(case.program, options.only)]
    with ThreadPoolExecutor(options.jobs) as pool:
        report(list(pool.map(examine, cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
