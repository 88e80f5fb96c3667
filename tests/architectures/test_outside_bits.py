"""On real architectures: observing the operations outside of modules, and those of functions that modules call, changes no bit."""

from __future__ import annotations

import pytest
from torch import Tensor

pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama

import kedge
from tests.architectures.training import plain, train, unlike
from tests.architectures.zoo import BY_NAME, Architecture, architectures

pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
EVERY = "/*:out, /*:in, /*:out.grad, /*:in.grad"


@architectures
def test_observing_the_loops_own_operations_changes_no_bit(architecture: Architecture) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model nobody watches."""
    with kedge.hook(EVERY, kedge.record()):
        watched = train(architecture, architecture.build())
    assert unlike(plain(architecture), watched) == []


def test_a_function_that_modules_call_is_observed_and_edited() -> None:
    """Rotary embeddings: each layer's call has its operations, and an edit of them is one of the model."""
    architecture = BY_NAME["llama"]
    rotate = modeling_llama.apply_rotary_pos_emb
    with kedge.hook(rotate, EVERY, kedge.record(keep=None)) as acts:
        watched = train(architecture, architecture.build())
        passes = {record.event.pass_ for record in acts.records("/add#0")}
    assert unlike(plain(architecture), watched) == []
    assert len(passes) == 2 * architecture.options["num_hidden_layers"]

    shapes: list[tuple[int, ...]] = []

    def shorter(value: Tensor) -> Tensor:
        shapes.append(tuple(value.shape))
        return value * 0.5

    with kedge.hook(rotate, "/q_embed=", shorter):
        edited = train(architecture, architecture.build())
    assert len(shapes) == len(passes)
    assert unlike(watched, edited) != []
