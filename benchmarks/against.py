"""Ask of repeated and of faulty runs what held in a good one: ``kedge check --against``.

    python benchmarks/against.py [--only PROGRAM] [--jobs N] [--output FILE.json] [--keep FOLDER]

Each program of ``programs/`` that is in `VARIED` is run once as it is: the good run. It is run again
as a healthy repetition, with another seed, length and batch size as far as it has one, and with each
of its faults, as ``faults_in_the_wild.py`` plants them. All runs are made by ``kedge run`` without
an option. Three figures count:

* false: the repetitions with a departure. One in twenty is allowed;
* departing: the faulty runs with a departure;
* beyond: those of them in which ``kedge check`` alone names nothing that is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults_in_the_wild import Case, Outcome, judge, load

from kedge.compare.against.departures import departures
from kedge.errors import CannotCompare
from kedge.rules.rule import Finding
from kedge.store.recording import Recording

ALLOWED = 0.05
"The share of healthy repetitions that may have a departure."


@dataclass(frozen=True)
class Varied:
    """What a program can be repeated with.

    Attributes:
        length: The text of its length, whose number stands between two bars: ``range(|6|)``.
        batch: That of its batch size; empty if it has none, or one that stands in several places.
    """

    length: str
    batch: str = ""


VARIED = {
    "accumulation": Varied("range(|6|)", "ACCUMULATE = |16|,"),
    "autoencoder": Varied("range(|12|)", "split(|64|)"),
    "bfloat_mlp": Varied("range(|15|)", "split(|64|)"),
    "cancer_binary": Varied("range(|30|)", "batch_size=|32|"),
    "char_gpt": Varied("4, 3, |200|", "= 32, |12|,"),
    "char_lstm": Varied("range(|250|)"),
    "cross_validation": Varied("range(|10|)", "split(|32|)"),
    "deep_relu": Varied("range(|15|)", "batch_size=|64|"),
    "diabetes_regression": Varied("range(|40|)"),
    "digits_cnn": Varied("range(|6|)", "batch_size=|50|"),
    "digits_lenet": Varied("range(|12|)", "batch_size = |32|"),
    "distillation": Varied("range(|12|)"),
    "forecast_conv": Varied("range(|8|)", "batch_size=|32|"),
    "fraud": Varied("range(|8|)", "batch_size=|64|"),
    "gan_points": Varied("range(|400|)"),
    "gcn": Varied("range(|150|)"),
    "mixture_density": Varied("range(|20|)", "split(|80|)"),
    "multilabel": Varied("range(|10|)", "split(|40|)"),
    "multitask": Varied("range(|12|)", "split(|50|)"),
    "nll_digits": Varied("range(1, |7|)", "split(|64|)"),
    "recommender": Varied("range(|10|)", "split(|128|)"),
    "rows_transformer": Varied("range(|8|)", "batch_size=|50|"),
    "segmentation": Varied("range(|6|)"),
    "sentiment_gru": Varied("range(|5|)", "batch_size=|32|"),
    "seq2seq": Varied("range(|400|)"),
    "triplets": Varied("range(|300|)"),
    "vae": Varied("range(|15|)", "split(|100|)"),
}

REPETITIONS = ((1.0, 1.0), (1.5, 1.0), (0.6, 1.0), (1.0, 2.0), (1.0, 0.5))
"The factors of length and batch size of each repetition; each has a seed of its own."


@dataclass(frozen=True)
class Asked:
    """One run of which the good run's relations were asked.

    Attributes:
        outcome: The run, with what ``kedge check`` alone says of it.
        healthy: Whether it is a repetition.
        found: Its departures.
    """

    outcome: Outcome
    healthy: bool
    found: tuple[Finding, ...]

    @property
    def kinds(self) -> list[str]:
        """The relations that do not hold."""
        return [finding.evidence.kind for finding in self.found]

    @property
    def is_beyond(self) -> bool:
        """Whether this names something, and the rules alone name nothing that is wrong."""
        return bool(self.found) and not self.outcome.named

    def line(self) -> str:
        """Format it in a line."""
        verdict = "departs" if self.found else "holds"
        if self.healthy and self.found:
            verdict = "FALSE"
        elif self.is_beyond:
            verdict = "beyond"
        title = self.outcome.case.title
        return f"{verdict:8} {title:46} {' '.join(self.kinds) or '-':40} {' '.join(self.outcome.named)}"

    def entry(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return {
            "run": self.outcome.case.title,
            "healthy": self.healthy,
            "rules": self.outcome.named,
            "departures": [finding.entry() for finding in self.found],
        }


def repetitions(good: Case) -> Iterator[Case]:
    """Yield a program with other seeds, lengths and batch sizes."""
    varied = VARIED[good.program]
    for number, (length, batch) in enumerate(REPETITIONS, 1):
        source = reseeded(good.source, 100 * number)
        source = rescaled(source, varied.length, length)
        if varied.batch:
            source = rescaled(source, varied.batch, batch)
        yield Case(good.program, source, f"repetition {number}")


def reseeded(source: str, more: int) -> str:
    """Return a program with another seed."""
    before, call, rest = source.partition("manual_seed(")
    if not call:
        raise ValueError("the program sets no seed")
    seed, _, after = rest.partition(")")
    return f"{before}{call}{int(seed) + more}){after}"


def rescaled(source: str, text: str, factor: float) -> str:
    """Return a program with one of its numbers times a factor."""
    before, number, after = text.split("|")
    old = f"{before}{number}{after}"
    if source.count(old) != 1:
        raise ValueError(f"this must occur once in the program: {old}")
    return source.replace(old, f"{before}{round(int(number) * factor)}{after}")


def opened(case: Case, folder: Path) -> Recording:
    """Return the recording of a case that was run."""
    return Recording.open(next((folder / case.title.replace(": ", ".")).glob("*.kedge")))


def ask(good: Case, cases: list[Case], folder: Path, pool: ThreadPoolExecutor) -> list[Asked]:
    """Run a program and its variants, and ask of each what held in the first."""
    first, *others = pool.map(lambda case: judge(case, folder), [good, *cases])
    if first.failure:
        raise RuntimeError(f"{good.title}: {first.failure}")
    model = opened(good, folder)
    asked = []
    for outcome in others:
        if outcome.failure:
            print(f"FAILED   {outcome.case.title}: {outcome.failure}")
            continue
        try:
            found = departures(opened(outcome.case, folder), model)
        except CannotCompare as error:
            print(f"REFUSED  {outcome.case.title}: {error}")
            continue
        asked.append(Asked(outcome, outcome.case.name.startswith("repetition"), tuple(found)))
        print(asked[-1].line(), flush=True)
    return asked


def main() -> int:
    """Run all programs; return 1 if more repetitions depart than are allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="PROGRAM", default="*", help="only these programs")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all of it, as JSON")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep and reuse the recordings")
    args = parser.parse_args()
    began = time.perf_counter()
    known = [case for case in load() if case.program in VARIED]
    asked: list[Asked] = []
    with tempfile.TemporaryDirectory() as passing, ThreadPoolExecutor(args.jobs) as pool:
        folder = (args.keep or Path(passing)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for good in known:
            if good.name or not fnmatch.fnmatch(good.program, args.only):
                continue
            faults = [case for case in known if case.program == good.program and case.name]
            asked += ask(good, [*repetitions(good), *faults], folder, pool)
    if args.output:
        entries = [each.entry() for each in asked]
        args.output.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"{len(asked)} runs in {time.perf_counter() - began:.0f} s")
    return int(_print_totals(asked) > ALLOWED)


