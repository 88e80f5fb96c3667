"""What Kedge's hooks cost in compiled models: kernels and bytes by Inductor's own count, and time.

Each model is compiled by Inductor for the CPU, forward and backward, in four ways: without hooks;
with `kedge.measure()` at every output; at every output and output gradient; and with the same
statistics of every output written as PyTorch's own reductions, which Inductor reads and may fuse
with the code that makes the value. Kernels and bytes do not depend on the machine; the time does,
so a ratio compares steps of one round.

    python benchmarks/compiled.py [ROUNDS]
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch.nn import functional as F  # noqa: N812 - the field's name for it

import kedge

_WARM = 3


class Block(nn.Module):
    """One block of a GPT."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.first(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(self.act(self.up(self.second(x))))


class Residual(nn.Module):
    """Two convolutions with norms and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu2(x + self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))


def mlp() -> tuple[nn.Module, Tensor]:
    """Four hidden layers with norms, on 256 rows."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(256, 256)


def resnet() -> tuple[nn.Module, Tensor]:
    """A stem and two residual blocks, on 8 images."""
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), Residual(32), Residual(32)), torch.randn(
        8, 3, 32, 32
    )


def gpt() -> tuple[nn.Module, Tensor]:
    """One block, on 8 texts of 64 tokens."""
    return nn.Sequential(Block()), torch.randn(8, 64, 128)


MODELS = {"MLP": mlp, "ResNet": resnet, "GPT block": gpt}


def plain(model: nn.Module) -> Iterator[Any]:
    """No hooks."""
    yield None


def outputs(model: nn.Module) -> Iterator[Any]:
    """Statistics of every output, as Kedge measures them."""
    with kedge.hook(model, "**", kedge.measure()) as stats:
        yield stats


def both(model: nn.Module) -> Iterator[Any]:
    """Statistics of every output and output gradient, as Kedge measures them."""
    with kedge.hook(model, "**, **:out.grad", kedge.measure()) as stats:
        yield stats


def reductions(model: nn.Module) -> Iterator[Any]:
    """Statistics of every output by PyTorch's reductions, which Inductor can fuse with what makes the value."""
    modules = [m for _, m in model.named_modules()]
    table = torch.zeros(len(modules), 6, dtype=torch.float64)
    with ExitStack() as stack:
        for row, module in enumerate(modules):
            stack.enter_context(_Handle(module.register_forward_hook(_reduced(table, row))))
        yield table


class _Handle:
    """Removes a hook at the end of a block."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def _reduced(table: Tensor, row: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        x = out.detach()
        wide = x.double()
        low, high = x.amin(), x.amax()
        counts = (x != 0).sum(), (~torch.isfinite(x)).sum()
        figures = (wide.sum(), (wide * wide).sum(), low, high, *counts)
        table[row].copy_(torch.stack([f.double() for f in figures]))

    return hook


WAYS: dict[str, Callable[[nn.Module], Iterator[Any]]] = {
    "without hooks": plain,
    "outputs": outputs,
    "outputs and gradients": both,
    "outputs by reductions": reductions,
}


@dataclass
class Compiled:
    """One model, compiled in one way.

    Attributes:
        step: Runs forward and backward; returns the output and every gradient.
        kernels: The kernels that Inductor has generated.
        bytes: The bytes that all nodes read and write, by Inductor's count.
        seconds: The seconds that compiling took.
        times: The seconds of each timed step.
    """

    step: Callable[[], list[Tensor]]
    kernels: int
    bytes: int
    seconds: float
    times: list[float]


def hooked(name: str, way: str, stack: ExitStack) -> tuple[nn.Module, Tensor]:
    """Make a model with its hooks, which stay until the stack is closed, and its input."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    stack.enter_context(_Way(WAYS[way](model)))
    return model, x


def compiled(model: nn.Module, x: Tensor) -> Compiled:
    """Compile a model with the hooks that it has."""
    fast = torch.compile(model, fullgraph=True)

    def step() -> list[Tensor]:
        model.zero_grad()
        out = fast(x)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    metrics.reset()
    began = perf_counter()
    step()
    return Compiled(
        step, metrics.generated_kernel_count, metrics.num_bytes_accessed, perf_counter() - began, []
    )


class _Way:
    """One of `WAYS` as a ``with`` block."""

    def __init__(self, way: Iterator[Any]) -> None:
        self.way = way

    def __enter__(self) -> Any:
        return next(self.way)

    def __exit__(self, *_: object) -> None:
        next(self.way, None)


def compare(name: str, rounds: int) -> None:
    """Compile a model in every way, and print a row of the table for each."""
    with ExitStack() as stack:
        models = {
            way: hooked(name, way, stack) for way in WAYS
        }  # all hooks first: Kedge discards code that lacks them
        ways = {way: compiled(*model) for way, model in models.items()}
        first = {way: each.step() for way, each in ways.items()}
        for i in range(_WARM + rounds):
            order = list(ways.values())
            for each in order[i % len(order) :] + order[: i % len(order)]:
                began = perf_counter()
                each.step()
                each.times.append(perf_counter() - began)
    torch.compiler.reset()
    bare = ways["without hooks"]
    for way, each in ways.items():
        ratio = median(a / b for a, b in zip(each.times[_WARM:], bare.times[_WARM:], strict=True))
        same = sum(map(torch.equal, first[way], first["without hooks"]))
        print(
            f"| {name} | {way} | {each.kernels} | {each.bytes / 1e6:.1f} | {ratio:.2f} | {same} of {len(first[way])} "
            f"| {each.seconds:.0f} |",
            flush=True,
        )


def count_bytes() -> None:
    """Have Inductor count bytes, which it does only for its log, and show that log to nobody."""
    log = compile_fx.inductor_metrics_log
    log.handlers, log.propagate = [logging.NullHandler()], False
    log.setLevel(logging.INFO)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    inductor.force_disable_caches = True
    count_bytes()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print(
        "| model | hooks | kernels | MB | step / without hooks | equal to the bit | seconds to compile |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in MODELS:
        compare(name, rounds)


if __name__ == "__main__":
    main()
