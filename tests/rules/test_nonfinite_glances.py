"""NAN-BORN in runs of which most steps are not looked at: what was seen is told, and no place that nobody saw."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenes import FINITENESS, NAN, Scene, all_of, chain
from torch import Tensor, nn

from kedge.actions.measure import Meter
from kedge.rules.nonfinite import NanBorn
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from kedge.watch.budget import Level, Pace
from kedge.watch.watcher import Watch

#: Some steps are glanced at, the others are not looked at; a glance that finds something is followed by a full step.
LEVELS = (Level.OFF, Level.OFF, Level.GLANCE)
TOTAL = ":grad.norm"
BETWEEN = (
    "{site} held NaN at step {step}: it was made between the backward of step {sound}, of which a glance met finite "
    "gradients alone, and the end of step {step}. Of step {step} gradients alone were seen, not what the modules returned "
    "nor the parameters: "
    "a forward, the loss, a backward, the clipping or an optimizer's step can have made it."
)
SPOILED = (
    " In step {step}, {bad} parameters were not finite, as the optimizer's step makes them of such gradients: what came "
    "first no longer shows."
)
AGAIN = (
    "To have the module named, run it again from a checkpoint of step {sound} or before, if there is one, as "
    "`kedge run --budget none --every 1 SCRIPT`. Look at the loss first: log of 0, a division by a zero count, sqrt at 0, "
    "exp of a large number."
)


class Log(nn.Module):
    """A logarithm, of zero from some call on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.left = since

    def forward(self, x: Tensor) -> Tensor:
        """Give the logarithm of a positive number, or of none."""
        self.left -= 1
        return torch.log(x.abs() + 1 if self.left >= 0 else x - x)


class Rooted(nn.Module):
    """A linear map between two others, with a root of zero beside it from some call on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.a, self.b, self.left = nn.Linear(8, 8), nn.Linear(8, 1), since

    def forward(self, x: Tensor) -> Tensor:
        """Give the same values with the root as without."""
        taken = self.a(x)
        self.left -= 1
        return self.b(taken if self.left >= 0 else taken + (taken - taken).sqrt())


class Kept:
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        self.entries: Any = []
        self.roots: Any = []
        self.rows: list[dict[str, Any]] = []
        self.events: list[Any] = []

    def sites(self, sites: Any, roots: Any) -> None:
        """Take the sites."""
        self.entries, self.roots = sites, roots

    def stats(self, step: int, columns: Any) -> None:
        """Take the rows of a step."""
        for i in range(len(columns["site"])):
            self.rows.append({"step": step, **{name: column[i] for name, column in columns.items()}})

    def event(self, event: Any) -> None:
        """Take an event."""
        self.events.append(event)


@pytest.fixture
def glancing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fix the level of each step after the first."""
    order, ended = itertools.cycle(getattr(request, "param", LEVELS)), Pace.ended

    def awake(self: Pace, *given: Any, **how: Any) -> Level:
        level = ended(self, *given, **how)
        self.wake, self.settling = 0.0, 0
        return level

    monkeypatch.setattr(Pace, "_affordable", lambda self, step: next(order))
    monkeypatch.setattr(Pace, "ended", awake)
    monkeypatch.setattr(Pace, "_idle", lambda *_: 0.0)


#: Every step but the first is glanced at.
EVERY_STEP = pytest.mark.parametrize("glancing", [(Level.GLANCE,)], indirect=True, ids=["every step"])


def net(inner: nn.Module | None = None) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(8, 8), inner or nn.Tanh(), nn.Linear(8, 1))


def train(
    model: nn.Module,
    *,
    batch: Callable[[int], float] = lambda step: 1.0,
    loss: Callable[[int], float] = lambda step: 1.0,
    rate: Callable[[int], float] = lambda step: 1e-3,
    lasting: bool = True,
) -> Recording:
    """Train 20 steps under watch; batch and loss are multiplied, and a step that does not last is taken back."""
    torch.manual_seed(0)
    log = Kept()
    with Watch(Meter(), log, n=10, budget=0.5):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
        for step in range(20):
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            (model(torch.randn(4, 8) * batch(step)).square().mean() * loss(step)).backward()
            kept = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            if not lasting and loss(step) != 1:
                with torch.no_grad():
                    for param, value in zip(model.parameters(), kept, strict=True):
                        param.copy_(value)
    return Recording.build(log.entries, log.rows, {"every": 10}, log.events, log.roots)


