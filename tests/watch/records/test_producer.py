"""The operation that made a loss that is not finite: named with its line, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.watch.models.backward_start import BackwardStart
from kedge.watch.records.operation_lines import ProducerLines
from kedge.watch.records.producer import find_behind_gradients, find_producer
from tests.watch.watched import net, watch

BAD = 5
"""The step in which it happens, between two measured ones."""


def of_the_graph(log: Any) -> list[dict[str, Any]]:
    """Return what the graph of the loss has shown, without what a step that ran again did."""
    return [
        dict(event)
        for event in log.events
        if event["kind"] == "producer" and not event.get("again")
    ]


def producers(loss_of: Callable[[Tensor, bool], Tensor]) -> list[dict[str, Any]]:
    """Train a layer with a loss that becomes non-finite at the given steps, and return the producers that were found."""
    model = nn.Linear(4, 3)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(BAD + 2):
            optimizer.zero_grad()
            loss_of(model(torch.randn(6, 4)), step == BAD).backward()
            optimizer.step()
            if step == BAD:
                return

    log = watch(program, every=100)
    return of_the_graph(log)


def log_of_zero(y: Tensor, bad: bool) -> Tensor:
    """Take the logarithm of zero."""
    inner = y.abs() * (0.0 if bad else 1.0)
    return torch.log(inner).mean()


def division_by_zero(y: Tensor, bad: bool) -> Tensor:
    """Divide by zero."""
    below = y.detach().abs() * (0.0 if bad else 1.0)
    return (y / below).mean()


def root_of_a_negative(y: Tensor, bad: bool) -> Tensor:
    """Take the root of negative numbers."""
    return (y.abs() - (1e3 if bad else -1.0)).sqrt().sum()


def arc_beyond_one(y: Tensor, bad: bool) -> Tensor:
    """Leave the domain of the arc cosine."""
    return torch.acos(y.tanh() * (5.0 if bad else 0.5)).mean()


@pytest.mark.parametrize(
    ("loss_of", "operation", "text"),
    [
        (log_of_zero, "log", "return torch.log(inner).mean()"),
        (division_by_zero, "div", "return (y / below).mean()"),
        (root_of_a_negative, "sqrt", "return (y.abs() - (1e3 if bad else -1.0)).sqrt().sum()"),
        (arc_beyond_one, "acos", "return torch.acos(y.tanh() * (5.0 if bad else 0.5)).mean()"),
    ],
)
def test_the_operation_and_its_line_are_named(
    loss_of: Callable[[Tensor, bool], Tensor], operation: str, text: str
) -> None:
    """Of the step in which it happened first, although nothing but the loss was looked at in it."""
    (found,) = producers(loss_of)
    assert (found["operation"], found["step"], found["loss"]) == (operation, BAD, "loss")
    assert (found["text"], found["line"] > 1) == (text, True)
    assert Path(found["file"]).resolve() == Path(__file__)


@pytest.mark.parametrize(
    ("operation", "factors", "detail"),
    [
        (torch.log, [0.0], "its input has 1 zero"),
        (torch.log, [-1.0, -1.0], "its input has 2 negative elements"),
        (torch.log, [0.0, -1.0], "its input has 1 zero and 1 negative element"),
        (lambda y: torch.div(torch.ones(6, 3), y), [0.0], "its divisor has 1 zero"),
        (lambda y: y.pow(-0.5), [0.0], "its base has 1 element at or below zero"),
    ],
)
def test_the_elements_outside_the_domain_are_counted(
    operation: Callable[[Tensor], Tensor], factors: list[float], detail: str
) -> None:
    """Only those that there are, one of them in the singular."""
    model = nn.Linear(4, 3)
    spoiling = torch.ones(18)
    spoiling[: len(factors)] = torch.tensor(factors)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(BAD + 1):
            optimizer.zero_grad()
            inner = (model(torch.randn(6, 4)).abs() + 1.0) * (
                spoiling if step == BAD else torch.ones(18)
            ).view(6, 3)
            operation(inner).mean().backward()
            optimizer.step()

    log = watch(program, every=100)
    assert [event["detail"] for event in of_the_graph(log)] == [detail]


def test_the_file_is_relative_to_the_folder_that_the_program_runs_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As everywhere where a place of the program is shown; a file that lies elsewhere has its whole path."""
    monkeypatch.chdir(Path(__file__).parents[1])
    assert producers(log_of_zero)[0]["file"] == str(Path("records", Path(__file__).name))
    monkeypatch.chdir(tmp_path)
    assert producers(log_of_zero)[0]["file"] == __file__


