"""What was one tensor in a checkpoint's forward is one in its recompute, with what the program has noted on it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.saved_tensors import saved
from tests.offload.engines import Shelf, engaged
from tests.offload.test_checkpoint_inputs import ROWS, SIZE, X, equal, gradients


class Attention(nn.Module):
    """Attention in a checkpoint, which computes otherwise if its query, key and value are not one tensor."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.call = nn.MultiheadAttention(SIZE, 4, batch_first=True), call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.call(self.attention, x[None] * 1.5)[0]
        return y


def in_dict(attention: nn.Module, h: Tensor) -> Any:
    """Return it in a dict."""

    def run(given: dict[str, Tensor]) -> Any:
        return attention(given["q"], given["k"], given["v"])

    return checkpoint(run, {"q": h, "k": h, "v": h}, use_reentrant=False)


CALLS = {
    "positions": lambda attention, h: checkpoint(attention, h, h, h, use_reentrant=False),
    "keywords": lambda attention, h: checkpoint(
        attention, query=h, key=h, value=h, use_reentrant=False
    ),
    "both": lambda attention, h: checkpoint(attention, h, key=h, value=h, use_reentrant=False),
    "a dict": in_dict,
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_one_tensor_given_in_several_places_is_one_again(call: str, times: int) -> None:
    """Self-attention in a checkpoint gives the same bits, whatever takes its inputs, also in a second backward."""
    model = Attention(CALLS[call])
    plain = gradients(model, times)
    with engaged(model, Shelf(), find=None):
        moved = gradients(model, times)
    with kedge.offload(model, min_bytes=0):
        found = gradients(model, times)

    assert equal(plain, moved)
    assert equal(plain, found)


@pytest.mark.parametrize("call", CALLS)
def test_the_account_of_self_attention_in_a_checkpoint_has_its_backward(call: str) -> None:
    """To look at what is saved makes no two tensors of one either."""
    account = saved(Attention(CALLS[call]), backward=True)(X.clone().requires_grad_())

    assert account.timeline.bytes[-1] == 0


class Run(nn.Module):
    """Runs a function of a layer and of what a checkpoint is given."""

    def __init__(
        self, function: Callable[[nn.Module, Any], Tensor], give: Callable[[Tensor], Any]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function, self.give = nn.Linear(SIZE, SIZE), function, give

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            lambda given: self.function(self.layer, given), self.give(x * 2), use_reentrant=False
        )
        z: Tensor = checkpoint(self.layer, y, use_reentrant=False)
        return z


def noted(value: Tensor) -> Tensor:
    """Set an attribute on a tensor."""
    value.scale = 3.0  # type: ignore[attr-defined]
    return value


def scaled(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute with a tensor and its attribute."""
    return torch.tanh(layer(x) * getattr(x, "scale", 1.0))


class Pair(namedtuple("Pair", ["a", "b"])):  # noqa: PYI024, SLOT002 - its values are asked for by another signature
    def __new__(cls, a: Tensor, b: Tensor | None = None) -> Self:
        return super().__new__(cls, a, a * 2 if b is None else b * 7)


def paired(value: Tensor) -> list[Any]:
    """Return a named tuple that has an attribute."""
    pair = Pair(value)
    pair.scale = 3.0
    return [pair]


def inferred(value: Tensor) -> dict[str, Tensor]:
    """Return a tensor beside one of inference mode."""
    with torch.inference_mode():
        return {"x": value, "m": torch.full((ROWS, SIZE), 0.5)}


GIVEN = {
    "an argument": (scaled, noted),
    "in a list": (lambda layer, given: scaled(layer, given[0]), lambda h: [noted(h)]),
    "named tuple": (
        lambda layer, given: torch.tanh(layer(given[0].a) * torch.sigmoid(given[0].b)),
        lambda h: [Pair(h)],
    ),
    "noted on": (lambda layer, given: torch.tanh(layer(given[0].a) * given[0].scale), paired),
    "inference": (
        lambda layer, given: torch.tanh(layer(given["x"])) * given["m"].sum().item(),
        inferred,
    ),
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_more_than_its_values_comes_back_as_it_was(given: str) -> None:
    """Tensors and tuples with attributes, a tuple with a constructor of its own, and what autograd cannot save."""
    model = Run(*GIVEN[given])
    plain = gradients(model)
    with engaged(model, Shelf(), find=None):
        found = gradients(model)

    assert equal(plain, found)


def test_a_keeper_that_is_interrupted_leaves_no_container_changed() -> None:
    """What it had taken until then is put back before the recompute; the program that goes on has the same gradients."""

    class Interrupted(Shelf):
        def put(self, data: Tensor) -> Any:
            if len(self.slots) == 1:
                self.slots.append(super().put(data))
                raise KeyboardInterrupt
            return super().put(data)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            def run(d: dict[str, Tensor]) -> Tensor:
                return torch.tanh(self.layer(d["a"]) * d["b"])

            y: Tensor = checkpoint(run, {"a": x * 2, "b": x * 3}, use_reentrant=False)
            try:
                self.layer(y.detach()[:1])
                checkpoint(self.layer, y.detach(), use_reentrant=False)
            except KeyboardInterrupt:
                interrupts.append(y)
            return y

    interrupts: list[Tensor] = []
    model = Model()
    plain = gradients(model)
    with engaged(model, Interrupted(), find=None):
        found = gradients(model)

    assert interrupts
    assert equal(plain, found)
