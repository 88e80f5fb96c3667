"""Programs that broke the watch once: it says nothing on stderr, ends no program, and counts right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.registry import check
from kedge.watch.steps.budget import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Memory, descend, net, watch, watched

Paced = Callable[..., None]
LEVELS = [(StepKind.MEASURED,), (StepKind.GUARDED,), (StepKind.SKIPPED, StepKind.MEASURED, StepKind.GUARDED)]


def silent(log: Memory) -> dict[str, str]:
    """Read the ledger: what never fired, and why."""
    (ledger,) = [e for e in log.events if e["kind"] == "ledger"]
    return {entry["site"]: entry["cause"] for entry in ledger["sites"]}


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


class Overwriting(nn.Module):
    """Works in place on what a layer returned."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        hidden = self.fc(x).abs()
        hidden = self.fc(x)
        return self.head(hidden.abs_().mul_(0).log_() if broken else hidden.abs_())


@pytest.mark.parametrize("levels", LEVELS)
def test_a_layer_is_not_blamed_for_what_was_written_over_its_output(levels: tuple[StepKind, ...], paced: Paced) -> None:
    """What was changed in place is the program's own operations', wherever they stand."""
    paced(*levels)
    model = Overwriting()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 4), broken=step == 3).mean().backward()
            optimizer.step()

    findings = [f for f in check(watched(program).recording()) if f.code == "NAN-BORN"]
    site = "head:in" if levels == (StepKind.MEASURED,) else "loss"
    assert [(f.site, f.step) for f in findings][:1] == [(site, 3)]
    assert findings[0].evidence["operation"]["operation"] == "log"


def test_what_is_used_in_other_steps_alone_is_not_called_unused(paced: Paced) -> None:
    """The ledger lists what no step used, measured or not, under the path of its own root."""
    paced(StepKind.GUARDED, StepKind.SKIPPED, StepKind.GUARDED)
    generator, critic = net(), nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    critic.append(nn.Identity())
    generator.unused = nn.Parameter(torch.ones(3))

    def program(watch: Watcher) -> None:
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
        for step in range(6):
            theirs.zero_grad()
            critic[:2](critic(generator(torch.randn(5, 4)).detach())[:, [0, 0]]).mean().backward()
            theirs.step()
            if step > 1:
                ours.zero_grad()
                critic(generator(torch.randn(5, 4))).mean().backward()
                ours.step()

    assert set(silent(watched(program))) == {"unused:param.grad"}


class Sometimes(nn.Module):
    """Calls a layer in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.seldom, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, seldom: bool = False) -> Tensor:
        return self.seldom(self.usual(x)) if seldom else self.usual(x)


@pytest.mark.parametrize("level", [StepKind.SKIPPED, StepKind.GUARDED, StepKind.MEASURED])
def test_a_module_called_in_other_steps_alone_is_not_never_called(level: StepKind, paced: Paced) -> None:
    """Hooks of what was not called stay up in all steps, where they cost nothing."""
    paced(level)
    model = Sometimes()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(5, 4), seldom=step == 3).mean().backward()
            optimizer.step()

    assert set(silent(watched(program))) == {"never:out", "never.weight:param.grad", "never.bias:param.grad"}


def test_a_hook_that_the_program_sets_on_a_parameter_hides_nothing(paced: Paced) -> None:
    """The gradient goes on being measured, and the program's own hook stays when the watch has ended."""
    paced(StepKind.SKIPPED, StepKind.MEASURED)
    model, seen = net(), []

    def between(step: int) -> None:
        if step == 3:
            model[0].weight.register_hook(lambda grad: seen.append(step))

    recording = watched(lambda watch: descend(model, 8, between=between)).recording()
    assert recording.rows("0.weight:param.grad").step.tolist() == [0, 2, 4, 6]
    assert len(seen) == 5
    assert [len(p._backward_hooks or ()) for p in model.parameters()] == [1, 0, 0, 0]


@pytest.mark.parametrize("levels", LEVELS)
def test_a_model_that_its_own_hooks_refer_to_is_freed(levels: tuple[StepKind, ...], paced: Paced) -> None:
    """What is put up and taken down is known by weak references."""
    paced(*levels)

    def program(watch: Watcher) -> None:
        model = net()
        model.register_forward_hook(lambda *_, model=model: None)
        model[0].weight.register_hook(lambda grad, model=model: None)
        descend(model, 5)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    watched(program)


