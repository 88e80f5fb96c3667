"""Times of modules in measured steps, by a clock that only the modules and the hooks of a test move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.hooks.placing.call_brackets import BracketBegins
from kedge.offload.plan import timing
from kedge.report.page.document import condense
from kedge.report.shown_run import ShownRun
from kedge.store.events import ModuleTimesEvent
from kedge.store.timed_modules import TimedModules
from kedge.watch.records.module_times import ModuleTimes


class Clock:
    """A clock of the host that stands still unless it is moved."""

    now = 0.0

    def moved(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that modules are timed by."""
    made = Clock()
    monkeypatch.setattr(timing.HostClock, "mark", lambda _: made.now)
    return made


class Moving(torch.autograd.Function):
    """Moves the clock in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        clock.moved(forward)
        ctx.clock, ctx.seconds = clock, backward
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.moved(ctx.seconds)
        return grad, None, None, None


class Slow(nn.Module):
    """Takes some seconds of the forward and of the backward."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.given = clock, forward, backward
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = Moving.apply(x, *self.given)
        return moved * self.weight


class Residual(nn.Module):
    """Adds what a module returns to its input, and takes three seconds itself."""

    def __init__(self, clock: Clock, inner: nn.Module, *, again: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.clock = clock
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        self.clock.moved(3)
        if self.again:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


def timed(
    folder: Path, model: nn.Module, *, steps: int = 4, each: Callable[[int], None] = lambda _: None
) -> TimedModules | None:
    """Train a model under a watch that times modules; returns the times."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with kedge.watch(folder / "run.kedge", every=1, budget=None, time=True, force=True):
        for step in range(steps):
            each(step)
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return kedge.Recording.open(folder / "run.kedge").timed_modules


def figures(found: TimedModules | None) -> dict[str, tuple[float, float]]:
    """The median times of each module."""
    assert found is not None
    return found.medians


def test_a_module_has_the_times_of_those_inside(clock: Clock, tmp_path: Path) -> None:
    """Each step but the first, whose modules are seen for the first time."""
    model = nn.Sequential(Residual(clock, Slow(clock, 5, 7)), Slow(clock, 11, 13))
    found = timed(tmp_path, model)
    assert found is not None
    assert found.steps.tolist() == [1, 2, 3]
    assert figures(found) == {
        "": (5 + 3 + 11, 7 + 13),
        "0": (5 + 3, 7),
        "0.inner": (5, 7),
        "1": (11, 13),
    }


def test_hooks_are_no_time_of_a_module(clock: Clock, tmp_path: Path) -> None:
    """Neither of the module itself nor of those around it; the program's own included."""
    model = nn.Sequential(Residual(clock, Slow(clock, 5, 7)))
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: clock.moved(100))
        module.register_forward_hook(lambda *_: clock.moved(1000))
    assert figures(timed(tmp_path, model)) == {"": (8, 7), "0": (8, 7), "0.inner": (5, 7)}


def test_hooks_on_gradients_are_no_time_of_a_module(clock: Clock, tmp_path: Path) -> None:
    """They run before the node that gets the gradient."""
    model = nn.Sequential(Slow(clock, 5, 7))

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: clock.moved(100))

    model[0].register_forward_hook(hook)
    assert figures(timed(tmp_path, model)) == {"": (5, 7), "0": (5, 7)}


def test_calls_of_a_step_add_up(clock: Clock, tmp_path: Path) -> None:
    """A module that is called twice, and micro-batches."""
    twice = Slow(clock, 5, 7)
    model = nn.Sequential(twice, twice)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with kedge.watch(tmp_path / "run.kedge", every=1, budget=None, time=True):
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(2, 3, requires_grad=True)).sum().backward()
            optimizer.step()
    assert figures(kedge.Recording.open(tmp_path / "run.kedge").timed_modules)["0"] == (20, 28)


def test_the_second_run_of_a_checkpoint_is_backward(clock: Clock, tmp_path: Path) -> None:
    """It is a part of the node that asks for what was not saved."""
    model = nn.Sequential(Residual(clock, Slow(clock, 5, 7), again=True))
    found = figures(timed(tmp_path, model))
    assert found[""] == (8, 7 + 5)


def test_evaluations_are_not_timed(clock: Clock, tmp_path: Path) -> None:
    """Nor is a call that raised, whose time is that until then."""
    model = nn.Sequential(Slow(clock, 5, 7))

    def evaluated(_step: int) -> None:
        with torch.no_grad():
            model(torch.ones(2, 3))

    assert figures(timed(tmp_path, model, each=evaluated))["0"] == (5, 7)


