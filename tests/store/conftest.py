"""Programs that use the store by itself, without the rest of Kedge and without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.store import recording

Alone = Callable[..., list[str]]

_PACKAGE = str(Path(recording.__file__).parents[1])
_PREAMBLE = f"""
import sys, types
sys.modules["torch"] = None  # an import of it fails
sys.modules["kedge"] = types.ModuleType("kedge")
sys.modules["kedge"].__path__ = [{_PACKAGE!r}]
"""


@pytest.fixture(scope="session")
def alone() -> Alone:
    """Return the command line that runs code where ``kedge.store`` is there and torch is not."""

    def command(code: str, *arguments: object) -> list[str]:
        return [sys.executable, "-c", _PREAMBLE + code, *map(str, arguments)]

    return command