def test_a_loss_of_a_batch_that_is_not_finite_blames_no_operation_with_certainty() -> None:
    """All operations have been given what was not finite already."""

    def spoiled(y: Tensor, bad: bool) -> Tensor:
        return (y + (float("nan") if bad else 0.0)).square().mean()

    assert [
        found for found in producers(spoiled) if found["certain"] and found["operation"] != "add"
    ] == []


def test_no_operation_behind_a_finite_output_is_suspected() -> None:
    """The output of the model is a variable of the program, so the search passes over the divisions before it."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            moved = x + self.bias.sum()
            return super().forward(moved / (moved.std() + 1.0))

    def likelihood(y: Tensor, bad: bool) -> Tensor:
        spread = y.exp().mean()
        return spread + y.mean() / (y * (0.0 if bad else 1.0)).pow(2).mean().sqrt()

    model = Scaled(4, 4)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(BAD + 1):
            out = model(torch.randn(6, 4))
            likelihood(out, step == BAD).backward()
            optimizer.step()
            optimizer.zero_grad()

    (found,) = of_the_graph(watch(program, every=100))
    assert (found["text"], found["certain"]) == ("spread = y.exp().mean()", False)
    among = [(entry["operation"], entry["line"] - found["line"]) for entry in found["among"]]
    assert among == [("exp", 0), ("sqrt", 1), ("div", 1)]


def test_parameters_that_are_not_finite_already_have_no_producer() -> None:
    """It was made in an earlier step, by the update."""
    model = nn.Linear(4, 3)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).log_softmax(-1).mean().backward()
            optimizer.step()
            if step == 3:
                with torch.no_grad():
                    model.weight[0, 0] = float("nan")

    assert of_the_graph(watch(program, every=100)) == []


def test_a_finite_training_has_no_producer_and_leaves_autograd_as_it_was() -> None:
    """The lines are noted by autograd's anomaly mode in one step, and it is off afterwards."""
    seen = []

    def sound(y: Tensor, bad: bool) -> Tensor:
        seen.append(torch.is_anomaly_enabled())
        return y.square().mean()

    assert producers(sound) == []
    assert seen.count(True) == 1
    assert not torch.is_anomaly_enabled()


