"""Whose training it is: which models an optimizer trains, what they are named, and whose steps are counted."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.registry import check
from tests.threaded import in_threads
from tests.watch.watched import Memory, net, watch


def roots(log: Memory) -> dict[str, tuple[str, bool, int]]:
    """List the class, whether it is trained, and the steps of each root by its prefix."""
    return {r["prefix"]: (r["type"], r["trained"], r["steps"]) for r in log.roots}


def optimizers(log: Memory) -> list[dict[str, Any]]:
    """List what the recording says of each optimizer."""
    (event,) = [event for event in log.events if event["kind"] == "optimizers"]
    return list(event["optimizers"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train a model for some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()


def train_by_hand(model: nn.Module, steps: int) -> None:
    """Train a model for some steps without an optimizer."""
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * p.grad)


def one_after_the_other(first: nn.Module, second: nn.Module, steps: int) -> None:
    """Train two models for some steps each, with optimizers that are there from the beginning."""
    one, two = (torch.optim.SGD(m.parameters(), 0.1) for m in (first, second))
    train(first, one, steps)
    train(second, two, steps)


class Normalize(nn.Module):
    """A transform, called once for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.13) / 0.3


def test_a_transform_that_is_called_for_each_sample_hides_no_model() -> None:
    """The steps are the optimizer's, the plain names are the model's, the transform has its variable's."""
    transform, model = Normalize(), net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(12):
            x = torch.stack([transform(v) for v in torch.randn(8, 4)])
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    log = watch(program, every=3)
    assert roots(log) == {"transform": ("Normalize", False, 0), "": ("Sequential", True, 12)}
    assert log.watch.summary.steps == 12
    assert log.recording().rows("0.weight:param.grad").step.tolist() == [0, 1, 3, 6, 9]


def test_the_optimizer_that_steps_last_ends_the_steps_of_a_gan() -> None:
    """Both models are trained, each has a gradient in each measured step, and no step holds half a round."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def program() -> None:
        first, second = (
            torch.optim.Adam(critic.parameters(), 2e-3),
            torch.optim.Adam(generator.parameters(), 2e-4),
        )
        for _ in range(7):
            fake = generator(torch.randn(16, 4))
            first.zero_grad()
            (critic(torch.randn(16, 4) + 2).mean() - critic(fake.detach()).mean()).backward()
            first.step()
            second.zero_grad()
            critic(fake).mean().backward()
            second.step()

    log = watch(program, every=2)
    recording = log.recording()
    assert sorted(roots(log).values()) == [("Sequential", True, 7)] * 2
    assert (log.watch.summary.steps, log.watch.summary.sampled) == (7, 5)
    for prefix in ("generator.", "critic."):
        assert recording.rows(f"{prefix}0.weight:param.grad").step.tolist() == [0, 1, 2, 4, 6]
        assert recording.rows(f"{prefix.rstrip('.')}:grad.norm").step.tolist() == [*range(7)]
    for site in ("loss", "loss_2"):
        assert recording.rows(site).step.tolist() == [*range(7)]
    index = {root["prefix"]: i for i, root in enumerate(log.roots)}
    assert [(o["roots"], o["steps"]) for o in optimizers(log)] == [
        ([index["critic"]], 7),
        ([index["generator"]], 7),
    ]


@pytest.mark.parametrize("order", ["the critic first", "the generator last"])
@pytest.mark.parametrize("every", [3, 5, 10])
def test_a_generator_that_steps_in_one_of_five_steps_is_measured_at_its_own(
    order: str, every: int
) -> None:
    """Its critic ends the run's steps, and may take all those that are measured by their number."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def program() -> None:
        first, second = (
            torch.optim.Adam(critic.parameters(), 2e-3),
            torch.optim.Adam(generator.parameters(), 2e-4),
        )
        for n in range(22 * 5):
            fake = generator(torch.randn(16, 4))
            if n % 5 == 4 and order == "the critic first":
                second.zero_grad()
                critic(fake).mean().backward()
                second.step()
            first.zero_grad()
            (critic(torch.randn(16, 4) + 2).mean() - critic(fake.detach()).mean()).backward()
            first.step()
            if n % 5 == 4 and order == "the generator last":
                second.zero_grad()
                critic(fake).mean().backward()
                second.step()

    log = watch(program, every=every)
    label = next(root["prefix"] for root in log.roots if root["steps"] == 22)
    prefix = f"{label}." if label else ""
    recording = log.recording()
    steps = recording.rows(f"{label}:grad.norm").step.tolist()
    ended = recording.rows(f"{prefix}0.weight:update").step.tolist()
    own = [steps.index(step) for step in ended]
    assert own[0] <= 1
    assert {*own} >= {*range(every, 21, every)}
    assert recording.rows(f"{prefix}0.weight:param.grad").step.tolist() == ended
    critics = next(root["prefix"] for root in log.roots if root["steps"] == 110)
    measured = set(
        recording.rows(f"{critics}.0.weight:update" if critics else "0.weight:update").step.tolist()
    )
    assert measured >= set(range(0, 105, every))


