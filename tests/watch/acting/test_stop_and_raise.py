"""Programs that end at a finding, and programs that catch it."""

from __future__ import annotations

import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.errors import FindingRaised, TrainingStopped
from kedge.rules.registry import ALL, check
from kedge.store.recording import Recording
from kedge.testing import assert_unhooked
from tests.watch.acting.programs import Training, sgd
from tests.watch.watched import at_levels, fix_kinds


def watch(tmp_path, action, code="NAN-BORN", **options):
    """Return a watch that tells nothing."""
    run = kedge.watch(tmp_path / "run.kedge", on={code: action}, **options)
    run.tell = None
    return run


@pytest.mark.parametrize("bad", [0, 3, 60])
@pytest.mark.parametrize("of_loss", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_raise_comes_before_the_step_with_the_finding(bad, of_loss, closure, tmp_path) -> None:
    """In measured and in skipped steps: all bits are those of a program that has not stepped then."""
    plain = Training()
    for _ in range(bad):
        plain.step()
    training = Training(sgd, bad=(bad,), of_loss=of_loss)
    step = training.step_with_closure if closure else training.step

    with watch(tmp_path, "raise"), pytest.raises(FindingRaised) as raised:
        for _ in range(bad + 5):
            step()

    finding = raised.value.finding
    assert (finding.code, finding.severity, finding.step) == ("NAN-BORN", "error", bad)
    assert finding.message.removesuffix(".") in str(raised.value)
    assert training.at == bad
    for one, other in zip(plain.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(one, other)
    (found, *_) = check(Recording.open(tmp_path / "run.kedge"))
    assert (found.code, found.step) == ("NAN-BORN", bad)
    assert_unhooked(training.model)


@at_levels()
@pytest.mark.parametrize("of_loss", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_every_kind_of_step_raises(levels, of_loss, closure, tmp_path, monkeypatch) -> None:
    """Whether it is measured, guarded or skipped."""
    fix_kinds(monkeypatch, *levels)
    training = Training(sgd, bad=(9,), of_loss=of_loss)
    step = training.step_with_closure if closure else training.step

    with watch(tmp_path, "raise"), pytest.raises(FindingRaised) as raised:
        for _ in range(12):
            step()

    finding = raised.value.finding
    assert (training.at, finding.code, finding.step) == (9, "NAN-BORN", 9)
    assert finding.site
    assert all(torch.isfinite(param).all() for param in training.model.parameters())


def test_stop_passes_by_except_exception_and_runs_finally(tmp_path) -> None:
    """A loop that goes on after every error ends, and what it holds is released."""
    training = Training(sgd, bad=(2,))
    released = []

    with pytest.raises(TrainingStopped) as stopped, watch(tmp_path, "stop"):
        for _ in range(5):
            try:
                training.step()
            except Exception:  # noqa: BLE001 - as loops have it
                continue
            finally:
                released.append(training.at)

    assert (stopped.value.code, stopped.value.finding.code) == (3, "NAN-BORN")
    assert released == [1, 2, 2]
    end = Recording.open(tmp_path / "run.kedge").end
    assert end is not None
    assert end.exit == 3


def test_a_program_that_catches_a_finding_goes_on_and_is_told_of_the_next(tmp_path) -> None:
    """Each step that would train on bad gradients raises."""
    training = Training(sgd, bad=(2, 4))
    raised = []
    with watch(tmp_path, "raise"):
        for step in range(7):
            try:
                training.step()
            except FindingRaised as error:
                raised.append((step, error.finding.step))
                training.at += 1
    # The first step that was not taken is no step of the run.
    assert raised == [(2, 2), (4, 3)]


def test_the_errors_can_be_pickled() -> None:
    """They go from a worker process to its parent."""
    finding = kedge.Finding(code="SPIKE", severity="warning", site="", step=0, message="It is.")
    for error in (FindingRaised("SPIKE: It is", finding), TrainingStopped(finding)):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.finding) == (str(error), finding)


def test_what_never_reaches_an_optimizer_ends_nothing(tmp_path) -> None:
    """A program that leaves bad steps out itself, and infinities that a mask makes."""
    training = Training(sgd, bad=(3, 12))
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    masked = torch.optim.SGD(attention.parameters(), lr=0.1)
    mask = torch.full((5, 5), float("-inf")).triu(1)

    with watch(tmp_path, "stop"):
        for _ in range(20):
            training.step_or_skip()
            masked.zero_grad()
            x = torch.randn(2, 5, 4)
            attention(x, x, x, attn_mask=mask)[0].square().mean().backward()
            masked.step()
    assert training.at == 20


def test_gradients_of_every_parameter_are_looked_at_in_every_step(tmp_path) -> None:
    """Also large ones, which skipped steps do not check, and those that the program changes later."""
    model = nn.Linear(4, 1)
    wide = nn.Linear(400, 400)
    optimizer = torch.optim.SGD([*model.parameters(), *wide.parameters()], lr=0.1)
    with watch(tmp_path, "raise"):
        for step in range(80):
            optimizer.zero_grad()
            (model(torch.randn(3, 4)).mean() + wide(torch.randn(3, 400)).mean()).backward()
            if step == 73:
                wide.weight.grad[-1, -1] = np.inf
                with pytest.raises(FindingRaised) as raised:
                    optimizer.step()
            else:
                optimizer.step()
    assert raised.value.finding.step == 73


def test_large_finite_gradients_are_no_finding(tmp_path) -> None:
    """The sum of their squares is infinite in float32, and they are not."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with watch(tmp_path, "stop"):
        for _ in range(8):
            optimizer.zero_grad()
            (model(torch.randn(3, 4)).sum() * 1e30).backward()
            optimizer.step()


def test_judged_findings_act_at_a_later_step(tmp_path, monkeypatch) -> None:
    """Those of a rule that needs the recording, each once; a snapshot is of the step that acts."""
    monkeypatch.setattr("kedge.rules.paced_check.LEAST_PAUSE", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    raised = []
    with watch(tmp_path, "snapshot,raise", "RATE-TOO-LARGE", budget=None):
        for step in range(400):
            optimizer.zero_grad()
            x = torch.randn(32, 4)
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            try:
                optimizer.step()
            except FindingRaised as error:
                raised.append((error.finding.code, error.finding.site, error.finding.snapshot))
                at = step
    ((code, _, folder),) = raised
    assert (code, folder) == ("RATE-TOO-LARGE", f"snapshot-{at}")
    assert at > 1


def test_a_rule_that_fails_is_reported_and_the_program_goes_on(
    tmp_path, monkeypatch, capsys
) -> None:
    """Values that are not finite are acted on all the same."""
    monkeypatch.setattr("kedge.rules.paced_check.LEAST_PAUSE", 0.0)
    spike = next(rule for rule in ALL if rule.code == "SPIKE")

    def fail(self, recording):
        raise ArithmeticError("no such number")

    monkeypatch.setattr(type(spike), "check", fail)
    training = Training(sgd, bad=(40,))
    with watch(tmp_path, "stop", "error"), pytest.raises(TrainingStopped) as stopped:
        for _ in range(50):
            training.step()
    finding = stopped.value.finding
    assert (training.at, finding.code) == (40, "NAN-BORN")
    assert finding.site
    said = capsys.readouterr().err
    assert said.count("judging the run while it goes on failed: ArithmeticError") == 1


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_compiled_optimizer_is_looked_at_too(action, tmp_path) -> None:
    """Its graph ends at the look."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    done = []
    with suppress(TrainingStopped), watch(tmp_path, action):
        for at in range(10):
            x = torch.randn(3, 4)
            if at == 6:
                x[0] = np.nan
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
            done.append(at)
    assert torch.isfinite(model.weight).all()
    assert len(done) == {"stop": 6, "skip": 10}[action]
    torch._dynamo.reset()


def test_a_program_without_an_optimizer_is_told_that_nothing_is_done(tmp_path, capsys) -> None:
    """Its parameters change at no place that Kedge could keep it from."""
    model = nn.Linear(4, 2)
    with watch(tmp_path, "stop"):
        for _ in range(6):
            model.zero_grad()
            (model(torch.randn(3, 4)).sum() * float("nan")).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(0.1 * param.grad)
    assert (
        "nothing was done at findings: it is done where an optimizer steps"
        in capsys.readouterr().err
    )


def test_a_loss_that_led_to_no_step_does_not_count_for_a_later_one(tmp_path) -> None:
    """Also where a later pass begins at several losses, which are not read in skipped steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(tmp_path, "stop"):
        for step in range(100):
            optimizer.zero_grad()
            losses = [model(torch.randn(3, 4)).square().mean() for _ in range(2)]
            if step in {70, 80, 90}:
                (losses[0] * float("nan")).backward()
                continue
            torch.autograd.backward(losses)
            optimizer.step()
    assert torch.isfinite(model.weight).all()
