"""Ways to train on the simulated device: with observing, watching and offloading, each gives the bits that it gives without."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.repro.first_bad_call import FirstBadCall
from kedge.store.recording import Recording
from tests.marks import full
from tests.watch.watched import Memory

EVERYTHING = "**:out, **:out.grad, **:in.grad, **:param.grad"
pytestmark = pytest.mark.filterwarnings(
    "ignore::kedge.errors.NeverFiredWarning",
    "ignore::kedge.errors.NothingGained",
    "ignore:PyTorch is not compiled with NCCL support",
)


class Net(nn.Module):
    """Two layers around a middle that is called in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.middle = nn.Sequential(
            nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32)
        )
        self.way: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self.middle, torch.relu(self.first(x))))


Make = Callable[[], tuple[nn.Module, Callable[[int], None]]]


def made(way: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)) -> Net:
    """A net on the device whose middle is called in a way."""
    torch.manual_seed(0)
    net = Net().to("sim")
    net.way = way
    return net


def batch(step: int) -> Tensor:
    """The input of a step, on the device."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to("sim")


def plainly(
    net: nn.Module, call: Callable[[Tensor], Tensor] | None = None
) -> Callable[[int], None]:
    """A step of training with one optimizer."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (net if call is None else call)(batch(number)).square().mean().backward()
        optimizer.step()

    return step


