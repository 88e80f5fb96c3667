"""What reads a softmax behind a loss, and along which of its dimensions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.store.events import SoftmaxRead
from kedge.watch.records.softmax_reads import softmaxes_read

N, T, C = 6, 4, 5
LABELS = torch.zeros(N, dtype=torch.long)
MORE = torch.zeros(N * T, dtype=torch.long)


def reads(loss: Tensor) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the readers of softmaxes behind a loss, with the dimensions of both."""
    return [(read.by, read.dim, read.classes) for read in softmaxes_read([loss])]


def values(*shape: int) -> Tensor:
    """Return numbers that need a gradient."""
    return torch.randn(*shape, requires_grad=True)


def into_a_buffer(result: Callable[[], Tensor], at: int) -> Tensor:
    """Write results for samples by classes into a buffer, one for each time step."""
    shape = [N, C]
    shape.insert(at, T)
    buffer = torch.zeros(shape)
    for step in range(T):
        buffer.select(at, step).copy_(result())
    return buffer


@pytest.mark.parametrize("dim", [0, 1])
def test_a_softmax_is_found_behind_a_buffer(dim: int) -> None:
    """As of a decoder that writes what it says at each time step, also where sizes are equal."""
    for at in (0, 1):
        buffer = into_a_buffer(lambda: values(N, C).log_softmax(dim), at)
        loss = F.nll_loss(buffer.reshape(-1, C), MORE)

        assert set(reads(loss)) == {("nll_loss", dim, (1,))}

    square = torch.zeros(C, C, C)
    square[2] = values(C, C).log_softmax(dim)
    assert reads(F.nll_loss(square.view(-1, C), LABELS.repeat(5)[:25])) == [("nll_loss", dim, (1,))]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.reshape(-1, C),
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(0, -1, 1),
        lambda x: x[:, :, None].squeeze().reshape(-1, C),
        lambda x: x[:, 1],
        lambda x: x.select(-2, 1),
        lambda x: x.unbind(1)[1],
        lambda x: x.split(1, 1)[1].squeeze(1),
        lambda x: torch.stack([x, x])[0].reshape(-1, C),
        lambda x: torch.cat([x, x])[:N].reshape(-1, C),
        lambda x: x[x.detach()[..., 0] < 9],
        lambda x: x[:, torch.tensor([0, 2])].reshape(-1, C),
        lambda x: x.index_select(1, torch.tensor([0, 2])).reshape(-1, C),
        lambda x: (x.double() * 2 + torch.zeros(N, T, C)).clone().clamp(max=0).reshape(-1, C),
        lambda x: x[:, 0].t().t(),
    ],
)
def test_the_classes_are_followed_to_the_softmax(
    moved: Callable[[Tensor], Tensor], dim: int
) -> None:
    """Whatever moves, picks or stacks what the softmax returned."""
    result = moved(values(N, T, C).log_softmax(dim))
    labels = torch.zeros(result.shape[:1] + result.shape[2:], dtype=torch.long)

    assert reads(F.nll_loss(result, labels)) == [("nll_loss", dim, (2,))]


def test_a_view_that_merges_dimensions_leaves_both() -> None:
    """Either may be that of the classes."""
    merged = values(T, C, N).log_softmax(1).reshape(-1, N).t()

    assert reads(F.nll_loss(merged, LABELS)) == [("nll_loss", 1, (0, 1))]


def test_ctc_loss_has_the_classes_in_the_last_dimension() -> None:
    """Its input is time steps by samples by classes, or one sample without a batch."""
    targets = torch.ones(N, 1, dtype=torch.long)
    loss = F.ctc_loss(values(T, N, C).log_softmax(1), targets, (T,) * N, (1,) * N)
    assert softmaxes_read([loss]) == (
        SoftmaxRead(by="ctc_loss", softmax="log_softmax", dim=1, classes=(2,), shape=(T, N, C)),
    )

    alone = F.ctc_loss(values(T, C).log_softmax(-1), targets[0], torch.tensor(T), torch.tensor(1))
    assert reads(alone) == [("ctc_loss", 1, (1,))]


def test_a_choice_is_made_along_the_dimension_that_gather_names() -> None:
    """Of the softmax or of its logarithm."""
    chosen = values(N, C).softmax(0).log().gather(-1, LABELS[:, None])

    assert reads(chosen.mean()) == [("gather", 0, (1,))]


def test_a_softmax_of_a_softmax_is_found_anywhere_behind_the_loss() -> None:
    """But not of its logarithm, its multiple, or a product with something else."""
    once = values(N, C).softmax(1)
    other = values(C, C)
    loss = other.square().sum() + (once.softmax(0) - 1).square().sum()
    assert reads(loss) == [("softmax", 1, (0,))]

    for different in (once.log(), once * 3, once @ other, once + other[0]):
        assert reads(different.softmax(1).sum()) == []


def test_attention_is_read_by_nothing() -> None:
    """A softmax over tokens or time steps is multiplied with values, and tells nothing of classes."""
    tokens = values(N, T, C)
    weights = (tokens @ tokens.transpose(1, 2)).softmax(-1)
    pooled = (tokens * tokens.sum(-1, keepdim=True).softmax(1)).sum(1)
    loss = F.cross_entropy((weights @ tokens).mean(1) + pooled, LABELS)

    assert reads(loss) == [("nll_loss", 1, (1,))]


def test_weights_of_samples_are_not_mistaken_for_classes() -> None:
    """A column that is spread over all classes has none."""
    weighted = values(N, 1).log_softmax(0) + torch.zeros(N, C)

    assert reads(F.nll_loss(weighted, LABELS)) == []
