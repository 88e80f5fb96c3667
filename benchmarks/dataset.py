"""What writing the features of a data set costs: beside a loop that keeps everything in memory, and how flat memory is.

    python benchmarks/dataset.py

Both take the same features of the same 20,000 small images with the same model, turn by turn in one process. The loop is
what one writes by hand: forward hooks, and a list for each site. What is printed is the ratio of their rates.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kedge.recipes.dataset import Options, extract_dataset
from kedge.recipes.features import Features, extract

IMAGES, BATCH, SITES = 20_000, 64, ("6", "8")


class Images(Dataset[tuple[Tensor, int]]):
    """Random images of 32 by 32 pixels."""

    def __init__(self, count: int) -> None:
        self.images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % 64], index


class Resident:
    """Features that note how much memory the process has, now and then."""

    def __init__(self, features: Features, every: int) -> None:
        self.features, self.every, self.calls = features, every, 0
        self.seen: list[tuple[int, float]] = []

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls % self.every == 0:
            self.seen.append((self.calls * BATCH, resident()))
        found: dict[str, Tensor] = self.features(images)
        return found


def resident() -> float:
    """Give this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def model() -> nn.Sequential:
    """A small convolutional network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).eval()  # fmt: skip


def by_hand(net: nn.Sequential, loader: DataLoader[tuple[Tensor, int]]) -> float:
    """Keep everything in memory; give the seconds."""
    start = time.perf_counter()
    kept: dict[str, list[Tensor]] = {site: [] for site in SITES}
    handles = [
        net.get_submodule(site).register_forward_hook(lambda _m, _a, out, site=site: kept[site].append(out))
        for site in SITES
    ]
    with torch.no_grad():
        for images, _ in loader:
            net(images)
    for handle in handles:
        handle.remove()
    {site: torch.cat(values) for site, values in kept.items()}
    return time.perf_counter() - start


def to_disk(net: nn.Sequential, loader: DataLoader[tuple[Tensor, int]]) -> float:
    """Write everything; give the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        extract_dataset(extract(net, list(SITES), early_stop=False), loader, Path(folder) / "out")
        return time.perf_counter() - start


def flatness(net: nn.Sequential, loader: DataLoader[tuple[Tensor, int]]) -> None:
    """Print how resident memory goes over the run, after its first quarter."""
    taken = Resident(extract(net, list(SITES), early_stop=False), every=20)
    with tempfile.TemporaryDirectory() as folder:
        extract_dataset(taken, loader, Path(folder) / "out", Options(shard_bytes=8 << 20))
    later = taken.seen[len(taken.seen) // 4 :]
    count, total = (torch.tensor(column, dtype=torch.float64) for column in zip(*later, strict=True))
    slope = float(((count - count.mean()) * (total - total.mean())).sum() / (count - count.mean()).square().sum())
    print(f"resident: {total.min():.0f} to {total.max():.0f} MiB, slope {slope * 1e4:+.2f} MiB per 10,000 images")


def main() -> None:
    """Measure in pairs and print."""
    parser = argparse.ArgumentParser(description="Write the features of a data set, and compare with a loop in memory.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--images", type=int, default=IMAGES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    net, loader = model(), DataLoader(Images(args.images), BATCH)
    flatness(net, loader)  # first, while nothing else has widened the process's memory
    by_hand(net, DataLoader(Images(640), BATCH))
    ratios = []
    for pair in range(args.pairs):
        both = (by_hand, to_disk) if pair % 2 else (to_disk, by_hand)
        seconds = {each.__name__: each(net, loader) for each in both}
        ratios.append(seconds["by_hand"] / seconds["to_disk"])
        print(
            f"pair {pair}: by hand {seconds['by_hand']:.2f} s, to disk {seconds['to_disk']:.2f} s, rate {ratios[-1]:.3f}"
        )
    print(f"rate of writing to disk over keeping in memory: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
