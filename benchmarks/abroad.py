"""Judge Kedge on programs that were written elsewhere, after faults that people reported, at default settings.

    python benchmarks/abroad.py PROGRAMS [--table FILE.toml] [--only PATTERN] [--load N] [--keep FOLDER]
                                [--by run,examine,against]

``PROGRAMS`` is a folder with a local copy of the programs; ``abroad.toml`` says which they are,
what is wrong with each, and what has to be said of it. A program whose file is not there is left
out, and counted. Each runs alone, by ``kedge run`` and ``kedge check`` without an option; with
``--load N``, N processes that do nothing but compute run beside it.

* named: a finding of one of the rules that name the fault says what it has to;
* partly: a true symptom of it was found;
* missed: neither;
* FALSE: a sentence was said that is false of this program, whatever else was found;
* quiet, ALARM: a program without a fault got neither warning nor error, or got one.

``--by`` also has them examined, and checked against a good run; see ``ways.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from abroad_cases import Case, cases
from ways import NAMING, SHOWABLE, WAYS, Answer, Workplace

TABLE = Path(__file__).with_name("abroad.toml")
GOAL = 0.75
"""The share of the faults that training can show which are to be named."""


def line(case: Case, answers: Mapping[str, Answer], seconds: float) -> str:
    """Format what came of a case."""
    parts = [f"{answer.word:7} {answer.said}" for answer in answers.values()]
    if len(parts) == 1:
        (answer,) = answers.values()
        return f"{answer.word:7} {case.title:48} {seconds:5.1f} s  {answer.said}"
    return "\n".join(
        [f"{case.title}  {seconds:.1f} s"]
        + [f"    {way:8} {part}" for way, part in zip(answers, parts, strict=True)]
    )


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
    parser.add_argument(
        "--by", default="run", metavar="WAYS", help=f"which of these ask: {','.join(WAYS)}"
    )
    args = parser.parse_args()
    ways = args.by.split(",")
    if not set(ways) <= set(WAYS):
        parser.error(f"--by {args.by}: the ways are {', '.join(WAYS)}")

    asked: list[tuple[Case, dict[str, Answer]]] = []
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as passing, load(args.load):
        folder = (args.keep or Path(passing)).resolve()
        workplace = Workplace(args.programs, folder, args.table)
        for case in cases(args.table, args.only):
            if not (args.programs / case.program).is_file():
                outcomes["absent"] += 1
                continue
            began = time.perf_counter()
            try:
                answers = {way: workplace.ask(way, case) for way in ways}
            except RuntimeError as error:
                outcomes["FAILED"] += 1
                print(f"FAILED  {case.title}: {error}", flush=True)
                continue
            asked.append((case, answers))
            print(line(case, answers, time.perf_counter() - began), flush=True)

    summarise(asked, outcomes)
    print(f"{args.load} busy processes beside it, PyTorch {torch.__version__}")
    return int(bool(outcomes["FAILED"]))


def summarise(asked: Sequence[tuple[Case, Mapping[str, Answer]]], outcomes: Counter[str]) -> None:
    """Print what the answers come to, in each way, and together."""
    failed = [f"{count} {outcome}" for outcome, count in outcomes.most_common()]
    ways = list(dict.fromkeys(way for _, answers in asked for way in answers))
    print()
    for way in ways:
        words = Counter(answers[way].word for _, answers in asked)
        counts = [f"{count} {word}" for word, count in words.most_common() if word != "-"]
        print(f"{way}: {', '.join(counts + failed)}")
        shown = sum(words[word] for word in SHOWABLE)
        if shown:
            named = sum(words[word] for word in NAMING)
            print(
                f"named {named / shown:.2f} of {shown} that it can show{reached(way, named / shown)}"
            )
    if len(ways) > 1:
        _together(asked, ways)


def reached(way: str, share: float) -> str:
    """Return how a share stands to the goal, which is one of runs."""
    if way != "run":
        return ""
    return f"; goal {GOAL}: {'reached' if share >= GOAL else 'not reached'}"


def _together(asked: Sequence[tuple[Case, Mapping[str, Answer]]], ways: Sequence[str]) -> None:
    """Print by folder how many faults each way names, and how many any of them does."""
    every = [each for each in asked if all(answer.word != "-" for answer in each[1].values())]
    for folder in dict.fromkeys(case.program.partition("/")[0] for case, _ in every):
        own = [each for each in every if each[0].program.startswith(f"{folder}/")]
        faults = [answers for case, answers in own if case.fault]
        sound = [answers for case, answers in own if not case.fault]
        by_way = [f"{way} {sum(each[way].word in NAMING for each in faults)}" for way in ways]
        any_way = sum(any(each[way].word in NAMING for way in ways) for each in faults)
        alarms = sum(any(each[way].word == "ALARM" for way in ways) for each in sound)
        print(
            f"{folder}: of {len(faults)} faults {', '.join(by_way)}, any {any_way}; "
            f"{alarms} of {len(sound)} without a fault with an alarm"
        )


if __name__ == "__main__":
    sys.exit(main())
