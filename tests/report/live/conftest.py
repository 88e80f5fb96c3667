"""What the tests of the live screen share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.live.followed import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has not begun."""
    run = Run(tmp_path / "run.kedge")
    yield run
    run.close()
