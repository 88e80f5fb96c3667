"""How values are spread over ranks; tests/watch/steps/ and tests/accelerator/ try it with several."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.sites.spread import counted_once, spread_of


class Scheduled(Tensor):
    """A tensor of somebody's own that has the attributes of a DTensor, with another meaning."""

    device_mesh = "fine"
    placements = 3


def test_a_tensor_with_the_attributes_of_a_dtensor_is_an_ordinary_one():
    """A name says nothing: a program may call its own things so."""
    value = torch.ones(2).as_subclass(Scheduled)
    assert not isinstance(value, DTensor)
    assert spread_of(value) is None
    assert counted_once([value]) == ([value], [])
