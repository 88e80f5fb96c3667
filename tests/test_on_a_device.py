"""What Kedge does on a device, on the simulated one: it gives what the CPU gives, and the program does not wait for it."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import kedge
from kedge.features.dataset.batch import SampleBatch
from kedge.features.dataset.compute import BatchComputer
from kedge.inspection.operations import operations
from kedge.offload.saved_tensors import saved
from kedge.repro.calls import CallState, Surroundings
from kedge.store.recording import Recording
from kedge.torch_internals import accelerators


class Net(nn.Module):
    """Two layers with dropout, whose random numbers are the device's."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))


def made():
    """A model and its input, on the device."""
    torch.manual_seed(0)
    return Net().to("sim"), torch.randn(32, 64).to("sim")


def gradients(model, x, steps=3):
    """The gradients of the last of a few steps."""
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters()]


def test_watched_steps_read_nothing_from_a_device(sim, tmp_path, capfd):
    """Every number of a measured step leaves by copies on a side stream; the recording has them all."""
    model, x = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.watch(tmp_path / "run.kedge", every=1, budget=None):
        for step in range(8):
            if step == 3:
                sim.reset_counts()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        syncs = sim.counts()["syncs"]
    assert {kind: n for kind, n in syncs.items() if n and kind != "event"} == {}
    assert "failed" not in capfd.readouterr().err
    recording = Recording.open(tmp_path / "run.kedge")
    assert str(recording.manifest["device"]).startswith("sim")
    for site in ("loss", "first.weight:update", "first.weight:param.grad"):
        found = recording.rows(site)
        assert sorted(found.step.tolist()) == [*range(8)]
        assert all(0 < number < math.inf for number in found.sumsq.tolist())


def test_a_model_in_float64_is_watched(sim, tmp_path, capfd):
    """Its gradients have a norm, and its loss does not change the type of the numbers that leave with it."""
    model, x = made()
    model, x = model.double(), x.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.watch(tmp_path / "run.kedge", every=1, budget=None):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    told = capfd.readouterr().err
    assert "failed" not in told
    assert "ended" not in told
    recording = Recording.open(tmp_path / "run.kedge")
    for site in ("loss", ":grad.norm", "first:out", "last.weight:update"):
        assert all(0 < number < math.inf for number in recording.rows(site).sumsq.tolist()), site
        assert recording.rows(site).step.tolist() == [0, 1, 2], site


def test_a_device_measures_what_the_cpu_does(sim):
    """The same numbers, also of a value whose memory is used again at once."""
    values = [torch.randn(500, 30) for _ in range(4)]
    found = []
    for device in ("cpu", "sim"):
        model = nn.Identity()
        with kedge.hook(model, ":out", kedge.measure()) as stats:
            for value in values:
                model(value.to(device))
        found.append(stats[":out"])
    for name in ("sum", "sumsq", "min", "max", "nonzero", "nonfinite"):
        assert getattr(found[1], name) == pytest.approx(getattr(found[0], name), rel=1e-4)


@pytest.mark.parametrize("pin", [True, False])
def test_offloaded_gradients_are_equal_to_the_last_bit(sim, pin):
    """Copies out and in beside the computation, in memory that PyTorch locks for the device, or in none."""
    model, x = made()
    plain = gradients(model, x)
    with kedge.offload(model, to=kedge.Cpu(rebuild=False, pin=pin), min_bytes=1) as account:
        moved = gradients(model, x)
    assert all(map(torch.equal, plain, moved))
    assert account.total.moved


def test_rebuilt_gradients_are_equal_to_the_last_bit(sim):
    """What is computed again on the device is compared there."""
    model, x = made()
    plain = gradients(model, x)
    with kedge.offload(model, to=kedge.Rebuild(), min_bytes=1):
        assert all(map(torch.equal, plain, gradients(model, x)))


def test_looking_at_a_model_leaves_the_devices_random_numbers(sim):
    """The account, the list of operations and a block of our own draw what the program draws after them."""
    model, x = made()
    model(x)
    state = torch.sim.get_rng_state(0)
    for look in (
        lambda: saved(model)(x),
        lambda: operations(model, x),
        lambda: operations(lambda: model(x)),
    ):
        look()
        assert torch.equal(torch.sim.get_rng_state(0), state)


def test_a_kept_call_has_the_random_numbers_and_autocast_of_its_device(sim):
    """Of every device, whichever its arguments are on."""
    model, _ = made()
    state = CallState(model)
    state.take((torch.ones(3),), {})
    assert [*state.random] == ["cpu", "sim:0", "sim:1"]
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert Surroundings.now().autocast == {"sim": torch.bfloat16}


def test_features_of_a_batch_leave_the_device_beside_the_computation(sim):
    """They are complete once they have been waited for, and those of the CPU."""
    model = nn.Linear(64, 8)
    data = torch.randn(32, 64)
    expected = model(data).detach()
    model.to("sim")
    compute = BatchComputer(lambda x: {"out": model(x)}, device="sim")
    sim.reset_counts()
    columns = compute(SampleBatch([*map(str, range(32))], [*map(str, range(32))], data, []))
    assert columns.copied
    assert sim.counts()["syncs"]["read"] == sim.counts()["syncs"]["stream"] == 0
    columns.wait()
    torch.testing.assert_close(columns.values["out"], expected)


def test_streams_in_force_are_those_of_a_block(sim):
    """Blocks inside of blocks, with one stream twice, and on another device."""
    before, one, there = (
        accelerators.current_stream(torch.device("sim", 0)),
        torch.Stream("sim:0"),
        torch.Stream("sim:1"),
    )
    with accelerators.on(one):
        with accelerators.on(there), accelerators.on(one):
            assert torch.accelerator.current_stream() == one
        assert torch.accelerator.current_stream() == one
    assert torch.accelerator.current_stream() == before
    assert torch.accelerator.current_device_index() == 0
    assert re.match(r"sim", accelerators.name())