def test_memory_that_was_freed_is_not_read() -> None:
    """Sharded training frees gathered parameters between a forward and its backward; reading them would end the process."""
    x, weight = torch.tensor([0.0, 1.0], requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (x.log() * weight).sum()
    weight.untyped_storage().resize_(0)

    found = find_producer(BackwardStart((loss,), None, None), ProducerLines())

    assert found is not None
    assert (found.operation, found.certain) == ("log", True)
    weight.untyped_storage().resize_(8)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_of_the_operations_that_can_have_spoiled_a_gradient_those_that_explain_all_are_named(
    at: int,
) -> None:
    """Its line is named, if the gradients behind it are the bad ones, and none of an operation before or after it."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def program() -> None:
        optimizer = torch.optim.SGD(layers.parameters(), 0.0)
        for step in range(BAD + 1):
            optimizer.zero_grad()
            kept = [float(step != BAD or i != at) for i in range(3)]
            x = (kept[0] * layers[0](torch.randn(6, 4)).abs()).sqrt()
            x = (kept[1] * layers[1](x).abs()).pow(0.5)
            x = torch.acos(kept[2] * (layers[2](x).tanh() * 0.5 - 1.0) + 1.0)
            x.mean().backward()
            optimizer.step()

    (found,) = of_the_graph(watch(program, every=100))
    assert found["operation"] == ("sqrt", "pow", "acos")[at]
    assert f"kept[{at}]" in found["text"]


def test_a_square_after_a_root_is_not_suspected_of_an_infinite_slope() -> None:
    """The slope of a square is finite everywhere, so the root before it alone can have spoiled the gradient."""
    layer = nn.Linear(4, 4)

    def program() -> None:
        optimizer = torch.optim.SGD(layer.parameters(), 0.0)
        for step in range(BAD + 1):
            optimizer.zero_grad()
            distance = (float(step != BAD) * layer(torch.randn(6, 4)).abs()).sqrt()
            (distance - 1).pow(2).mean().backward()
            optimizer.step()

    (found,) = of_the_graph(watch(program, every=100))
    assert found["operation"] == "sqrt"
    assert "pow" not in found["detail"]


def behind_gradients(loss: Tensor) -> dict[str, Any] | None:
    """Run the backward pass of a finite loss, and return what made its gradients bad."""
    loss.backward()
    assert loss.isfinite()
    return find_behind_gradients(BackwardStart((loss,), None, None), ProducerLines())


KEPT = torch.tensor([True, True, False, True]).unsqueeze(1)
"""A mask that leaves out the third of four rows."""


def masked_mean(out: Tensor) -> Tensor:
    """Take the mean over the rows that a mask keeps, as a program does that fears an empty one."""
    return (out.masked_fill(~KEPT, 0.0).sum(0) / KEPT.sum().clamp(min=1)).square().mean()


@pytest.mark.parametrize("layer", [nn.LayerNorm(5), nn.Linear(5, 5), nn.GroupNorm(1, 5)])
def test_a_value_that_a_mask_hides_is_looked_for_before_the_layer_that_took_it(
    layer: nn.Module,
) -> None:
    """A clamped division behind the mask is not accused: the gradients of the layer's bias and weight show what it took."""
    first = nn.Linear(6, 5)
    h = first(torch.randn(4, 6))
    weights = (h @ h.t()).masked_fill(~KEPT, -torch.inf).softmax(-1)

    found = behind_gradients(masked_mean(layer(weights @ h)))

    assert found is not None
    assert (found.operation, found.where, found.certain) == ("softmax", "hidden", False)
    assert "the gradient of its bias is finite and that of its weight is not" in found.detail
    assert found.among == ()


def test_a_finite_gradient_of_a_weight_clears_what_the_layer_took() -> None:
    """The quotient went into a layer whose weight has a finite gradient, so the divisor was not zero."""
    first, last = nn.Linear(6, 5), nn.Linear(5, 2)
    count = torch.tensor([3.0, 1.0, 0.5, 2.0]).unsqueeze(1)
    h = (first(torch.randn(4, 6)).abs() * KEPT).sqrt() / count

    found = behind_gradients(last(h).mean())

    assert found is not None
    assert (found.operation, found.where, found.among) == ("sqrt", "backward", ())


class Broken(torch.autograd.Function):
    """An operation whose backward is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Pass a value on."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return NaN."""
        return grads[0] * torch.nan


def test_an_operation_that_the_gradients_contradict_is_not_accused() -> None:
    """The division leads to a gradient that is finite, so what is bad comes from an operation that is not known."""
    first, last = nn.Linear(6, 5), nn.Linear(5, 2)
    out = last(Broken.apply(first(torch.randn(4, 6))))

    assert behind_gradients((out / torch.tensor(3.0)).mean()) is None


def test_several_operations_that_may_have_made_a_gradient_are_listed_and_none_is_probable() -> None:
    """Each leads to the gradients that are not finite, and nothing was seen of their inputs."""
    first = nn.Linear(6, 5)
    h = (first(torch.randn(4, 6)).abs() * KEPT).sqrt()

    found = behind_gradients((h + 1.0).pow(0.5).mean())

    assert found is not None
    assert [entry.operation for entry in found.among] == ["sqrt", "pow"]


@pytest.mark.parametrize(("least", "accused"), [(1.0, None), (1e-30, "div")])
def test_a_division_by_a_clamped_divisor_makes_nothing_of_usual_numbers(
    least: float, accused: str | None
) -> None:
    """Its smallest divisor is the clamp's, in the loss as in the gradients."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (torch.ones(2) * x / x.clamp(min=least)).sum() + x.sum() * torch.inf
    loss.backward()

    found = find_producer(BackwardStart((loss,), None, None), ProducerLines())

    assert (found and found.operation) == accused


def test_the_lesser_of_two_numbers_is_not_suspected() -> None:
    """It is one of them, so that finite ones never make it NaN: here the weights of a policy's gradient do."""
    ratio = torch.tensor([1.0, 2.0], requires_grad=True)
    weights = torch.tensor([1.0, torch.nan])
    loss = -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights).mean()
    loss.backward()

    assert find_producer(BackwardStart((loss,), None, None), ProducerLines()) is None


