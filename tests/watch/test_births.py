"""What is said of real programs that go wrong: where the first NaN was born, from what a watch records of them."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.registry import check
from kedge.rules.rule import Finding
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.rules.scenes import made_at
from tests.watch.watched import (
    GUARDED,
    MEASURED,
    MIXED,
    Paced,
    at_levels,
    batch,
    descend,
    names,
    net,
    watch,
    watched,
)

pytestmark = pytest.mark.usefixtures("without_copies")


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)


class Net(nn.Module):
    """Two linear layers, with something between them."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.middle, self.head = nn.Linear(4, 8), middle, nn.Linear(8, 1)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4).repeat(2, 1))
            self.fc.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.fc(x)))


def train(
    model: nn.Module,
    bad: Callable[[int, Tensor], Tensor],
    *,
    steps: int = 20,
    before: Callable[[int, nn.Module], None] = lambda step, model: None,
    lr: float = 0.0,
) -> Callable[[], None]:
    """Train on positive batches; `bad` may change one, `before` is called before the optimizer's step."""

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(steps):
            optimizer.zero_grad()
            model(bad(step, torch.rand(5, 4) + 0.5)).square().mean().backward()
            before(step, model)
            optimizer.step()

    return program


def zero_at(when: int) -> Callable[[int, Tensor], Tensor]:
    """Put a zero into the batch of one step."""
    return lambda step, x: x * torch.tensor([0.0, 1, 1, 1]) if step == when else x


def born(program: Callable[[], None]) -> Finding:
    """Watch a program, and give the one birth that is found."""
    (finding,) = NanBorn().check(watch(program).recording())
    return finding


@pytest.mark.parametrize("step", [0, 10], ids=["first", "measured"])
def test_a_module_that_leaves_its_domain(step: int) -> None:
    """In a measured step the finding names the module, its operation and its line, and the steps before it."""
    finding = born(train(Net(Log()), zero_at(step)))

    assert (finding.site, finding.step, finding.severity) == ("middle:out", step, "error")
    assert 'in Net.forward: "return self.head(self.middle(self.fc(x)))"' in finding.message
    assert "log made it" in finding.message
    assert "outside of modules" not in finding.message
    line = (
        "return torch.log(x)" if step else "return self.head(self.middle(self.fc(x)))"
    )  # noted in the second step
    assert finding.evidence.source.text == line
    before = finding.evidence.before
    assert before.steps == list(range(step + 1))
    assert [s for s in before.sites["fc:out"].state if s] == ["finite"] * (1 + 2 * (step > 0))
    assert "Keep the input of log above zero" in finding.remedy


@pytest.mark.parametrize("middle", [Log(), torch.log], ids=["module", "operation"])
def test_an_operation_that_leaves_its_domain_in_a_guarded_step(
    middle: Callable[[Tensor], Tensor],
) -> None:
    """No module is seen in it, and yet the operation and its line are: the graph of the loss shows them."""
    finding = born(train(Net(middle), zero_at(13)))

    assert (finding.site, finding.step, finding.severity) == ("loss", 13, "error")
    assert (made_at(finding), finding.evidence.operation.operation) == (
        "forward, seen",
        "log",
    )
    assert (
        "log(x)" in finding.evidence.source.text or "self.middle(" in finding.evidence.source.text
    )
    assert "its input has 10 zeros" in finding.message
    assert "kedge run" not in finding.remedy


def test_an_operation_between_two_modules() -> None:
    """Glue code is named by the module that holds it, by its autograd node, and by the line where its result goes in."""
    finding = born(train(Net(torch.log), zero_at(10)))

    assert (finding.site, finding.evidence.node) == ("head:in", "LogBackward0")
    assert (
        "an operation in the forward of Net made it, outside any watched module (log was its last operation)"
        in finding.message
    )
    assert "The result goes in at" in finding.message


def test_a_derivative_that_is_infinite() -> None:
    """In a full step the module whose backward made it is named."""
    finding = born(train(Net(Root()), zero_at(10)))

    assert (made_at(finding), finding.evidence.module, finding.step) == (
        "backward, seen",
        "middle",
        10,
    )
    assert finding.evidence.source.function == "Net.forward"


