"""Offloading on the simulated device: the bits of gradients do not depend on the order in which streams run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.engine import engine
from kedge.offload.held import raw_bytes, steps
from kedge.offload.stores.cpu import CpuStore
from kedge.offload.stores.streams import CopyDevice
from tests.marks import full, sampled

BATCH = 20
SEEDS = [range(first, first + BATCH) for first in range(0, 200, BATCH)]
STORES = ["cpu", "cpu alone", "cpu, small window", "disk"]
Train = Callable[[nn.Module, Tensor], list[Tensor]]


class Net(nn.Module):
    """Convolutions, norms, dropout, pooling and a residual path."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.2)
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(8 * 36, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5)
        )
        self.way: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.way(self.block, x))


def made() -> tuple[Net, Tensor]:
    """A net and a batch on the device."""
    net = Net()
    return net.to("sim"), torch.randn(4, 3, 12, 12).to("sim")


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Train two steps; returns the gradients of each."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
        found += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return found


def store(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The destination of one of `STORES`."""
    if name == "disk":
        return kedge.Disk(str(tmp_path))
    if name.endswith("small window"):
        small(monkeypatch, 10_000)
    return kedge.Cpu() if name == "cpu" else kedge.Cpu(rebuild=False)


def small(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Limit the bytes in transit between device and host, and the restored bytes that are held."""
    monkeypatch.setattr(engine, "_ROOM", window)
    monkeypatch.setitem(CpuStore.__init__.__kwdefaults__, "window", window)


def differing(
    seeds: range, sim: Any, to: Any, model: nn.Module, x: Tensor, how: Train = train
) -> list[int]:
    """The seeds of delays for which the gradients are not those of a model that keeps all."""
    plain = [grad.cpu() for grad in how(copy.deepcopy(model), x)]
    wrong = []
    for seed in seeds:
        sim.set_seed(seed)
        trained = copy.deepcopy(model)
        with kedge.offload(trained, to=to, min_bytes=1):
            ours = how(trained, x)
        if not all(torch.equal(a, b.cpu()) for a, b in zip(plain, ours, strict=True)):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("seeds", sampled(SEEDS, SEEDS[:1]), ids=str)
def test_gradients_have_the_bits_of_plain_training(
    sim: Any, seeds: range, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order the device runs its streams."""
    model, x = made()
    sim.reset_counts()

    assert differing(seeds, sim, store(name, tmp_path, monkeypatch), model, x) == []
    assert sim.counts()["copies"]["h2d"][0] > len(seeds)


def _skipped(direction: str | None) -> Callable[..., None]:
    """`CopyDevice.after`, which forgets to wait on the stream for copies "out" or "in", or (None) on the program's."""
    real = CopyDevice.after

    def after(self: CopyDevice, stream: torch.Stream, event: torch.Event) -> None:
        own = {way: own for (_, way), own in self._own.items()}
        which = next((way for way, each in own.items() if each == stream), None)
        if which != direction:
            real(self, stream, event)

    return after


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "the copy out does not wait for the value": ("after", _skipped("out")),
    "the copy in does not wait for the copy out": ("after", _skipped("in")),
    "backward does not wait for the copy in": ("after", _skipped(None)),
    "the source of a copy is freed before it is done": ("reached", lambda self, event: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_seen(
    sim: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fault on purpose the comparison fails: it would see one that was made by mistake."""
    model, x = deep(32, 4), torch.randn(32, 32).to("sim")  # no indices, which would be out of range
    monkeypatch.setattr(CopyDevice, *FAULTS[fault])

    assert (
        differing(range(100, 140), sim, store("cpu alone", tmp_path, monkeypatch), model, x) != []
    )


def on_another_stream(block: nn.Module, x: Tensor) -> Tensor:
    """Call a block on a stream of its own, with all waits and `record_stream`s that a program needs."""
    here, side = torch.accelerator.current_stream(), torch.Stream("sim")
    side.wait_stream(here)
    x.record_stream(side)
    with side:
        y = block(x)
    here.wait_stream(side)
    y.record_stream(here)
    return y


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "on another stream": on_another_stream,
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "autocast": lambda block, x: _in_bfloat16(block, x),
    "on the other device": lambda block, x: block(x.to("sim:1")).to("sim:0"),
}


def _in_bfloat16(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("sim", torch.bfloat16):
        return block(x).float()


@pytest.mark.parametrize("name", sampled(STORES, {"cpu alone", "disk"}))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seeds", [range(3), full(range(3, 40))], ids=str)
def test_programs_of_several_streams_and_devices_keep_their_bits(
    sim: Any, way: str, seeds: range, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream, another device, a recompute or autocast within a model change nothing."""
    model, x = made()
    model.way = WAYS[way]
    if way == "on the other device":
        model.block.to("sim:1")
    sim.reset_counts()

    assert differing(seeds, sim, store(name, tmp_path, monkeypatch), model, x) == []
    assert sim.counts()["copies"]["h2d"][0] > len(seeds)


class Twins(nn.Module):
    """Two chains of layers whose calls alternate, each chain on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.ModuleList(nn.Linear(16, 16) for _ in range(6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        here, side = torch.accelerator.current_stream(), torch.Stream("sim")
        side.wait_stream(here)
        x.record_stream(side)
        y, z = x, x
        for one, two in zip(self.one, self.two, strict=True):
            y = one(y).tanh()
            with side:
                z = two(z).sigmoid()
        here.wait_stream(side)
        z.record_stream(here)
        return y * z


@pytest.mark.parametrize("name", STORES)
def test_streams_that_alternate_keep_their_bits(
    sim: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one stream has brought back is neither used nor freed too early by another."""
    model, x = Twins().to("sim"), torch.randn(64, 16).to("sim")

    assert differing(range(20), sim, store(name, tmp_path, monkeypatch), model, x) == []


def test_a_missing_record_stream_is_seen(
    sim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, memory that was read ahead on one stream is reused before another has read it."""
    model, x = Twins().to("sim"), torch.randn(64, 16).to("sim")
    monkeypatch.setattr(CopyDevice, "lend", lambda self, tensor, stream: True)

    assert differing(range(40), sim, store("cpu alone", tmp_path, monkeypatch), model, x) != []


@pytest.mark.parametrize("to", [kedge.Cpu(rebuild=False), kedge.Rebuild()], ids=repr)
def test_bytes_are_summed_in_the_compared_steps_alone(
    sim: Any, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are the first two, and one in some; on the CPU all are."""
    sums: list[int] = []
    real = raw_bytes._sums

    def summed(data: Tensor) -> Any:
        sums[-1] += 1
        return real(data)

    monkeypatch.setattr(raw_bytes, "_sums", summed)
    monkeypatch.setattr(steps, "_COMPARED_EVERY", 5)

    def compared(model: nn.Module, x: Tensor, **options: Any) -> list[int]:
        sums.clear()
        with kedge.offload(model, min_bytes=1024, **options):
            for _ in range(7):
                sums.append(0)
                model(x).sum().backward()
        return [step for step, number in enumerate(sums, 1) if number]

    model = deep(layers=3)
    x = torch.randn(64, 64)
    assert compared(model, x.to("sim"), to=to) == [1, 2, 5]
    assert compared(model.cpu(), x) == [1, 2, 3, 4, 5, 6, 7]


def deep(width: int = 64, layers: int = 12) -> nn.Module:
    """A net that saves a lot: some 100 kB in each layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    ).to("sim")


@pytest.mark.parametrize("name", STORES)
def test_what_does_not_fit_is_trained(
    sim: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that runs out of the device's memory plain is trained with offloading, to the same bits."""
    model, x = deep(), torch.randn(512, 64).to("sim")
    plain = [grad.cpu() for grad in train(model, x)]
    taken = sim.max_memory_allocated()
    model.zero_grad()
    sim.empty_cache()
    sim.set_limit(int(taken * 0.75))
    with pytest.raises(torch.OutOfMemoryError):
        train(model, x)
    model.zero_grad()
    torch.accelerator.synchronize()

    small(monkeypatch, 300_000)
    to = store(name, tmp_path, monkeypatch)
    for seed in range(5):
        sim.set_seed(seed)
        with kedge.offload(model, to=to):
            ours = train(model, x)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(plain, ours, strict=True))


def test_a_small_model_that_runs_ahead_saves_memory_in_every_step(sim: Any) -> None:
    """Of 80 MB at the peak a third goes, in the first step and later, with the same bits: not all is on its way at once."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.Tanh()))
    ).to("sim")
    x = torch.randn(4096, 256).to("sim")

    def steps() -> tuple[list[float], list[Tensor]]:
        resting, peaks = sim.memory_allocated(), []
        for _ in range(2):
            sim.reset_peak_memory_stats()
            model.zero_grad()
            model(x).square().mean().backward()
            sim.synchronize()
            peaks.append(sim.max_memory_allocated() - resting)
        return peaks, [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    kept, wanted = steps()
    model.zero_grad()
    with kedge.offload(model, to=kedge.Cpu(rebuild=False)):
        peaks, found = steps()
    assert all(map(torch.equal, found, wanted))
    assert max(peaks) < 0.75 * min(kept)
