"""Every test that asks for a `way` is run in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kedge import native
from tests.native.ways import INTERPRETED, PYTORCH, TRITON, Bound, Way, compiled

OTHERS = {way.name: way for way in ((PYTORCH, TRITON) if INTERPRETED else (PYTORCH,))}


@pytest.fixture(params=[*native.instruction_sets(), *OTHERS])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Each way: every instruction set that this processor has, PyTorch's reductions, and Triton's kernel if it is interpreted."""
    if request.param in OTHERS:
        yield OTHERS[request.param]
        return
    before = native.use(request.param)
    yield Way(request.param, compiled, Bound(2**-40, 2**-21))
    native.use(before)