@pytest.mark.parametrize(
    ("step", "site", "how"), [(10, ":in", "entry, seen"), (7, "loss", "entry, seen")]
)
def test_a_batch_with_a_nan(step: int, site: str, how: str) -> None:
    """What came in is distinguished from what was made, in measured steps and in guarded ones."""
    finding = born(train(Net(nn.Tanh()), lambda at, x: x * math.nan if at == step else x))

    assert (finding.site, made_at(finding), finding.step) == (site, how, step)
    assert "it came from outside the model" in finding.message
    assert "Check the batch" in finding.remedy


def test_what_the_program_computed_before_the_call_did_not_come_with_the_batch() -> None:
    """A value that has a gradient was computed: the operation is named, and nobody is sent to the batch."""
    scale, model = nn.Parameter(torch.zeros(1)), nn.Linear(4, 1)

    def program() -> None:
        optimizer = torch.optim.SGD([scale, *model.parameters()], 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.zeros(6, 4) / scale).sum().backward()
            optimizer.step()

    finding = born(program)

    assert (
        "the program computed it before this call (div was its last operation)" in finding.message
    )
    assert "Check the batch" not in finding.remedy


@pytest.mark.parametrize("step", [9, 12], ids=["measured", "guarded"])
def test_a_learning_rate_that_is_far_too_large(step: int) -> None:
    """The remedy is the learning rate, whichever operation is the first to overflow: nobody is sent to look for another."""

    def program() -> None:
        model = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for number in range(20):
            optimizer.param_groups[0]["lr"] = 1e30 if number == step else 1e-2
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()

    finding = born(program)

    assert finding.severity == "error"
    assert finding.remedy.startswith("The optimizer's steps are probably too large")
    assert finding.step == step + 1


def test_gradients_that_the_program_writes() -> None:
    """A NaN that comes in between backward and step is not blamed on a backward."""

    def write(step: int, model: nn.Module) -> None:
        if step == 10:
            model.fc.weight.grad[0, 0] = math.nan

    finding = born(train(Net(nn.Tanh()), lambda step, x: x, before=write))

    assert (finding.site, made_at(finding), finding.step) == (":grad.norm", "written, seen", 10)


def test_loss_scaling_that_skips_steps_is_no_error() -> None:
    """A scaler begins with a scale that is too large, and skips steps until it fits: the optimizer never gets infinities."""

    def program() -> None:
        model, scaler = (
            nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)),
            torch.amp.GradScaler("cpu", 2.0**24),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(32, 8)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    log = watch(program)

    assert log.watch.summary.steps < 40
    assert list(NanBorn().check(log.recording())) == []


def test_a_value_beyond_float16() -> None:
    """The message says what the dtype can hold: the input was beyond that before anything was summed."""
    gc.collect()  # optimizers of other tests would be waited for

    def program() -> None:
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        with torch.autocast("cpu", torch.float16), torch.no_grad():
            for step in range(20):
                model(torch.randn(32, 8) * 3.0**step)

    finding = born(program)

    assert finding.evidence.module == "0"
    assert "float16 cannot hold: it ends at 6.55e+04" in finding.remedy


def test_two_models_of_which_one_goes_on() -> None:
    """The one that went wrong is named once, however long the other one does well."""

    def program() -> None:
        good, hurt = nn.Linear(4, 1), Net(Log())
        first, second = (
            torch.optim.SGD(good.parameters(), lr=0.1),
            torch.optim.SGD(hurt.parameters(), lr=0.1),
        )
        for step in range(45):
            x = torch.rand(5, 4) + 0.5
            for model, optimizer in ((good, first), (hurt, second)):
                optimizer.zero_grad()
                model(zero_at(13)(step, x)).square().mean().backward()
                optimizer.step()

    finding = born(program)

    assert (finding.site, finding.severity) == ("loss", "error")
    assert finding.evidence.operation.operation == "log"


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


