"""The causes of sites that did not fire."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """The reason why a site did not fire, and the remedy."""

    why: str
    remedy: str


class ExpectedSilence(Cause):
    """A cause that is expected where many sites were hooked at once."""


WITHOUT_GRAD = "the forward ran without grad, or nothing before it is trainable"
"""What stands in place of a remedy where a value has no gradient."""
