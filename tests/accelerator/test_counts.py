"""Waits and copies of a watched training, counted by the simulated device."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.actions.measure.meter import Meter
from kedge.repro.first_bad_call import FirstBadCall
from kedge.torch_internals.accelerators import generator_states
from kedge.watch.records import gradient_checks
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import GUARDED, MEASURED, SKIPPED, Memory, at_levels, fix_kinds, watch

STEPS = 6


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what fixes the kind of each step after the first."""
    return partial(fix_kinds, monkeypatch)


class Net(nn.Module):
    """Convolutions, channels, a buffer, and activations that saturate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.tanh, self.fc = nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.tanh(self.act(self.norm(self.conv(x))).mean((2, 3))))


class Training:
    """A training on the device that asks it for nothing itself.

    Attributes:
        steps: What was counted in each step but the first, in which hooks are attached.
    """

    def __init__(
        self,
        sim: Any,
        device: str = "sim",
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ):
        torch.manual_seed(0)
        self.sim, self.make = sim, make
        self.model, self.x = Net().to(device), torch.randn(5, 1, 6, 6).to(device)
        self.steps: list[Mapping[str, Any]] = []

    def __call__(self) -> None:
        optimizer = self.make(self.model.parameters(), lr=0.1)
        for step in range(STEPS):
            self.sim.reset_counts()
            optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            optimizer.step()
            if step:
                self.steps.append(self.sim.counts())

    @property
    def waits(self) -> list[int]:
        """How often each step waited for the device."""
        return [sum(step["syncs"].values()) for step in self.steps]

    @property
    def copies(self) -> list[int]:
        """How many copies left the device in each step."""
        return [step["copies"]["d2h"][0] for step in self.steps]


NONE, ONE = [0] * (STEPS - 1), [1] * (STEPS - 1)


def test_the_training_asks_for_nothing_itself(sim: Any) -> None:
    """So whatever is counted below is Kedge's."""
    plain = Training(sim)
    plain()
    assert (plain.waits, plain.copies) == (NONE, NONE)


@at_levels(MEASURED, GUARDED, SKIPPED)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_no_step_waits(
    sim: Any, paced: Callable[..., None], levels: tuple[StepKind, ...], make: Any
) -> None:
    """A measured step leaves the device in one copy, a guarded and a skipped one in none."""
    paced(*levels)
    training = Training(sim, make=make)
    log = watch(training)
    assert not log.watch.failed
    assert training.waits == NONE
    assert training.copies == (ONE if levels == MEASURED else NONE)


