"""What a cause is."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """Why a site did not fire, and what to do."""

    why: str
    remedy: str


class ExpectedSilence(Cause):
    """A cause with which nothing is wrong where many sites were hooked at once."""