def _print_totals(asked: list[Asked]) -> float:
    """Print the figures over all runs, and return the share of repetitions that depart."""
    healthy = [each for each in asked if each.healthy]
    faulty = [each for each in asked if not each.healthy]
    shown = [each for each in faulty if not each.outcome.case.hidden]
    false = [each for each in healthy if each.found]
    beyond = [each for each in faulty if each.is_beyond]
    print(f"{len(false)} of {len(healthy)} healthy repetitions depart")
    print(f"{sum(bool(each.found) for each in faulty)} of {len(faulty)} faulty runs depart")
    named = sum(bool(each.outcome.named) for each in shown)
    print(f"of the {len(shown)} faults that training shows, the rules alone name {named}")
    hidden = sum(bool(each.outcome.case.hidden) for each in beyond)
    print(f"{len(beyond)} faults are named beyond these, {hidden} of which are hidden from rules")
    for title, runs in (("repetitions", healthy), ("faults", faulty), ("beyond", beyond)):
        counts = Counter(kind for each in runs for kind in dict.fromkeys(each.kinds))
        listed = ", ".join(f"{kind} {number}" for kind, number in counts.most_common())
        print(f"relations that do not hold in {title}: {listed or 'none'}")
    return len(false) / max(len(healthy), 1)


if __name__ == "__main__":
    sys.exit(main())
