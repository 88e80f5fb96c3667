"""The face of the device's kernel: rows for many programs, and PyTorch's reductions wherever the kernel cannot be used."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kedge import native
from kedge.actions.measure.devices import DeviceTables
from kedge.actions.measure.finished import FinishedStep
from kedge.actions.measure.host import HostTable
from kedge.actions.measure.table import Departures
from kedge.native import driver, on_device, reductions
from kedge.store.rows import FULL
from kedge.torch_internals import accelerators
from tests.native.ways import INTERPRETED

CPU = torch.device("cpu")


class StandIn:
    """What the kernel computes, program by program, where there is no Triton."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            numbers: Tensor, table: Tensor, first: int, count: int, what: int, *, num_warps: int
        ) -> None:
            assert numbers.numel() == count
            self.launches += 1
            for program in range(grid[0]):
                own = torch.cat(numbers.split(on_device.FOLD)[program :: grid[0]])
                table[first + program] = torch.tensor(reductions.row(own)[:7], dtype=table.dtype)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel, made to run on the CPU: Triton's interpreter if it is there, else a stand-in."""
    chosen = (
        importlib.import_module("kedge.native.device_kernel").statistics
        if INTERPRETED
        else StandIn()
    )
    monkeypatch.setattr(on_device, "KINDS", {"cpu"})
    monkeypatch.setattr(on_device, "_failed", {})
    monkeypatch.setattr(on_device, "_ran", set())
    monkeypatch.setattr(on_device, "_kernel", lambda: chosen)
    return chosen


def columns(values: list[Tensor], what: native.What = "full") -> dict[str, Any]:
    """Measure values as those of a device; returns the columns of the recording."""
    tables = DeviceTables(Departures())
    for site, value in enumerate(values):
        tables.measure(
            site, value, what, count=value.numel(), dim=None, draws=True, saturation=None
        )
    measured, snapshots = tables.end()
    step = FinishedStep(0, FULL, measured, snapshots, HostTable().end())
    return step.columns()


def test_every_value_has_one_row_in_the_recording(kernel: Any) -> None:
    """However many programs read it: their rows are added up, as exactly as on the host, beside values with a row alone."""
    torch.manual_seed(0)
    values = [
        torch.randn(3),
        torch.randn(30_000),
        torch.randn(200, 100).t(),
        torch.full((9000,), 1e-30),
        torch.randn(5),
    ]
    values[1][7], values[2][0, 0] = 0, math.inf
    with np.errstate(all="ignore"):
        found = columns(values)
    assert found["site"].tolist() == [0, 1, 2, 3, 4]
    assert found["count"].tolist() == [3, 30_000, 20_000, 9000, 5]
    for i, value in enumerate(values):
        row = native.measure(value)
        assert [found[name][i] for name in ("min", "max", "nonzero", "nonfinite", "nan")] == [
            row[name] for name in ("min", "max", "nonzero", "nonfinite", "nan")
        ]
        size = value.double().abs().sum().item()
        assert found["sum"][i] == pytest.approx(
            row["sum"], abs=2**-20 * size if math.isfinite(size) else 0
        )
        assert found["sumsq"][i] == pytest.approx(row["sumsq"], rel=2**-20)
        assert found["sampled"][i] == min(value.numel(), found["sampled"][i]) > 0


def test_rows_of_one_value_are_in_one_block(kernel: Any) -> None:
    """Values that do not fit into the rest of a block begin the next one; later steps use the same blocks."""
    tables = DeviceTables(Departures())
    for _ in range(2):
        for site in range(9):
            value = torch.full((on_device.FOLD * 200,) if site % 2 else (2,), float(site + 1))
            value[-1] = -1
            if INTERPRETED:
                value = value[-on_device.FOLD - 1 :].contiguous()
            tables.measure(
                site, value, "full", count=value.numel(), dim=None, draws=False, saturation=None
            )
        measured, snapshots = tables.end()
        found = FinishedStep(0, FULL, measured, snapshots, HostTable().end()).columns()
        assert found["max"].tolist() == [float(site + 1) for site in range(9)]
        assert found["min"].tolist() == [-1.0] * 9
        assert (found["nonzero"] == found["count"]).all()


def test_what_the_kernel_cannot_read_is_left_to_pytorch(kernel: Any) -> None:
    """A number that many places share, a dtype without a kernel, a subclass, memory that was given back: rows stay."""
    table = torch.full((1, 7), math.nan)
    given_back = torch.randn(4)
    given_back.untyped_storage().resize_(0)
    for numbers in (
        torch.ones(()).expand(4),
        torch.arange(4),
        torch.nn.Parameter(torch.ones(4)),
        given_back,
    ):
        assert not on_device.measure_into(table, 0, numbers, 0)
    assert table.isnan().all()
    found = columns([torch.ones(()).expand(70_000), torch.randn(3)])
    assert found["sum"][0] == 70_000
    assert on_device.why_not() == {}


