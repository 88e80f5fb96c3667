"""The kernel that is shipped is that of its source, and cards' assemblers take it."""

from __future__ import annotations

import re

import pytest

from kedge.native import driver
from tests.native import kernel

NEEDED = pytest.mark.skipif(kernel.missing() is not None, reason=str(kernel.missing()))


@NEEDED
def test_the_shipped_kernel_is_made_from_its_source() -> None:
    """Byte for byte; `python -m tests.native.kernel` writes it again."""
    assert kernel.made() == kernel.SHIPPED.read_bytes()


@NEEDED
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_cards_take_it_without_spills(architecture: str) -> None:
    """No register of any kernel or function is kept in memory."""
    report = kernel.assembled(architecture)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spilled) >= len(driver.KERNELS)
    assert set(spilled) == {("0", "0")}


def test_it_has_the_kernels_that_the_driver_is_asked_for() -> None:
    """By their names, and no others; for the oldest card that it is made for."""
    text = driver.ptx().decode()
    assert sorted(re.findall(r"\.entry (\w+)", text)) == sorted(driver.KERNELS)
    assert ".target sm_70" in text
