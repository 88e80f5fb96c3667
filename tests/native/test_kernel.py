"""The kernel that is shipped is that of its source, and compilers and assemblers of cards take it."""

from __future__ import annotations

import re

import pytest

from kedge.native import cuda, driver_library
from tests.marks import full
from tests.native import kernel

CLANG = pytest.mark.skipif(
    kernel.clang() is None,
    reason="there is no clang from release 19 on that compiles for AMD's cards",
)
HIPRTC = pytest.mark.skipif(
    kernel.hiprtc() is None, reason="there is no hiprtc, which builds of PyTorch for ROCm bring"
)
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
    assert len(spilled) >= len(driver_library.KERNELS)
    assert set(spilled) == {("0", "0")}


def test_it_has_the_kernels_that_the_driver_is_asked_for() -> None:
    """By their names, and no others; for the oldest card that it is made for."""
    text = cuda.ptx().decode()
    assert sorted(re.findall(r"\.entry (\w+)", text)) == sorted(driver_library.KERNELS)
    assert ".target sm_70" in text


# -- for HIP ------------------------------------------------------------------------------------


@CLANG
@pytest.mark.parametrize(
    ("architecture", "lanes"), [full("gfx90a", 64), ("gfx942", 64), ("gfx1100", 32)]
)
def test_cards_of_hip_take_it_without_memory_of_their_own(architecture: str, lanes: int) -> None:
    """Numbers are read 16 bytes at a time, from global memory; no register and no array is kept in a thread's memory."""
    made = kernel.assembly(architecture)
    facts = dict[str, set[str]]()
    for name, value in re.findall(r"^ +\.(\w+): +(\S+)$", made, re.MULTILINE):
        facts.setdefault(name, set()).add(value)
    assert set(driver_library.KERNELS) <= facts["name"]
    assert facts["wavefront_size"] == {str(lanes)}
    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert facts[name] == {"0"}, name
    assert re.search(r"global_load_(dwordx4|b128)", made)
    assert not re.search(r"\b(flat|scratch)_(load|store)", made)


@HIPRTC
def test_hiprtc_compiles_it() -> None:
    """From the files that are shipped, without a card."""
    code = kernel.code_of_hiprtc("gfx90a")
    assert code.startswith(b"\x7fELF")
    for name in driver_library.KERNELS:
        assert name.encode() in code
