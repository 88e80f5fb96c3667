"""Every action on every kind of tensor: the right value, or an error of one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

import kedge
from kedge.errors import ActionError, ConditionMet, EditError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse",
    "ignore:The PyTorch API of nested tensors",
    "ignore:The PyTorch API of MaskedTensors",
)

A, B = torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[0.5, 3.0], [0.0, -1.0], [2.0, 2.0]])
BAD = torch.tensor([[1.0, math.nan], [math.inf, 4.0]])


def jagged_with_gaps(*parts: Tensor) -> Tensor:
    """A jagged tensor in whose memory a NaN follows each part."""
    gap = torch.full((1, 2), math.nan)
    offsets = torch.tensor([0, *(len(part) + 1 for part in parts)]).cumsum(0)
    lengths = torch.tensor([len(part) for part in parts])
    values = torch.cat([each for part in parts for each in (part, gap)])
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, lengths=lengths)


NESTED: dict[str, Callable[..., Tensor]] = {
    "strided": lambda *parts: torch.nested.nested_tensor(list(parts)),
    "transposed": lambda *parts: torch.nested.nested_tensor(
        [p.T.contiguous() for p in parts]
    ).transpose(1, 2),
    "jagged": lambda *parts: torch.nested.nested_tensor(list(parts), layout=torch.jagged),
    "gaps": jagged_with_gaps,
}
SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
    "mkldnn": Tensor.to_mkldnn,
}


def through(value: Tensor, action: Any) -> tuple[Tensor, Any]:
    """What a model returns for a value that passes an action, and the handle of the hook."""
    model = nn.Sequential(nn.Identity())
    with kedge.hook(model, "0", action) as hooked:
        return model(value), hooked


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_statistics_of_a_nested_tensor_are_those_of_its_parts(make: Callable[..., Tensor]) -> None:
    """Statistics of a nested tensor are those of the numbers of its parts, without the gaps between them."""
    numbers = torch.cat([A.reshape(-1), B.reshape(-1)])
    _, stats = through(make(A, B), kedge.measure())
    found = stats["0"]
    assert (found.count, found.nonfinite, found.min, found.max) == (10, 0, -2.0, 4.0)
    assert found.nonzero == int(numbers.count_nonzero())
    assert found.sum == pytest.approx(float(numbers.sum()))
    assert found.rms == pytest.approx(float(numbers.square().mean().sqrt()))
    assert through(make(A, BAD), kedge.measure())[1]["0"].nonfinite == 2


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_statistics_of_a_sparse_tensor_are_those_of_the_whole(
    make: Callable[[Tensor], Tensor],
) -> None:
    """Statistics of a tensor in another layout are those of the dense one: what is left out is zero."""
    _, stats = through(make(A), kedge.measure())
    _, dense = through(A, kedge.measure())
    for name in ("count", "sum", "sumsq", "min", "max", "zero", "nonzero", "nonfinite"):
        assert getattr(stats["0"], name) == getattr(dense["0"], name), name
    assert through(make(BAD), kedge.measure())[1]["0"].nonfinite == 2


def test_an_index_that_a_sparse_tensor_has_twice_counts_once() -> None:
    """The numbers of an uncoalesced tensor are the sums at each index."""
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    found = through(twice, kedge.measure())[1]["0"]
    assert (found.count, found.max, found.nonzero, found.sumsq) == (3, 3.0, 1, 9.0)


def test_numbers_of_other_types_are_counted_as_those_of_dense_tensors() -> None:
    """A complex number counts as two, and whole numbers are counted without statistics, in any layout."""
    complex_ = torch.eye(3, dtype=torch.complex64) * 1j
    of_sparse, of_dense = (
        through(value, kedge.measure())[1]["0"] for value in (complex_.to_sparse(), complex_)
    )
    assert (of_sparse.count, of_sparse.sum) == (of_dense.count, of_dense.sum) == (18, 3.0)
    whole = through(torch.nested.nested_tensor([A.int(), B.int()]), kedge.measure())[1]["0"]
    assert (whole.count, whole.nonfinite) == (10, 0)
    assert math.isnan(whole.rms)


def test_a_masked_number_is_not_measured() -> None:
    """Statistics of a masked tensor are those of what the mask lets through."""
    value = masked_tensor(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True]))
    found = through(value, kedge.measure())[1]["0"]
    assert (found.count, found.sum, found.nonfinite) == (2, 4.0, 0)


def test_of_a_value_without_data_nothing_is_known() -> None:
    """Nobody has counted the non-finite numbers of a meta tensor: the count is NaN, not 0."""
    found = through(torch.empty(3, device="meta"), kedge.measure())[1]["0"]
    assert math.isnan(found.nonfinite)
    assert math.isnan(found.mean)
    assert through(torch.zeros(0, 3), kedge.measure())[1]["0"].nonfinite == 0


@pytest.mark.parametrize("make", [*NESTED.values(), *SPARSE.values()], ids=[*NESTED, *SPARSE])
def test_a_number_that_is_not_finite_is_found_in_any_layout(make: Callable[..., Tensor]) -> None:
    """error_if(nonfinite) holds where a stored number is not finite, and not for one in a gap."""
    sound, bad = (A, B), (A, BAD)
    several = make in NESTED.values()
    through(make(*sound) if several else make(A), kedge.error_if(kedge.nonfinite))
    with pytest.raises(ConditionMet, match="1 of them NaN and 1 infinite"):
        through(make(*bad) if several else make(BAD), kedge.error_if(kedge.nonfinite))


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (kedge.scale(2.0), lambda x: x * 2),
        (kedge.scale(torch.tensor([1.0, 0.0])), lambda x: x * torch.tensor([1.0, 0.0])),
        (kedge.add(1.0), lambda x: x + 1),
        (kedge.clamp(-1, 1), lambda x: x.clamp(-1, 1)),
        (kedge.zero(), torch.zeros_like),
        (kedge.replace(7.0), lambda x: torch.full_like(x, 7.0)),
        (kedge.replace(lambda x: x * 3), lambda x: x * 3),
    ],
    ids=lambda each: repr(each) if not callable(each) or hasattr(each, "name") else "",
)
def test_edits_act_on_every_part(
    make: Callable[..., Tensor], action: Any, expected: Callable[[Tensor], Tensor]
) -> None:
    """An edit of a nested tensor is the edit of each of its parts, and the result is nested in the same way."""
    value = make(A, B)
    edited, _ = through(value, action)
    assert edited.is_nested
    assert edited.layout is value.layout
    for part, before in zip(edited.unbind(), (A, B), strict=True):
        assert torch.equal(part, expected(before))


def test_the_gradient_passes_an_edit_of_each_part() -> None:
    """An edit of a nested tensor is differentiated."""
    parts = [A.clone().requires_grad_(), B.clone().requires_grad_()]
    edited, _ = through(torch.nested.as_nested_tensor(parts), kedge.clamp(-1, 1))
    edited.unbind()[0].sum().backward()
    assert torch.equal(parts[0].grad, ((A >= -1) & (A <= 1)).float())


def test_a_sparse_tensor_is_not_filled_in_part() -> None:
    """PyTorch fills only the stored elements of a compressed sparse tensor: an error, and zeros are zeros."""
    with pytest.raises(EditError, match="cannot be filled with 5.0"):
        through(A.to_sparse_csr(), kedge.replace(5.0))
    assert not through(A.to_sparse_csr(), kedge.replace(0.0))[0].to_dense().any()


@pytest.mark.parametrize(
    ("make", "action"),
    [
        (SPARSE["coo"], kedge.clamp(-1, 1)),
        (SPARSE["coo"], kedge.replace(1.0)),
        (SPARSE["mkldnn"], kedge.zero()),
        (NESTED["strided"], Tensor.isfinite),
    ],
)
def test_what_pytorch_cannot_do_is_explained_in_one_line(
    make: Callable[..., Tensor], action: Any
) -> None:
    """Where PyTorch has no kernel, the error names it, without the table of all kernels there are; so does its cause."""
    with pytest.raises(ActionError, match="Could not run 'aten::") as told:
        through(make(A), action)
    for error in (told.value, told.value.__cause__):
        assert len(str(error)) < 300
        assert "\n" not in str(error)


def test_the_fast_path_of_the_encoder_is_measured() -> None:
    """The nested tensors between the layers of an encoder have the statistics of what is not padding."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    ).eval()
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad(), kedge.session() as s:
        stats = s.hook(encoder, "layers.0", kedge.measure())
        values = s.hook(encoder, "layers.0", kedge.record())
        s.hook(encoder, "layers.0", kedge.error_if(kedge.nonfinite))
        encoder(torch.randn(4, 6, 8), src_key_padding_mask=padding)
    assert values["layers.0"].is_nested
    assert stats["layers.0"].count == 21 * 8
    assert stats["layers.0"].rms == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("shape", [(5,), (), (2, 3)])
def test_zeros_without_memory_are_measured_as_zeros(shape: tuple[int, ...]) -> None:
    """Forward-mode derivatives of nothing have no memory that could be read."""
    value, module = torch._efficientzerotensor(shape), nn.Identity()

    with kedge.hook(module, ":out", kedge.measure()) as hook:
        module(value)

    row = hook[":out"]
    assert (row.count, row.mean, row.max, row.nonfinite) == (value.numel(), 0.0, 0.0, 0)


def test_saved_tensors_of_a_forward_mode_derivative_are_measured() -> None:
    """The program gets its derivative: zeros without memory among its saved tensors stop nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.ones(5, 4)

    def derivative() -> Tensor:
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]

    plain = derivative()
    with kedge.hook(model, "**:saved", kedge.measure()):
        observed = derivative()

    assert torch.equal(observed, plain)
