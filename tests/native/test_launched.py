"""Values on a device whose driver launches the kernel, against the same values on the host.

The simulated device's driver computes the rows as the kernel does, so what is tried here is all
that is around it: what a launch is given, where rows are, and what is done where none is possible.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import kedge
from kedge import native
from kedge.actions.measure.meter import Meter
from kedge.actions.measure.site_table import MeasuredSite
from kedge.native import cuda, driver, on_device
from kedge.sites.site import Site
from kedge.store.rows import LIGHT
from kedge.torch_internals import accelerators, device_graphs
from tests.native.test_layouts import laid_out
from tests.native.test_statistics import values
from tests.native.ways import COMPILED

pytestmark = COMPILED
some = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
EXACT = (
    "site",
    "count",
    "nonzero",
    "nonfinite",
    "nan",
    "sampled",
    "saturated",
    "active",
    "exponents",
)
ROUND = 2**-20


class Steps:
    """What a meter passes on, by step."""

    def __init__(self) -> None:
        self.columns: dict[int, Mapping[str, Any]] = {}

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        self.columns[step] = columns


class Measuring:
    """A meter, and a site for each value that is given to it."""

    def __init__(self, what: native.What = "full", *, draws: bool = True) -> None:
        self.meter = Meter(what)
        self.meter.draws = draws
        self.meter.finished.sink = self.steps = Steps()
        self._at: dict[Site, Callable[..., None]] = {}

    def observe(self, name: str, value: Tensor, *, kind: str = "out", step: int = 0) -> None:
        site = Site(name, kind)
        if site not in self._at:
            measure = self.meter.bind_value(site)
            assert measure is not None
            self._at[site] = measure
        self._at[site](value, step)

    def columns(self, step: int = 0) -> Mapping[str, Any]:
        self.meter.finish()
        return self.steps.columns[step]


def measured(given: Sequence[Tensor], what: native.What = "full") -> Mapping[str, Any]:
    """Measure each value at a site of its own, in one step."""
    measuring = Measuring(what)
    for i, value in enumerate(given):
        measuring.observe(f"v{i}", value)
    return measuring.columns()


def assert_alike(found: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
    """Hold the columns of a step to those of the host: counts and extremes exactly, sums to the rounding."""
    for name in EXACT:
        assert list(found[name]) == list(truth[name]), name
    for name in ("min", "max"):
        np.testing.assert_array_equal(found[name], truth[name], err_msg=name)
    np.testing.assert_allclose(found["sumsq"], truth["sumsq"], rtol=ROUND)
    bound = ROUND * np.sqrt(truth["count"] * truth["sumsq"])
    for one, other, near in zip(found["sum"], truth["sum"], bound, strict=True):
        if math.isfinite(other):
            assert abs(one - other) <= near
        else:
            assert one == pytest.approx(other, nan_ok=True)


def at_its_place(value: Tensor, device: str = "sim") -> Tensor:
    """Copy the memory under a view to a device, and return the same view of it."""
    flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return flat.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


@given(value=values())
@some
def test_every_statistic_is_that_of_the_host(sim: Any, value: Tensor) -> None:
    """Also the histogram, of every format, size and place in memory, in one launch."""
    launches = sim.launches()
    assert_alike(measured([at_its_place(value)]), measured([value]))
    assert sim.launches() == launches + 1


@given(value=laid_out())
@some
def test_every_view_is_read_where_it_is(sim: Any, value: Tensor) -> None:
    """Sliced, permuted, expanded and overlapping ones; the same numbers are drawn."""
    there = at_its_place(value)
    launches = sim.launches()
    assert_alike(measured([there]), measured([value]))
    assert sim.launches() == launches + 1


def test_common_layouts_of_a_model(sim: Any) -> None:
    """Each is one launch, and nothing is copied for it."""
    torch.manual_seed(1)
    x, image = torch.randn(130, 96), torch.randn(3, 8, 17, 19)
    last = image.to(memory_format=torch.channels_last)
    given = [
        x, x.t(), x[:, ::2], x[::3], x[:, 5], x.diagonal(), x[:, :1].expand(-1, 50), x[:1].expand(70, -1),
        torch.ones(()), torch.ones(()).expand(1000), *x.chunk(3, dim=1), last, last[:, :5], image[:, :, 1:-1, 1:-1],
        image.transpose(1, 3), torch.complex(x, -x), torch.complex(x, -x)[::2, 1:], torch.tensor([3.5])[0], x.bfloat16()[1:].t(),
    ]  # fmt: skip
    there = [at_its_place(value) for value in given]
    sim.reset_counts()
    found = Measuring()
    for i, value in enumerate(there):
        found.observe(f"v{i}", value)
    assert sim.launches() == len(given)
    assert_alike(found.columns(), measured(given))


def test_what_has_no_numbers_has_a_row_without(sim: Any) -> None:
    """Empty ones, integers and truths are passed over as on the host; they are not launched."""
    given = [torch.zeros(0), torch.zeros(3, 0), torch.arange(5), torch.tensor([True, False])]
    found = measured([value.to("sim") for value in given])
    assert_alike(found, measured(given))
    assert sim.launches() == 0


@pytest.mark.parametrize("what", ["norm", "finite"])
@given(value=values())
@settings(some, max_examples=25)
def test_part_of_the_statistics(sim: Any, what: native.What, value: Tensor) -> None:
    """The rest is as missing as on the host; a single number keeps its sign."""
    single = value.reshape(-1)[:1]
    given = [value, single]
    found, truth = measured([at_its_place(v) for v in given], what), measured(given, what)
    for name in ("count", "nonzero", "nonfinite", "nan", "sampled", "exponents"):
        assert list(found[name]) == list(truth[name]), name
    for name in ("sum", "sumsq", "min", "max"):
        size = truth["count"] * value.abs().double().nan_to_num(0, 0, 0).amax().item()
        near = ROUND * max(size) if name == "sum" else 0.0
        for one, other in zip(found[name], truth[name], strict=True):
            assert one == pytest.approx(other, rel=ROUND, abs=near, nan_ok=True), name


# -- channels and saturation --------------------------------------------------------------------


def with_activations(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Measure the outputs of layers whose channels are tracked, and which may saturate."""
    measuring = Measuring()
    for name in given:
        measuring.meter.sites.channel_dims[name] = 2
    for how in ("tanh", "sigmoid", "softsign"):
        measuring.meter.sites.saturates(how, how, ())
    measuring.meter.sites.saturates("between", "between", (-0.5, 0.5))
    measuring.meter.sites.saturates("softmax", "softmax", (-1,))
    measuring.meter.sites.saturates("across", "softmax", (1,))
    for name, value in given.items():
        measuring.observe(name, value)
    return measuring.columns()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_channels_and_saturation_are_those_of_the_host(sim: Any, dtype: torch.dtype) -> None:
    """Vectors, images and sequences in any layout, few and many channels, dead and healthy ones."""
    torch.manual_seed(2)
    image = (torch.randn(4, 70, 6, 5) - 2.5).relu()
    wide = (torch.randn(3, 9000) - 2).relu()
    given = {
        "tanh": (3 * torch.randn(40, 30)).tanh(),
        "sigmoid": (6 * torch.randn(10, 20)).sigmoid(),
        "softsign": (50 * torch.randn(400)) / (1 + (50 * torch.randn(400)).abs()),
        "between": torch.randn(300).clamp(-0.5, 0.5),
        "softmax": (5 * torch.randn(20, 10)).softmax(-1),
        "across": (5 * torch.randn(4, 10, 6)).softmax(1),
        "image": image,
        "last": image.to(memory_format=torch.channels_last),
        "part": image[:, 1:40],
        "every": image[:, ::2],
        "wide": wide,
        "turned": wide.t(),
        "one": torch.randn(5, 1),
        "expanded": torch.randn(5, 1).expand(5, 7),
        "sequence": (torch.randn(2, 9, 33) - 1).relu(),
        "complex": torch.complex(torch.randn(4, 3), torch.randn(4, 3)),
    }
    for name, value in given.items():
        if name != "complex":
            given[name] = value.to(dtype)
    there = {name: at_its_place(value) for name, value in given.items()}
    found, truth = with_activations(there), with_activations(given)
    # PyTorch's reductions, whose rows come last, draw other numbers of a view with gaps.
    order = np.argsort(found["site"])
    for name in ("count", "nonzero", "saturated", "active"):
        ordered = [found[name][i] for i in order]
        assert dict(zip(given, ordered, strict=True)) == dict(
            zip(given, truth[name], strict=True)
        ), name
    assert any(truth["active"])
    assert max(truth["saturated"]) > 0


