"""Models that the program trains without an optimizer: what is recorded of them, and what the rules say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.judgement import UNCHANGED, judge
from kedge.rules.registry import check
from tests.watch.watched import Memory, watch, watched

STEPS = 40
RATE = 0.1
Rule = Callable[[nn.Module], None]


def model() -> nn.Sequential:
    """Make a net with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))


def batch() -> tuple[Tensor, Tensor]:
    """Draw inputs, and classes that they determine."""
    inputs = torch.randn(32, 8)
    return inputs, inputs[:, :3].argmax(1)


def add_to_data(net: nn.Module, rate: float = RATE) -> None:
    """As the language model of PyTorch's examples does."""
    for param in net.parameters():
        param.data.add_(param.grad, alpha=-rate)


def subtract(net: nn.Module, rate: float = RATE) -> None:
    """Change the parameters in place without a graph."""
    with torch.no_grad():
        for param in net.parameters():
            param.sub_(rate * param.grad)


def replace_data(net: nn.Module, rate: float = RATE) -> None:
    """Give each parameter another memory."""
    for param in net.parameters():
        param.data = param.data - rate * param.grad


def train(
    net: nn.Module,
    update: Callable[..., None] = add_to_data,
    *,
    rate: float = RATE,
    clears: bool = True,
    clips: bool = False,
    accumulates: int = 1,
) -> None:
    """Train a net by hand."""
    for number in range(STEPS * accumulates):
        inputs, classes = batch()
        loss = nn.functional.cross_entropy(net(inputs), classes) / accumulates
        loss.backward()
        if (number + 1) % accumulates:
            continue
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        update(net, rate)
        if clears:
            net.zero_grad()


def train_on_returned(net: nn.Module, rate: float = RATE) -> None:
    """Train a net by the gradients that `torch.autograd.grad` returns."""
    params = list(net.parameters())
    for _ in range(STEPS):
        inputs, classes = batch()
        loss = nn.functional.cross_entropy(net(inputs), classes)
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param.sub_(rate * grad)


def codes(log: Memory) -> set[str]:
    """Return the codes of the findings that are no hints."""
    return {each.code for each in check(log.recording()) if each.severity != "info"}


@pytest.mark.parametrize("update", [add_to_data, subtract, replace_data])
def test_a_model_that_the_program_changes_itself_is_trained(update: Callable[..., None]) -> None:
    """Each change is recorded in the step of its backward pass, and no rule has anything to say."""
    net = model()
    before = [param.detach().clone() for param in net.parameters()]
    log = watch(lambda: train(net, update), every=1)
    recording = log.recording()

    (root,) = recording.roots
    assert (root.trained, root.by_hand) == (True, True)
    rows = recording.rows("0.weight:update")
    assert rows.step.tolist() == list(range(STEPS))
    moved = (net[0].weight - before[0]).norm() / before[0].numel() ** 0.5
    assert 0 < rows.statistic("rms").max() <= moved * 10
    assert codes(log) == set()


def test_a_change_is_as_large_as_the_gradient_says() -> None:
    """The rate times the root mean square of the gradient, in each step."""
    net = model()
    log = watch(lambda: train(net, subtract), every=1)
    recording = log.recording()
    updates = recording.rows("3.weight:update").statistic("rms")
    gradients = recording.rows("3.weight:param.grad").statistic("rms")

    assert updates == pytest.approx(RATE * gradients, rel=1e-3)


def test_a_rate_that_is_too_large_is_named() -> None:
    """As with an optimizer; the program is named for it."""
    log = watch(lambda: train(model(), rate=100.0, clips=True), every=1)
    (found,) = [each for each in check(log.recording()) if each.code == "RATE-TOO-LARGE"]

    assert found.severity == "error"
    assert "the program, which updates them by hand, had overwritten" in found.message


def test_training_in_evaluation_mode_is_named() -> None:
    """The mode is noted since the first change."""
    assert codes(watch(lambda: train(model().eval()), every=1)) == {"EVAL-MODE"}


@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_are_not_cleared_are_named(accumulates: int, clips: bool) -> None:
    """Also where they are clipped after each pass, and where several passes lead to an update."""
    watched = watch(
        lambda: train(model(), clears=False, clips=clips, accumulates=accumulates),
        every=1,
    )
    assert "GRADS-KEPT" in codes(watched)

    cleared = watch(lambda: train(model(), clips=clips, accumulates=accumulates), every=1)
    assert "GRADS-KEPT" not in codes(cleared)


