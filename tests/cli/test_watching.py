"""Watching never ends the program that is watched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kedge.cli.watching import Watching
from kedge.watch.run.options import WatchOptions


class Broken:
    """A watch that cannot be ended."""

    summary, record = "what came out", SimpleNamespace(dump=None)

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("no end")


class Taken:
    """Takes what is recorded, and keeps nothing."""

    def sites(self, *_: object) -> None: ...

    def stats(self, *_: object) -> None: ...

    def event(self, *_: object) -> None: ...


@pytest.fixture
def told() -> list[str]:
    """The messages to the user, as a list that grows."""
    return []


def test_a_watch_that_cannot_begin_is_reported(told: list[str]) -> None:
    """The program goes on unwatched, and nothing comes out."""
    watching = Watching(Taken(), WatchOptions("conv["), told.append)

    watching.begin()

    (message,) = told
    assert message.startswith("beginning to watch failed: SelectorError: ")
    assert message.endswith("; the program goes on unwatched")
    assert watching.finish() is None


def test_a_watch_that_cannot_end_is_reported(told: list[str]) -> None:
    """What came out until then is given, and the program's ending stays its own."""
    watching = Watching(Taken(), WatchOptions(), told.append)
    broken: Any = Broken()
    watching.watch = broken

    assert watching.finish() == "what came out"
    (message,) = told
    assert message.startswith("ending the watch failed: RuntimeError: no end")
    assert message.endswith("; the end of the recording may be missing")
