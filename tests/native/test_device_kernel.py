"""The Triton kernel: what it computes, in Triton's interpreter, and whether it compiles for cards that are not here."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge import native
from kedge.native import on_device
from tests.native.ways import INTERPRETED, TRITON, by_triton, numbers

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; CUDA builds of PyTorch bring it"
)
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="run with TRITON_INTERPRET=1 by the test that starts a process for it"
)
FOLDER = Path(__file__).parent
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]


def launch(x: torch.Tensor, programs: int, what: native.What = "full") -> torch.Tensor:
    """Run the kernel in the interpreter with a number of programs; returns their rows."""
    rows = torch.full((programs, 7), math.nan, dtype=torch.float64)
    statistics = importlib.import_module("kedge.native.device_kernel").statistics
    with np.errstate(all="ignore"):
        statistics[(programs,)](x, rows, 0, x.numel(), native.CODES[what], num_warps=4)
    return rows


@pytest.mark.skipif(INTERPRETED, reason="this is the process that was started")
def test_the_kernel_passes_all_tests_of_the_native_pass() -> None:
    """Run by Triton's interpreter: the same values, the same properties, and the bounds of the pass in C."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(FOLDER),
        "-k",
        "triton or device",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@interpreted
@pytest.mark.parametrize("size", [8192, 3 * 8192, 50_000])
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_programs_take_folds_in_turn(size: int, programs: int) -> None:
    """Each number is read once, however few programs there are, and only the last fold may be short."""
    torch.manual_seed(0)
    x = torch.randn(size)
    x[::7] = 0
    row, wide = on_device.folded(launch(x, programs).numpy(), [0], [programs])[0], numbers(x)
    assert row[2:].tolist() == [wide.min(), wide.max(), np.count_nonzero(wide), 0, 0]
    assert row[0] == pytest.approx(wide.sum(), abs=TRITON.bound.other * np.abs(wide).sum())
    assert row[1] == pytest.approx((wide * wide).sum(), rel=TRITON.bound.other)


@interpreted
def test_one_program_s_bad_numbers_are_read_again_and_no_other_s() -> None:
    """Sums of the others are the same bits as without the bad number."""
    torch.manual_seed(0)
    x = torch.randn(3 * on_device.FOLD)
    before = launch(x, 3)
    x[on_device.FOLD + 5] = math.nan
    after = launch(x, 3)
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert after[1].tolist() == pytest.approx([math.nan] * 4 + [on_device.FOLD, 1, 1], nan_ok=True)


@interpreted
def test_what_is_not_asked_for_stays_unmeasured() -> None:
    """A norm has its sum too, of which the sign of a loss is read, and the count of non-finite numbers; a sum is alone."""
    x = torch.tensor([3.0, -5.0])
    nan = math.nan
    assert launch(x, 1, "norm")[0].tolist() == pytest.approx(
        [-2, 34, nan, nan, nan, 0, 0], nan_ok=True
    )
    assert launch(x, 1, "finite")[0].tolist() == pytest.approx([-2] + [nan] * 6, nan_ok=True)
    large = torch.full((4,), 3e38)
    assert launch(large, 1, "norm")[0].tolist() == pytest.approx(
        [4 * 3e38, 36e76, nan, nan, nan, 0, 0], nan_ok=True, rel=1e-6
    )


@interpreted
def test_rows_may_be_of_float32() -> None:
    """A row takes what its dtype holds."""
    found = by_triton(torch.tensor([1.5, 0.0, -3.0]), torch.float32)
    assert list(found.values()) == [-1.5, 11.25, -3, 1.5, 2, 0, 0, 3]


@interpreted
def test_the_host_knows_how_much_a_program_reads() -> None:
    """Rows are reserved for as many programs as there are folds."""
    kernel = importlib.import_module("kedge.native.device_kernel")
    assert kernel.FOLD.value == kernel.TILE.value * kernel.TILES.value == on_device.FOLD
    assert [kernel.FULL.value, kernel.NORM.value, kernel.FINITE.value] == list(
        native.CODES.values()
    )


def compiled(target: tuple[Any, ...], dtype: str, what: int, tmp_path: Path) -> Any:
    """Compile the kernel for a card as `on_device` does."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.backends.compiler")
    kernel = importlib.import_module("kedge.native.device_kernel")
    source = triton.compiler.ASTSource(
        kernel.statistics,
        signature={
            "numbers": f"*{dtype}",
            "rows": "*fp64",
            "first": "i32",
            "count": "i64",
            "what": "constexpr",
        },
        constexprs={(4,): what},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        return triton.compile(source, target=compiler.GPUTarget(*target), options={"num_warps": 4})


class Card:
    """A card for which Triton compiles, and on which nothing runs."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 99  # kernels are kept by the number of their device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not compiled")
def test_no_size_makes_triton_compile_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel serves every count, up to beyond 2^31, and every row; only where a value begins makes another one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = importlib.import_module("triton.runtime").driver
    statistics = importlib.import_module("kedge.native.device_kernel").statistics
    value, table = torch.ones(64), torch.zeros(4, 7, dtype=torch.float64)

    def kernel(count: int, first: int, offset: int) -> str:
        """Compile as a launch does; returns which kernel it is."""
        return statistics.warmup(
            value[offset:], table, first, count, 0, num_warps=4, grid=(1,)
        ).hash

    monkeypatch.setattr(driver, "_active", Card())
    same = {
        kernel(*case)
        for case in [(1, 0, 0), (16, 1, 0), (17, 16, 4), (1 << 33, 5, 8), (1000, 1 << 20, 0)]
    }
    other = kernel(17, 16, 1)
    assert len(same) == 1
    assert other not in same


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not compiled")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_the_kernel_compiles_for_cards_that_are_not_here(
    target: tuple[Any, ...], dtype: str, tmp_path: Path
) -> None:
    """The interpreter accepts what compilers refuse; a machine's code comes out, with shared memory for one number a warp alone."""
    triton = importlib.import_module("triton")
    if not any(backend.compiler.supports_target(importlib.import_module("triton.backends.compiler").GPUTarget(*target))
               for backend in triton.backends.backends.values()):  # fmt: skip
        pytest.skip(f"this Triton has no compiler for {target[0]}")
    for what in native.CODES.values() if dtype == "fp32" else [native.CODES["full"]]:
        built = compiled(target, dtype, what, tmp_path)
        assert built.asm["cubin" if target[0] == "cuda" else "hsaco"]
        assert built.metadata.shared <= 256
        if target[0] == "cuda":
            assert "ld.global.v" in built.asm["ptx"], "numbers are read one by one"
            assert ".ftz" not in built.asm["ptx"], "subnormal numbers are flushed"
            assert "atom." not in built.asm["ptx"], "the order in which programs end may show"
        else:
            assert ".vgpr_spill_count: 0" in built.asm["amdgcn"]
