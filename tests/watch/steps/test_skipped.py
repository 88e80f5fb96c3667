"""Steps that are skipped: what is known of them all the same."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.actions.measure.meter import Meter
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.store.recording import Recording
from kedge.watch.records.losses import Losses
from kedge.watch.step import StepKind
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.costs import Costs
from kedge.watch.watcher import Watcher
from tests.watch.watched import Memory, net

pytestmark = pytest.mark.usefixtures("without_copies")

MEASURED, BAD, STEPS = 3, 10, 20


@pytest.fixture(autouse=True)
def _mostly_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are measured, the others skipped in one run."""

    def choose(budget: Budget, step: int, now: float) -> StepKind:
        budget.kind = StepKind.MEASURED if step < MEASURED else StepKind.SKIPPED
        budget.run = budget._planned = 1 if step < MEASURED else 1000
        budget._wished = False
        return budget.kind

    monkeypatch.setattr(Budget, "_choose", choose)


def run(program: Callable[[Watcher], Any]) -> Memory:
    """Watch a program within a budget."""
    log = Memory()
    log.watch = Watcher(Meter(), log, n=10, budget=0.03)
    with log.watch:
        program(log.watch)
    return log


@pytest.mark.parametrize("then", ["mended", "not stepped", "used"])
def test_the_gradients_of_a_loss_that_is_not_finite_are_measured(then: str) -> None:
    """As backward made them, whatever the program does to them before its optimizer steps, or if it does not step."""

    def program(_: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            x[0, 0] = math.nan if step == BAD else 0.0
            model(x).square().mean().backward()
            if step == BAD and then == "mended":
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.nan_to_num_(0.0)
            if step != BAD or then != "not stepped":
                optimizer.step()

    recording = run(program).recording()
    gradients = recording.rows("0.weight:param.grad")
    bad = gradients.step[~gradients.clean]
    assert bad[0] == BAD


class Rooted(nn.Module):
    """A root that is healed where its input is not above zero; its slope is infinite there, so backward makes NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.abs() + 1.0
        return torch.where(x > 0, torch.sqrt(x * (0.0 if self.is_bad else 1.0)), 0.0)


class Towers(nn.Module):
    """Two towers that end in one layer; the second one was called last, so its gradients arrive first."""

    def __init__(self, *roots: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), root, nn.Linear(8, 3)) for root in roots
        )
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([tower(x) for tower in self.towers]).mean(0))


class Words(nn.Module):
    """A table of words, which is too large to be checked, or has sparse gradients; and a residual branch after it."""

    def __init__(self, root: nn.Module, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9 if sparse else 9000, 8, sparse=sparse)
        self.branch, self.head = (
            nn.Sequential(nn.Linear(8, 8), root, nn.Linear(8, 8)),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        words = self.table(x.long().clamp(0, 8)).mean(1)
        return self.head(words + self.branch(words))


ROOT = Rooted()
MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(nn.Linear(4, 8), ROOT, nn.Linear(8, 1)),
    "first tower": lambda: Towers(ROOT, nn.Tanh()),
    "second tower": lambda: Towers(nn.Tanh(), ROOT),
    "branch": lambda: Words(ROOT, sparse=False),
    "sparse": lambda: Words(ROOT, sparse=True),
    "frozen": lambda: nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 8), ROOT, nn.Linear(8, 1)
    ),
    "without biases": lambda: nn.Sequential(
        nn.Linear(4, 8, bias=False), ROOT, nn.Linear(8, 1, bias=False)
    ),
}


def descend(
    model: nn.Module,
    between: Callable[[], Any] = lambda: None,
    *,
    bad: Callable[[int], bool] = lambda step: step == BAD,
) -> Callable[[Watcher], None]:
    """Make a training in which the root of a model goes bad; `between` is called between backward and the step."""

    def program(_: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        for step in range(STEPS):
            optimizer.zero_grad()
            ROOT.is_bad = bad(step)
            model(torch.randn(5, 4)).square().mean().backward()
            between()
            optimizer.step()

    return program


@pytest.mark.parametrize("name", MODELS)
def test_what_only_backward_makes_is_noticed_in_its_step(name: str) -> None:
    """Whichever of the paths of the gradients it takes, with the operation; the loss of the step is finite."""
    recording = run(descend(MODELS[name]())).recording()
    (finding,) = NanBorn().check(recording)

    assert recording.rows("loss").clean[recording.rows("loss").step == BAD].all()
    assert (finding.step, finding.severity) == (BAD, "error")
    assert finding.evidence.operation.operation == "sqrt"
    assert "--dump" in finding.remedy


def test_the_place_is_between_the_gradients_that_are_finite_and_the_others() -> None:
    """As backward made them: clipping spreads a NaN to all."""
    model = MODELS["chain"]()
    recording = run(
        descend(model, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    ).recording()
    (finding,) = NanBorn().check(recording)

    assert finding.site == "0.weight:param.grad"
    assert (
        "; the loss was finite, and so was 2.weight:param.grad, nearer to it: " in finding.message
    )
    assert "such as that of 1 (Rooted)" in finding.message


def test_all_gradients_of_a_finite_loss_may_be_bad() -> None:
    """Then it was made nearer to the loss than any parameter."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), ROOT)
    (finding,) = NanBorn().check(run(descend(model)).recording())

    assert finding.site == "1.weight:param.grad"
    assert (
        "while the loss was finite: it arose in the loss or between it and this parameter, in a backward there"
        in finding.message
    )


def test_gradients_that_stay_bad_are_news_once() -> None:
    """A program that mends them in each step pays for one guarded step."""
    model = MODELS["chain"]()

    def mend() -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.nan_to_num_(0.0)

    log = run(descend(model, mend, bad=lambda step: step >= BAD))
    gradients = log.recording().rows("0.weight:param.grad")
    assert gradients.step[~gradients.clean].tolist() == [BAD]


def test_a_deleted_layer_takes_its_check_along() -> None:
    """The other gradients are checked all the same."""
    model = nn.Sequential(nn.Linear(4, 8), ROOT, nn.Linear(8, 1))

    def program(watcher: Watcher) -> None:
        descend(model, bad=lambda _: False)(watcher)
        model[2] = nn.Linear(8, 1)
        gc.collect()
        descend(model)(watcher)

    gradients = run(program).recording().rows("0.weight:param.grad")
    assert gradients.step[~gradients.clean].tolist() == [STEPS + BAD]


def test_backward_passes_are_counted() -> None:
    """A model that no optimizer trains has gradients in each of them."""
    encoder, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(head.parameters(), 0.01)

    def program(_: Watcher) -> None:
        for _ in range(STEPS):
            head(encoder(torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
            head.zero_grad()
            encoder.zero_grad()

    log = run(program)
    assert [
        e["passes"] for e in log.events if e["kind"] == "not-optimized" and e["root"] is not None
    ] == [STEPS]


def test_a_second_optimizer_does_not_take_over_in_skipped_steps() -> None:
    """However many follow each other, the one that steps last in each round still ends the steps."""
    maker, judge, rounds = nn.Linear(2, 2), nn.Linear(2, 1), 100
    makers, judges = (torch.optim.SGD(m.parameters(), 0.001) for m in (maker, judge))

    def program(_: Watcher) -> None:
        for _ in range(rounds):
            for optimizer in (judges, makers):
                optimizer.zero_grad()
                judge(maker(torch.randn(5, 2))).mean().backward()
                optimizer.step()

    log = run(program)
    assert log.watch is not None
    assert log.watch.summary.steps == rounds
    assert [entry.steps for entry in log.watch.steps.optimizers.entries] == [rounds, rounds]


def test_counting_is_in_what_watching_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the steps that were skipped since the last choice too."""
    each = 0.001
    monkeypatch.setattr(Costs, "per_step", property(lambda costs: each))
    took: list[float] = []

    def program(watch: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(200):
            model(torch.randn(5, 4)).mean().backward()
            optimizer.step()
        took.append(watch.budget.seconds + watch.budget.counting)

    run(program)
    assert took[0] >= 200 * each


def losses_of(recording: Recording, site: str) -> dict[int, float]:
    """Return the recorded losses of a site by their steps."""
    rows = recording.rows(site)
    return dict(zip(rows.step.tolist(), rows.statistic("mean").tolist(), strict=True))


def test_every_loss_of_every_step_is_recorded() -> None:
    """Also where a step has two, and where a line calls backward in skipped steps alone."""
    seen: dict[str, dict[int, float]] = {"loss": {}, "loss_2": {}, "loss_3": {}}

    def program(_: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            near = -model(torch.randn(5, 4)).square().mean()
            near.backward()
            far = model(torch.randn(5, 4)).mean()
            far.backward()
            seen["loss"][step], seen["loss_2"][step] = near.item(), far.item()
            if step > MEASURED:
                late = model(torch.randn(5, 4)).sum()
                late.backward()
                seen["loss_3"][step] = late.item()
            optimizer.step()

    recording = run(program).recording()
    assert recording.steps.tolist() == list(range(MEASURED))
    for site, known in seen.items():
        assert losses_of(recording, site) == pytest.approx(known)


def test_losses_of_skipped_steps_are_recorded_without_the_scale() -> None:
    """As those of other steps: the scaler's factor is divided out."""
    known: list[float] = []

    def program(_: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            known.append(loss.item())

    recording = run(program).recording()
    assert losses_of(recording, "loss") == pytest.approx(dict(enumerate(known)))


def test_a_loss_that_cannot_be_recorded_in_a_skipped_step_ends_no_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs the watching of itself."""
    steps: list[int] = []

    def fails(*_: Any) -> None:
        raise RuntimeError("no such loss")

    monkeypatch.setattr(Losses, "skipped", fails)

    def program(_: Watcher) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(STEPS):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            steps.append(step)

    run(program)
    assert steps == [*range(STEPS)]


def test_what_skipped_steps_take_is_not_charged_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A measured step would seem to cost what hundreds of checks before it took."""
    each = 0.001
    charged: list[tuple[StepKind, float]] = []
    run_ended = Budget.run_ended

    def choose(budget: Budget, step: int, now: float) -> StepKind:
        measured = step < MEASURED or step % 10 == 0
        budget.kind = StepKind.MEASURED if measured else StepKind.SKIPPED
        budget.run = budget._planned = 1 if measured else 9
        return budget.kind

    def ended(budget: Budget, step: int, now: float, timed: float) -> StepKind:
        charged.append((budget.kind, timed))
        return run_ended(budget, step, now, timed)

    monkeypatch.setattr(Budget, "_choose", choose)
    monkeypatch.setattr(Budget, "run_ended", ended)
    monkeypatch.setattr(Costs, "uncharged", property(lambda costs: each))
    log = run(descend(MODELS["chain"](), bad=lambda _: False))
    assert log.watch is not None
    skipped = [timed for kind, timed in charged if kind is StepKind.SKIPPED]
    assert skipped == [each] * len(skipped)
    assert log.watch.budget._time.counting >= sum(skipped) > 0
