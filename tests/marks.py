"""Marks of single cases in a list of parameters."""

from __future__ import annotations

from typing import Any

import pytest


def full(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - as pytest calls it
    """A case that is run by `make test-all` alone: others of its kind are run always."""
    return pytest.param(*values, id=id, marks=pytest.mark.full)


def sampled(cases: Any, sample: Any) -> list[Any]:
    """Each of the cases, those outside the sample marked as `full` does."""
    return [case if case in sample else full(case) for case in cases]
