"""On real architectures: skipped modules and edited parameters, to the bit as models that were changed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

pytest.importorskip("transformers")
import kedge
from kedge.errors import EditError
from kedge.hooks.forward_source import structure_returned
from tests.architectures.training import batch_of, generators, plain, seed, tensors, train, unlike
from tests.architectures.zoo import Architecture, architectures

pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")


class Passes(nn.Dropout):
    """Returns its input; a fused attention reads its ``p``, and calls it no more than a dropout."""

    def forward(self, value: Tensor) -> Tensor:
        return value


@architectures
def test_skipped_dropout_is_a_model_without_dropout(architecture: Architecture) -> None:
    """Outputs, gradients, generators and weights of two steps are those with modules that pass their input on."""
    model, twin = architecture.build(), architecture.build()
    for path, module in list(twin.named_modules()):
        if isinstance(module, nn.Dropout):
            twin.set_submodule(path, Passes(module.p))
    expected = train(architecture, twin)
    if not any(isinstance(module, nn.Dropout) for module in model.modules()):
        pytest.skip("has no dropout")
    with kedge.hook(model, "**{Dropout}", kedge.skip()):
        assert unlike(train(architecture, model), expected) == []
    assert unlike(train(architecture, architecture.build()), plain(architecture)) == []


@architectures
def test_what_returns_one_tensor_can_pass_its_input_on(architecture: Architecture) -> None:
    """A module is refused only if it does return a structure, and whole models are."""
    model = architecture.build()
    outputs: dict[nn.Module, object] = {}
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: outputs.update({module: output}))
    model(**architecture.inputs())
    for module, output in outputs.items():
        said = structure_returned(module)
        assert said is None or not isinstance(output, Tensor), type(module).__name__
    with pytest.raises(EditError, match="its first input cannot be its output"):
        kedge.hook(model, ":out", kedge.skip())


def made(
    architecture: Architecture, model: nn.Module, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return all that comes of a step with these weights in place of the model's."""
    seed(2)
    batch = batch_of(architecture)
    output = functional_call(model, weights, (), batch) if weights else model(**batch)
    architecture.loss(output).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return tensors(output, "output") | grads | generators()


@architectures
def test_edited_parameters_are_those_of_a_functional_call(architecture: Architecture) -> None:
    """Weights of all kinds of layers, tied ones among them: outputs and gradients are equal to the bit."""
    model, twin = architecture.build(), architecture.build()
    names = [name for name, _ in model.named_parameters()]
    chosen = [*dict.fromkeys((names[0], *names[:: max(1, len(names) // 4)], names[-1]))]
    weights = {name: twin.get_parameter(name) * 0.5 for name in chosen}
    expected = made(architecture, twin, weights)
    with kedge.hook(model, [f"{name}:param" for name in chosen], kedge.scale(0.5)):
        assert unlike(made(architecture, model, {}), expected) == []
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
