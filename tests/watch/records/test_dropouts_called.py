"""Dropouts in the graph of a loss, of modules and of functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.rules import check
from kedge.store.events import DropoutCalled
from kedge.watch.records.dropouts_called import dropouts_called
from kedge.watch.records.operation_lines import ProducerLines
from tests.watch.watched import watch


def kept(loss: Tensor) -> list[float]:
    """Return what the dropouts behind a loss keep."""
    return [each.kept for each in dropouts_called([loss], ProducerLines())]


def through(dropped: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a loss of two layers with something between them."""
    torch.manual_seed(0)
    return nn.Linear(64, 4)(dropped(nn.Linear(8, 64)(torch.randn(32, 8)))).square().mean()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_dropout_is_known_by_its_mask(share: float, inplace: bool) -> None:
    """Whether it is a function or a module."""
    usual = [pytest.approx(1 - share, abs=1e-4)]
    assert kept(through(lambda x: F.dropout(x, share, inplace=inplace))) == usual
    assert kept(through(nn.Dropout(share))) == usual


def test_a_dropout_of_a_device_has_its_share_in_its_node() -> None:
    """It is an operation of its own there, and its mask is not read."""
    assert kept(through(lambda x: torch.native_dropout(x, 0.9, True)[0])) == [pytest.approx(0.1)]


def normalised(x: Tensor) -> Tensor:
    """Mask what is above some bound, and divide the mask by its mean."""
    mask = (torch.rand_like(x) < 0.1).float()
    return x * (mask / mask.mean())


@pytest.mark.parametrize(
    "masked",
    [
        lambda x: F.dropout(x, 0.9, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: x * (torch.rand_like(x) < 0.1).float(),
        lambda x: x * (torch.rand_like(x) < 0.1).float() * 4,
        normalised,
        lambda x: x * F.one_hot(torch.arange(32) % 64, 64) * 64.0,
        lambda x: x * (torch.rand_like(x) * 10),
        lambda x: x * torch.tensor([0.0, 10.0]).repeat(32),
        lambda x: x * 7.0,
        torch.relu,
    ],
)
def test_masks_of_the_program_are_no_dropouts(masked: Callable[[Tensor], Tensor]) -> None:
    """Nor are factors, one dimension of which chooses, or masks that are divided by their mean."""
    assert kept(through(masked)) == []


def test_a_mask_of_the_loss_is_no_dropout() -> None:
    """No layer takes its result, as where a few tokens are predicted."""
    error = nn.Linear(8, 64)(torch.randn(32, 8)).square()
    chosen = (torch.rand(32, 64) < 0.1).float() / 0.1

    assert kept((error * chosen).mean()) == []


def test_what_has_run_already_is_not_known() -> None:
    """Its mask is freed; nothing is unpacked."""
    loss = through(lambda x: F.dropout(x, 0.9))
    loss.backward()

    assert kept(loss) == []


class Net(nn.Module):
    """Drops by a function between its layers."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.last = nn.Linear(64, 4)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Map it."""
        return self.last(F.dropout(self.first(x).relu(), self.share, self.training))


def of_training(model: nn.Module) -> list[str]:
    """Train a model, and return what is said of its dropout."""

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()

    findings = check(watch(program, every=1).recording())
    return [each.message for each in findings if each.code == "HEAVY-DROPOUT"]


def test_a_dropout_that_a_forward_calls_as_a_function_is_named_with_its_line() -> None:
    """If it keeps next to nothing; one of a usual share is not."""
    (message,) = of_training(Net(0.96))

    assert message.startswith("A dropout at ")
    assert message.endswith("lets 4.0% of its input through.")
    assert of_training(Net(0.5)) == []
    assert of_training(Net(0.96).eval()) == []


def test_a_dropout_of_a_module_is_named_once() -> None:
    """By its module, not by the graph as well."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.96), nn.Linear(64, 4))

    (message,) = of_training(model)
    assert message.startswith("1 (Dropout)")


def test_a_dropout_is_noted_again_with_its_line() -> None:
    """The first step is over before the lines of operations can be known."""
    model = Net(0.96)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()

    noted = watch(program, every=1).recording()
    (*_, last) = [event for event in noted.events if event.kind == "dropouts"]
    (dropout,) = last.dropouts
    assert isinstance(dropout, DropoutCalled)
    assert dropout.source is not None
    assert "F.dropout" in (dropout.source.text or "")