def test_a_variable_that_only_passes_on_what_is_hidden_did_not_make_it() -> None:
    """The first variable that is not finite took what an operation before it had made."""
    first, norm = nn.Linear(6, 5), nn.LayerNorm(5)
    h = first(torch.randn(4, 6))
    out = norm((h @ h.t()).masked_fill(~KEPT, -torch.inf).softmax(-1) @ h)
    loss = masked_mean(out)
    loss.backward()

    found = find_behind_gradients(BackwardStart((loss,), None, sys._getframe()), ProducerLines())

    assert found is not None
    assert (found.operation, found.certain) == ("softmax", False)
    assert found.detail.startswith("5 of the results of native_layer_norm are not finite")


def shares_with(value: float) -> Tensor:
    """Return a softmax of which one element has another value."""
    shares = nn.Linear(5, 5)(torch.randn(4, 5)).softmax(1)
    at = torch.zeros(4, 5).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(1.0))
    return torch.where(at == 1.0, shares * 0.0 + value, shares)


def hidden_in_a_result(
    result_of: Callable[[Tensor], Tensor], value: float
) -> dict[str, Any] | None:
    """Give an operation a value at one place behind a softmax, and hide what it makes of it from the loss."""
    result = result_of(shares_with(value))
    loss = result[0].sum()
    loss.backward()
    assert loss.isfinite()
    return find_behind_gradients(BackwardStart((loss,), None, sys._getframe()), ProducerLines())


@pytest.mark.parametrize(
    ("operation", "result_of", "value"),
    [
        ("log", torch.log, 0.0),
        ("log2", torch.log2, 0.0),
        ("log10", torch.log10, 0.0),
        ("log1p", torch.log1p, -1.0),
        ("rsqrt", torch.rsqrt, 0.0),
        ("reciprocal", torch.reciprocal, 1e-39),
    ],
)
def test_an_infinity_that_no_other_input_makes_shows_that_the_input_was_finite(
    operation: str, result_of: Callable[[Tensor], Tensor], value: float
) -> None:
    """What lies before the operation is not suspected, though none of its own values was seen."""
    found = hidden_in_a_result(result_of, value)

    assert found is not None
    assert (found.operation, found.where, found.certain) == (operation, "hidden", True)
    assert found.detail.startswith("1 of its results is")


def test_a_nan_out_of_a_logarithm_shows_no_finite_input() -> None:
    """It may have taken the NaN, so it is one of several."""
    found = hidden_in_a_result(torch.log, torch.nan)

    assert found is not None
    assert not found.certain
    assert [entry.operation for entry in found.among] == ["softmax", "log"]


def test_a_gradient_that_overflowed_shows_no_value_that_is_hidden() -> None:
    """Of vast numbers the products overflow, though all values were finite; no operation is accused then."""
    first, last = nn.Linear(6, 5), nn.Linear(5, 2)
    out = last((first(torch.randn(4, 6)) * 1e25).softmax(-1) + first(torch.randn(4, 6)) * 1e18)

    assert behind_gradients((out * 1e25).clamp(-1e30, 1e30).sum() * 1e-9) is None


def test_stacks_are_not_recorded_of_the_same_operations_again() -> None:
    """An optimizer may call its closure many times in a step; what the stacks took is known."""
    seen: list[list[bool]] = []

    def program() -> None:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6)
        x = torch.randn(5, 4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            seen[-1].append(torch.is_anomaly_enabled())
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            seen.append([])
            optimizer.step(closure)

    log = watch(program)
    asked = [passes for passes in seen if any(passes)]
    assert [passes[:4] for passes in asked] == [[True, True, False, False]]
    assert log.watch.record.losses.lines.seconds > 0
