"""Values on a device of HIP's, against the same values on the host.

The simulated device runs the source of the kernel that hiprtc compiles for a card, with wavefronts
of 64 or 32 lanes, so what it computes is tried here as well as what a launch is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kedge.native import driver, hip, on_device
from kedge.native.driver_library import DriverFailed
from tests.native.test_launched import (
    Measuring,
    assert_alike,
    at_its_place,
    measured,
    some,
    with_activations,
)
from tests.native.test_layouts import laid_out
from tests.native.test_statistics import values
from tests.native.ways import COMPILED

pytestmark = COMPILED
few = settings(some, max_examples=15)
NARROW, WIDE = "gfx1100", "gfx942:sramecc+:xnack-"


@pytest.fixture(params=[WIDE, NARROW])
def card(sim: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The simulated device, as a card with wavefronts of 64 or of 32 lanes."""
    with sim.by_hip(request.param), sim.without_delays():
        yield sim


@pytest.fixture
def wide(sim: Any) -> Iterator[Any]:
    """The simulated device, as a card with wavefronts of 64 lanes."""
    with sim.by_hip(WIDE), sim.without_delays():
        yield sim


@given(value=values())
@few
def test_every_statistic_is_that_of_the_host(card: Any, value: Tensor) -> None:
    """Also the histogram, of every format, size and place in memory, in one launch."""
    launches = card.launches()
    assert_alike(measured([at_its_place(value)]), measured([value]))
    assert card.launches() == launches + 1


@given(value=laid_out())
@few
def test_every_view_is_read_where_it_is(wide: Any, value: Tensor) -> None:
    """Sliced, permuted, expanded and overlapping ones; the same numbers are drawn."""
    assert_alike(measured([at_its_place(value)]), measured([value]))


def test_channels_and_saturation_are_those_of_the_host(card: Any) -> None:
    """In every format, of vectors, images and sequences, dense ones and those with gaps."""
    torch.manual_seed(2)
    image = (torch.randn(3, 70, 6, 5) - 2.5).relu()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        given = {
            "tanh": (3 * torch.randn(40, 30)).tanh(),
            "softmax": (5 * torch.randn(20, 10)).softmax(-1),
            "image": image,
            "last": image.to(memory_format=torch.channels_last),
            "wide": (torch.randn(3, 900) - 2).relu(),
            "one": torch.randn(5, 1),
        }
        given = {name: value.to(dtype) for name, value in given.items()}
        there = {name: at_its_place(value) for name, value in given.items()}
        found, truth = with_activations(there), with_activations(given)
        for name in ("count", "nonzero", "saturated", "active", "exponents"):
            assert list(found[name]) == list(truth[name]), name
        assert any(truth["active"])
        assert max(truth["saturated"]) > 0


def large() -> list[Tensor]:
    """Values that many blocks of threads read, with numbers that float32 cannot add up."""
    torch.manual_seed(3)
    x = torch.randn(40_001)
    x[27_777], x[29_999], x[5] = math.inf, math.nan, 3e38
    return [
        x, x[1:], x.double(), x.half(), x.bfloat16()[:-1], x[:40_000].reshape(500, 80).t(),
        torch.full((30_000,), 1e-30), torch.zeros(9_000), torch.full((20_000,), 2e38),
    ]  # fmt: skip


def test_the_last_of_many_blocks_adds_their_parts_up(card: Any) -> None:
    """In every format."""
    given = large()
    with np.errstate(all="ignore"):
        assert_alike(measured([at_its_place(value) for value in given]), measured(given))


def test_the_last_block_leaves_the_counter_as_it_was(wide: Any) -> None:
    """So that the next value of the same row is right, in steps that use the same memory again."""
    measuring = Measuring()
    for step in range(3):
        value = torch.linspace(-1, 2 + step, 9_000)
        measuring.observe("v", value.to("sim"), step=step)
        assert_alike(measuring.columns(step), measured([value]))


def test_wavefronts_of_either_width_give_the_same_bits(sim: Any) -> None:
    """Threads are joined in groups of 32 on both."""
    there = [at_its_place(value) for value in large()]
    rows = []
    for architecture in (NARROW, WIDE):
        with sim.by_hip(architecture), sim.without_delays():
            found = measured(there)
            rows.append(np.stack([found[name] for name in ("sum", "sumsq", "min", "max")]))
    assert rows[0].tobytes() == rows[1].tobytes()


def test_the_device_of_the_thread_is_what_it_was(wide: Any) -> None:
    """Values of the other device are measured there, and the program's calls go where they went."""
    given = [torch.randn(50 + i) for i in range(6)]
    there = [value.to(f"sim:{i % 2}") for i, value in enumerate(given)]
    assert_alike(measured(there), measured(given))
    assert wide._C.hip_device() == 0


