"""No step waits for a device: nothing that runs in it asks for a value of a tensor there.

The devices are those of fake tensors, which have shapes and no values: asking for one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kedge
from kedge.actions.error_if import nonfinite
from kedge.actions.measure import reduce
from kedge.repro import finiteness
from kedge.repro.calls import RecordedCall
from kedge.torch_internals import accelerators, modes
from kedge.watch.records.optimizer_updates import squares_of
from kedge.watch.step import StepKind
from tests.watch.watched import GUARDED, MEASURED, MIXED, SKIPPED, at_levels, watch

THERE = "meta"  # fake tensors of other devices cannot go backward without the device's own build of PyTorch


class Leaving(TorchDispatchMode):
    """Notes every operation that takes a tensor of the device and returns one of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [v.device.type for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        made = [v.device.type for v in tree_leaves(out) if isinstance(v, Tensor)]
        if THERE in given and "cpu" in (*made, *given[:1]):
            self.names.append(str(func))
        return out


class Device:
    """A device whose tensors have no values.

    Attributes:
        leaving: Notes what left it otherwise than as a table.
        tables: The number of numbers in each copy that left it as a table.
    """

    def __init__(self) -> None:
        self.leaving, self.tables = Leaving(), list[int]()

    def to_host(self, whole: Tensor, *, beside: bool = True) -> tuple[Any, None]:
        self.tables.append(whole.numel())
        numbers = np.zeros(whole.shape, dtype=np.float32)
        return SimpleNamespace(numpy=lambda: numbers), None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Return a device; in its test Kedge takes fake tensors for real ones."""
    found = Device()
    monkeypatch.setattr(modes, "is_fake", lambda value: False)
    monkeypatch.setattr(modes, "has_data", lambda value: True)
    monkeypatch.setattr(modes, "plainly", nullcontext)
    for module, name in ((reduce, "measurable"), (finiteness, "_measurable")):
        monkeypatch.setattr(
            module, name, lambda value: value.is_floating_point() and value.numel() > 0
        )
    monkeypatch.setattr(accelerators, "to_host", found.to_host)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(THERE), found.leaving:
        yield found


def test_the_device_of_these_tests_has_no_values(device: Device) -> None:
    """So whoever asks for one is found out."""
    value = torch.ones(3)
    for ask in (
        Tensor.tolist,
        Tensor.nonzero,
        lambda v: bool(v.sum()),
        lambda v: torch.equal(v, v),
    ):
        with pytest.raises(
            (RuntimeError, DataDependentOutputException, DynamicOutputShapeException)
        ):
            ask(value)
    assert device.leaving.names == []
    value.cpu()
    assert device.leaving.names == ["aten._to_copy.default"]


class Net(nn.Module):
    """Activations that saturate, channels, a buffer, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.inner = nn.Linear(4, 4)
        self.tanh, self.fc = nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x))).mean((2, 3))
        return self.fc(self.tanh(self.inner(self.inner(x)))).softmax(-1)


def train(steps: int) -> None:
    """Train on the device."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 1, 6, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def sound(log: Any) -> bool:
    """Whether the watch has gone on to the end."""
    return not log.watch.failed and log.watch.summary.steps > 0


@at_levels(MEASURED, GUARDED, SKIPPED, MIXED)
def test_a_watched_training_asks_for_no_value(
    device: Device, paced: Callable[..., None], levels: tuple[StepKind, ...]
) -> None:
    """Whatever kind its steps are of."""
    paced(*levels)
    log = watch(lambda: train(4))
    assert sound(log)
    assert device.leaving.names == []


def test_a_measured_step_leaves_the_device_in_one_copy(
    device: Device, paced: Callable[..., None]
) -> None:
    """With the loss, the norm of all gradients and the updates; the norms of used gradients leave at the end."""
    paced(*MEASURED)
    assert sound(watch(lambda: train(4)))
    *steps, norms = device.tables
    assert len(steps) == 4
    assert norms < min(steps)


def test_guarded_steps_leave_the_device_together(
    device: Device, paced: Callable[..., None]
) -> None:
    """What they collect leaves with the next table, or at the end, with the norms of used gradients after it."""
    paced(*GUARDED)
    log = watch(lambda: train(4))
    assert sound(log)
    assert len(device.tables) == 2 + 1
    assert {row["step"] for row in log.rows if row["level"] == 1} == {1, 2, 3}


def test_updates_are_rows_like_others(device: Device, paced: Callable[..., None]) -> None:
    """The squares of each parameter's change are read with the table, not one by one."""
    paced(*MEASURED)
    log = watch(lambda: train(2))
    kinds = {e["id"]: e["kind"] for e in log.entries}
    assert sum(kinds[row["site"]] == "update" for row in log.rows) == 2 * 8


