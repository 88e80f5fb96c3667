"""Attributions of Kedge and of captum side by side: where they differ, and what each takes.

captum goes into a folder of its own, so that nothing of the environment changes:

    pip install --no-deps --target FOLDER captum tqdm
    PYTHONPATH=FOLDER python benchmarks/beside_captum.py [--rounds 15] [--threads 1]

The models are ones that captum handles: ReLUs are modules, and each is used once. The last is the
first with ``F.relu``, where captum's guided backpropagation says nothing and gives the plain
gradient. A round runs both on the same images, the one that goes first changing from round to
round; the ratio is Kedge's time over captum's in the same round, the median of all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import captum.attr
import torch
from torch import Tensor, nn

from kedge.recipes import (
    deconvnet,
    deep_lift,
    grad_cam,
    guided_backprop,
    integrated_gradients,
    saliency,
)

TARGET = 3
Ask = Callable[[Tensor], Tensor]


class Functional(nn.Module):
    """The small net, with its ReLUs as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer for layer in small() if not isinstance(layer, nn.ReLU)])

    def forward(self, x: Tensor) -> Tensor:
        conv1, conv2, pool, conv3, flat, fc1, fc2 = self.layers
        x = pool(conv2(conv1(x).relu()).relu())
        return fc2(fc1(flat(conv3(x).relu())).relu())


class Residual(nn.Module):
    """A block of a residual net whose two ReLUs are two modules."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1, self.relu1 = nn.BatchNorm2d(width), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(width), nn.ReLU()
        self.short = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.short(x))


def small() -> nn.Sequential:
    """Make three convolutions and two linear layers for images of 32 by 32."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def residual() -> nn.Sequential:
    """Make a residual net of 18 layers, each ReLU a module of its own."""
    widths = (
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    )
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *[Residual(*width) for width in widths], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "small net, 8x3x32x32": (small, "5", (8, 3, 32, 32)),
    "ResNet-18, 4x3x96x96": (residual, "10", (4, 3, 96, 96)),
    "the small net with F.relu": (Functional, "layers.3", (8, 3, 32, 32)),
}


def methods(model: nn.Module, site: str) -> dict[str, tuple[Ask, Ask]]:
    """Pair each method's two ways."""
    layer = model.get_submodule(site)
    return {
        "saliency": (
            saliency(model, TARGET),
            partial(captum.attr.Saliency(model).attribute, target=TARGET),
        ),
        "guided": (
            guided_backprop(model, TARGET),
            partial(captum.attr.GuidedBackprop(model).attribute, target=TARGET),
        ),
        "deconvnet": (
            deconvnet(model, TARGET),
            partial(captum.attr.Deconvolution(model).attribute, target=TARGET),
        ),
        "integrated": (
            integrated_gradients(model, TARGET, steps=20, at_once=20),
            partial(captum.attr.IntegratedGradients(model).attribute, target=TARGET, n_steps=20),
        ),
        "deep_lift": (
            deep_lift(model, TARGET),
            partial(captum.attr.DeepLift(model).attribute, target=TARGET),
        ),
        "grad_cam": (
            lambda x: grad_cam(model, site, TARGET, size=None)(x).unsqueeze(1),
            partial(
                captum.attr.LayerGradCam(model, layer).attribute,
                target=TARGET,
                relu_attributions=True,
            ),
        ),
    }


def timed(ask: Ask, x: Tensor) -> float:
    """Return how long one question takes."""
    begun = time.perf_counter()
    ask(x)
    return time.perf_counter() - begun


def compare(pair: tuple[Ask, Ask], x: Tensor, rounds: int) -> tuple[float, float, float, float]:
    """Return the largest difference, the largest value, the median ratio of times, and Kedge's median time."""
    ours, theirs = (ask(x.clone().requires_grad_()).detach() for ask in pair)
    ratios, times = [], []
    for i in range(rounds):
        order = (0, 1) if i % 2 else (1, 0)
        took: dict[int, float] = {
            which: timed(pair[which], x.clone().requires_grad_()) for which in order
        }
        ratios.append(took[0] / took[1])
        times.append(took[0])
    difference = (ours - theirs).abs().max().item()
    return (
        difference,
        theirs.abs().max().item(),
        statistics.median(ratios),
        statistics.median(times),
    )


def main(arguments: list[str] | None = None) -> None:
    """Compare all methods on all models."""
    parser = argparse.ArgumentParser(description="Compare attributions with captum's.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args: Any = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    warnings.filterwarnings(
        "ignore", message="Setting (forward, backward|backward)"
    )  # captum's, at each call
    print(
        f"captum {importlib.metadata.version('captum')}, torch {torch.__version__}, {args.rounds} rounds"
    )
    print(f"{'':28}{'':12}{'difference':>12}{'of at most':>12}{'time ratio':>12}{'Kedge ms':>10}")
    for name, (build, site, shape) in MODELS.items():
        torch.manual_seed(0)
        model, x = build().eval(), torch.randn(shape)
        for method, pair in methods(model, site).items():
            difference, most, ratio, took = compare(pair, x, args.rounds)
            print(
                f"{name:28}{method:12}{difference:12.3g}{most:12.3g}{ratio:12.3f}{1000 * took:10.1f}"
            )


if __name__ == "__main__":
    main()
