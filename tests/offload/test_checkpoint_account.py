"""The account says what checkpoints leave no choice about."""

from __future__ import annotations

import torch

import kedge
from tests.offload.test_checkpoint_inputs import BYTES, Model, X, gradients


def test_blocks_in_checkpoints_say_why_nothing_is_moved() -> None:
    """A selector of what is in checkpoints takes nothing; the account counts the calls, and a line says why."""
    model = Model("dict")
    with kedge.offload(model, "blocks.**", to=kedge.Disk(rebuild=False), min_bytes=0) as account:
        gradients(model)

    assert account.total.moved == {}
    assert account.checkpointed == 9
    assert "9 module calls a step ran in a checkpoint" in str(account)


def test_a_wrapped_block_in_a_checkpoint_says_so() -> None:
    """So does a block that is wrapped by itself and called in a checkpoint."""
    model = Model("positional")
    wrapped = kedge.offload(model.blocks[0], to=kedge.Disk(rebuild=False), min_bytes=0)
    torch.utils.checkpoint.checkpoint(
        wrapped, X.clone().requires_grad_(), use_reentrant=False
    ).sum().backward()

    assert wrapped.account.checkpointed == 3
    assert "ran in a checkpoint" in str(wrapped.account)


def test_what_a_checkpoint_holds_and_the_program_too_is_kept_and_counted() -> None:
    """Containers that the program has as well stay, and the account has their bytes."""
    model = Model("dict", keeps=True)
    with kedge.offload(model, to=kedge.Disk(rebuild=False), min_bytes=0) as account:
        gradients(model)

    assert account.total.kept["checkpoint"].number == 3
    assert account.total.kept["checkpoint"].bytes == 3 * BYTES
    assert "held by a checkpoint" in str(account)