def test_the_time_of_the_device_is_that_of_its_clock(wide: Any) -> None:
    """In seconds, at the rate that the driver tells."""
    measuring = Measuring()
    for i in range(5):
        measuring.observe(f"v{i}", torch.ones(3).to("sim"))
    measuring.meter.finish()
    assert 0 < measuring.meter.finished.device_seconds < 5


def test_a_captured_graph_is_left_alone_and_a_launch_that_fails_reduced(wide: Any) -> None:
    """As with CUDA's driver."""
    there = torch.linspace(-1, 1, 50).to("sim")
    measuring = Measuring()
    measuring.observe("before", there)
    with wide.capturing():
        measuring.observe("captured", there * 1)
    with wide.failing_launches(700):
        measuring.observe("failed", there * 2)
    found = measuring.columns()
    assert wide.launches() == 1
    assert sorted(found["max"].tolist()) == [1, 2]


def test_the_kernel_is_compiled_once_for_an_architecture(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many devices and meters there are."""
    asked, source = list[str](), hip.source
    monkeypatch.setattr(hip, "source", lambda name: asked.append(name) or source(name))
    with sim.by_hip():
        for _ in range(2):
            measured([torch.ones(3).to("sim"), torch.ones(3).to("sim:1")])
        assert on_device.described() == "device_kernel: present, launched by the device's driver"
    assert sorted(asked) == ["statistics.cu", "work.h"]
    assert sim.launches() == 4


# -- where it cannot be used --------------------------------------------------------------------


def given_up() -> str:
    """Measure a value, which PyTorch's reductions do; returns why the driver does not."""
    found = measured([torch.linspace(-1, 1, 50).to("sim")])
    assert found["max"].tolist() == [1]
    return driver.why_not()["sim"]


def test_a_source_that_does_not_compile(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the first error of the compiler's log."""
    monkeypatch.setattr(hip, "source", lambda name: b"int x;")
    with sim.by_hip():
        assert given_up() == (
            "hiprtc does not compile for gfx942:sramecc+:xnack-: "
            "statistics.cu:1:1: error: it is not whole"
        )
    assert sim.launches() == 0


def test_a_code_object_of_another_card(sim: Any) -> None:
    """The reason is the runtime's own."""
    with sim.by_hip("x"):
        assert given_up() == "hipModuleLoadData failed: it is not one of its own (error 200)"


def test_a_pytorch_that_tells_c_another_stream(sim: Any) -> None:
    """A kernel on the default stream would read values that the current one has not made yet."""
    with sim.by_hip(stream_function="sim_default_stream"):
        assert given_up() == "this PyTorch does not tell C its current stream"
    assert sim.launches() == 0


def test_a_runtime_without_a_function(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is older than this Kedge knows; C is not connected to it."""
    monkeypatch.setattr(hip.Hip, "capturing", "hipStreamIsCapturing_of_another_release")
    with pytest.raises(AttributeError, match="of_another_release"), sim.by_hip():
        pass


@pytest.mark.parametrize(
    ("cuda", "rocm", "why"),
    [
        ("12.9", None, "libcuda.so.1 cannot be loaded"),
        (None, "7.0", "libamdhip64.so cannot be loaded"),
        (None, None, "built for neither CUDA nor ROCm"),
    ],
)
def test_which_driver_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, rocm: str | None, why: str
) -> None:
    """That of what PyTorch was built for; what is missing is the reason."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(driver, "_failed", {})
    try:
        driver.find()
    except DriverFailed as missing:
        assert why in str(missing)  # noqa: PT017 - a machine may have the one that is looked for
    else:
        assert cuda or rocm


def test_the_runtime_is_the_one_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By whatever path PyTorch has it, with the compiler of the same folder."""
    (tmp_path / "some lib").mkdir()
    runtime = tmp_path / "some lib" / "libamdhip64.so.7.1.2"
    for name in ("hiprtc-builtins.so.7", "hiprtc.so.6", "hiprtc.so.7", "hiprtc.so.7.1.2"):
        (runtime.parent / f"lib{name}").touch()
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 00:00 0 [heap]\n"
        "7f01-7f02 r--p 00000000 fd:01 42                 /usr/lib/libc.so.6\n"
        f"7f02-7f03 r-xp 00001000 fd:01 43                 {runtime}\n"
    )
    monkeypatch.setattr(hip, "_MAPS", maps)
    assert hip.loaded("libamdhip64.so") == runtime
    assert hip.loaded("libhiprtc.so") is None
    assert hip.beside(runtime, "libhiprtc.so") == runtime.parent / "libhiprtc.so.7"
    assert hip.beside(Path("libamdhip64.so"), "libhiprtc.so") is None