def test_the_norm_of_parameters_on_several_devices_stays_on_one(device: Device) -> None:
    """Not on the CPU, which would have to wait; and one number leaves each of the others."""
    squares, known = squares_of(
        [torch.ones(2, device="cpu"), torch.ones(3), torch.ones(4, dtype=torch.bfloat16)]
    )
    assert isinstance(squares, Tensor)
    assert (squares.is_meta, known) == (True, False)
    assert device.leaving.names == []


def test_optimizers_that_never_step_are_compared_without_waiting(device: Device) -> None:
    """The result of a comparison leaves the device when it is begun, and is read at the next one."""

    def program() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(12):
            model(torch.randn(5, 4)).sum().backward()
        del optimizer

    log = watch(program, every=100)
    assert not log.watch.failed
    assert device.leaving.names == []


def test_a_rate_that_is_a_tensor_is_read_at_the_end(device: Device) -> None:
    """Its value of the first step is kept, though a schedule writes into it."""
    with unset_fake_temporarily():
        rate = torch.tensor(0.5, device="cpu")
        model = nn.Linear(4, 2, device="cpu")

        def program() -> None:
            optimizer = torch.optim.SGD(model.parameters(), rate)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(5, 4, device="cpu")).sum().backward()
                optimizer.step()
                rate.mul_(0.1)

        (event,) = [e for e in watch(program).events if e["kind"] == "optimizers"]
    assert event["optimizers"][0]["rates"] == [0.5]


EDITS = [
    kedge.replace(1.0), kedge.replace(torch.neg), kedge.scale(0.5), kedge.add(1.0), kedge.clamp(-1, 1), kedge.zero(),
    kedge.replace(lambda value: value + torch.randn_like(value)),
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=repr)
def test_edits_ask_for_no_value(device: Device, edit: Any) -> None:
    """In the forward and in the backward."""
    model, x = Net(), torch.randn(5, 1, 6, 6)
    with kedge.hook(model, "act:out, tanh:out.grad", edit):
        model(x).sum().backward()
    assert device.leaving.names == []


@pytest.mark.parametrize(
    "action", [kedge.record(), kedge.record(copy=True), kedge.measure(), kedge.measure("norm")]
)
def test_recording_asks_for_no_value(device: Device, action: Any) -> None:
    """Until the values are looked at; statistics leave the device as a table."""
    model, x = Net(), torch.randn(5, 1, 6, 6)
    with kedge.hook(model, "**:out, **:in, **:out.grad, **:param, **:param.grad", action) as values:
        for _ in range(3):
            model(x).sum().backward()
    assert len(values) > 10
    assert device.leaving.names == []


def test_a_condition_is_computed_there_and_read_once(device: Device) -> None:
    """Raising an error needs the result: `error_if` is the one action that waits, as its page says."""
    value = torch.ones(3)
    assert nonfinite(value).is_meta
    with pytest.raises(DataDependentOutputException):
        kedge.error_if(nonfinite)(value)


def test_the_checks_of_a_dump_are_read_together(device: Device) -> None:
    """Sums wait on the device until there are many, or until the optimizer steps."""
    checks = finiteness.PendingChecks(lambda check, kind: None)
    call = RecordedCall(nn.Linear(2, 2), "", None)
    for _ in range(checks.together - 1):
        checks.add("out", (call,), torch.ones(3))
    with pytest.raises(DataDependentOutputException):
        checks.add("out", (call,), torch.ones(3))
    assert device.leaving.names == []
