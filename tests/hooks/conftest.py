"""What the tests of hooks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hook_tables import hook_tables


@pytest.fixture
def tables() -> Callable[..., dict[str, Any]]:
    """The function that lists what is hooked on models and tensors."""
    return hook_tables