def test_a_loss_made_anew_for_each_call_is_one_root() -> None:
    """It takes the place of the one before it, which is gone."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(6):
            optimizer.zero_grad()
            nn.MSELoss()(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
            optimizer.step()

    log = watch(program, every=1)
    assert [root["name"] for root in log.roots] == ["Sequential", "MSELoss"]
    assert log.recording().rows("MSELoss:out").step.tolist() == list(range(6))
    assert len(log.watch.session.targets) == 2


def test_a_module_that_a_model_gets_later_is_no_root() -> None:
    """Without a budget new roots are looked for in every step, but not inside of a forward."""
    model = net()
    log = watch(lambda: descend(model, 6, between=lambda step: step == 3 and model.append(nn.Tanh())), every=10)
    assert [root["name"] for root in log.roots] == ["Sequential"]


def test_a_model_that_is_wrapped_late_is_one_root() -> None:
    """Its steps count once."""
    model = net()

    def program() -> None:
        descend(model, 3)
        descend(nn.DataParallel(model), 3)

    log = watch(program, every=1)
    assert [root["name"] for root in log.roots] == ["Sequential"]
    assert log.watch.summary.steps == 6


class Outer(nn.Module):
    """Holds a model that is also called alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.log = nn.Linear(4, 4), inner, Logarithm()

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        return self.log(self.inner(self.before(x)).abs() * (0.0 if broken else 1.0))


class Logarithm(nn.Module):
    """The logarithm."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


@pytest.mark.parametrize("level", [StepKind.MEASURED, StepKind.GUARDED])
def test_a_root_inside_of_another_ends_nothing(level: StepKind, paced: Paced) -> None:
    """What comes after it in the outer forward is looked at too."""
    paced(level)
    inner = net()
    outer = Outer(inner)

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(outer.parameters(), 1e-4)
        for step in range(7):
            optimizer.zero_grad()
            inner(torch.randn(5, 4)).mean().backward()
            outer(torch.randn(5, 4), broken=step == 5).mean().backward()
            optimizer.step()

    (finding, *_) = [f for f in check(watched(program).recording()) if f.code == "NAN-BORN"]
    assert finding.step == 5
    assert finding.site == ("Outer.log:out" if level is StepKind.MEASURED else "loss_2")
    assert finding.evidence["operation"]["operation"] == "log"


class Trainer(nn.Module):
    """Steps within its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.optimizers = [torch.optim.SGD(self.net.parameters(), 0.01)]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizers[0].step()
        return loss.detach()


@pytest.mark.parametrize("levels", LEVELS)
def test_a_step_within_a_forward_leaves_no_forward_open(levels: tuple[StepKind, ...], paced: Paced) -> None:
    """The hooks that see its end may be gone by then."""
    paced(*levels)
    trainer = Trainer()

    def program(watch: Watcher) -> None:
        for _ in range(7):
            trainer(torch.randn(5, 4))
        if watch.budget.kind is not StepKind.MEASURED:
            assert not any(root.hooks.is_running for root in watch.models.roots)

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 7
    assert silent(log) == {}


class Unreadable(nn.Module):
    """Returns a mapping that raises when it is read for the third time and later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return _Raising(y=self.fc(x)) if self.calls > 2 else {"y": self.fc(x)}


class _Raising(dict[str, Tensor]):
    def items(self) -> Any:
        raise OSError("not now")


def test_what_cannot_be_read_is_not_looked_at_in_guarded_steps(
    paced: Paced, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is returned to the program may be something that cannot be looked at."""
    paced(StepKind.GUARDED)
    model = Unreadable()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(6):
            model(torch.randn(5, 4))["y"].mean().backward()
            optimizer.step()

    log = watched(program)
    assert capsys.readouterr().err == ""
    assert log.recording().rows("loss").step.tolist() == list(range(6))


def test_the_watch_hooks_no_gradient_on_its_way(paced: Paced) -> None:
    """Autograd reads tables of hooks without a lock: parameters have none that could change under another thread's backward."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    model = net()
    there: list[bool] = []

    def between(step: int) -> None:
        there.extend(p._backward_hooks is not None for p in model.parameters())

    watched(lambda watch: descend(model, 5, between=between))
    assert not any(there)
