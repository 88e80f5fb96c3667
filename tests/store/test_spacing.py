"""Which elements of a value are drawn: evenly spread over every dimension."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kedge.store.exponents import spacing

SHAPES = [(512, 784), (64, 1024), (64, 16, 8, 8), (768, 768), (80, 64, 3, 3), (4096, 1000), (1152, 1152), (1000, 1000)]


@pytest.mark.parametrize("most", [256, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_or_column_is_left_out(shape, most):
    """The drawn elements are of as many places of each dimension as can be, however its size divides the whole."""
    drawn = np.arange(math.prod(shape))[:: spacing(math.prod(shape), most)]

    assert 0.9 * most < len(drawn) <= most
    for size, places in zip(shape, np.unravel_index(drawn, shape), strict=True):
        assert len(np.unique(places)) >= 0.6 * min(size, most)


@pytest.mark.parametrize(("number", "distance"), [(0, 1), (1, 1), (256, 1), (257, 2), (512, 3), (513, 4), (65536, 257)])
def test_few_elements_are_all_drawn(number, distance):
    """More of them only at a distance that shares no factor with their number."""
    assert spacing(number, 256) == distance
