"""Watching a program: what a step is, which are measured, and what is seen in those between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.registry import check
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Conv, Memory, Paced, batch, images, net, watch, watched


def trained(model: nn.Module, steps: int, **spare: Callable[[int], None]) -> None:
    """Train, doing something before each step's forward."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        spare.get("before", lambda step: None)(step)
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()


def test_one_step_in_so_many_is_measured_in_full() -> None:
    """So is the one after an optimizer's first; a healthy run leaves the loss and the norm of the gradients of those between."""
    log = watch(lambda: trained(Conv(), 23), every=5)
    assert (log.steps(level=1), log.steps(level=2)) == ([], [0, 1, 5, 10, 15, 20])
    for site in ("loss", ":grad.norm"):
        rows = log.recording().rows(site)
        assert rows.step.tolist() == list(range(23))
        assert [
            step for step, level in zip(rows.step, rows.level, strict=True) if level == 2
        ] == log.steps(level=2)
    summary = log.watch.summary
    assert (summary.steps, summary.sampled, summary.sites) == (23, 6, len(log.entries))
    assert summary.levels == {"measured": 6, "guarded": 17, "skipped": 0}
    assert 0 < summary.watching <= summary.seconds


def test_the_passes_of_an_accumulated_gradient_are_one_step() -> None:
    """Steps are the optimizer's; all micro-batches of a sampled one are measured."""

    def program() -> None:
        model = Conv()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(12):
            model(images(2 + i % 3)).square().mean().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    log = watch(program, every=2)
    recording = log.recording()
    assert log.watch.summary.steps == 4
    for site in ("conv:out", ":out", "fc:out.grad"):
        rows = recording.rows(site)
        assert (rows.step.tolist(), rows.calls.tolist()) == ([0, 1, 2], [3, 3, 3])
    assert recording.rows(":out").count.tolist() == [9 * 3] * 3
    for site in ("conv.weight:param", "conv.weight:param.grad"):
        assert recording.rows(site).calls.tolist() == [1, 1, 1]
    loss = recording.rows("loss")
    assert (loss.step.tolist(), loss.calls.tolist()) == ([0, 1, 2, 3], [3, 3, 3, 3])


def test_without_an_optimizer_each_forward_is_a_step() -> None:
    """Nothing needs a gradient for being watched."""
    model = Conv()

    def program() -> None:
        with torch.inference_mode():
            for _ in range(7):
                model(images())

    log = watch(program, every=3)
    assert log.steps(level=2) == [0, 3, 6]
    assert (log.watch.summary.steps, log.watch.summary.sampled) == (7, 3)
    assert {e["kind"] for e in log.entries} == {"in", "out"}


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_validation_is_not_measured(off: Any) -> None:
    """Neither before the first step, nor between two, whatever batch it takes."""
    model = Conv()

    def validate(step: int) -> None:
        with off():
            for _ in range(3):
                model(torch.full((64, 1, 6, 6), 1e4))

    log = watch(lambda: trained(model, 5, before=validate), every=2)
    rows = log.recording().rows("conv:out")
    assert (rows.step.tolist(), rows.calls.tolist()) == ([0, 1, 2, 4], [1, 1, 1, 1])
    assert rows.statistic("absmax").max() < 100
    assert log.watch.summary.steps == 5


def test_a_teacher_that_runs_without_gradients_hides_nothing_of_its_student() -> None:
    """A pass that is not measured between a forward and its backward leaves the backward measured."""
    student, teacher = Conv(), nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    def program() -> None:
        optimizer = torch.optim.SGD(student.parameters(), 0.1)
        for _ in range(3):
            x = images()
            out = student(x)
            with torch.no_grad():
                aim = teacher(x)
            (out - aim).square().mean().backward()
            optimizer.step()

    log = watch(program, every=1)
    recording = log.recording()
    for site in ("conv:out.grad", "conv.weight:param", "conv.weight:update"):
        assert recording.rows(site).step.tolist() == [0, 1, 2], site
    assert [t for t in log.texts() if t.startswith("Sequential")] == []


