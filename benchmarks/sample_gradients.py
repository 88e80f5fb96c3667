"""The gradient of each sample: Kedge's recipe beside `torch.func`, in time and in memory.

    python benchmarks/sample_gradients.py [--rounds 5]

Each variant runs in a process of its own, which reports its median time and by how much the peak of
its memory rose above that of an ordinary forward and backward.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from kedge.recipes import sample_gradients

N = 32


def convolutional() -> tuple[nn.Module, Tensor]:
    """Make a small convolutional network, and images."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    return model, torch.randn(N, 3, 32, 32)


def perceptron() -> tuple[nn.Module, Tensor]:
    """Make four linear layers of 512."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(N, 512)


class Reader(nn.Module):
    """A small transformer of hand-written blocks, whose parameters all have a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 256)
        self.norms = nn.ModuleList([nn.LayerNorm(256) for _ in range(4)])
        self.mixed = nn.ModuleList([nn.Linear(256, 768) for _ in range(4)])
        self.out = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
        self.answer = nn.Linear(256, 10)

    def forward(self, words: Tensor) -> Tensor:
        """Map tokens to ten scores."""
        x = self.words(words)
        for norm, mixed, out in zip(self.norms, self.mixed, self.out, strict=True):
            q, k, v = mixed(norm(x)).chunk(3, -1)
            x = x + out((q @ k.mT / 16).softmax(-1) @ v)
        return self.answer(x.mean(1))


def transformer() -> tuple[nn.Module, Tensor]:
    """Make the transformer, and tokens."""
    return Reader(), torch.randint(0, 1000, (N, 64))


MODELS = {"convolutional": convolutional, "perceptron": perceptron, "transformer": transformer}


def by_torch_func(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """As the tutorial of PyTorch does it."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)  # type: ignore[no-any-return]


def norms_by_torch_func(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The norms of these."""
    return {name: g.flatten(1).norm(dim=1) for name, g in by_torch_func(model, x, y).items()}


def by_kedge(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients in one call."""
    return sample_gradients(model, x, cross_entropy, y)


def norms_by_kedge(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The norms, with the gradients of four samples at a time."""
    return sample_gradients(model, x, cross_entropy, y, norms=True, at_once=4)


WAYS: dict[str, Callable[..., Any]] = {
    "torch.func": by_torch_func,
    "kedge": by_kedge,
    "torch.func, norms": norms_by_torch_func,
    "kedge, norms": norms_by_kedge,
}


def one(model_name: str, way: str, rounds: int) -> None:
    """Run one way in this process and print its figures."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = MODELS[model_name]()
    y = torch.randint(0, 10, (N,))
    cross_entropy(model(x), y).backward()
    sample_gradients(nn.Linear(2, 2), torch.randn(2, 2), torch.sum)
    by_torch_func(nn.Linear(512, 10), torch.randn(N, 512), y)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        found = WAYS[way](model, x, y)
        times.append(time.perf_counter() - begun)
        del found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = by_kedge(model, x, y)
    theirs = by_torch_func(model, x, y)
    worst = max(float((found[k] - theirs[k]).norm() / theirs[k].norm()) for k in theirs)
    print(
        f"{model_name:15}{way:20}{1000 * statistics.median(times):10.1f} ms{peak / 1024:10.0f} MB{worst:10.1e}"
    )


def main() -> None:
    """Compare the ways on all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs=2)
    args = parser.parse_args()
    if args.only:
        one(*args.only, args.rounds)
        return
    print(
        f"torch {torch.__version__}, {N} samples, {args.rounds} rounds; the last column: the largest difference"
    )
    for name in MODELS:
        for way in WAYS:
            command = [sys.executable, __file__, "--only", name, way, "--rounds", str(args.rounds)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
