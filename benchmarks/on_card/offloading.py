"""Time and memory of training steps whose saved tensors are kept, offloaded or recomputed.

Each case has a model of its own. Memory is the peak of a step above what is there before it: model,
optimizer and the gradients of the step before. "half" is half of what the bare step takes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import models
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.plan.link import measured
from kedge.offload.stores.cpu import CpuStore
from on_card import trainings
from on_card.bench import Bench
from on_card.sheet import Table
from on_card.trainings import Training

MANY, FEW = 8, 2
"""Steps before the first that counts: a plan holds after the first few."""
SLOW = "save_on_cpu, pinned"
STEPS = 4
GB = 1e9
AMPLE = 40 * GB
"""The memory of a device on which all models have their full batch."""
BLOCKS = (models.Bottleneck, models.Layer)
Case = Callable[[nn.Module, int], Any]


@dataclass
class Found:
    """The figures of one case: seconds of a step, bytes at its peak, and the loss of each step."""

    seconds: float
    peak: int
    losses: list[float]


def checkpointed(model: nn.Module, half: int) -> Any:
    """Have each block of a model recompute what it saves."""
    for block in model.modules():
        if isinstance(block, BLOCKS):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return contextlib.nullcontext()


def streamed(model: nn.Module, half: int) -> Any:
    """Move saved tensors to the host as torchtune does, on a stream of their own."""
    training: Any = importlib.import_module("torchtune.training")
    return training.OffloadActivations(use_pin_memory=True, use_streams=True)


def recomputed(model: nn.Module, **options: Any) -> Any:
    """Have Kedge recompute the blocks of a model, if it has any."""
    paths = [path for path, each in model.named_modules() if isinstance(each, BLOCKS)]
    if paths:
        options["recompute"] = ", ".join(paths)
    return kedge.offload(model, **options)


CASES: dict[str, Case] = {
    "bare": lambda model, half: contextlib.nullcontext(),
    "checkpoint, each block": checkpointed,
    "kedge.offload(model)": lambda model, half: kedge.offload(model),
    "recompute=, each block": lambda model, half: recomputed(model),
    "recompute=, max_memory=half": lambda model, half: recomputed(model, max_memory=half),
    "max_slowdown=1.05": lambda model, half: kedge.offload(
        model, to=kedge.Cpu(), max_slowdown=1.05
    ),
    "max_memory=half": lambda model, half: kedge.offload(model, to=kedge.Cpu(), max_memory=half),
    SLOW: lambda model, half: torch.autograd.graph.save_on_cpu(
        pin_memory=torch.accelerator.is_available()
    ),
    "bare again": lambda model, half: contextlib.nullcontext(),
}
if importlib.util.find_spec("torchtune") is not None:
    CASES["torchtune, streamed"] = streamed


def offload(bench: Bench) -> None:
    """Fill the table."""
    on = bench.on
    with bench.sheet.trying("offload: link"):
        bench.sheet.line(_link(bench))
    share = min(1.0, on.size() / AMPLE) if on.size() else 1.0
    made: dict[str, tuple[Callable[[], trainings.Made], bool]] = {}
    images, texts = max(1, int(96 * share)), max(1, int(8 * share))
    made[f"ResNet-152, batch {images}"] = (
        lambda: trainings.resnet(on, (3, 8, 36, 3), images),
        False,
    )
    made[f"GPT 24x1024, batch {texts}, bf16"] = (
        lambda: trainings.gpt(on, layers=24, width=1024, heads=16, length=1024, batch=texts),
        True,
    )
    if bench.tiny:
        made = {
            "images": (lambda: trainings.small_images(on, 16, 32), False),
            "GPT": (
                lambda: trainings.gpt(on, layers=2, width=32, heads=2, length=64, words=64),
                True,
            ),
        }
    table = bench.sheet.table("Offloading: ms a step (x bare), GB at the peak (share of bare)")
    for name, (make, bf16) in made.items():
        compare(bench, table, name, make, bf16=bf16)


def _link(bench: Bench) -> str:
    """Tell how quick the link to the host is."""
    if not bench.on.there:
        return "no link to a device"
    store = CpuStore()
    try:
        link = measured(store, bench.on.device)
    finally:
        store.close()
    if link is None:
        return "the link cannot be measured"
    return f"link: {link.write / GB:.1f} GB/s out, {link.read / GB:.1f} GB/s back"


def compare(
    bench: Bench, table: Table, name: str, make: Callable[[], trainings.Made], *, bf16: bool
) -> None:
    """Fill a column."""
    bare: Found | None = None
    for case, block in CASES.items():
        bench.on.clean()
        if bare is None and case != "bare":
            return
        with bench.sheet.trying(f"offload: {name}, {case}"):
            half = bare.peak // 2 if bare else 0
            warm = 1 if bench.tiny else FEW if case == SLOW else MANY
            training = Training(bench.on, *make(), bf16=bf16, adam=False)
            found = measure(bench, training, block(training.model, max(half, 1 << 16)), warm)
            del training
            bare = bare or found
            table.put(case, name, _figures(found, bare))
    bench.on.clean()


def measure(bench: Bench, training: Training, block: Any, warm: int) -> Found:
    """Train some steps of one case."""
    on = bench.on
    losses = []

    def step() -> None:
        losses.append(training.step())

    torch.manual_seed(1)  # so that dropout is the same in each case
    with block as account:
        for _ in range(warm):
            step()
        before = on.watch_memory()
        seconds = [on.seconds(step, 1) for _ in range(STEPS)]
        peak = on.peak() - before
    plan = getattr(account, "plan", None)
    if plan is not None:
        bench.sheet.line(" ".join(str(plan).split()))
    return Found(statistics.median(seconds), peak, torch.stack(losses).tolist())


def _figures(found: Found, bare: Found) -> str:
    time = f"{found.seconds * 1e3:.0f} ({found.seconds / bare.seconds:.2f})"
    share = found.peak / bare.peak if bare.peak else 0.0
    told = f"{time}, {found.peak / GB:.2f} ({share:.2f})"
    pairs = zip(found.losses, bare.losses, strict=False)
    differing = [step for step, (one, other) in enumerate(pairs) if one != other]
    return f"{told}, other losses from step {differing[0]} on" if differing else told
