"""How long reading takes: a recording of 1,000 sites over 10,000 sampled steps, 10 million rows.

Writes the recording once into a temporary folder, then prints what opening, reporting and checking
it take, each in a process of its own, the best of several times: seconds, seconds of the processor
(where others use the machine too, these say more), and how much memory each needs at most, the file
as far as it is mapped included.

    python benchmarks/reading.py [--sites 1000] [--steps 10000] [--times 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kedge.cli.main import main as kedge
from kedge.report import terminal  # noqa: F401 - what is measured is the reading, not the imports of the commands
from kedge.rules import registry  # noqa: F401 - as above
from kedge.store.events import EndEvent
from kedge.store.exponents import BUCKETS, encode
from kedge.store.recording import Recording
from kedge.store.writing.folder import create

DRAWN = 64
CHANNELS = 64
KINDS = ("out", "out.grad", "param", "param.grad", "update")
EVERY = 10

TASKS: dict[str, Callable[[str], object]] = {
    "open": Recording.open,
    "open, all steps": lambda path: Recording.open(path).steps,
    "one site's series": lambda path: Recording.open(path).series("h.3:out", "rms"),
    "kedge report": lambda path: kedge(["report", path]),
    "kedge report --all": lambda path: kedge(["report", path, "--all"]),
    "kedge check": lambda path: kedge(["check", path]),
}


def main() -> None:
    """Write the recording if it is not there, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the recording is, or is to be; a temporary folder if not given",
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        _perform(args.task, str(args.folder))
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = args.folder or Path(temporary) / "large.kedge"
        if not path.exists():
            write(path, args.sites, args.steps)
        size = sum(file.stat().st_size for file in path.iterdir())
        print(
            f"{args.sites:,} sites x {args.steps:,} steps: {args.sites * args.steps:,} rows, {size / 1e9:.2f} GB"
        )
        print(f"{'':<20}{'seconds':>9}{'processor':>11}{'peak MB':>9}")
        for name in TASKS:
            times = [_measured(name, path) for _ in range(args.times)]
            took, used, peak = (min(figures) for figures in zip(*times, strict=True))
            print(f"{name:<20}{took:>9.2f}{used:>11.2f}{peak:>9.0f}", flush=True)


def _measured(name: str, path: Path) -> list[float]:
    """Run one task in a process of its own; give its seconds and the processor's, imports left out, and its peak in MB."""
    command = [sys.executable, __file__, "--task", name, "--folder", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: list[float] = json.loads(done.stderr.splitlines()[-1])
    return figures


def _perform(name: str, path: str) -> None:
    start, used = time.perf_counter(), time.process_time()
    TASKS[name](path)
    took, used = time.perf_counter() - start, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([took, used, peak]), file=sys.stderr)


def write(path: Path, sites: int, steps: int) -> None:
    """Write a recording of a training in which nothing is wrong."""
    described = list(_described(sites))
    rng = np.random.default_rng(0)
    root = {"name": "Net", "prefix": "", "parameters": 64 * 64 * sites}
    manifest = {
        "kedge": "0.1.0",
        "command": ["train.py"],
        "script": "train.py",
        "every": EVERY,
        "rank": 0,
        "world": 1,
    }
    with create(path, manifest, force=False) as writer:
        writer.sites(described, [root])
        pools = [_pool(described, rng) for _ in range(8)]
        for number in range(steps):
            writer.stats(number * EVERY, _columns(pools[number % len(pools)], rng))
        writer.event(
            EndEvent(exit=0, steps=steps * EVERY, sampled=steps, seconds=1.0, watching=0.0)
        )


def _described(sites: int) -> Iterator[dict[str, Any]]:
    for number in range(sites):
        block, kind = divmod(number, len(KINDS))
        path = f"h.{block}" if kind < 2 else f"h.{block}.weight"
        yield {
            "id": number,
            "site": f"{path}:{KINDS[kind]}",
            "path": path,
            "kind": KINDS[kind],
            "type": "ReLU" if block % 4 == 3 else "Linear",
            "root": 0,
            "shape": [32, 64],
            "dtype": "float32",
            "channels": CHANNELS if KINDS[kind] == "out" and block % 4 == 3 else None,
            "from": [number - len(KINDS)] if number >= len(KINDS) else [None],
            "owner": f"h.{block}",
            "node": None,
        }


def _pool(described: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    """Make what steps have in common: the bytes, which are slow to make."""
    centres = np.array(
        [
            {"out": 45, "out.grad": 38, "param": 43, "param.grad": 38, "update": 33}[d["kind"]]
            for d in described
        ]
    )
    drawn = np.clip(
        rng.normal(centres[:, None], 2, (len(described), DRAWN)).astype(int), 0, BUCKETS - 1
    )
    return {
        "exponents": [encode(np.bincount(row, minlength=BUCKETS)) for row in drawn],
        "active": [rng.bytes(CHANNELS // 8) if d["channels"] else b"" for d in described],
        "scale": 2.0 ** (centres - 45),
    }


def _columns(pool: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    scale = pool["scale"] * rng.uniform(0.9, 1.1, len(pool["scale"]))
    many, count = len(scale), 32 * 64
    return {
        "site": np.arange(many),
        "calls": np.ones(many),
        "count": np.full(many, count),
        "sum": scale * rng.normal(size=many),
        "sumsq": scale**2 * count,
        "min": -3 * scale,
        "max": 3 * scale,
        "nonzero": np.full(many, count - 7),
        "nonfinite": np.zeros(many),
        "sampled": np.full(many, DRAWN),
        "active": pool["active"],
        "exponents": pool["exponents"],
    }


if __name__ == "__main__":
    main()