# -- launches, waits and tables -----------------------------------------------------------------


def test_a_value_at_several_sites_is_launched_once(sim: Any) -> None:
    """Until it is changed; and where an input came from is known."""
    x = torch.randn(7, 5).to("sim")
    measuring = Measuring()
    for name, kind in (("a", "out"), ("b", "in"), ("b", "out"), ("c", "in")):
        measuring.observe(name, x, kind=kind)
    assert sim.launches() == 1
    measuring.observe("c", x.add_(1), kind="out")
    assert sim.launches() == 2
    found = measuring.columns()
    assert len(set(found["sum"][:4].tolist())) == 1
    assert found["sum"][4] == pytest.approx(found["sum"][0] + 35)
    seats = measuring.meter.sites.seats
    assert seats[Site("b", "in")].sources == (seats[Site("a", "out")].id,)


def test_a_step_does_not_wait(sim: Any) -> None:
    """Neither the first one, which opens the device, nor one whose table grows."""
    given = [torch.randn(4).to("sim") for _ in range(600)]
    measuring = Measuring()
    sim.reset_counts()
    for step in range(3):
        for i, value in enumerate(given):
            measuring.observe(f"v{i}", value, step=step)
        measuring.meter.flush()
    assert sim.launches() == 3 * len(given)
    assert sum(sim.counts()["syncs"].values()) == 0
    assert len(measuring.columns(2)["site"]) == len(given)


