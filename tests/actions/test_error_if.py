"""`error_if` alone: conditions and what the error says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kedge
from kedge.errors import ConditionMet, WrongCall

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        (torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, INF]), True),
        (torch.tensor([1.0, -INF]), True),
        (torch.tensor([1, 2]), False),
        (torch.tensor([True]), False),
        (torch.tensor([1 + 1j]), False),
        (torch.tensor([complex(NAN, 0)]), True),
        (torch.tensor([3.0e38, 3.0e38]), False),
        (torch.tensor([6.0e4, 6.0e4], dtype=torch.float16), False),
        (torch.empty(0), False),
    ],
)
def test_nonfinite_finds_nan_and_infinities_alone(value: Tensor, bad: bool) -> None:
    """NaN and both infinities are found in floating and complex values; large sums, integers and empty tensors are fine."""
    assert bool(kedge.nonfinite(value)) is bad


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("scale", "bad"), [(0.1, False), (INF, True), (NAN, True)])
def test_a_quantized_value_is_what_it_stands_for(scale: float, bad: bool) -> None:
    """A quantized tensor holds integers, and is not finite if its scale is not; the message counts its elements."""
    value = torch.quantize_per_tensor(torch.ones(4), scale, 0, torch.qint8)
    assert bool(kedge.nonfinite(value)) is bad
    if bad:
        with pytest.raises(ConditionMet, match=r"4 elements, [04] of them NaN and [04] infinite"):
            kedge.error_if(kedge.nonfinite)(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.tensor([NAN, INF, 1.0]),
            "nonfinite is true: 3 elements, 1 of them NaN and 1 infinite",
        ),
        (
            torch.tensor([complex(NAN, 0), 1]),
            "nonfinite is true: 2 elements, 1 of them NaN and 0 infinite",
        ),
    ],
)
def test_a_met_condition_says_what_it_found(value: Tensor, message: str) -> None:
    """The error names the condition and counts."""
    with pytest.raises(ConditionMet) as caught:
        kedge.error_if(kedge.nonfinite)(value)

    assert str(caught.value) == message


def test_any_condition_will_do() -> None:
    """A function of the value that returns a bool, or a tensor of one element, is a condition."""
    kedge.error_if(lambda v: False)(torch.ones(1))
    kedge.error_if(lambda v: v.sum() > 5)(torch.ones(1))
    with pytest.raises(ConditionMet, match="^<lambda> is true: 2 elements$"):
        kedge.error_if(lambda v: v.sum() > 5)(torch.tensor([3, 3]))


def test_a_condition_of_each_element_says_how_to_make_one_of_them() -> None:
    """PyTorch's own words do not name the condition."""
    with pytest.raises(WrongCall, match=r"lambda value: isnan\(value\)\.any\(\)\)$"):
        kedge.error_if(torch.isnan)(torch.ones(2))
    kedge.error_if(torch.isnan)(torch.ones(1))


def test_it_observes() -> None:
    """It returns nothing and prints as it is written."""
    assert kedge.error_if(kedge.nonfinite)(torch.ones(1)) is None
    assert repr(kedge.error_if(kedge.nonfinite)) == "error_if(nonfinite)"


def test_a_condition_is_looked_at_under_vmap() -> None:
    """Under `vmap` there is an answer for each sample, and one that is true stops the program."""
    model, x = torch.nn.Sequential(torch.nn.Identity()), torch.ones(4, 3)
    with kedge.hook(model, "0", kedge.error_if(kedge.nonfinite)):
        torch.func.vmap(model)(x)
        x[2, 1] = NAN
        with pytest.raises(ConditionMet, match="nonfinite is true: 12 elements, 1 of them NaN"):
            torch.func.vmap(model)(x)