def test_an_optimizer_that_calls_the_model_itself_makes_one_step() -> None:
    """All forwards within one call of `step` belong to it, on schedule and off."""
    model, x = Conv(), images()

    def program() -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)

    log = watch(program, every=2)
    recording = log.recording()
    assert log.watch.summary.steps == 5
    assert (log.steps(level=1), log.steps(level=2)) == ([], [0, 1, 2, 4])
    assert (recording.rows("conv:out").calls >= 2).all()
    assert recording.rows("conv.weight:update").step.tolist() == [
        1,
        2,
        4,
    ]  # the model is met in the midst of the first step
    gradients, total = recording.rows("conv.weight:param.grad"), recording.rows(":grad.norm")
    assert (gradients.step.tolist(), set(gradients.calls)) == ([0, 1, 2, 4], {1})
    assert (total.step.tolist(), set(total.calls)) == ([*range(5)], {1})


def test_a_second_training_goes_on_counting() -> None:
    """When the optimizer that made the steps is gone or no longer used, the next one makes them."""
    kept: list[Any] = []

    def program() -> None:
        trained(Conv(), 4)
        model = Conv()
        for steps in (5, 50):
            kept.append(optimizer := torch.optim.SGD(model.parameters(), 0.01))
            for _ in range(steps):
                optimizer.zero_grad()
                model(images()).square().mean().backward()
                optimizer.step()

    log = watch(program, every=1)
    assert 4 + 5 + 50 - 31 <= log.watch.summary.steps <= 4 + 5 + 50
    assert len(log.recording().rows("model_2.conv:out")) >= 5 + 50 - 31


class Log(nn.Module):
    """Takes a logarithm, of zero if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.gate = nn.Identity()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        y = self.gate(self.body(x).abs() * (0.0 if broken else 1.0))
        return self.head(torch.log(y))


def break_at(*steps: int, last: int = 20) -> Memory:
    """Train, with a logarithm of zero in some steps; what it does to the weights is undone."""

    def program() -> None:
        model = Log()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(last):
            saved = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            model(torch.randn(3, 4), broken=step in steps).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                if step in steps:
                    for p, old in zip(model.parameters(), saved, strict=True):
                        p.copy_(old)

    log: Memory = watch(program, every=10)
    return log


def test_a_nan_between_two_sampled_steps_is_seen_where_it_was_born() -> None:
    """Its gradients and parameters are written, the operation and its line are found, and the next step is measured."""
    log = break_at(13)
    assert (log.steps(level=1), log.steps(level=2)) == ([13], [0, 1, 10, 14])
    ids = {e["id"]: e["site"] for e in log.entries}
    written = {ids[row["site"]] for row in log.rows if row["step"] == 13}
    parameters = {
        f"{module}.{name}" for module in ("body", "head.0", "head.2") for name in ("weight", "bias")
    }
    assert written == {
        "loss",
        ":grad.norm",
        *(f"{p}:{kind}" for p in parameters for kind in ("param", "param.grad")),
    }
    (producer,) = [
        event for event in log.events if event["kind"] == "producer" and not event.get("again")
    ]
    assert (producer["operation"], producer["step"], producer["certain"]) == ("log", 13, True)
    assert producer["text"] == "return self.head(torch.log(y))"
    (finding, *_) = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    assert (finding.site, finding.step) == ("loss", 13)


def test_a_nan_in_a_sampled_step_is_seen_there() -> None:
    """The rule names the first value that it is seen in."""
    log = break_at(10)
    assert log.steps(level=1) == []
    (finding, *_) = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    assert (finding.site, finding.step) == ("head:in", 10)


def test_a_step_between_is_written_only_if_something_is_newly_not_finite() -> None:
    """A run that is not finite for long does not fill the disk, and what breaks again later is seen again."""
    log = break_at(*range(11, 60), last=60)
    assert log.steps(level=1) == [11]
    assert (
        log.watch.summary.sampled <= 7 + 8
    )  # those of the schedule, and a few that were asked for
    again = break_at(13, 45, last=50)
    assert (again.steps(level=1), again.steps(level=2)) == (
        [13, 45],
        [0, 1, 10, 14, 20, 30, 40, 46],
    )


def test_a_gradient_alone_that_is_not_finite_is_seen_between_two_sampled_steps() -> None:
    """An infinite derivative at finite values shows in the parameters' gradients."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(8):
            optimizer.zero_grad()
            out = model(torch.randn(2, 3))
            ((out * 0).sqrt() if step == 5 else out.square()).sum().backward()
            kept = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            with torch.no_grad():
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old)

    log = watch(program)
    assert log.steps(level=1) == [5]
    ids = {e["id"]: e["site"] for e in log.entries}
    bad = {
        ids[r["site"]]
        for r in log.rows
        if r["step"] == 5 and r["sumsq"] != r["sumsq"] and r["sum"] != r["sum"]
    }
    assert "1.weight:param.grad" in bad
    assert [f.step for f in check(log.recording()) if f.code == "NAN-BORN"] == [5]


