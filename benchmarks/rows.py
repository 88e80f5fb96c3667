"""What it costs to read the features of a million images: Kedge beside a NumPy memory map of the same numbers.

Writes the features once, by default a million rows of 256 numbers with labels and names, and the
same rows as one .npy file. Each round draws new rows and reads them from both, in shuffled order:
first from pages and blocks that this process has not read yet, then again. It is the processor's
time of the thread, medians are printed, with quartiles. Both files are in the page cache. The first
look-up of a key is measured in a process of its own, with the memory that it takes.

    python benchmarks/rows.py [--rows 1000000] [--width 256] [--rounds 20] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.features.dataset import FeatureSet, Options, extract_dataset, open_features

AT_ONCE, SINGLE, BATCH, SLICE = 8192, 1000, 256, 4096


class Batches:
    """Rows as batches of a loader, each with its labels and names."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows = rows
        self.base = torch.randn(AT_ONCE, width)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
        for start in range(0, self.rows, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, self.rows))
            labels = torch.arange(numbers.start, numbers.stop)
            yield (
                self.base[: len(numbers)] + start,
                labels,
                [f"images/{number:08}.png" for number in numbers],
            )


def write(folder: Path, rows: int, width: int) -> None:
    """Write the features, and the same rows as one array."""
    options = Options(labels=True, fields={"path": 2}, keys=lambda batch: batch[2], progress=False)
    found = extract_dataset(lambda x: {"f": x}, Batches(rows, width), folder / "features", options)
    array = np.lib.format.open_memmap(folder / "f.npy", "w+", np.float32, (rows, width))
    for start in range(0, rows, AT_ONCE):
        array[start : start + AT_ONCE] = found["f"][start : start + AT_ONCE].numpy()
    array.flush()


def seconds(work: Callable[[], Any]) -> float:
    """Measure the processor's time."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def read(folder: Path, rounds: int) -> None:
    """Read single rows, random batches and slices, and print how much longer Kedge takes."""
    found, array = open_features(folder / "features"), np.load(folder / "f.npy", mmap_mode="r")
    column = found["f"]
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        drawn = np.random.default_rng()
        rows = drawn.integers(0, len(column), SINGLE).tolist()
        batch = drawn.integers(0, len(column), BATCH)
        start = drawn.integers(0, max(1, len(column) - SLICE)).item()
        kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            f"{SINGLE:,} single rows": (
                lambda rows=rows: [column[row] for row in rows],
                lambda rows=rows: [torch.from_numpy(np.array(array[row])) for row in rows],
            ),
            f"a random batch of {BATCH}": (
                lambda batch=batch: column[batch],
                lambda batch=batch: torch.from_numpy(array[batch]),
            ),
            f"a slice of {SLICE:,}": (
                lambda start=start: column[start : start + SLICE],
                lambda start=start: torch.from_numpy(np.array(array[start : start + SLICE])),
            ),
        }
        for kind, (mine, other) in kinds.items():
            for when in ("first", "again"):
                pair = {"kedge": mine, "numpy": other}
                for name in random.sample(list(pair), 2):
                    times.setdefault(f"{kind}, {when}/{name}", []).append(seconds(pair[name]))
    for key in [key.removesuffix("/kedge") for key in times if key.endswith("/kedge")]:
        mine, other = times[f"{key}/kedge"], times[f"{key}/numpy"]
        low, middle, high = statistics.quantiles(a / b for a, b in zip(mine, other, strict=True))
        each = statistics.median(mine) * 1e3
        print(
            f"  {key:32} {middle:5.2f} of a memory map ({low:.2f} to {high:.2f}), {each:.2f} ms   to reach 2"
        )


def first_look(folder: Path) -> None:
    """Open the features, read a row, find a key; print seconds and MiB."""
    torch.empty(1).numpy()
    before, start = _resident(), time.process_time()
    found: FeatureSet = open_features(folder / "features")
    found["f"][0]
    opened = time.process_time()
    found.number("images/00000007.png")
    print(json.dumps([opened - start, time.process_time() - opened, _resident() - before]))


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the features are, or are to be (default: a temporary folder)",
    )
    parser.add_argument("--first-look", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.first_look:
        first_look(asked.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        if not (folder / "f.npy").exists():
            write(folder, asked.rows, asked.width)
        rows, width = np.load(folder / "f.npy", mmap_mode="r").shape
        print(
            f"{rows:,} rows of {width} numbers, {len([*(folder / 'features').glob('shard-*')])} shards"
        )
        command = [sys.executable, __file__, "--first-look", "--folder", str(folder)]
        found = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(3)
        ]
        opened, key, memory = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"  the first row {opened:.2f} s, then the first key {key:.2f} s, {memory:.0f} MiB more in all"
        )
        read(folder, asked.rounds)


if __name__ == "__main__":
    main()
