"""What several rules derive from a recording: each of it is derived once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from kedge.store.recording import Recording

T = TypeVar("T")


def once(derive: Callable[[Recording], T]) -> Callable[[Recording], T]:
    """Make a function return what it returned for the same recording before; nobody may change that."""

    @functools.wraps(derive)
    def derived(recording: Recording) -> T:
        known = recording.derived
        if derive not in known:
            known[derive] = derive(recording)
        result: T = known[derive]
        return result

    return derived
