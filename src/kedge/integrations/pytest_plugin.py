"""Kedge in pytest: the mark ``finite`` and the fixture ``kedge_watch``.

This is loaded in every pytest run, so it is light.

# Note [The mark]
A marked test is recorded, every step in full, to a temporary folder. The test fails if the rule
NAN-BORN has findings; if it fails by itself, the findings are added to its report.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kedge.watch.run.block import WatchBlock

_MARK = (
    "finite: fail if an output or a gradient of a module holds a NaN or an infinity, "
    "and report where it was made"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _MARK)


@pytest.fixture
def kedge_watch(tmp_path: Path) -> Callable[..., WatchBlock]:
    """A function that watches a block of a test, every step in full; the recording is in the test's `tmp_path`.

    ``with kedge_watch() as run: train()``, and then ``assert run.findings() == ()``. Arguments are
    those of `kedge.watch`.
    """
    from kedge.watch.run.block import watch

    def begin(path: str = "run.kedge", **options: Any) -> WatchBlock:
        return watch(tmp_path / path, **{"every": 1, "budget": None, "strict": True, **options})

    return begin


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch a test with the mark; see Note [The mark]."""
    if item.get_closest_marker("finite") is None:
        return (yield)
    with TemporaryDirectory(prefix="kedge-") as folder:
        watched = _watched(Path(folder))
        try:
            outcome = yield
        except BaseException as error:
            watched.end(error)
            verdict = _verdict(watched)
            if verdict:
                item.add_report_section("call", "kedge", verdict)
            raise
        watched.end()
        verdict = _verdict(watched)
    if verdict:
        pytest.fail(verdict, pytrace=False)
    return outcome


def _watched(folder: Path) -> WatchBlock:
    from kedge.watch.run.block import watch

    watched = watch(folder / "test.kedge", every=1, budget=None, strict=True)
    watched.tell = None  # the test reports instead
    return watched.begin()


def _verdict(watched: WatchBlock) -> str:
    from kedge.rules.nonfinite.nan_born import NanBorn

    lines = []
    for finding in watched.findings([NanBorn()]):
        lines.append(f"{finding.code}: {finding.message}")
        if finding.remedy:
            lines.append(finding.remedy)
    return "\n".join(lines)