def test_a_table_that_grows_is_one_block_from_the_next_step_on(sim: Any) -> None:
    """All rows are where they belong, in each step; memory stays as it is after the first."""
    given = [torch.full((3,), float(i)) for i in range(5000)]
    there = [value.to("sim") for value in given]
    measuring, memory = Measuring(), list[int]()
    blocks = list[int]()
    for step in range(3):
        for i, value in enumerate(there):
            measuring.observe(f"v{i}", value, step=step)
        (table,) = measuring.meter._values._launched._tables.values()
        blocks.append(1 + len(table._full))
        measuring.meter.flush()
        found = measuring.columns(step)
        assert found["sum"].tolist() == [3.0 * i for i in range(5000)]
        assert found["sampled"].tolist() == [3] * 5000
        memory.append(len(table._earlier))
    assert blocks[0] > 1
    assert blocks[1:] == [1, 1]
    assert memory[1] == memory[2]


def test_large_values_with_parts_and_wide_channels(sim: Any) -> None:
    """Parts of more large values than there is room for, and channels that are wider than a table."""
    torch.manual_seed(3)
    large = [torch.randn(1 << 18) + i for i in range(70)]  # 64 parts each
    wide = (torch.randn(2, 100_000) - 3).relu()
    given = {f"v{i}": value for i, value in enumerate(large)} | {"wide": wide}
    with sim.without_delays():
        found = with_activations({name: value.to("sim") for name, value in given.items()})
    assert sim.launches() == len(given)
    assert_alike(found, with_activations(given))