def test_a_model_that_is_loaded_again_for_a_test_is_not_trained() -> None:
    """Its parameters have no gradient, and nobody expects one; neither does a target network's."""
    model, x = net(), torch.randn(16, 4)

    def program() -> None:
        optimizer, target = torch.optim.SGD(model.parameters(), 0.1), copy.deepcopy(model)
        for _ in range(10):
            with torch.no_grad():
                aim = target(x)
            optimizer.zero_grad()
            (model(x) - aim - 1).square().mean().backward()
            optimizer.step()
        again = copy.deepcopy(model).eval()
        with torch.no_grad():
            again(x)

    log = watch(program, every=1)
    trained = [root for root in log.roots if root["trained"]]
    assert [(root["prefix"], root["steps"]) for root in trained] == [("", 10)]
    assert len(log.roots) >= 2
    assert not {f.code for f in check(log.recording())} & {"UNUSED-PARAM", "NOT-OPTIMIZED"}


class Layer(nn.Linear):
    """A layer that trains itself without being called as a module."""

    def train_on(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        y = self.forward(x)
        y.square().mean().backward()
        self.optimizer.step()
        return y.detach()


def test_layers_that_train_through_forward_are_trained() -> None:
    """An optimizer's parameters are met although no module that holds them was called yet."""
    head, layers, x = nn.Linear(4, 4), [Layer(4, 4), Layer(4, 4)], torch.randn(16, 4)

    def program() -> None:
        head(x).square().mean().backward()
        for layer in layers:
            layer.optimizer = torch.optim.Adam(layer.parameters(), 0.1)
        for _ in range(10):
            h = x
            for layer in layers:
                h = layer.train_on(h)
        for layer in layers:
            x.add_(0 * layer(x).detach())

    log = watch(program, every=1)
    trained = [root for root in log.roots if root["trained"]]
    assert [(root["type"], root["steps"]) for root in trained] == [("Layer", 10)] * 2
    assert "UNUSED-PARAM" not in {f.code for f in check(log.recording())}
    for root in trained:
        path = f"{root['prefix']}.weight".lstrip(".")
        assert len(log.recording().rows(f"{path}:param.grad")) >= 5


def test_tensors_without_a_module_are_watched_under_the_names_of_their_variables() -> None:
    """The loss, gradients, values and updates of what an optimizer holds."""

    def program() -> None:
        weight, bias = torch.randn(4, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight, bias], 0.1)
        for _ in range(8):
            optimizer.zero_grad()
            (torch.randn(5, 4) @ weight + bias).square().mean().backward()
            optimizer.step()

    log = watch(program, every=1)
    assert roots(log) == {"": ("tensors", True, 8)}
    assert log.watch.summary.steps == 8
    assert {
        "loss",
        "weight:param",
        "weight:param.grad",
        "weight:update",
        "bias:param",
        ":grad.norm",
    } <= set(log.texts())
    assert log.recording().rows("weight:param.grad").step.tolist() == [*range(8)]


def test_a_model_that_is_trained_by_hand_has_a_step_for_each_backward_pass() -> None:
    """Without an optimizer, a backward pass is a step; the model has the plain names.

    A change is seen in the three measured steps.
    """
    model = net()

    def program() -> None:
        train_by_hand(model, 9)

    log = watch(program, every=4)
    assert roots(log) == {"": ("Sequential", True, 3)}
    assert log.watch.summary.steps == 9
    assert log.recording().rows("loss").step.tolist() == [*range(9)]
    (by_hand,) = optimizers(log)
    assert (by_hand["type"], by_hand["by_hand"]) == ("updates by hand", True)


