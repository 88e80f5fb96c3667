"""benchmarks/gpu.py runs from beginning to end with tiny models, and what is wrong in a part costs that part alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.accelerator import build

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
TITLES = ("Looking in each step", "Host time", "One value", "Is it right?", "What is seen", "Watching", "Offloading")  # fmt: skip

pytestmark = pytest.mark.timing


@pytest.fixture
def gpu(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module("gpu")
    for name in set(sys.modules) - before:
        if name in ("gpu", "models") or name.partition(".")[0] == "on_card":
            del sys.modules[name]


def tried(out, *more):
    """Run the script with tiny models; return what it printed, without the tables, and the tables."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--try", "--out", str(out), *more]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr
    tables = out.read_text()
    assert done.stdout.endswith(f"\n{tables}\n")
    assert "raised" not in done.stdout
    assert "4 of 4 equal to plain" in tables
    assert tables.count("equal to plain") == tables.count("4 of 4 equal to plain")
    assert "80 of 80 right" in tables
    assert "NAN-BORN" in tables
    return done.stdout.removesuffix(f"\n{tables}\n"), tables


@pytest.mark.full
def test_it_runs_on_whatever_there_is(tmp_path):
    """All parts print lines as they come, and the tables of all are in the file, too."""
    lines, tables = tried(tmp_path / "cpu.md")
    assert "note: no accelerator: these figures mean nothing" in lines
    for title in TITLES:
        assert f"### {title}" in tables


@pytest.mark.full
@pytest.mark.skipif(build.compiler() is None, reason="the simulated device needs a C++ compiler")
def test_it_runs_on_the_simulated_device(tmp_path):
    """There waits are counted, memory and the link are measured, and tensors move."""
    lines, tables = tried(tmp_path / "sim.md", "--import", "tests.accelerator.sim:load")
    assert "simulated accelerator" in lines
    waits = [line for line in tables.splitlines() if line.startswith("| waits")]
    assert len(waits) == 5
    assert all(line.endswith("| 0 |") for line in waits)
    assert "link: " in lines


def test_a_part_that_is_not_there_is_refused(gpu):
    """By name, before anything is measured."""
    with pytest.raises(Exception, match="no part 'speed': there are looking, kernel"):
        gpu.parts("looking,speed")


def test_a_part_that_fails_costs_itself(gpu, tmp_path, monkeypatch, capsys):
    """An error and a part that does not end are a line each; what was found before stays."""

    def failing(bench):
        table = bench.sheet.table("Begun")
        table.put("a row", "a column", "a figure")
        raise ValueError("no\nsuch thing")

    def endless(bench):
        time.sleep(30)

    def well(bench):
        bench.sheet.table("Done").put("a row", "a column", "another")

    parts = {"failing": (failing, 10), "endless": (endless, 1), "well": (well, 10)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    out = tmp_path / "out.md"
    bench = gpu.Bench(gpu.Device(), gpu.Sheet(out), tmp_path, tiny=False)
    gpu.run(bench, list(parts))
    told = out.read_text()
    assert "| a row | a figure |" in told
    assert "| a row | another |" in told
    assert "* failing raised ValueError: no such thing @ " in told
    assert "test_gpu_benchmark.py" in told
    assert "* endless raised OutOfTime: 1 seconds are up" in told
    assert told in capsys.readouterr().out


def test_the_parts_take_less_than_nine_minutes(gpu):
    """Also if each is cut off."""
    assert sum(seconds for _, seconds in gpu.PARTS.values()) <= 9 * 60


def test_waits_of_a_card_are_its_warnings(gpu, monkeypatch):
    """CUDA warns at each wait while it is asked to, and of that itself."""
    device = gpu.Device()
    modes = []

    def set_sync_debug_mode(mode):
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    module = SimpleNamespace(set_sync_debug_mode=set_sync_debug_mode)
    monkeypatch.setattr(device, "_module", module)

    def work():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert device.waits(work) == 3
    assert modes == ["warn", "default"]


def test_a_card_is_held_while_work_is_queued(gpu, monkeypatch):
    """So that the host's time is not part of the device's."""
    device = gpu.Device()
    order = []
    monkeypatch.setattr(
        device, "_module", SimpleNamespace(_sleep=lambda cycles: order.append("held"))
    )
    assert device.device_seconds(lambda: order.append("queued")) >= 0
    assert order == ["held", "queued"]


def test_rounds_end_when_their_seconds_are_up(gpu):
    """But not before the least."""
    sheet = importlib.import_module("on_card.sheet")
    assert list(sheet.rounds(0, least=2, most=5)) == [0, 1]
    assert list(sheet.rounds(60, least=2, most=3)) == [0, 1, 2]


def test_figures_that_are_wrong_are_told(gpu):
    """The comparison with NumPy can fail: in a sum, in a count, and where a NaN was overlooked."""
    right = importlib.import_module("on_card.right")
    value = torch.tensor([1.0, -2.0, 0.0, 5.0])
    found = {
        "count": 4, "nonfinite": 0, "nan": 0, "nonzero": 3, "min": -2.0, "max": 5.0, "sum": 4.0, "sumsq": 30.0,
    }  # fmt: skip
    assert not right._differences(SimpleNamespace(**found), value, right.KERNEL)
    for name, figure in {"sum": 4.001, "nonzero": 4, "max": float("nan")}.items():
        wrong = SimpleNamespace(**{**found, name: figure})
        assert right._differences(wrong, value, right.KERNEL).startswith(f"{name} ")