def test_without_a_backward_there_is_no_time_of_it(clock: Clock, tmp_path: Path) -> None:
    """A module whose output nothing is made of."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = Slow(clock, 5, 7)
            self.unused = Slow(clock, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            out: Tensor = self.used(x)
            return out

    found = figures(timed(tmp_path, Beside()))
    assert found["used"] == (5, 7)
    assert found["unused"] == (2, 0)


def test_no_bit_changes(tmp_path: Path) -> None:
    """Losses and parameters are those of a plain training."""

    def run(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def train() -> None:
            for _ in range(6):
                model(torch.randn(4, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        if watched:
            with kedge.watch(tmp_path / "run.kedge", every=1, budget=None, time=True):
                train()
        else:
            train()
        return [*(p.detach().clone() for p in model.parameters()), *model.buffers()]

    assert all(map(torch.equal, run(watched=True), run(watched=False)))


def test_another_thread_calls_a_module_across_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that began in a step and ends while that is taken raises nothing and is of no step."""
    inside = threading.Event()
    go_on = threading.Event()
    raised: list[BaseException] = []

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(60)
            return super().forward(x)

    model = nn.Sequential(Waiting(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    def call() -> None:
        try:
            model(torch.ones(3, 2))
        except BaseException as error:  # noqa: BLE001 - of whatever kind
            raised.append(error)

    thread = threading.Thread(target=call)
    take = ModuleTimes.take

    def take_meanwhile(times: ModuleTimes, number: int) -> Iterator[ModuleTimesEvent]:
        yield from take(times, number)
        if inside.is_set():
            go_on.set()
            thread.join(1)  # it may wait for the end of the step

    monkeypatch.setattr(ModuleTimes, "take", take_meanwhile)
    with kedge.watch(tmp_path / "run.kedge", time=True, every=1, budget=None):
        step()
        step()
        thread.start()
        assert inside.wait(60)
        step()
        step()
    times = kedge.Recording.open(tmp_path / "run.kedge").of(ModuleTimesEvent)

    assert not raised
    assert [event.step for event in times] == [1, 2, 3]


def test_a_hook_that_goes_while_another_thread_calls_has_no_arguments_by_name() -> None:
    """PyTorch has noted elsewhere that a hook wants them, and forgets it before the call is over."""
    begun: list[Any] = []
    BracketBegins(lambda *given: begun.append(given))(nn.ReLU(), (1,))

    assert [given[1:] for given in begun] == [((1,), {})]


def test_a_run_without_a_timed_step_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step is not enough: its modules are seen for the first time."""
    assert timed(tmp_path, nn.Sequential(nn.Linear(3, 3)), steps=1) is None
    assert "no module was timed: a step is timed if" in capsys.readouterr().err


def test_a_long_run_times_fewer_steps(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some, one in two, then one in three, and so on."""
    monkeypatch.setattr("kedge.watch.records.module_times._ALL", 4)
    found = timed(tmp_path, nn.Sequential(Slow(clock, 1, 1)), steps=20)
    assert found is not None
    assert found.steps.tolist() == [1, 2, 3, 4, 5, 7, 10, 13]


def test_the_page_and_the_report_have_the_times(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As rows of the heat-map, and as columns."""
    timed(tmp_path, nn.Sequential(Residual(clock, Slow(clock, 5, 7)), Slow(clock, 11, 13)))
    recording = kedge.Recording.open(tmp_path / "run.kedge")
    shown = condense(ShownRun(recording)).described
    added = [site["site"] for site in shown["sites"] if site["kind"].startswith("time.")]
    assert len(shown["sites"]) == len(recording.sites) + len(added)
    assert added[:4] == [
        ":time.forward",
        "0:time.forward",
        "0.inner:time.forward",
        "1:time.forward",
    ]
    assert len(shown["sheets"]["milliseconds"]["rows"]) == 8


def test_the_page_has_the_classes_of_several_models(clock: Clock, tmp_path: Path) -> None:
    """The modules of each have paths that begin with its name."""
    first, second = nn.Sequential(Slow(clock, 1, 1)), nn.Sequential(Slow(clock, 1, 1))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (first, second)]
    with kedge.watch(tmp_path / "run.kedge", every=1, budget=None, time=True):
        for _ in range(4):
            (first(torch.ones(2, 3)).sum() + second(torch.ones(2, 3)).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
    sites = condense(ShownRun(kedge.Recording.open(tmp_path / "run.kedge"))).described["sites"]
    types = {site["site"]: site["type"] for site in sites if site["kind"] == "time.forward"}
    assert types["first:time.forward"] == types["second:time.forward"] == "Sequential"
    assert types["first.0:time.forward"] == types["second.0:time.forward"] == "Slow"
