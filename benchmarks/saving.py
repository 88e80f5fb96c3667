"""What it costs that Kedge is asked about every saved tensor: microseconds for each, and for each call of a module.

Run ``python benchmarks/saving.py`` on an idle machine. Each figure is the least of many rounds,
forward and backward. Then it prints what running a block again takes over PyTorch's checkpoint of
it, in a GPT whose tensors are so small that only the host's time counts.

With an accelerator, and with ``--import MODULE:FUNCTION`` on one that a function registers, it also
prints the host's time for a saved tensor of the device that is kept, rebuilt or moved, in the
forward and in the backward: processor's time of the thread, in which the backward runs, too.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.hooks.saved.keeper import SavingPlace, keep

NUMBER, ROUNDS = 300, 60
BLOCKS = 12
_ONES = torch.ones(4)


class Leaves:
    """A keeper that leaves everything where it is."""

    def pack(self, value: Tensor, place: SavingPlace) -> None:
        """Leave it."""

    def unpack(self, packed: Any) -> Tensor:
        """Never called: nothing was packed."""
        raise AssertionError(packed)


class Chain(nn.Module):
    """Saves a small tensor many times."""

    def forward(self, x: Tensor) -> Tensor:
        """Take the sine again and again."""
        for _ in range(NUMBER):
            x = x.sin()
        return x


def least(model: nn.Module) -> float:
    """Return the least microseconds of a round, for each of its steps."""
    x = torch.ones(4, requires_grad=True)
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - begun)
    return min(times) / NUMBER * 1e6


def keeping(model: nn.Module) -> AbstractContextManager[Any]:
    """Ask a keeper that leaves everything."""
    stack = ExitStack()
    keep(stack, model, Leaves(), ambient=True)
    return stack


def host_time(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return the least microseconds of the host for each tensor, in the forward and in the backward."""
    forwards = []
    backwards = []
    for _ in range(ROUNDS // 2):
        begun = time.thread_time()
        loss = model(x).sum()
        forwards.append(time.thread_time() - begun)
        torch.accelerator.synchronize()
        begun = time.thread_time()
        loss.backward()
        backwards.append(time.thread_time() - begun)
        torch.accelerator.synchronize()
    return min(forwards) / NUMBER * 1e6, min(backwards) / NUMBER * 1e6


def on_device(device: torch.device) -> None:
    """Print the host's time for a saved tensor of a device."""
    model = Chain()
    model.weight = nn.Parameter(torch.ones(1, device=device))
    x = torch.ones(1 << 14, device=device, requires_grad=True)
    ways: dict[str, dict[str, Any]] = {
        "kept": {"min_bytes": "1 GB"},
        "rebuilt": {"min_bytes": 1024},
        "moved": {"min_bytes": 1024, "to": kedge.Cpu(rebuild=False)},
    }
    host_time(model, x)
    bare = host_time(model, x)
    print(f"\nhost time on {device}: bare forward {bare[0]:.1f} us, backward {bare[1]:.1f} us")
    for name, options in ways.items():
        with kedge.offload(model, **options):
            cost = host_time(model, x)
        print(
            f"{name:10} forward {cost[0] - bare[0]:+.1f} us, backward {cost[1] - bare[1]:+.1f} us"
        )


def of_blocks() -> None:
    """Print the time of a transformer's block that is run again, beside PyTorch's checkpoint."""
    words = torch.randint(0, 64, (1, 9))
    made: dict[str, nn.Module] = {}
    for way in ("bare", "checkpoint", "Kedge, kept", "Kedge, run again"):
        torch.manual_seed(0)
        made[way] = models.GPT(layers=BLOCKS, width=16, heads=2, words=64, length=8, dropout=0.1)
    for block in made["checkpoint"].h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    around: dict[str, AbstractContextManager[Any]] = {
        "Kedge, kept": kedge.offload(made["Kedge, kept"]),
        "Kedge, run again": kedge.offload(made["Kedge, run again"], recompute="h.*"),
    }
    times: dict[str, float] = {}
    for way, model in made.items():
        with around.get(way, nullcontext()):
            times[way] = min(_seconds(model, words) for _ in range(ROUNDS)) / BLOCKS * 1e6
    inside = sum(1 for _ in made["bare"].h[0].modules())
    print(f"\na block of {inside} modules, forward and backward, processor's time of the thread:")
    for way, each in times.items():
        print(f"  {way:20} {each:6.0f} us, over checkpoint {each - times['checkpoint']:+.0f}")


def _seconds(model: nn.Module, words: Tensor) -> float:
    begun = time.thread_time()
    logits = model(words[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()
    return time.thread_time() - begun


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--import", dest="registers", metavar="MODULE:FUNCTION")
    registers = parser.parse_args().registers
    torch.set_num_threads(1)
    cases: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
        "no hooks": lambda model: nullcontext(),
        "empty hooks": lambda model: saved_tensors_hooks(lambda value: 0, lambda packed: _ONES),
        "hooks that detach": lambda model: saved_tensors_hooks(
            lambda value: value.detach(), lambda packed: packed
        ),
        "a keeper that leaves all": keeping,
        "an action at :saved": lambda model: kedge.hook(
            model, "**:saved", lambda value, event: None
        ),
    }
    for what, model in (
        ("saved tensor", Chain()),
        ("module that saves one", nn.Sequential(*(nn.Tanh() for _ in range(NUMBER)))),
    ):
        least(model)
        bare = least(model)
        for name, block in cases.items():
            with block(model):
                cost = least(model)
            print(f"{what:22} {name:26} {cost:6.2f} us, {cost - bare:+.2f}")
    torch.autograd.set_multithreading_enabled(False)
    of_blocks()
    if registers is not None:
        module, _, function = registers.partition(":")
        getattr(importlib.import_module(module), function)()
    device = torch.accelerator.current_accelerator()
    if device is not None:
        on_device(torch.device(device.type, 0))


if __name__ == "__main__":
    main()
