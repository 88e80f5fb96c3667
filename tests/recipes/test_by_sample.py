"""The gradient of each sample: the bits of `torch.func`, and of one backward pass for each sample where that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from kedge.errors import AttributionError
from kedge.recipes.by_sample import sample_gradients
from kedge.testing import assert_same_bits, assert_unhooked


class Reader(nn.Module):
    """Embeddings that are also the output's weights, a norm, a projection that is used twice, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.free = nn.Parameter(torch.randn(6))

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.twice(self.norm(self.words(words)) * self.free).tanh()
        x = self.frozen(self.twice(x))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return x.mean(1) @ self.words.weight.T


class Reading(nn.Module):
    """Its forward depends on a number, which `torch.func` cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return self.layer(x)
        return self.layer(x * 2)


def networks() -> dict[str, tuple[nn.Module, Any, Tensor]]:
    """Make the networks, with an input and labels."""
    torch.manual_seed(0)
    conv = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.PReLU(), nn.Flatten(), nn.Linear(72, 11),
    ).eval()  # fmt: skip
    return {
        "linear": (nn.Linear(4, 11), torch.randn(6, 4), torch.arange(6)),
        "convolutions and norms": (conv, torch.randn(6, 3, 8, 8), torch.arange(6)),
        "embeddings, shared and reused": (Reader(), torch.randint(0, 11, (6, 5)), torch.arange(6)),
    }


def by_torch_func(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """As PyTorch's tutorial does it."""
    weights = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One backward pass for each sample."""
    weights = {k: p for k, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        rows.append(torch.autograd.grad(loss, list(weights.values())))
    return {k: torch.stack(each) for k, each in zip(weights, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("name", networks())
def test_it_gives_what_torch_func_gives(name: str) -> None:
    """To the bit, and one sample after another to rounding; the model stays as it was."""
    model, x, y = networks()[name]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = sample_gradients(model, x, F.cross_entropy, y)

    assert_same_bits(found, by_torch_func(model, x, y))
    torch.testing.assert_close(found, by_hand(model, x, y))
    assert_same_bits(dict(model.state_dict()), before)
    assert all(weight.grad is None for weight in model.parameters())
    assert_unhooked(model)


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("at_once", [None, 1, 4])
def test_norms_are_those_of_the_gradients(name: str, at_once: int | None) -> None:
    """However many samples run at once."""
    model, x, y = networks()[name]
    gradients = sample_gradients(model, x, F.cross_entropy, y)
    norms = sample_gradients(model, x, F.cross_entropy, y, norms=True, at_once=at_once)

    expected = {k: g.flatten(1).norm(dim=1) for k, g in gradients.items()}
    torch.testing.assert_close(norms, expected)


def test_a_mask_for_each_sample_and_a_function_of_ones_own() -> None:
    """Arguments by name, without targets; what has no row for each sample goes to all."""
    model, words, _ = networks()["embeddings, shared and reused"]
    mask = (torch.rand(6, 5) > 0.5).float()
    ones = torch.ones(5)

    def loss(output: Tensor) -> Tensor:
        return output.logsumexp(-1)

    found = sample_gradients(model, {"words": words, "mask": mask}, loss)
    for i in range(6):
        own = model(words[i : i + 1], mask[i : i + 1]).logsumexp(-1).sum()
        expected = torch.autograd.grad(own, model.twice.weight)[0]
        torch.testing.assert_close(found["twice.weight"][i], expected)
    same = sample_gradients(model, {"words": words, "mask": ones}, loss)
    torch.testing.assert_close(same, sample_gradients(model, words, loss))


@pytest.mark.parametrize("at_once", [None, 2])
def test_a_model_that_torch_func_cannot_run_runs_for_each_sample(at_once: int | None) -> None:
    """With the same result as by hand."""
    torch.manual_seed(1)
    model, x, y = Reading(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    found = sample_gradients(model, x, F.cross_entropy, y, at_once=at_once)
    assert_same_bits(found, by_hand(model, x, y))


def test_what_is_no_loss_and_no_sample_is_refused() -> None:
    """With what it takes."""
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with pytest.raises(AttributionError, match="for one sample; it must return one number"):
        sample_gradients(model, x, lambda output: output)
    with pytest.raises(AttributionError, match="has no samples"):
        sample_gradients(model, torch.tensor(1.0), F.cross_entropy)
    with pytest.raises(AttributionError, match="whole number from 1 on"):
        sample_gradients(model, x, F.cross_entropy, at_once=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sample_gradients(model, torch.randn(5, 7), F.cross_entropy)
