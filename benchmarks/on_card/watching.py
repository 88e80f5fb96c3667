"""What it costs to watch a training, how much of a short one is seen, and whether a NaN is.

The ratio to the bare steps, at the defaults and with every step measured; the steps of 1,000 quick
and 120 slower ones that are measured at the defaults; and what `kedge run` finds in a program whose
loss becomes NaN after most of its steps.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kedge
from on_card import trainings
from on_card.bench import Bench
from on_card.right import watched
from on_card.sheet import Table, rounds, spread
from on_card.trainings import Training

WARM = 10
AT_DEFAULTS, EVERY_STEP = "at the defaults", "every step, no budget"
OPTIONS = {AT_DEFAULTS: {}, EVERY_STEP: {"every": 1, "budget": None}}
SECONDS = {AT_DEFAULTS: 4.0, EVERY_STEP: 0.7}
"""How long a block's steps take bare: at the defaults some seconds are free, so that a short one shows little."""
PROGRAM = Path(__file__).with_name("nan_in_the_loop.py")


def watch(bench: Bench) -> None:
    """Fill the tables."""
    on = bench.on
    made: dict[str, Callable[[], trainings.Made]] = {
        "MLP": lambda: trainings.mlp(on),
        "GPT 12x768": lambda: trainings.gpt_768(on),
    }
    short = {"1,000 quick steps": (lambda: trainings.mlp(on, width=16, layers=3), 1000)}
    short["120 steps of a GPT"] = (lambda: trainings.gpt_768(on), 120)
    if bench.tiny:
        made = {"MLP": lambda: trainings.mlp(on, width=16, layers=2)}
        short = {"20 steps": (made["MLP"], 20)}
    seen = bench.sheet.table("What is seen at the defaults")
    with bench.sheet.trying("watch: NaN"):
        seen.put("a loss that becomes NaN", "found", find_nan(bench))
    for name, (make, steps) in short.items():
        with bench.sheet.trying(f"watch: {name}"):
            seen.put(name, "found", measured_of(bench, Training(on, *make()), steps))
        on.clean()
    costs = bench.sheet.table("Watching: ratio to the bare step, median (lowest-highest)")
    for name, make in made.items():
        with bench.sheet.trying(f"watch: {name}"):
            ratios(bench, costs, name, Training(on, *make()))
        on.clean()


def find_nan(bench: Bench) -> str:
    """Return what `kedge run` tells of a program whose loss becomes NaN."""
    # A device that a module registers is not there in the program's process.
    kind = bench.on.kind if bench.on.kind in ("cuda", "xpu", "mps") else "cpu"
    how_long = ("100", "0.02") if bench.tiny else ("3600", "6")
    kedge_run = ["-m", "kedge", "run", "--force", "-o", str(bench.folder / "nan.kedge")]
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *kedge_run, str(PROGRAM), kind, *how_long],
        capture_output=True,
        text=True,
        timeout=600 if bench.tiny else 60,
        check=False,
    )
    taken = time.perf_counter() - begun
    lines = [line for line in done.stderr.splitlines() if line.startswith("[kedge]")]
    told = [line.removeprefix("[kedge] ") for line in lines if "see more with" not in line]
    if done.returncode and not told:
        told = done.stderr.splitlines()[-1:]
    printed = done.stdout.strip() or "nothing"
    return f"the program prints {printed} after {taken:.0f} s; " + "; ".join(told).replace("|", "/")


def measured_of(bench: Bench, training: Training, steps: int) -> str:
    """Tell how many of some steps are measured at the defaults."""
    with watched(bench, "short") as block:
        for _ in range(steps):
            training.step()
        bench.on.synchronize()
    measured, watching = _measured(block.recording)
    return f"{measured:,} measured; {watching:.1f} s of watching"


def _measured(recording: Path) -> tuple[int, float]:
    """Return how many steps were measured, and the seconds that watching took."""
    end = kedge.Recording.open(recording).end
    return (0, 0.0) if end is None else (end.levels["measured"], end.watching)


def ratios(bench: Bench, table: Table, name: str, training: Training) -> None:
    """Fill a column: what watching costs, beside bare steps before it."""
    on = bench.on
    for _ in range(WARM):
        training.step()
    bare = on.seconds(training.step, WARM)
    found: dict[str, list[float]] = {case: [] for case in OPTIONS}
    said: dict[str, str] = {}
    try:
        for _ in rounds(seconds=20, least=1 if bench.tiny else 2, most=1 if bench.tiny else 3):
            for case, options in OPTIONS.items():
                steps = 20 if bench.tiny else max(20, int(SECONDS[case] / bare))
                bare = on.seconds(training.step, 5 + steps // 5)
                with watched(bench, "cost", **options) as block:
                    found[case].append(on.seconds(training.step, steps) / bare)
                measured, _ = _measured(block.recording)
                said[case] = f"{measured:,} of {steps:,} steps measured"
    finally:  # a part that is out of time has had some rounds
        for case, each in found.items():
            table.put(case, name, f"{spread(each, 3)}, {len(each)} rounds; {said.get(case, '')}")