def only(recording: Recording) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = NanBorn().check(recording)
    return finding


def at(wrong: int, forever: bool = False) -> Callable[[int], float]:
    """Give NaN in one step, or from it on."""
    return lambda step: NAN if step == wrong or (forever and step > wrong) else 1.0


@pytest.mark.usefixtures("glancing")
@pytest.mark.parametrize("how", ["batch", "loss", "log"])
def test_no_place_is_named_where_nobody_saw_one(how):
    """A NaN in a batch, in the loss and in a forward look the same afterwards, and are told the same."""
    given = {"batch": {"batch": at(7)}, "loss": {"loss": at(7)}, "log": {}}[how]
    finding = only(train(net(Log(7) if how == "log" else None), **given))

    assert finding.evidence["how"] == "glanced"
    assert 7 <= finding.step <= 10
    assert (finding.severity, finding.site, finding.confidence) == ("error", TOTAL, 0.5)
    assert finding.evidence["module"] is None
    assert finding.evidence["glance"] == {
        "step": 8, "sound": 0, "glanced": 5, "finite": [], "later": 9,
    }  # fmt: skip
    said = BETWEEN.format(site=TOTAL, step=8, sound=5)
    assert finding.message == said + SPOILED.format(step=finding.step + 1, bad="4 of 4")
    assert finding.remedy == AGAIN.format(sound=5)


@pytest.mark.usefixtures("glancing")
def test_what_still_comes_in_is_told():
    """Where the data go on holding NaN, the step after shows it, which is no proof of what came first."""
    finding = only(train(net(), batch=at(7, forever=True)))

    assert finding.message.endswith(f"What came into the model was not finite in step {finding.step + 1} either.")
    assert finding.site == TOTAL


@pytest.mark.usefixtures("glancing")
def test_who_goes_on_making_it_is_named():
    """Where what comes before a module is not trained, the step after shows the module at it again."""
    model = net(Log(7))
    model[0].requires_grad_(False)

    finding = only(train(model))

    assert (finding.severity, finding.site, finding.confidence) == ("error", "1:out", 0.8)
    assert 7 <= finding.step <= 10
    assert finding.message.startswith(
        f"Gradients were not finite at step {finding.step}, of which nothing else was seen: it was made between the "
        f"backward of step 5, of which a glance met finite gradients alone, and the end of step {finding.step}. The next step that "
        f"was seen shows who goes on making it: 1:out was the first to hold -inf (32 of 32 elements) at step "
        f"{finding.step + 1}; its input was finite."
    )
    assert finding.remedy.startswith("In 1 (Log), look at the range of the inputs")


@EVERY_STEP
def test_gradients_that_were_finite_are_listed(glancing):
    """What a backward spoils halfway leaves the gradients nearer to the loss finite, and the parameters too."""
    finding = only(train(Rooted(7)))

    said = BETWEEN.format(site=finding.site, step=7, sound=6)
    listed = " Finite in this step were b.bias:param.grad, b.weight:param.grad."
    assert finding.site in ("a.bias:param.grad", "a.weight:param.grad")
    assert finding.message == said + listed + SPOILED.format(step=finding.step + 1, bad="2 of 4")
    assert finding.evidence["glance"]["finite"] == ["b.bias:param.grad", "b.weight:param.grad"]


@pytest.mark.usefixtures("glancing")
def test_steps_that_were_too_large_are_the_remedy():
    """Before a parameter was NaN it had grown a thousandfold, as the step after shows."""
    finding = only(train(net(), rate=lambda step: 80.0))

    assert finding.evidence["how"] == "glanced"
    assert finding.remedy.startswith(
        "The optimizer's steps are too large: the rms of 2.weight:param had gone from 0.24 at"
    )
    assert finding.remedy.endswith(AGAIN.format(sound=5))