def test_a_skipped_step_adds_few_kernels(
    sim: Any, paced: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides its loss, the norms of at most five gradients, whatever the size of the model; a card takes one call for all."""
    paced(*SKIPPED)
    monkeypatch.setattr(gradient_checks, "_SHARE", math.inf)  # however slow this machine is
    plain, skipped = Training(sim), Training(sim)
    plain()
    watch(skipped)
    pairs = zip(skipped.steps, plain.steps, strict=True)
    added = [watched["kernels"] - bare["kernels"] for watched, bare in pairs]
    assert 0 < min(added[1:]) <= max(added) <= 5


@pytest.mark.parametrize(
    ("every", "budget"), [(10, 0.03), (1, None)], ids=["as it comes", "--every 1 --budget none"]
)
def test_as_kedge_run_does_it(sim: Any, every: int, budget: float | None) -> None:
    """The first steps are all measured; each of them leaves in one copy, and none waits."""
    log, training = Memory(), Training(sim)
    log.watch = Watcher(Meter(), log, n=every, budget=budget)
    with log.watch:
        training()
    assert not log.watch.failed
    assert training.waits == NONE
    assert max(training.copies) == 1


def test_losses_of_skipped_steps_are_copied_later(sim: Any, paced: Callable[..., None]) -> None:
    """Nothing waits for them, and none leaves the device in its step."""
    paced(*SKIPPED, *SKIPPED, *GUARDED)
    training = Training(sim)
    log = watch(training)
    assert training.waits == NONE
    assert training.copies == NONE
    losses = log.recording().rows("loss")
    assert losses.step.tolist() == list(range(STEPS))
    plain = Training(sim, "cpu")
    paced(*MEASURED)
    expected = watch(plain).recording().rows("loss").statistic("mean")
    assert losses.statistic("mean") == pytest.approx(expected, rel=1e-5)


def test_what_is_recorded_is_what_a_cpu_would_have_recorded(
    sim: Any, paced: Callable[..., None]
) -> None:
    """Losses, norms, gradients, updates and outputs, though they come later and together."""
    paced(*MEASURED)
    found: dict[str, dict[tuple[str, int], tuple[float, ...]]] = {}
    for device in ("cpu", "sim"):
        log = watch(Training(sim, device), every=1)
        names = {e["id"]: e["site"] for e in log.entries}
        found[device] = {
            (names[row["site"]], int(row["step"])): (
                row["count"],
                row["sum"],
                math.sqrt(max(row["sumsq"], 0.0)),
            )
            for row in log.rows
        }
    assert found["sim"].keys() == found["cpu"].keys()
    for at, row in found["cpu"].items():
        known = [n for n, of in zip(found["sim"][at], row, strict=True) if not math.isnan(of)]
        assert known == pytest.approx([n for n in row if not math.isnan(n)], rel=1e-4, abs=1e-5), at


def test_a_rate_on_the_device_is_read_when_the_run_is_over(sim: Any) -> None:
    """The message has its value of the first step, although the program has written into it since."""
    training = Training(sim)
    rate = torch.tensor(0.5).to("sim")

    def lowered(params: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, rate, foreach=False)
        optimizer.register_step_post_hook(lambda *_: rate.mul_(0.5))
        return optimizer

    training.make = lowered
    (event,) = [e for e in watch(training).events if e["kind"] == "optimizers"]
    assert event["optimizers"][0]["rates"] == [0.5]


def test_optimizers_that_never_step_do_not_make_the_training_wait(sim: Any) -> None:
    """Their parameters are compared where they are."""
    training, waits = Training(sim), list[int]()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)

    def by_hand() -> None:
        for step in range(22):
            sim.synchronize()  # or a slow machine's device falls so far behind that Kedge waits for it
            sim.reset_counts()
            training.model(training.x).square().mean().backward()
            waits.append(sum(sim.counts()["syncs"].values()) if step > 1 else 0)

    log = watch(by_hand, every=100)
    assert sum(waits) == 0
    assert [e["in_vain"] for e in log.events if e.get("in_vain")] == [20]
    del optimizer


def test_a_dump_waits_after_the_forward_and_before_the_update(sim: Any, tmp_path: Any) -> None:
    """That is what it costs: the sums are read together, before anything changes the inputs or the parameters."""
    training = Training(sim)
    dump = FirstBadCall(lambda: tmp_path, Memory(), lambda: 0)
    dump.watch(training.model, lambda path: path)
    training()
    dump.close()
    assert training.waits == [2] * (STEPS - 1)


def test_a_dump_reads_the_states_of_all_generators_without_a_wait(sim: Any) -> None:
    """They are kept on the host: for each call of a module it reads those of all devices."""
    torch.ones(1, device="sim:1")
    sim.reset_counts()
    assert [*generator_states()] == ["cpu", "sim:0", "sim:1"]
    counts = sim.counts()
    assert sum(counts["syncs"].values()) == counts["kernels"] == 0
    assert {number for number, _ in counts["copies"].values()} == {0}


ACTIONS = {
    "record": kedge.record(), "copies": kedge.record(copy=True), "replace": kedge.replace(1.0), "scale": kedge.scale(0.5),
    "add": kedge.add(1.0), "clamp": kedge.clamp(-1.0, 1.0), "zero": kedge.zero(),
    "noise": kedge.replace(lambda value: value + torch.randn_like(value)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_wait_for_nothing(sim: Any, name: str) -> None:
    """Neither in the forward nor in the backward."""
    training = Training(sim)
    with kedge.hook(training.model, "conv:out, tanh:out.grad", ACTIONS[name]):
        training()
    assert (training.waits, training.copies) == (NONE, NONE)


def test_statistics_leave_in_one_copy_a_step(sim: Any) -> None:
    """Until they are read."""
    training = Training(sim)
    with kedge.hook(
        training.model, "**:out, **:in, **:out.grad, **:param.grad", kedge.measure()
    ) as stats:
        training()
        assert (training.waits, training.copies) == (NONE, ONE)
        assert stats["fc"].count == 15


def test_a_condition_waits_where_it_is_asked(sim: Any) -> None:
    """`error_if` has to know before the program goes on: once for each value."""
    training = Training(sim)
    with kedge.hook(training.model, "act, fc", kedge.error_if(kedge.nonfinite)):
        training()
    assert training.waits == [2] * (STEPS - 1)


@pytest.mark.parametrize("to", [kedge.Rebuild(), kedge.Cpu(rebuild=False), kedge.Cpu()], ids=repr)
def test_offloading_does_not_wait(sim: Any, to: Any) -> None:
    """Recipes are compared with the originals in the first step; later the device checks by itself, and copies run beside."""
    training = Training(sim)
    with kedge.offload(training.model, to=to, min_bytes=1) as account:
        training()
    assert training.waits == NONE
    assert account.total.sum("rebuilt").bytes > 0 or not getattr(to, "rebuild", True)
    assert (min(training.copies) > 0) == isinstance(to, kedge.Cpu)


def test_a_measured_value_takes_few_calls_of_python_and_one_launch(sim: Any) -> None:
    """On a card the host is what a step waits for: what a value costs there is Python's calls and the launch."""
    layers = [nn.Linear(4, 4) for _ in range(20)]
    model, x = nn.Sequential(*layers).to("sim"), torch.randn(2, 4).to("sim")
    called: list[str] = []

    def note(frame: FrameType, what: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if what == "call" and f"{os.sep}kedge{os.sep}" in file:
            called.append(frame.f_code.co_name)

    with torch.no_grad(), kedge.hook(model, "*:out", kedge.measure()) as stats:
        for _ in range(3):  # the first steps begin things
            model(x)
        sim.reset_counts()
        sys.setprofile(note)
        try:
            model(x)
        finally:
            sys.setprofile(None)
        launches = sim.launches()
        assert stats["19"].count == 8
    once_a_step = {name for name in called if called.count(name) < len(layers)}
    each_value = [name for name in called if name not in once_a_step]
    assert launches == len(layers)
    assert len(each_value) <= 6 * len(layers) + 6, Counter(called).most_common()