def test_a_kernel_that_fails_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    """A compiler that is missing, a card that Triton does not know: the reason is kept, and PyTorch measures the value."""

    def fail() -> Any:
        nonlocal tries
        tries += 1
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    tries = 0
    monkeypatch.setattr(on_device, "_kernel", fail)
    found = columns([torch.ones(20_000), torch.ones(10)])
    assert found["sum"].tolist() == [20_000, 10]
    assert tries == 1
    assert on_device.why_not() == {"cpu": "RuntimeError: Failed to find C compiler."}
    assert not on_device.available(CPU)


def test_a_device_without_float64_keeps_rows_of_float32(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    """Not every device computes in float64, of which the kernel has need."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Required aspect fp64 is not supported on the device")

    monkeypatch.setattr(on_device.torch, "empty", refuse)
    assert not on_device.available(CPU)
    assert "fp64" in on_device.why_not()["cpu"]


def test_nothing_is_compiled_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    """Compiling and loading may break a capture; a kernel that has run before is part of the graph."""
    table, numbers = torch.full((2, 7), math.nan, dtype=torch.float64), torch.ones(4)
    assert on_device.measure_into(table, 0, numbers, 0)
    monkeypatch.setattr(accelerators, "is_capturing", lambda: True)
    assert on_device.measure_into(table, 1, numbers, 0)
    assert not on_device.measure_into(table, 1, numbers.double(), 0)
    assert table[1, 0] == 4


def test_other_kinds_of_devices_do_not_look_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported for a device that Triton does not compile for."""
    monkeypatch.setattr(on_device, "_kernel", lambda: pytest.fail("looked for"))
    assert not on_device.available(CPU)
    assert not on_device.available(torch.device("mps"))


@pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is not None, reason="Triton is installed"
)
def test_without_triton_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no dependency of Kedge's, and not of every PyTorch's."""
    monkeypatch.setattr(on_device, "KINDS", {"cpu"})
    monkeypatch.setattr(on_device, "_failed", {})
    assert not on_device.available(CPU)
    assert on_device.why_not() == {"cpu": "ModuleNotFoundError: No module named 'triton'"}


@pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret in this process")
def test_triton_s_interpreter_is_not_used_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy each value to the host; somebody has set it to find an error in kernels of their own."""
    monkeypatch.setattr(on_device, "KINDS", {"cpu"})
    monkeypatch.setattr(on_device, "_failed", {})
    assert not on_device.available(CPU)
    assert "TRITON_INTERPRET" in on_device.why_not()["cpu"]


def test_rows_are_added_up_as_values_are() -> None:
    """NaN stays in extremes; statistics that were not measured stay NaN."""
    table = np.array(
        [[1, 2, 3, 4, 5, 0, 0], [1, 2, -3, math.nan, 5, 1, 1], [7, 8, *[math.nan] * 3, 0, 0]]
    )
    rows = on_device.folded(table.astype(np.float32), [2, 0], [1, 2])
    assert rows[0] == pytest.approx([7, 8, math.nan, math.nan, math.nan, 0, 0], nan_ok=True)
    assert rows[1] == pytest.approx([2, 4, -3, math.nan, 10, 1, 1], nan_ok=True)
    assert on_device.folded(table, [], []).shape == (0, 7)


def test_the_line_of_the_version_says_how_devices_are_measured(
    monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    """``kedge --version -v``: not needed, there, or the reason and what it costs."""
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available=False: None)
    assert on_device.described() == "device_kernel: not needed, without a device"
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available=False: CPU)
    monkeypatch.setattr(accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(on_device, "available", lambda device: True)
    assert on_device.described() == "device_kernel: present, launched by Triton"
    monkeypatch.setitem(driver._failed, "cpu", "it is too old")
    assert on_device.described() == (
        "device_kernel: present, launched by Triton; not by its driver: it is too old"
    )
    monkeypatch.delitem(driver._failed, "cpu")
    monkeypatch.setattr(on_device, "available", lambda device: False)
    monkeypatch.setitem(on_device._failed, "cpu", "ModuleNotFoundError: No module named 'triton'")
    assert on_device.described() == (
        "device_kernel: missing (Triton: ModuleNotFoundError: No module named 'triton'): "
        "a value on a device takes a dozen of PyTorch's reductions, and sums are in float32."
    )
    monkeypatch.setattr(on_device, "KINDS", {"cuda"})
    assert on_device.described() == (
        "device_kernel: not needed, without a device for which there is one"
    )
