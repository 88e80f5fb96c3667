"""Every test that asks for a `way` is run in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kedge import native
from tests.native.ways import PYTORCH, Bound, Way, compiled


@pytest.fixture(params=[*native.instruction_sets(), "pytorch"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Each way: every instruction set that this processor has, and PyTorch's reductions."""
    if request.param == "pytorch":
        yield PYTORCH
        return
    before = native.use(request.param)
    yield Way(request.param, compiled, Bound(2**-40, 2**-21))
    native.use(before)
