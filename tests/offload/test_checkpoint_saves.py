"""What a checkpoint holds of its inputs, in containers and by keyword, is in the account."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kedge.offload.saved_tensors import saved
from tests.offload.account.test_saved_tensors import Made
from tests.offload.test_checkpoint_inputs import BYTES, KINDS, Model, X


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("way", "reentrant"), KINDS)
def test_the_account_has_what_a_checkpoint_holds(way: str, reentrant: bool, keeps: bool) -> None:
    """However a checkpoint is given its inputs, the total is, to 1 %, that of the storages alive after the forward."""
    model, x = Model(way, reentrant=reentrant), X.clone().requires_grad_()
    account = saved(model)(x)
    model.kept = [] if keeps else None
    with Made() as made:
        graph = model(x).grad_fn
    alive = made.alive(x, *model.parameters(), *model.buffers())

    assert graph is not None
    assert alive >= 3 * BYTES
    assert account.total.bytes - account.inputs == pytest.approx(alive, rel=0.01)
    assert sum(sums.bytes for sums in account.by_module()) == account.total.bytes


def test_an_input_of_a_checkpoint_is_named_as_one() -> None:
    """An item says that a checkpoint needs it, as which argument, and in which module that was called."""
    account = saved(Model("all at once"))(X)
    held = [item for item in account.items if item.node == "checkpoint"]

    assert {item.field for item in held} == {"0", "1.a.0.0", "1.a.0.1.x.b", "x", "y.0"}
    assert {item.path for item in held} == {""}
    assert {item.source.function for item in held if item.source is not None} == {"Model.forward"}
    assert len({item.storage for item in held}) == 3


@pytest.mark.parametrize("way", ["positional", "dict"])
def test_what_a_recompute_is_given_is_no_input_of_the_model(way: str) -> None:
    """With the backward run, too, only what the model itself is called with counts as an input."""
    account = saved(Model(way), backward=True)(X)

    assert account.inputs == 0
    assert [item.origin for item in account.items if item.node == "checkpoint"] == ["made"] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_holds_is_given_back(reentrant: bool) -> None:
    """The time line ends at nothing; its peak is the total, and what a block recomputes in backward besides."""
    account = saved(Model("dict", reentrant=reentrant), backward=True)(X.clone().requires_grad_())
    line = account.timeline
    recomputed = [
        sum(span.bytes for kind, span in line.tensors.at(moment) if kind.origin == "recomputed")
        for moment in range(len(line.at))
    ]

    assert line.bytes[-1] == 0
    assert (
        max(size - again for size, again in zip(line.bytes, recomputed, strict=True))
        == account.total.bytes
    )
    assert max(recomputed) == (
        0 if reentrant else BYTES
    )  # PyTorch cannot run a reentrant one for some inputs alone


def test_a_checkpoint_without_a_module_is_in_the_account() -> None:
    """Also where no module runs in it, and what its function closes over or was bound to."""

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h, more = x * 2, x * 3
            y: Tensor = checkpoint(
                lambda d: torch.tanh(d["x"]) * more, {"x": h}, use_reentrant=False
            )
            return y

    account = saved(Plain())(X.clone().requires_grad_())

    assert account.total.bytes == 2 * BYTES
    assert {item.field for item in account.items} == {"0.x", "function"}
