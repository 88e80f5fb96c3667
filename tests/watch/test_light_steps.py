"""Steps that are not measured in full: what is seen in them, and what is on the model meanwhile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint
from watched import Conv, images, norm, watch, watched

from kedge.rules.registry import check
from kedge.watch.budget import Level
from kedge.watch.lookout import SMALL
from kedge.watch.watcher import Watch


def hooks_on(model: nn.Module) -> int:
    """Count the forward hooks on a model and its parts."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Wide(nn.Module):
    """Takes the logarithm of a value too large to be held, of zero if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, SMALL)
        self.log = Log()
        self.head = nn.Linear(SMALL, 2)

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        return self.head(self.log(self.body(x).abs() * (0.0 if broken else 1.0)))


class Log(nn.Module):
    """The logarithm."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def train(model: nn.Module, steps: int, *, broken: int = -1, each: Callable[[], None] = lambda: None) -> None:
    """Train, with a logarithm of zero in one step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8), broken=step == broken).square().mean().backward()
        optimizer.step()
        each()


@pytest.mark.parametrize("level", [Level.LOOK, Level.NORM])
def test_a_birth_in_a_value_that_was_not_held_is_found(paced: Callable[..., None], level: Level) -> None:
    """When the root returns something not finite, what autograd still keeps is looked at, large values too."""
    paced(level)
    log = watched(lambda watch: train(Wide(), 6, broken=4))
    (finding, *_) = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    assert (finding.site, finding.step) == ("log:out", 4)


def test_a_mere_look_writes_nothing(paced: Callable[..., None]) -> None:
    """Of steps that are only looked at, and of those that are not, a healthy run keeps no row."""
    paced(Level.LOOK, Level.OFF)
    log = watched(lambda watch: train(Wide(), 9))
    assert {row["step"] for row in log.rows} == {0}
    assert log.watch.summary.levels == {"full": 1, "light": 4, "off": 4}


def test_a_step_of_norms_writes_the_curves(paced: Callable[..., None]) -> None:
    """The norm of all gradients and a loss that a module returns are recorded in it, and are exact."""
    paced(Level.NORM)
    model, loss, grads, losses = Conv(), nn.CrossEntropyLoss(), [], []

    def program(watch: Watch) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            optimizer.zero_grad()
            out = loss(model(images()), torch.tensor([0, 1, 2, 0, 1]))
            out.backward()
            losses.append(out.item())
            grads.append(sum(norm(p.grad) ** 2 for p in model.parameters()))
            optimizer.step()

    recording = watched(program).recording()
    assert recording.rows(":grad.norm").sumsq.tolist() == pytest.approx(grads, rel=1e-5)
    assert recording.rows("CrossEntropyLoss:out").sum.tolist() == pytest.approx(losses, rel=1e-6)
    assert recording.rows("conv:out").step.tolist() == [0]


def test_what_led_up_to_a_birth_is_written_with_it(paced: Callable[..., None]) -> None:
    """The norms of the sixteen light steps before are recorded, and no step has a row twice."""
    paced(Level.NORM)
    recording = watched(lambda watch: train(Wide(), 25, broken=22)).recording()
    for site in ("body:out", "log:out", ":grad.norm", "head.weight:param.grad"):
        rows = recording.rows(site)
        assert set(range(6, 23)) <= set(rows.step.tolist()), site
        assert (rows.calls == 1).all(), site


def test_a_step_that_is_not_looked_at_leaves_the_model_as_it_was(paced: Callable[..., None]) -> None:
    """Neither hooks nor global hooks are there; afterwards all of them come back."""
    paced(Level.OFF, Level.LOOK, Level.FULL)
    model, counts = Wide(), []
    watched(lambda watch: train(model, 4, each=lambda: counts.append((watch.pace.level, _seen(model)))))
    assert [level for level, _ in counts] == [Level.OFF, Level.LOOK, Level.FULL, Level.OFF]
    (_, off), (_, look), (_, full), (_, again) = counts
    assert off == again == (0, 0, 0)
    assert 0 < look[0] < full[0]
    assert full[2] == len(list(model.parameters()))
    assert _seen(model) == (0, 0, 0)


def _seen(model: nn.Module) -> tuple[int, int, int]:
    return (
        hooks_on(model),
        len(modules._global_forward_pre_hooks),
        sum(len(p._backward_hooks or ()) for p in model.parameters()),
    )


def test_the_users_hooks_stay_where_they_are(paced: Callable[..., None]) -> None:
    """Hooks of the program fire in every step, those that it sets between two steps too, and stay at the end."""
    paced(Level.OFF, Level.LOOK, Level.FULL, Level.NORM)
    model, fired = Wide(), []
    model.body.register_forward_hook(lambda *_: fired.append("out"))
    model.body.weight.register_hook(lambda _: fired.append("grad"))
    late: list[Any] = []

    def each() -> None:
        fired.append("step")
        if not late:
            late.append(model.log.register_forward_hook(lambda *_: fired.append("late")))

    watched(lambda watch: train(model, 6, each=each))
    assert fired == ["out", "grad", "step", *["out", "late", "grad", "step"] * 5]
    assert (len(model.body._forward_hooks), len(model.log._forward_hooks)) == (1, 1)


def test_copies_and_pickles_made_in_any_step_are_not_hooked(paced: Callable[..., None]) -> None:
    """A model copied or pickled while its light hooks are up has none of them."""
    paced(Level.LOOK, Level.NORM, Level.FULL, Level.OFF)
    model, copies = Wide(), []
    watched(
        lambda watch: train(
            model, 5, each=lambda: copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
        )
    )
    assert [hooks_on(each) for each in copies] == [0] * 10
    assert all("__reduce_ex__" not in vars(m) for each in (*copies, model) for m in each.modules())


@pytest.mark.parametrize("levels", [(Level.LOOK,), (Level.NORM,), (Level.OFF, Level.FULL, Level.LOOK)])
def test_light_steps_change_no_bit(paced: Callable[..., None], levels: tuple[Level, ...]) -> None:
    """Parameters after a training are those of an unwatched one."""

    def result(run: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = Wide()
        run(model)
        return list(model.parameters())

    plain = result(lambda model: train(model, 7))
    paced(*levels)
    seen = result(lambda model: watched(lambda watch: train(model, 7)))
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_nothing_is_kept_alive_between_steps(paced: Callable[..., None]) -> None:
    """When a forward has ended, no value of it is held."""
    paced(Level.LOOK, Level.NORM)
    held: list[int] = []
    watched(
        lambda watch: train(
            Wide(), 5, each=lambda: held.append(len(watch.lookout.now.held + watch.lookout.now.remembered))
        )
    )
    assert held == [0] * 5


def test_a_recompute_is_not_looked_at(paced: Callable[..., None]) -> None:
    """What a checkpoint runs again in backward is measured once."""
    paced(Level.NORM)

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
            return checkpoint(self.inner, x.requires_grad_() / (0.0 if broken else 1.0), use_reentrant=False)

    recording = watched(lambda watch: train(Saving(), 5, broken=3)).recording()
    rows = recording.rows("inner.0:out")
    assert rows.step.tolist()[:4] == [0, 1, 2, 3]
    assert (rows.calls == 1).all()


def test_validation_is_not_looked_at(paced: Callable[..., None]) -> None:
    """A pass without gradients between two steps leaves no row, not even of something infinite."""
    paced(Level.LOOK, Level.NORM)
    model = Wide()

    def validate() -> None:
        with torch.no_grad():
            model(torch.randn(4, 8), broken=True)

    log = watched(lambda watch: train(model, 6, each=validate))
    assert [f.code for f in check(log.recording()) if f.code == "NAN-BORN"] == []


def test_a_model_without_an_optimizer_is_looked_at_too(paced: Callable[..., None]) -> None:
    """Where each forward is a step, its first hooks are those that were there when it began."""
    paced(Level.NORM, Level.LOOK, Level.OFF, Level.FULL)
    model = Wide()

    def program(watch: Watch) -> None:
        with torch.no_grad():
            for step in range(9):
                model(torch.randn(4, 8), broken=step == 5)

    log = watched(program)
    assert log.watch.summary.levels == {"full": 2, "light": 4, "off": 3}
    (finding, *_) = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    assert finding.step == 5


def test_a_value_changed_in_place_is_not_measured_as_it_was(paced: Callable[..., None]) -> None:
    """A held value that a later operation overwrites has no row in that step, rather than a wrong one."""
    paced(Level.NORM)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))

    def program(watch: Watch) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8) * (float("nan") if step == 3 else 1.0)).square().mean().backward()
            optimizer.step()

    recording = watched(program).recording()
    assert recording.rows("0:out").step.tolist() == [0, 1, 2, 3]
    assert recording.rows("1:out").step.tolist() == [0]


def test_a_root_found_in_a_light_step_is_watched_from_the_next_full_one_on() -> None:
    """A second model that begins later has its own sites, and the first goes on as before."""

    def program() -> None:
        first, second = Wide(), Conv()
        train(first, 3)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 1e-6)
        for _ in range(4):
            optimizer.zero_grad()
            (first(torch.randn(4, 8)).mean() + second(images()).mean()).backward()
            optimizer.step()

    recording = watch(program, every=5).recording()
    assert recording.rows("Conv.conv:out").step.tolist() == [5]
    assert recording.rows("body:out").step.tolist() == [0, 5]


def test_a_second_training_is_seen_though_steps_are_not_looked_at(paced: Callable[..., None]) -> None:
    """An optimizer that steps for the first time may have a new model: the hooks that find it go up at once."""
    paced(Level.OFF)
    kept: list[Any] = []

    def program(watch: Watch) -> None:
        first, second = Wide(), Conv()
        kept.append(torch.optim.SGD(second.parameters(), 1e-6))
        train(first, 5)
        for _ in range(4):
            kept[0].zero_grad()
            second(images()).mean().backward()
            kept[0].step()

    assert "Conv.conv:out" in watched(program).texts()