def test_values_of_both_devices_and_of_the_host_in_one_step(sim: Any) -> None:
    """Each device has a table; rows come in the order in which they were measured."""
    torch.manual_seed(4)
    given = [torch.randn(50 + i) for i in range(12)]
    there = [value.to(("sim:0", "cpu", "sim:1")[i % 3]) for i, value in enumerate(given)]
    found = measured(there)
    assert sim.launches() == 8
    assert_alike(found, measured(given))


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_gradients_in_a_backward_thread(sim: Any, device: str) -> None:
    """Whose current device is not this thread's; the driver's context is the device's own."""
    torch.manual_seed(5)
    rows = {}
    for where in ("cpu", device):
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(where)
        x = torch.linspace(-1, 1, 24).reshape(4, 6).to(where)
        with kedge.hook(model, "**:out, **:out.grad, **:param.grad", kedge.measure()) as stats:
            model(x).square().sum().backward()
        rows[where] = {name: (stats[name].sum, stats[name].rms, stats[name].max) for name in (
            "0", "2", "0:out.grad", "2:out.grad", "0.weight:param.grad", "2.bias:param.grad")}  # fmt: skip
    for name, row in rows["cpu"].items():
        assert rows[device][name] == pytest.approx(row, rel=1e-4, abs=1e-6), name
    assert sim.launches() > 0


def test_values_of_a_side_stream(sim: Any) -> None:
    """They are read on the stream that they were made on, after that."""
    torch.manual_seed(7)
    given = [torch.randn(400) for _ in range(8)]
    for seed in range(10):
        sim.set_seed(seed)
        side = torch.Stream("sim")
        measuring = Measuring()
        there = [value.to("sim") for value in given]
        measuring.observe("first", there[0])
        side.wait_stream(sim.current_stream())
        with side:
            for i, value in enumerate(there):
                measuring.observe(f"v{i}", value * 2)
        sim.current_stream().wait_stream(side)
        truth = measured([given[0], *(value * 2 for value in given)])
        assert_alike(measuring.columns(), truth)


def test_streams_that_the_program_does_not_order(sim: Any) -> None:
    """Neither of two is behind the other when a table is made on one, nor when its rows are taken on the other."""
    slow, there = torch.Stream("sim"), torch.ones(5).to("sim")
    measuring = Measuring()
    sim.synchronize()
    for step in range(2):
        with sim.held(slow):
            with slow:
                measuring.observe("slow", there, step=step)
            measuring.observe("quick", there * 2, step=step)
            measuring.meter.flush()
        assert measuring.columns(step)["sum"].tolist() == [5, 10]
    assert sim.launches() == 4


