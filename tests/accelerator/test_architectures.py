"""On real architectures, on the simulated device: no bit of a training depends on Kedge, in whatever order streams run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")
import kedge
from kedge.store.recording import Recording
from tests.architectures.training import EVERYTHING, train, unlike
from tests.architectures.zoo import BY_NAME, ZOO, Architecture
from tests.marks import full, sampled

SIX = [BY_NAME[name] for name in ("resnet", "bert", "gpt2", "t5", "mamba", "vit")]
SAMPLE = [BY_NAME[name] for name in ("resnet", "gpt2", "mamba")]
SEEDS = [range(2), full(range(2, 20))]
six = pytest.mark.parametrize("architecture", sampled(SIX, SAMPLE), ids=lambda a: a.name)
seeded = pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
LEAST = 256
pytestmark = pytest.mark.filterwarnings(
    "ignore::kedge.errors.NeverFiredWarning", "ignore::kedge.errors.NothingGained"
)


def made(architecture: Architecture, device: str) -> Any:
    """A model on a device; weights that are tied stay so, which PyTorch does not see to on devices of libraries."""
    model: Any = architecture.build().to(device)
    model.tie_weights()
    return model


def found(
    architecture: Architecture, around: Callable[[nn.Module], Any] = nullcontext
) -> dict[str, Tensor]:
    """What comes of a training on the device, on the host, in a block that is made for the model."""
    model = made(architecture, "sim")
    with around(model):
        trained = train(architecture, model)
    return {name: value.cpu() for name, value in trained.items()}


def differing(
    sim: Any, architecture: Architecture, seeds: range, around: Callable[[nn.Module], Any]
) -> dict[int, list[str]]:
    """What is not as without Kedge, by the seed of the streams' delays."""
    plain = found(architecture)
    wrong = {}
    for seed in seeds:
        sim.set_seed(seed)
        if names := unlike(plain, found(architecture, around)):
            wrong[seed] = names
    return wrong


def everything(model: nn.Module) -> Any:
    """Record and measure all that can be."""
    session = kedge.session()
    session.hook(model, EVERYTHING, kedge.record())
    session.hook(model, EVERYTHING, kedge.measure())
    return session


@seeded
@pytest.mark.parametrize("architecture", sampled(ZOO, SAMPLE), ids=lambda a: a.name)
def test_observing_everything_changes_no_bit(
    sim: Any, architecture: Architecture, seeds: range
) -> None:
    """Outputs, loss, gradients, generators and weights of two steps, with every value recorded and measured."""
    assert differing(sim, architecture, seeds, everything) == {}


STORES: dict[str, Callable[[], Any]] = {
    "cpu": kedge.Cpu,
    "cpu alone": lambda: kedge.Cpu(rebuild=False),
    "disk": kedge.Disk,
    "disk alone": lambda: kedge.Disk(rebuild=False),
    "rebuild": kedge.Rebuild,
}


@seeded
@pytest.mark.parametrize("store", sampled(STORES, {"cpu", "cpu alone"}))
@six
def test_offloading_changes_no_bit(
    sim: Any, architecture: Architecture, store: str, seeds: range
) -> None:
    """Saved tensors leave the device, or are computed again on it, and come back with their bits."""
    accounts = []

    def offloaded(model: nn.Module) -> Any:
        block = kedge.offload(model, to=STORES[store](), min_bytes=LEAST)
        accounts.append(block)
        return block

    assert differing(sim, architecture, seeds, offloaded) == {}
    assert len(accounts) == len(seeds)


@seeded
@six
def test_watching_changes_no_bit(
    sim: Any, architecture: Architecture, seeds: range, tmp_path: Any
) -> None:
    """Every step measured; the recording has every step's loss as the program would have printed it."""
    files = iter([tmp_path / f"{seed}.kedge" for seed in seeds])

    assert differing(sim, architecture, seeds, lambda _: kedge.watch(next(files), every=1)) == {}
    losses = {
        tuple(Recording.open(file).rows("loss").sum.tolist()) for file in tmp_path.glob("*.kedge")
    }
    assert len(losses) == 1
    assert len(losses.pop()) == 2


def recorded(
    architecture: Architecture, device: str
) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
    """What is recorded of two steps without dropout, the last value of each site, and what the training gives."""
    model = made(architecture, device).eval()
    with (
        sdpa_kernel(SDPBackend.MATH),
        kedge.hook(model, EVERYTHING, kedge.record(copy=True)) as acts,
    ):
        trained = train(architecture, model)
        values = {site: acts[site].cpu() for site in acts}
    return values, {
        name: value.cpu() for name, value in trained.items() if not name.startswith("rng.")
    }


@six
def test_what_is_recorded_is_what_the_cpu_records(sim: Any, architecture: Architecture) -> None:
    """To the last bit, without dropout, whose numbers every kind of device draws in its own way."""
    here, there = (recorded(architecture, device) for device in ("cpu", "sim"))
    assert unlike(here[1], there[1]) == []
    assert unlike(here[0], there[0]) == []
    assert len(here[0]) > 50