def written_over() -> None:
    """Write a NaN over what a layer returned: the layer is not blamed for it, but the program's own operations."""
    model = Overwriting()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        optimizer.zero_grad()
        model(batch(), broken=step == 3).mean().backward()
        optimizer.step()


class Outer(nn.Module):
    """Holds a model that is also called alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.log = nn.Linear(4, 4), inner, Log()

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        return self.log(self.inner(self.before(x)).abs() * (0.0 if broken else 1.0))


def behind_another_root() -> None:
    """Train a model that holds a root: what comes after that in the outer forward is looked at too."""
    inner = net()
    outer = Outer(inner)
    optimizer = torch.optim.SGD(outer.parameters(), 1e-4)
    for step in range(7):
        optimizer.zero_grad()
        inner(batch()).mean().backward()
        outer(batch(), broken=step == 5).mean().backward()
        optimizer.step()


class Failing(nn.Module):
    """Raises if asked to."""

    error: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


def after_errors() -> None:
    """Interrupt forwards in each step: what they left is neither taken for the next one's, nor in its way."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Failing(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(8):
        optimizer.zero_grad()
        x = batch()
        for kind in (KeyboardInterrupt, ValueError):
            model[3].error = kind
            with pytest.raises(kind):
                model(x)
        model[3].error = None
        if step == 5:
            with torch.no_grad():
                model[2].weight[0, 0] = float("inf")
        model(x).mean().backward()
        optimizer.step()


BIRTHS = [
    (written_over, MEASURED, 6, ("head:in", 3, "log")),
    (written_over, GUARDED, 6, ("loss", 3, "log")),
    (written_over, MIXED, 6, ("loss", 3, "log")),
    (behind_another_root, MEASURED, 7, ("log:out", 5, "log")),
    (behind_another_root, GUARDED, 7, ("loss_2", 5, "log")),
    (after_errors, MEASURED, 8, ("2.weight:param", 5, None)),
    (after_errors, GUARDED, 8, ("2.weight:param", 5, None)),
]


@pytest.mark.parametrize(
    ("program", "levels", "steps", "birth"),
    BIRTHS,
    ids=[f"{program.__name__}-{names(levels)}" for program, levels, _, _ in BIRTHS],
)
def test_the_first_birth_is_where_it_was(
    program: Callable[[], None],
    levels: tuple[StepKind, ...],
    steps: int,
    birth: tuple[str, int, str | None],
    paced: Paced,
) -> None:
    """Its site, its step and its operation, in steps of each kind."""
    paced(*levels)
    log = watched(lambda watch: program())
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.summary.steps == steps
    (first, *_) = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    operation = (first.entry()["evidence"].get("operation") or {}).get("operation")
    assert (first.site, first.step, operation) == birth


class Meeting(nn.Module):
    """Waits for another thread in the middle of a forward."""

    def __init__(self, turns: Any) -> None:
        super().__init__()
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        if self.turns is not None:
            self.turns.wait(timeout=30)
        return x * 1.0


@at_levels(GUARDED, MEASURED)
def test_threads_with_a_model_each_are_told_apart(
    levels: tuple[StepKind, ...], paced: Paced
) -> None:
    """Forwards of two threads that run at once do not mix: a NaN in the one is not looked for in the other."""
    paced(*levels)
    turns = threading.Barrier(2)
    models = [nn.Sequential(nn.Linear(4, 4), Meeting(turns), nn.Linear(4, 2)) for _ in range(2)]

    def work(number: int) -> None:
        for step in range(4):
            scale = float("nan") if number == 1 and step == 3 else 1.0
            models[number](torch.randn(5, 4) * scale).mean().backward()

    def program(watch: Watcher) -> None:
        for model in models:
            model[1].turns = None
            descend(model, 2)
            model[1].turns = turns
        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    log = watched(program)
    assert log.watch is not None
    assert not log.watch.failed
    sites = {f.site for f in check(log.recording()) if f.code == "NAN-BORN"}
    assert sites == {f"{log.roots[1]['prefix']}:in"}
