"""Models whose class has its own `named_modules` and `parameters`, which raise or leave things out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.testing import assert_hooks_restored, assert_same_bits

_LISTS = ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers",
          "children", "named_children")  # fmt: skip


class Net(nn.Module):
    """A plain model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(4, 2)
        for one in (self, self.conv, self.norm, self.act, self.fc):
            one.training = False  # eval() would ask for the children

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.norm(self.conv(x))).mean((2, 3)))


def _raise(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("no list of this model")


def _nothing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return iter(())


Raising = type("Net", (Net,), dict.fromkeys(_LISTS, _raise))
Empty = type("Net", (Net,), dict.fromkeys(_LISTS, _nothing))


def _extract(model: nn.Module, x: Tensor) -> Any:
    return dict(kedge.extract(model, ["conv", "fc"])(x))


def _attribute(model: nn.Module, x: Tensor) -> Any:
    return {"": kedge.recipes.grad_cam(model, "conv", target=1)(x)}


def _offload(model: nn.Module, x: Tensor) -> Any:
    with kedge.offload(model, min_bytes=1) as spared:
        y = model(x)
        y.sum().backward()
    return {"": y.detach(), "spared": re.sub(r"\d+ ms", "", str(spared))}


def _saved(model: nn.Module, x: Tensor) -> Any:
    return {"": str(kedge.saved(model)(x))}


def _sites(model: nn.Module, x: Tensor) -> Any:
    return {"": str(kedge.sites(model))}


def _operations(model: nn.Module, x: Tensor) -> Any:
    return {"": str(kedge.sites(model, "**/*:out", args=(x,)))}


def _audit(model: nn.Module, x: Tensor) -> Any:
    model.fc.register_forward_hook(lambda *_: None)
    return {"": len(str(kedge.audit(model)).splitlines())}


def _hook(model: nn.Module, x: Tensor) -> Any:
    with (
        assert_hooks_restored(model),
        kedge.hook(model, "**:out, **:param.grad", kedge.record()) as acts,
    ):
        model(x).sum().backward()
    return dict(acts)


@pytest.mark.parametrize("kind", [Raising, Empty], ids=["raises", "leaves out"])
@pytest.mark.parametrize("use", [_extract, _attribute, _offload, _saved, _sites, _audit, _hook])
def test_lists_of_a_users_class_are_not_asked(
    use: Callable[[nn.Module, Tensor], Any], kind: Any
) -> None:
    """What Kedge does with such a model is what it does with a plain one of the same weights."""
    x = torch.rand(2, 3, 6, 6)
    wanted, found = use(Net(), x), use(kind(), x)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert_same_bits(found[name], value)
        else:
            assert found[name] == value
