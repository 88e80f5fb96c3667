"""What the account says that a remedy would free is what it frees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kedge.offload.saved_tensors import saved
from kedge.store.saved_account import Sums


class Block(nn.Module):
    """A residual block."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x)).sigmoid()


class Model(nn.Module):
    """Blocks, and a part whose input nobody else holds; those named are checkpointed."""

    def __init__(self, *checkpointed: str) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.act = nn.Sequential(nn.Flatten(), nn.Tanh())
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        for name in ("first", "second"):
            x = self.call(name, x)
        return self.call("act", x + 1)

    def call(self, name: str, x: Any) -> Any:
        module = self.get_submodule(name)
        return (
            checkpoint(module, x, use_reentrant=False) if name in self.checkpointed else module(x)
        )


def by_path(model: nn.Module, x: torch.Tensor, **options: Any) -> dict[str | None, Sums]:
    """The account by module with all that is in it."""
    return {sums.path: sums for sums in saved(model, **options)(x).by_module(inner=True)}


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_checkpoint_frees_what_was_said(name: str) -> None:
    """A module that is checkpointed frees, to the byte, what the account said of it."""
    x = torch.randn(8, 24)
    torch.manual_seed(0)
    before = by_path(Model(), x)
    after = saved(Model(name))(x).total

    assert before[name].checkpoint > 0
    assert before[""].bytes - after.bytes == before[name].checkpoint


def test_a_checkpoint_of_what_holds_only_its_input_frees_nothing() -> None:
    """Whose saved tensors are its inputs, or fewer bytes than they are, has nothing to gain."""
    tree = by_path(Model(), torch.randn(8, 24))

    assert tree["first.mlp.0"].checkpoint == 0
    assert tree["first.mlp.1"].checkpoint == 0
    assert tree["act"].checkpoint == 0


def test_the_whole_model_and_lists_have_no_checkpoint() -> None:
    """To compute the whole model again needs all of it at once; a list of modules is never called."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    tree = by_path(Listed(), torch.randn(8, 24))

    assert (tree[""].checkpoint, tree["blocks"].checkpoint) == (0, 0)
    assert tree["blocks.1"].checkpoint > 0


def test_what_can_be_moved_is_large_and_was_made_in_the_forward() -> None:
    """Parameters, inputs and what is smaller than the least size are not moved; the least size can be chosen."""
    x = torch.randn(256, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh())

    assert saved(model)(x).total.offload == 256 * 64 * 4
    assert saved(model, min_bytes=1)(x).total.offload == 256 * 64 * 4 + 256 * 8 * 4
    assert saved(model, min_bytes=10**6)(x).total.offload == 0


@pytest.mark.parametrize(
    ("dtype", "bf16", "int8"),
    [
        (torch.float32, 2, 3 - 4 / 256),
        (torch.bfloat16, 0, 1 - 4 / 256),
        (torch.float64, 6, 7 - 4 / 256),
    ],
)
def test_narrow_floats_free_what_the_formula_says(
    dtype: torch.dtype, bf16: float, int8: float
) -> None:
    """bfloat16 takes 2 bytes of a number, int8 one and 4 for every 256."""
    numbers = 256 * 128
    total = saved(nn.Tanh())(torch.randn(256, 128, dtype=dtype, requires_grad=True)).total

    assert (total.bf16, total.int8) == (numbers * bf16, numbers * int8)


def test_indices_are_not_compressed() -> None:
    """Only floating-point numbers can be kept in fewer bits."""
    pool = nn.Sequential(nn.Identity(), nn.MaxPool2d(2))
    account = saved(pool)(torch.randn(4, 8, 64, 64, requires_grad=True))
    index = next(item for item in account.items if item.dtype == torch.int64)

    assert index.movable
    assert (index.compressed(16), index.compressed(8)) == (0, 0)


def test_what_can_be_rebuilt_is_named_by_its_rule() -> None:
    """A GELU's output that the next layer saves can be made again of the GELU's input, at no cost in bytes."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    account = saved(model)(torch.randn(256, 64))
    output = next(item for item in account.items if item.path == "2" and item.origin == "made")

    assert output.rule is not None
    assert "gelu" in output.rule
    assert account.total.rebuild == output.held == 256 * 64 * 4
    assert {sums.path: sums.rebuild for sums in account.by_module()}["2"] == output.held