def test_a_part_that_is_watched_alone_has_the_steps_of_its_optimizer() -> None:
    """What is measured does not decide whose training it is: a selector of modules leaves the steps and the loss."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()

    log = watch(program, every=1, sites="2")
    assert roots(log) == {"": ("Sequential", True, 6)}
    assert log.watch.summary.steps == 6
    assert {site for site in log.texts() if not site.startswith("2")} == {"loss"}
    assert log.recording().rows("loss").step.tolist() == [*range(6)]


def test_an_optimizer_that_steps_before_its_model_is_called_trains_it() -> None:
    """One that runs its closure itself, as LBFGS does, begins its first step when no model is known."""
    model, x = net(), torch.randn(5, 4)

    def program() -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)

    log = watch(program, every=1)
    assert roots(log) == {"": ("Sequential", True, 4)}
    totals, gradients = (
        log.recording().rows(":grad.norm"),
        log.recording().rows("0.weight:param.grad"),
    )
    assert (totals.step.tolist(), set(totals.calls)) == ([*range(4)], {1})
    assert (gradients.step.tolist(), set(gradients.calls)) == ([*range(4)], {1})


def test_an_optimizer_that_is_garbage_takes_no_model_its_plain_name() -> None:
    """A model that nothing trains is named as if that optimizer had never been."""

    def leave_one_behind() -> None:
        optimizer = torch.optim.SGD(net().parameters(), 0.1)
        optimizer.itself = optimizer  # type: ignore[attr-defined]

    leave_one_behind()
    model = net()
    log = watch(lambda: model(torch.ones(2, 4)), every=1)
    assert roots(log) == {"": ("Sequential", False, 0)}


def test_heads_that_are_trained_in_turns_are_each_seen() -> None:
    """Each backward pass is recognised by what arrives first in it, whichever part of the model it goes through."""
    trunk, left, right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    model = nn.ModuleDict({"trunk": trunk, "left": left, "right": right})

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(12):
            optimizer.zero_grad()
            if step % 2:
                left(trunk(torch.randn(5, 4))).square().mean().backward()
            else:
                right(trunk(torch.randn(5, 4))).square().mean().backward()
            optimizer.step()

    recording = watch(program, every=1).recording()
    assert recording.rows("loss").step.tolist() == [*range(0, 12, 2)]
    assert recording.rows("loss_2").step.tolist() == [*range(1, 12, 2)]


def test_two_threads_that_train_at_once_do_not_disturb_each_other() -> None:
    """What one changes, the other does not read."""

    def work() -> None:
        model = net()
        train(model, torch.optim.SGD(model.parameters(), 0.01), 20)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(2):
            log = watch(lambda: in_threads(work, work), every=1)
            assert log.watch.shield.failure is None
            assert sorted(steps for _, _, steps in roots(log).values()) == [20, 20]
    finally:
        sys.setswitchinterval(before)


def test_passes_before_a_training_are_no_steps() -> None:
    """Neither a transform's that prepares the data, nor those that validate a teacher."""
    transform, teacher, model = Normalize(), net(), nn.Linear(4, 1)

    def program() -> None:
        for _ in range(300):
            transform(torch.randn(4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad():
            for _ in range(7):
                teacher(torch.randn(5, 4))
        train(model, optimizer, 6)

    log = watch(program, every=1)
    assert log.watch.summary.steps == 6
    assert roots(log)[""] == ("Linear", True, 6)
    assert log.recording().rows("loss").step.tolist() == [*range(6)]


def test_a_program_that_only_evaluates_is_recorded_whatever_optimizers_it_makes() -> None:
    """As one does that loads a checkpoint: the first pass is measured at least."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            for _ in range(7):
                model(torch.randn(5, 4))

    recording = watch(program, every=1).recording()
    assert recording.rows("0:out").calls.tolist()[0] == 1


def test_what_is_evaluated_before_a_training_is_not_in_its_first_step() -> None:
    """A sanity check's batches are no part of the training."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(50, 4))
        train(model, optimizer, 4)

    rows = watch(program, every=1).recording().rows("2:out")
    assert (rows.step.tolist(), rows.calls.tolist(), set(rows.count)) == (
        [*range(4)],
        [1] * 4,
        {5 * 2},
    )


def test_the_optimizer_of_a_second_phase_ends_the_steps_then() -> None:
    """The first one is still there, and idle."""
    first, second = net(), nn.Linear(4, 1)

    log = watch(lambda: one_after_the_other(first, second, 12), every=1)
    assert log.watch.summary.steps in (23, 24)
    assert {steps for _, _, steps in roots(log).values()} == {12}


def test_a_model_that_is_loaded_after_a_training_by_hand_makes_no_steps() -> None:
    """Its passes are a test's."""

    def program() -> None:
        model = net()
        train_by_hand(model, 9)
        model = copy.deepcopy(model)
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(5, 4))

    assert watch(program, every=1).watch.summary.steps == 9


def test_gradients_of_an_optimizer_that_rests_are_not_recorded_again() -> None:
    """A teacher that was trained first keeps its last gradients while the student is trained."""
    teacher, student = net(), nn.Linear(4, 1)

    recording = watch(lambda: one_after_the_other(teacher, student, 6), every=1).recording()
    prefix = next(root.prefix for root in recording.roots if root.type == "Sequential")
    rows = recording.rows(f"{prefix}.2.weight:param.grad".lstrip("."))
    assert rows.step.tolist() == [*range(6)]


def test_many_passes_without_gradients_leave_those_of_the_training_measured() -> None:
    """As a rollout of a policy before each step; of passes with gradients the first 256 of a step are measured."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            with torch.no_grad():
                for _ in range(300):
                    model(torch.randn(1, 4))
            for _ in range(300 if step == 3 else 2):
                model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    rows = watch(program, every=1).recording().rows("2:out")
    assert (rows.step.tolist(), rows.calls.tolist()) == ([*range(4)], [2, 2, 2, 256])
