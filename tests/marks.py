"""Marks of tests that need a device, and of single cases in a list of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DEVICE = torch.accelerator.current_accelerator(check_available=True)
"""The kind of device of this machine besides the CPU; None without one."""

needs_device = pytest.mark.skipif(
    DEVICE is None, reason="needs an accelerator, and this machine has none"
)
needs_cuda = pytest.mark.skipif(
    DEVICE is None or DEVICE.type != "cuda", reason="needs a CUDA device, and there is none"
)


measured = pytest.mark.measured
"""Of tests whose subject is a duration as the machine measures it; if one fails beside others, it is repeated alone."""


def full(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - as pytest calls it
    """A case that is run by `make test-all` alone: others of its kind are run always."""
    return pytest.param(*values, id=id, marks=pytest.mark.full)


def sampled(cases: Any, sample: Any) -> list[Any]:
    """Each of the cases, those outside the sample marked as `full` does."""
    return [case if case in sample else full(case) for case in cases]