def checkpointed(reentrant: bool) -> Make:
    """A middle whose forward is run again in the backward."""

    def make() -> tuple[nn.Module, Callable[[int], None]]:
        net = made(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
        return net, plainly(net)

    return make


def split() -> tuple[nn.Module, Callable[[int], None]]:
    """A middle on the other device."""
    net = made(lambda block, x: block(x.to("sim:1")).to("sim:0"))
    net.middle.to("sim:1")
    return net, plainly(net)


def parallel() -> tuple[nn.Module, Callable[[int], None]]:
    """Replicas on both devices, each with half of the batch."""
    net = made()
    return net, plainly(net, nn.DataParallel(net, [0, 1]))


def scaled() -> tuple[nn.Module, Callable[[int], None]]:
    """Autocast in half precision, whose loss is scaled; some scales are too large at first."""
    net = made()
    optimizer, scaler = (
        torch.optim.SGD(net.parameters(), lr=0.1),
        torch.amp.GradScaler("sim", init_scale=2.0**24),
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("sim", torch.float16):
            loss = net(batch(number)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return net, step


def two_optimizers() -> tuple[nn.Module, Callable[[int], None]]:
    """One for the middle, one for the rest, each with a backward of its own."""
    net = made()
    inner = torch.optim.SGD(net.middle.parameters(), lr=0.1)
    outer = torch.optim.Adam([*net.first.parameters(), *net.last.parameters()], lr=0.01)

    def step(number: int) -> None:
        for optimizer in (inner, outer):
            optimizer.zero_grad()
            net(batch(number)).square().mean().backward()
            optimizer.step()

    return net, step


def compiled() -> tuple[nn.Module, Callable[[int], None]]:
    """Traced by Dynamo and autograd, and run as traced."""
    torch.compiler.reset()
    net = made()
    return net, plainly(net, torch.compile(net, backend="aot_eager"))


WAYS: dict[str, Make] = {
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "both devices": split,
    "replicas": parallel,
    "autocast and scaler": scaled,
    "two optimizers": two_optimizers,
    "compiled": compiled,
}
SEEDS = [range(2), full(range(2, 20))]


def trained(make: Make, around: Callable[[nn.Module], Any] | None = None) -> dict[str, Tensor]:
    """The weights, and the gradients of the last of a few steps, on the host."""
    net, step = make()
    torch.manual_seed(1)
    with ExitStack() as stack:
        if around is not None:
            stack.enter_context(around(net))
        for number in range(4):
            step(number)
    found = {name: p.detach().cpu() for name, p in net.named_parameters()}
    return found | {
        f"{name}.grad": p.grad.cpu() for name, p in net.named_parameters() if p.grad is not None
    }


def bits(value: Tensor) -> bytes:
    """The memory of a tensor; scaled gradients may be NaN."""
    return value.numpy().tobytes()


def everything(net: nn.Module) -> Any:
    """Record and measure all that can be."""
    session = kedge.session()
    session.hook(net, EVERYTHING, kedge.record())
    session.hook(net, EVERYTHING, kedge.measure())
    return session


AROUND: dict[str, Callable[..., Any]] = {
    "hooks": lambda net, file: everything(net),
    "watch": lambda net, file: kedge.watch(file, every=1, budget=None),
    "offload": lambda net, file: kedge.offload(net, to=kedge.Cpu(), min_bytes=1),
    "offload alone": lambda net, file: kedge.offload(net, to=kedge.Cpu(rebuild=False), min_bytes=1),
    "rebuild": lambda net, file: kedge.offload(net, to=kedge.Rebuild(), min_bytes=1),
}


CASES = [(way, around) for way in WAYS for around in AROUND]
SAMPLE = [
    (way, around)
    for way, around in CASES
    if (way != "compiled" and around != "offload") or around == "watch"
]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize(
    ("way", "around"), [full(*case) if case not in SAMPLE else case for case in CASES]
)
def test_a_training_keeps_its_bits(
    sim: Any, way: str, around: str, seeds: range, tmp_path: Path, capfd: Any
) -> None:
    """In whatever order the device runs its streams."""
    plain = trained(WAYS[way])
    for seed in seeds:
        sim.set_seed(seed)
        ours = trained(WAYS[way], partial(AROUND[around], file=tmp_path / f"{seed}.kedge"))
        assert {name for name in plain if bits(plain[name]) != bits(ours[name])} == set()
    assert "failed" not in capfd.readouterr().err
    if around == "watch":
        assert Recording.open(tmp_path / f"{seeds[-1]}.kedge").rows("loss").step.tolist()


def test_replicas_are_recorded_apart(sim: Any) -> None:
    """Each as one call of the layer, on its device."""
    net = made()
    with kedge.hook(net, "middle.0", kedge.record()) as acts:
        nn.DataParallel(net, [0, 1])(batch(0))
    assert {str(each.value.device): len(each.value) for each in acts.records("middle.0")} == {
        "sim:0": 4,
        "sim:1": 4,
    }


def test_a_split_model_leaves_each_device_in_one_copy(sim: Any, tmp_path: Path) -> None:
    """Each device has a table of its own; nothing waits but the copy of the batch to the device."""
    _, step = split()
    copies, waits = [], []
    with kedge.watch(tmp_path / "it.kedge", every=1, budget=None):
        for number in range(6):
            sim.reset_counts()
            step(number)
            counts = sim.counts()
            copies.append(counts["copies"]["d2h"][0])
            waits.append({kind: n for kind, n in counts["syncs"].items() if n})
    assert copies == [2] * 6
    assert waits == [{"copy": 1}] * 6


def test_a_dump_of_a_split_model_waits_twice_for_each_device(sim: Any, tmp_path: Path) -> None:
    """After the forward and before the update, for the sums of each; the batch waits once itself."""
    net, step = split()
    dump, waits = FirstBadCall(lambda: tmp_path, Memory(), lambda: 0), []
    dump.watch(net, lambda path: path)
    for number in range(3):
        sim.reset_counts()
        step(number)
        waits.append({kind: n for kind, n in sim.counts()["syncs"].items() if n})
    dump.close()
    assert waits == [{"copy": 1 + 2 * 2}] * 3


def test_features_of_a_data_set_are_those_of_the_cpu(sim: Any, tmp_path: Path) -> None:
    """Whether batches come from the device, from the host, or from pinned memory; and of operations too."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    data = torch.randn(50, 1, 6, 6)
    sites = {"0": "conv", "3": "out"}
    with_cpu = kedge.extract(model, sites).dataset(
        DataLoader(TensorDataset(data), 8), out=tmp_path / "cpu"
    )
    model.to("sim")
    loaders = {
        "host": DataLoader(TensorDataset(data), 8),
        "device": DataLoader(TensorDataset(data.to("sim")), 8),
        "pinned": DataLoader(TensorDataset(data), 8, pin_memory=True),
    }
    for name, loader in loaders.items():
        for seed in range(3):
            sim.set_seed(seed)
            taken = kedge.extract(model, sites).dataset(loader, out=tmp_path / f"{name} {seed}")
            assert all(
                torch.equal(taken[site].tensor(), with_cpu[site].tensor())
                for site in ("conv", "out")
            ), name


@pytest.mark.parametrize(("rate", "finite"), [(1e20, True), (float("inf"), False)])
def test_an_update_too_large_for_its_sum_of_squares_is_finite(
    sim: Any, tmp_path: Path, rate: float, finite: bool
) -> None:
    """Only an element that is not finite makes the sum infinite, though it is in float32."""
    model = nn.Linear(3, 2, bias=False).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with kedge.watch(tmp_path / "it.kedge", every=1, budget=None):
        model(torch.ones(4, 3).to("sim")).sum().backward()
        optimizer.step()
    (squares,) = Recording.open(tmp_path / "it.kedge").rows("weight:update").sumsq.tolist()
    assert math.isfinite(squares) == finite
    assert squares > 3e38