def test_what_does_not_change_is_not_trained() -> None:
    """Gradients alone, as of an attack on the input, are no training; and no tick says that it was judged."""
    net = model().eval()

    def attack() -> None:
        for _ in range(STEPS):
            inputs, classes = batch()
            nn.functional.cross_entropy(net(inputs.requires_grad_()), classes).backward()

    recording = watch(attack, every=1).recording()
    judgement = judge(recording)

    assert not recording.roots[0].trained
    assert judgement.findings == ()
    assert UNCHANGED in {each.why for each in judgement.idle}
    assert not judgement.is_passed


def test_what_changes_beside_an_optimizer_is_not_said_to_stay() -> None:
    """A last layer that the program changes itself is in no optimizer, and trained."""
    net = model()
    optimizer = torch.optim.SGD(net[:2].parameters(), RATE)

    def both() -> None:
        for _ in range(STEPS):
            inputs, classes = batch()
            net.zero_grad()
            nn.functional.cross_entropy(net(inputs), classes).backward()
            optimizer.step()
            subtract(net[3])

    assert codes(watch(both, every=1)) == set()


def test_two_models_are_told_apart() -> None:
    """Of two adversaries each has its own changes, in the steps of its own passes."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def adversaries() -> None:
        for _ in range(STEPS):
            critic.zero_grad()
            made = maker(torch.randn(16, 4))
            (critic(made.detach()).mean() - critic(torch.randn(16, 2)).mean()).backward()
            subtract(critic, 0.01)
            maker.zero_grad()
            critic(maker(torch.randn(16, 4))).mean().neg().backward()
            subtract(maker, 0.01)

    recording = watch(adversaries, every=1).recording()
    steps = {
        root.name + root.prefix: recording.rows(f"{root.prefix}.0.weight:update".lstrip(".")).step
        for root in recording.roots
    }
    assert [each.tolist()[:3] for each in steps.values()] == [[1, 3, 5], [0, 2, 4]]
    assert "GRADS-KEPT" not in {each.code for each in check(recording)}


def test_gradients_that_are_returned_train_as_well() -> None:
    """Their pass reaches no hook of a parameter; losses and changes are recorded all the same."""
    net = model()
    log = watch(lambda: train_on_returned(net), every=1)
    recording = log.recording()

    (root,) = recording.roots
    assert root.by_hand
    assert recording.rows("3.weight:update").step.tolist() == list(range(STEPS))
    assert recording.rows("loss").step.tolist() == list(range(STEPS))
    assert codes(log) == set()


def test_faults_of_training_on_returned_gradients_are_named() -> None:
    """A rate that is too large, and evaluation mode."""
    log = watch(lambda: train_on_returned(model(), rate=300.0), every=1)
    assert "RATE-TOO-LARGE" in codes(log)

    log = watch(lambda: train_on_returned(model().eval()), every=1)
    assert codes(log) == {"EVAL-MODE"}


def test_gradients_that_are_returned_within_a_step_are_no_training() -> None:
    """As the inner steps of meta-learning: an optimizer holds the parameters, before its first step too."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    def meta() -> None:
        for _ in range(STEPS):
            inputs, classes = batch()
            names, params = zip(*net.named_parameters(), strict=True)
            loss = nn.functional.cross_entropy(net(inputs), classes)
            grads = torch.autograd.grad(loss, params, create_graph=True)
            fast = [param - RATE * grad for param, grad in zip(params, grads, strict=True)]
            inputs, classes = batch()
            outputs = torch.func.functional_call(
                net, dict(zip(names, fast, strict=True)), (inputs,)
            )
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, classes).backward()
            optimizer.step()

    recording = watch(meta, every=1).recording()
    (root,) = recording.roots
    assert (root.trained, root.by_hand) == (True, False)
    assert [site.path for site in recording.of_kind("loss")] == ["loss"]


def test_gradients_of_inputs_are_no_training() -> None:
    """As of a saliency map: no parameter is named."""
    net = model().eval()

    def look() -> None:
        for _ in range(STEPS):
            inputs = batch()[0].requires_grad_()
            torch.autograd.grad(net(inputs).sum(), inputs)

    recording = watch(look, every=1).recording()
    assert not recording.of_kind("loss")
    assert not recording.of_kind("update")


def test_no_value_needs_an_event() -> None:
    """What looks for such passes measures values alone, as all that watches does; an event costs more than the value."""
    kept = []

    def program(watch: Any) -> None:
        train_on_returned(model())
        kept.extend(watch.session.taps)

    watched(program)
    assert kept
    assert all(tap.measure is not None for tap in kept)


def test_a_new_optimizer_of_a_new_model_is_no_update_by_hand() -> None:
    """At the end of its first backward pass it has not stepped, and what it changes then is its own."""

    def program() -> None:
        for _ in range(3):
            net = model()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            for _ in range(4):
                inputs, labels = batch()
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()

    log = watched(lambda _: program())

    assert [root.by_hand for root in log.watch.models.roots] == [False] * 3
    assert log.watch.steps.optimizers.by_hand == []