def test_values_of_several_threads(sim: Any) -> None:
    """Each row belongs to its value, whichever thread measures meanwhile."""
    measuring = Measuring()
    there = [[torch.full((64,), float(100 * t + i)).to("sim") for i in range(60)] for t in range(4)]

    def observe(thread: int) -> None:
        for i, value in enumerate(there[thread]):
            measuring.observe(f"{thread}.{i}", value)

    threads = [threading.Thread(target=observe, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = measuring.columns()
    for site, seat in measuring.meter.sites.seats.items():
        thread, i = map(int, site.path.split("."))
        (place,) = np.flatnonzero(found["site"] == seat.id)
        assert found["sum"][place] == 64.0 * (100 * thread + i)


# -- captured, failing and missing --------------------------------------------------------------


@pytest.fixture
def captured(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a block in which PyTorch and the driver say that a graph is being captured."""
    monkeypatch.setattr(device_graphs, "_said", [])

    class Captured:
        def __enter__(self) -> None:
            self.block = sim.capturing()
            self.block.__enter__()
            monkeypatch.setattr(accelerators, "is_capturing", lambda: True)

        def __exit__(self, *raised: object) -> None:
            self.block.__exit__(*raised)
            monkeypatch.setattr(accelerators, "is_capturing", lambda: False)

    return Captured()


@pytest.mark.parametrize("before", ["nothing", "host", "device", "device, in a step before"])
def test_a_graph_that_is_captured_is_left_alone(
    sim: Any, captured: Any, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    """No kernel, no memory, nothing loaded; it is said once, and what comes later is measured."""
    there = [torch.full((4,), float(i)).to("sim") for i in range(4)]
    measuring = Measuring()
    if before == "host":
        measuring.observe("before", torch.zeros(2))
    elif before != "nothing":
        measuring.observe("before", torch.zeros(2).to("sim"))
    if before == "device, in a step before":
        measuring.meter.flush()
    sim.reset_counts()
    memory = sim.memory_allocated()
    with captured:
        for i in range(3):
            measuring.observe(f"v{i}", there[i])
        if before in ("host", "device"):
            measuring.meter.observe_all([seat(measuring, "all")], [there[3]], 0)
    assert (sim.counts()["kernels"], sim.launches(), sim.memory_allocated()) == (0, 0, memory)
    assert capsys.readouterr().err.count("a graph of the device is being captured") == 1
    measuring.observe("after", there[3])
    found = measuring.columns()
    assert found["sum"].tolist() == [*[0] * (before in ("host", "device")), 12]


def seat(measuring: Measuring, name: str) -> MeasuredSite:
    """Return the entry of a site that stands for many tensors."""
    return measuring.meter.sites.total_seat(Site(name, "param"), 4, None)


def test_launches_that_fail_are_reduced_by_pytorch(sim: Any) -> None:
    """Beside those that do not fail; what is drawn and which channels are active are there, too."""
    torch.manual_seed(8)
    given = [torch.randn(20, 30) for _ in range(6)]
    there = [value.to("sim") for value in given]
    measuring = Measuring()
    for i, value in enumerate(there):
        if i % 2:
            with sim.failing_launches(700):
                measuring.observe(f"v{i}", value)
        else:
            measuring.observe(f"v{i}", value)
    found, truth = measuring.columns(), measured(given)
    assert sim.launches() == 3
    order = np.argsort(found["site"])
    for name in ("count", "nonzero", "nonfinite", "nan", "sampled"):
        assert np.array(found[name])[order].tolist() == list(truth[name])
    for name in ("sumsq", "min", "max"):
        assert found[name][order] == pytest.approx(truth[name], rel=1e-5)


def test_more_dimensions_than_a_launch_takes(sim: Any) -> None:
    """Where they cannot be joined, PyTorch's reductions read the value."""
    torch.manual_seed(9)
    value = torch.randn([3] * 10)[(slice(None, None, 2),) * 10]
    found, truth = measured([at_its_place(value)]), measured([value])
    assert sim.launches() == 0
    assert found["sumsq"] == pytest.approx(truth["sumsq"], rel=1e-5)
    assert (found["max"], found["count"]) == (truth["max"], truth["count"])


def test_without_the_driver_all_is_as_before(sim: Any) -> None:
    """PyTorch's reductions give the same figures, in float32."""
    torch.manual_seed(10)
    given = [torch.randn(20, 30), torch.randn(5)]
    with sim.without_driver():
        found = measured([value.to("sim") for value in given])
    assert sim.launches() == 0
    truth = measured(given)
    for name in ("count", "nonzero", "sampled", "exponents"):
        assert list(found[name]) == list(truth[name])
    assert found["sumsq"] == pytest.approx(truth["sumsq"], rel=1e-5)


def test_a_driver_that_cannot_load_the_kernel_is_given_up(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is kept, and PyTorch's reductions measure, also in the next meter."""
    asked = []
    monkeypatch.setattr(cuda, "ptx", lambda: asked.append(1) or b"no kernel is in this")
    given = torch.linspace(-1, 1, 50)
    for _ in range(2):
        found, truth = measured([given.to("sim"), given.to("sim:1")]), measured([given, given])
        assert found["sumsq"] == pytest.approx(truth["sumsq"], rel=1e-5)
    assert driver.why_not() == {"sim": "cuModuleLoadData failed: error 1"}
    assert (sim.launches(), len(asked)) == (0, 1)
    assert on_device.described() == (
        "device_kernel: not needed, without a device for which there is one; "
        "not by its driver: cuModuleLoadData failed: error 1"
    )


def test_a_driver_that_lacks_a_function_is_given_up(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is older than this Kedge knows."""

    class Old:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setattr(driver._connected["sim"], "_library", Old())
    assert measured([torch.ones(3).to("sim")])["sum"].tolist() == [3]
    assert driver.why_not() == {"sim": "the driver has no cuDeviceGet"}


def test_the_kernel_is_loaded_once_a_device(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many meters there are."""
    asked, ptx = [], cuda.ptx
    monkeypatch.setattr(cuda, "ptx", lambda: asked.append(1) or ptx())
    for _ in range(3):
        measured([torch.ones(3).to("sim"), torch.ones(3).to("sim:1")])
    assert len(asked) == 2
    assert sim.launches() == 6
    assert on_device.described() == "device_kernel: present, launched by the device's driver"


# -- what is taken back, added and light --------------------------------------------------------


def test_measurements_are_dropped_and_withdrawn(sim: Any) -> None:
    """Those of some sites, the last one of a site, or all; what comes then is measured."""
    there = [torch.full((2,), float(i)).to("sim") for i in range(5)]
    measuring = Measuring()
    for i, value in enumerate(there):
        measuring.observe("abc"[i % 3], value)
    seats = measuring.meter.sites.seats
    measuring.meter.drop([seats[Site("c", "out")]])
    measuring.meter.withdraw(Site("b", "out"))
    found = measuring.columns()
    assert found["sum"].tolist() == [0, 2, 6]
    assert found["max"].tolist() == [0, 1, 3]

    measuring = Measuring()
    for i, value in enumerate(there):
        measuring.observe(f"v{i}", value)
    measuring.meter.drop()
    measuring.observe("kept", there[4])
    assert measuring.columns()["sum"].tolist() == [8]


def test_known_sums_of_squares_come_from_the_device(sim: Any) -> None:
    """Beside measured values and those of the host, on each device, also more than a table holds."""
    measuring = Measuring()
    measuring.observe("value", torch.full((3,), 2.0).to("sim"))
    sums = [torch.tensor(float(i)).to(f"sim:{i % 2}") for i in range(1500)]
    seats = [seat(measuring, f"s{i}") for i in range(1501)]
    sim.reset_counts()
    measuring.meter.add_squares(seats, 0, [4] * 1501, [*sums, 0.25])
    assert sum(sim.counts()["syncs"].values()) == 0
    found = measuring.columns()
    by_site = dict(zip(found["site"].tolist(), found["sumsq"].tolist(), strict=True))
    assert [by_site[one.id] for one in seats] == [*map(float, range(1500)), 0.25]
    assert found["count"].tolist() == [3, *[4] * 1501]
    assert np.isnan(found["sum"][1:]).all()


def test_a_light_step_finds_a_nan(sim: Any) -> None:
    """Only such a step is passed on, with the site where the NaN is."""
    measuring = Measuring()
    measuring.meter.level = LIGHT
    good, bad = torch.ones(5000).to("sim"), torch.ones(5000)
    bad[4000] = math.nan
    bad = bad.to("sim")
    for step in range(4):
        measuring.observe("good", good, step=step)
        measuring.observe("bad", bad if step >= 2 else good * 1, step=step)
        measuring.meter.flush()
    measuring.meter.finish()
    assert list(measuring.steps.columns) == [2]
    found = measuring.columns(2)
    assert (found["nonfinite"].tolist(), found["nan"].tolist()) == ([0, 1], [0, 1])
    assert sim.launches() == 8


def test_the_seconds_of_the_device_are_those_of_its_launches(sim: Any) -> None:
    """Each row has how long its kernel took: on this device a millionth of a second."""
    measuring = Measuring()
    for i in range(5):
        measuring.observe(f"v{i}", torch.ones(3).to("sim"))
    measuring.meter.finish()
    assert measuring.meter.finished.device_seconds == pytest.approx(5e-6)