@pytest.mark.parametrize("within", [False, True])
def test_one_optimizer_a_parameter_makes_one_step_an_iteration(within: bool, paced: Paced) -> None:
    """Many optimizers do not take the lead from each other; those that step within a backward end a step with it."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    optimizers = {p: torch.optim.SGD([p], 1e-3) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    def program(watch: Watcher) -> None:
        for _ in range(6):
            model(torch.randn(5, 4)).square().mean().backward()
            if not within:
                list(map(step, optimizers))

    handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers] if within else []
    log = watched(program)
    for handle in handles:
        handle.remove()
    assert log.watch is not None
    assert log.watch.summary.steps == 6
    if within:
        recording = log.recording()
        for site in ("3:out", "3:out.grad", "3.weight:param.grad", "3.weight:update"):
            assert recording.rows(site).step.tolist() == [0, 2, 4], site


def test_evaluating_one_model_after_the_other_goes_on_counting() -> None:
    """Without an optimizer the passes of a model that comes when another is gone are further steps."""

    def program() -> None:
        with torch.no_grad():
            for _ in range(3):
                model = net()
                for _ in range(4):
                    model(batch())
                del model

    log = watch(program, every=1)
    assert log.watch.summary.steps == 12
    recording = log.recording()
    assert recording.rows("0:out").step.tolist() == [0, 1, 2, 3]
    assert recording.rows("model_3.0:out").step.tolist() == [8, 9, 10, 11]


def test_the_rows_of_a_gan_are_of_whole_rounds(paced: Paced) -> None:
    """The optimizer that steps last ends the step: each row holds all calls of a round, and only measured steps have one."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    generator, critic = net(), nn.Linear(2, 1)

    def program(watch: Watcher) -> None:
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
        for _ in range(6):
            theirs.zero_grad()
            with torch.no_grad():
                fake = generator(torch.randn(5, 4))
            real = critic(torch.randn(5, 2))
            (critic(fake).mean() - real.mean()).backward()
            theirs.step()
            ours.zero_grad()
            critic(generator(torch.randn(5, 4))).mean().backward()
            ours.step()

    log = watched(program)
    recording = log.recording()
    assert log.watch.summary.steps == 6
    assert recording.rows("critic:out").step.tolist() == [0, 2, 4] == log.steps(level=2)
    assert recording.rows("critic:out").calls.tolist() == [3, 3, 3]
    for site in ("generator.0.weight:update", "critic.weight:update"):
        assert recording.rows(site).step.tolist() == [0, 2, 4], site
    assert (
        recording.rows("loss").step.tolist()
        == recording.rows("loss_2").step.tolist()
        == list(range(6))
    )
