"""Warnings that Kedge ignores for a while."""

from __future__ import annotations

import warnings

from kedge.hooks.placing.own_warnings import ANOMALY_WARNINGS, ignore_warnings, show_warnings


def test_warnings_that_were_printed_once_are_not_printed_again() -> None:
    """What Kedge ignores for a while is ignored, and Python still knows which of the program's warnings it has printed."""
    registry: dict[str, int] = {}

    def warn(message: str) -> None:
        warnings.warn_explicit(message, UserWarning, "prog.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("default")
        warn("once")
        ignore_warnings(ANOMALY_WARNINGS)
        warn("once")
        warn("Error detected in MulBackward0")
        show_warnings(ANOMALY_WARNINGS)
        warn("once")
        warn("Error detected in DivBackward0")
    assert [str(each.message) for each in printed] == ["once", "Error detected in DivBackward0"]
