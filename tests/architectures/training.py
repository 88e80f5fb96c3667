"""Training a model of the zoo, and everything that came of it, to be compared to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.architectures.zoo import BY_NAME, Architecture

EVERYTHING = "**:out, **:out.grad, **:in.grad, **:param.grad"


def seed(number: int) -> None:
    """Set every generator that a model could draw from."""
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - SpecAugment draws from this one
    random.seed(number)


def generators() -> dict[str, Any]:
    """Where every generator stands."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return {
        "rng.torch": torch.get_rng_state(),
        "rng.device": torch.empty(0)
        if device is None
        else torch.get_device_module(device).get_rng_state(),
        "rng.numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),  # type: ignore[index] # noqa: NPY002
        "rng.python": torch.tensor(random.getstate()[1]),
    }


def tensors(value: Any, name: str) -> dict[str, Tensor]:
    """Every tensor inside an output, found without Kedge's help; a key-value cache is looked into as well."""
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    if isinstance(value, Mapping):
        inside: Any = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("transformers"):
        inside = vars(value).items()
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, child in inside:
        found |= tensors(child, f"{name}.{key}")
    return found


def batch_of(architecture: Architecture, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The inputs; those that can have a gradient ask for one, but for Wav2Vec2, which sets that itself and only on a leaf."""
    inputs = {k: v.to(device) for k, v in architecture.inputs().items()}
    return {
        k: v.requires_grad_() if v.is_floating_point() and k != "input_values" else v
        for k, v in inputs.items()
    }


def train(architecture: Architecture, model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """Train where the model is and return everything that came of it, by name."""
    seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    all_of_it: dict[str, Tensor] = {}
    for step in range(steps):
        batch = batch_of(architecture, next(model.parameters()).device)
        optimizer.zero_grad()
        output = model(**batch)
        loss = architecture.loss(output)
        loss.backward()
        all_of_it |= tensors(output, f"{step}.output") | {f"{step}.loss": loss.detach().clone()}
        for name, leaf in {**dict(model.named_parameters()), **batch}.items():
            if leaf.grad is not None:
                all_of_it[f"{step}.grad.{name}"] = leaf.grad.clone()
        optimizer.step()
        all_of_it |= tensors(model.state_dict(), f"{step}.state") | generators()
    return all_of_it


@functools.lru_cache(maxsize=2)
def _plain(name: str, steps: int) -> dict[str, Tensor]:
    architecture = BY_NAME[name]
    return train(architecture, architecture.build(), steps)


def plain(architecture: Architecture, steps: int = 2) -> dict[str, Tensor]:
    """What comes of training without Kedge; it is the same for all that is compared with it one after the other."""
    return _plain(architecture.name, steps)


def unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of what is not equal to the last bit, or not on both sides."""
    lacking = sorted(one.keys() ^ other.keys())
    return lacking + [n for n in one if n in other and not same(one[n], other[n])]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN is equal to itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(value: Tensor) -> Tensor:
    """The memory of a tensor as bytes."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