@pytest.mark.usefixtures("glancing")
def test_a_rate_that_is_raised_where_nobody_looked_is_no_claim():
    """Steps that were small when they were measured are no sign."""
    finding = only(train(net(), rate=lambda step: 1e12 if step >= 5 else 1e-3))

    assert (finding.evidence["how"], finding.remedy) == ("glanced", AGAIN.format(sound=5))


@EVERY_STEP
def test_a_run_that_went_on_is_no_error(glancing):
    """Where the program took the step back, the step after is sound."""
    finding = only(train(net(), loss=at(7), lasting=False))

    assert (finding.step, finding.severity, finding.evidence["recovered"]) == (7, "warning", True)
    assert finding.message == BETWEEN.format(site=TOTAL, step=7, sound=6) + " The run went on."


def test_a_long_step_before_is_the_remedy():
    """The last step that was measured had changed a weight by its own size."""
    scene = chain()
    scene.step(0)
    glanced(scene, 7, all_of(["fc.weight:param.grad", "head.weight:param.grad"], NAN))

    assert only(scene.recording()).remedy.startswith(
        "The optimizer's steps may be too large: the one of step 0, the last that was measured before, changed head.weight "
        "by 1 times its size; lower the learning rate"
    )


def glanced(scene: Scene, step: int, bad: dict[str, float]) -> None:
    """Add a step of which gradients alone were seen."""
    unseen = [s["site"] for s in scene.sites if s.get("kind", s["site"].rpartition(":")[2]) in ("in", "out", "param")]
    scene.step(step, bad, level=FINITENESS, without=unseen)


def test_a_parameter_whose_gradient_was_finite_is_no_consequence():
    """It was so before, or the optimizer made it: the gradients of the step did not."""
    scene = chain()
    scene.step(0)
    glanced(scene, 7, {"fc.weight:param.grad": NAN})
    scene.step(8, all_of([s["site"] for s in scene.sites if s["site"] != ":in"], NAN))

    assert only(scene.recording()).message.endswith(
        "In step 8, 2 of 2 parameters were not finite, head.weight:param although its gradient was finite in step 7."
    )


def test_nothing_is_said_of_what_was_not_recorded_after():
    """Of a program that ended there only the glance is known."""
    scene = chain()
    scene.step(0)
    scene.step(10, without=["fc.weight:update", "head.weight:update"])
    glanced(scene, 27, all_of(["fc.weight:param.grad", "head.weight:param.grad"], NAN))

    finding = only(scene.recording())

    assert finding.message.endswith("the clipping or an optimizer's step can have made it.")
    assert finding.remedy.startswith(
        "To have the module named, run it again from a checkpoint of step 10 or before, if there is one, as `kedge run --budget none"
    )


def test_a_tied_parameter_is_not_overlooked():
    """A module that borrows a spoiled parameter makes nothing anew, though none is recorded as its own."""
    scene = chain()
    scene.roots[0]["modules"] = [{"path": "log", "type": "Log", "parameters": 4}]
    scene.step(0)
    glanced(scene, 7, {"head.weight:param.grad": NAN})
    scene.step(
        8, all_of(["head.weight:param", "log:out", "head:in", "head:out", ":out", "head.weight:param.grad"], NAN)
    )

    assert only(scene.recording()).evidence["how"] == "glanced"


def test_gradients_that_had_grown_are_the_remedy():
    """The curve of the gradients' norm goes on where nothing else is recorded."""
    scene = chain()
    scene.site(TOTAL, path="", kind="grad.norm", shape=[20])
    for step in range(0, 50, 10):
        scene.step(step, {TOTAL: 1e6} if step == 40 else {})
    glanced(scene, 47, all_of(["fc.weight:param.grad", "head.weight:param.grad", TOTAL], NAN))

    assert only(scene.recording()).remedy.startswith(
        "The run had diverged before: the norm of all gradients had gone from "
    )


def test_outputs_that_were_seen_are_said_to_be_finite():
    """In a light step what the model returned is looked at: there the loss or a backward is to blame."""
    scene = chain()
    scene.step(0)
    scene.step(7, all_of(["fc.weight:param.grad", "head.weight:param.grad"], NAN), level=FINITENESS)

    assert only(scene.recording()).evidence["how"] == "gap"
