"""`measure`: every statistic against numpy, and what is merged, kept and read."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kedge
from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.devices import DeviceTables
from kedge.actions.measure.finished import FinishedStep, FinishedSteps
from kedge.actions.measure.host import HostTable
from kedge.actions.measure.meter import Meter
from kedge.actions.measure.results import KeptSteps
from kedge.actions.measure.site_table import MeasuredSite
from kedge.actions.measure.table import Departures, DeviceTable
from kedge.errors import NotRecorded, SelectorError, SeveralRecorded
from kedge.sites.site import Site
from kedge.store.rows import FULL
from kedge.testing import assert_same_bits
from kedge.torch_internals import accelerators

NAMES = (
    "count",
    "sum",
    "sumsq",
    "min",
    "max",
    "nonzero",
    "nonfinite",
    "mean",
    "rms",
    "std",
    "absmax",
    "zero",
)


def measured(value: Tensor, what: Any = "full") -> Any:
    """Measure one tensor on its way through a module."""
    with kedge.hook(model := nn.Identity(), ":out", kedge.measure(what)) as stats:
        model(value)
        return stats[":out"]


def expected(value: Tensor) -> dict[str, float]:
    """Compute every statistic with numpy in double precision, of the real numbers in a tensor."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    x = real.detach().double().numpy().ravel()
    with np.errstate(invalid="ignore"):
        found = {
            "sum": x.sum(),
            "sumsq": (x * x).sum(),
            "min": x.min(),
            "max": x.max(),
            "absmax": np.abs(x).max(),
        }
        found |= {
            "mean": x.mean(),
            "rms": np.sqrt((x * x).mean()),
            "std": x.std(),
            "count": float(x.size),
        }
    return found | {
        "nonzero": (x != 0).sum(),
        "zero": (x == 0).mean(),
        "nonfinite": (~np.isfinite(x)).sum(),
    }


def assert_equal(stats: Any, truth: Mapping[str, float]) -> None:
    """Compare statistics with what numpy says: counts exactly, the others to float32's precision."""
    found = {name: getattr(stats, name) for name in NAMES}
    for name in ("count", "nonzero", "nonfinite"):
        assert found[name] == truth[name], name
    # A sum of terms of both signs is as exact as the sum of their magnitudes.
    slack = {
        "sum": 1e-6 * math.sqrt(abs(truth["count"] * truth["sumsq"])),
        "mean": 1e-6 * truth["rms"],
    }
    for name in NAMES:
        assert found[name] == pytest.approx(
            truth[name], rel=2e-5, abs=slack.get(name, 0), nan_ok=True
        ), name


def normal(*shape: int) -> Tensor:
    """Draw normal numbers of which some are exactly zero."""
    drawn = torch.randn(*shape)
    return drawn.masked_fill(drawn.abs() < 0.2, 0.0) + 0.0


LAYOUTS = {
    "contiguous": lambda: normal(6, 5, 4, 3),
    "channels last": lambda: normal(6, 5, 4, 3).to(memory_format=torch.channels_last),
    "channels last in three dimensions": lambda: normal(2, 3, 4, 3, 2).to(
        memory_format=torch.channels_last_3d
    ),
    "transposed": lambda: normal(6, 5).T,
    "permuted": lambda: normal(6, 5, 4).permute(2, 0, 1),
    "expanded": lambda: normal(6, 1, 4).expand(6, 5, 4),
    "with gaps": lambda: normal(6, 10)[:, ::3],
    "without dimensions": lambda: torch.tensor(-2.5),
    "one element": lambda: normal(1, 1),
    "larger than a chunk": lambda: normal(3, 1 << 18).T,
    "a chunk and one more": lambda: normal((1 << 18) + 1),
    "needing a gradient": lambda: normal(4, 5).requires_grad_(),
    "a parameter": lambda: nn.Parameter(normal(4, 5)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_statistic_is_numpys_whatever_the_layout(layout: str) -> None:
    """Strides, sizes and views change nothing of what is measured."""
    value = LAYOUTS[layout]()
    assert_equal(measured(value), expected(value))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("size", [7, (1 << 18) + 3])
def test_every_statistic_is_numpys_whatever_the_precision(dtype: torch.dtype, size: int) -> None:
    """Narrow numbers are added up in float32, so that a large tensor neither overflows nor stops growing."""
    value = (normal(size) + 1).to(dtype)
    assert_equal(measured(value), expected(value))


def test_a_complex_tensor_counts_as_the_real_numbers_in_it() -> None:
    """Real and imaginary parts are elements of their own, so that shares and means stay shares and means."""
    value = torch.complex(normal(4, 5), normal(4, 5))
    for z in (value, value.conj(), value.T.conj()):
        stats = measured(z)
        assert_equal(stats, expected(z))
        assert stats.count == 40


@pytest.mark.parametrize(
    "value", [torch.arange(6), torch.tensor([True, False]), torch.ones(3, dtype=torch.uint8)]
)
def test_of_whole_numbers_only_count_and_finiteness_are_measured(value: Tensor) -> None:
    """Indices and masks have no mean; they are there, and finite."""
    stats = measured(value)
    assert (stats.count, stats.nonfinite, stats.nonzero) == (value.numel(), 0, -1)
    assert all(
        math.isnan(getattr(stats, name))
        for name in ("sum", "sumsq", "min", "max", "mean", "rms", "zero")
    )


@pytest.mark.parametrize(
    "value", [torch.ones(0), torch.ones(3, 0, 2), torch.ones(0, dtype=torch.int64)]
)
def test_an_empty_tensor_is_a_row_without_elements(value: Tensor) -> None:
    """The site fired; there was nothing in it."""
    stats = measured(value)
    assert (stats.count, stats.calls, stats.nonfinite) == (0, 1, 0)
    assert math.isnan(stats.mean)


def test_what_has_no_data_leaves_a_row_without_elements() -> None:
    """Nothing is claimed of values that were not looked at, and the program goes on."""
    stats = measured(torch.ones(3, device="meta"))
    assert (stats.count, stats.calls, stats.nonzero) == (0, 1, -1)
    assert math.isnan(stats.rms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "bad",
    [(math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf), (math.nan, math.inf, 0.0)],
)
def test_what_is_not_finite_is_counted(bad: tuple[float, ...], dtype: torch.dtype) -> None:
    """NaN and infinities are counted exactly, and the extremes show which they are, as PyTorch computes them."""
    value = torch.tensor([1.0, *bad, 0.0, -2.0], dtype=dtype)
    stats = measured(value)
    assert_equal(stats, expected(value))
    assert stats.nonfinite == sum(not math.isfinite(x) for x in bad)


def test_a_sum_that_overflows_does_not_make_its_elements_infinite() -> None:
    """Finite elements whose sum is beyond float32, or beyond float64, are counted as finite."""
    stats = measured(torch.tensor([3e38, 3e38, 0.0]))
    assert (stats.sum, stats.sumsq, stats.nonfinite, stats.nonzero, stats.absmax) == (
        pytest.approx(6e38), pytest.approx(1.8e77), 0, 2, pytest.approx(3e38),
    )  # fmt: skip
    stats = measured(torch.tensor([1.5e308, 1.5e308, 0.0], dtype=torch.float64))
    assert (stats.sum, stats.sumsq, stats.nonfinite, stats.nonzero) == (math.inf, math.inf, 0, 2)


def test_non_finite_elements_are_counted_over_all_chunks() -> None:
    """A large tensor is counted piece by piece, and no piece is forgotten."""
    value = torch.ones(3 * (1 << 18) + 5)
    value[[0, 1 << 18, -1]] = torch.tensor([math.nan, math.inf, math.nan])
    value[7] = 0.0
    stats = measured(value)
    assert (stats.count, stats.nonfinite, stats.nonzero) == (value.numel(), 3, value.numel() - 1)


def test_norm_and_finite_measure_nothing_else() -> None:
    """What was not asked for is not measured, and can be distinguished from zero."""
    value = torch.tensor([3.0, -4.0])
    norm, finite = measured(value, "norm"), measured(value, "finite")
    assert (norm.sumsq, norm.count, norm.nonzero, norm.nonfinite) == (25.0, 2, -1, 0)
    assert norm.rms == pytest.approx(math.sqrt(12.5))
    assert (finite.sum, finite.count, finite.nonzero, finite.nonfinite) == (-1.0, 2, -1, 0)
    assert all(
        math.isnan(x) for x in (norm.sum, norm.max, norm.zero, finite.sumsq, finite.min, finite.rms)
    )
    assert measured(torch.tensor([math.nan]), "norm").nonfinite == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_norm_and_finite_measure_other_precisions_too(dtype: torch.dtype) -> None:
    """Their one number is numpy's as well."""
    value = normal(50).to(dtype)
    truth = expected(value)
    assert measured(value, "norm").sumsq == pytest.approx(truth["sumsq"], rel=1e-5)
    assert measured(value, "finite").sum == pytest.approx(truth["sum"], rel=1e-4, abs=1e-4)


def test_calls_passes_and_micro_batches_of_a_step_are_one() -> None:
    """What flows through a site between two optimizer steps has the statistics of all of it put together."""
    model = nn.Sequential(layer := nn.Linear(3, 3), layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    truth, seen = [], []
    layer.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    with kedge.hook(model, "0, 0:out.grad", kedge.measure()) as stats:
        for _ in range(3):
            for n in (2, 5):
                model(torch.randn(n, 3)).square().mean().backward()
            truth.append(expected(torch.cat(seen)))
            seen.clear()
            optimizer.step()
        model(torch.randn(1, 3))
    records = stats.records("0")
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.calls for r in records] == [4, 4, 4, 2]
    for record, wanted in zip(records, truth, strict=False):
        assert_equal(record, wanted)
    assert [r.count for r in stats.records("0:out.grad")] == [42, 42, 42]


def test_reading_in_the_middle_of_a_step_loses_nothing() -> None:
    """`keep` counts steps, however often they were read while they lasted."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.hook(model, ":out", kedge.measure(keep=2)) as stats:
        for _ in range(4):
            for calls in (1, 2, 3):
                model(torch.randn(1, 2)).sum().backward()
                assert stats[":out"].calls == calls
            optimizer.step()
    assert [(r.step, r.calls) for r in stats.records(":out")] == [(2, 3), (3, 3)]


@pytest.mark.parametrize(("keep", "steps"), [(1, [4]), (3, [2, 3, 4]), (None, [0, 1, 2, 3, 4])])
def test_the_last_steps_are_kept(keep: int | None, steps: list[int]) -> None:
    """Older ones go."""
    with kedge.hook(model := nn.Identity(), ":out", kedge.measure(keep=keep)) as stats:
        for i in range(5):
            model(torch.full((2,), float(i)))
    assert [r.step for r in stats.records(":out")] == steps
    assert stats[":out"].mean == 4.0


class Twice(nn.Module):
    """Calls one layer twice, and returns two tensors of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y * 10, self.fc(y)


def test_a_name_reads_the_call_and_leaf_it_says() -> None:
    """Calls and leaves that were hooked apart are read apart, and never one for the other."""
    model, x = Twice(), torch.randn(3, 2)
    with kedge.hook(model, "fc#0, fc#1, :out[0], :out[1]", kedge.measure()) as stats:
        first, second = model(x)
    assert stats["fc#0"].absmax == pytest.approx(model.fc(x).abs().max().item())
    assert stats["fc#1"].absmax == pytest.approx(second.abs().max().item())
    assert stats[":out[0]"].absmax == pytest.approx(first.abs().max().item())
    assert stats[":out[1]"].absmax == stats["fc#1"].absmax
    with pytest.raises(
        SeveralRecorded, match='^"fc" matches 2 measured sites; read one of "fc#0:out", "fc#1:out"$'
    ):
        stats["fc"]


def test_a_name_without_a_kind_reads_the_output_or_the_only_kind() -> None:
    """As for `record`."""
    model = nn.Sequential(nn.Linear(2, 2))
    with kedge.session() as s:
        both = s.hook(model, "0:out.grad, 0:out", kedge.measure())
        alone = s.hook(model, "0:out.grad", kedge.measure())
        model(torch.ones(3, 2)).sum().backward()
    assert (both["0"].site.kind, both["0:out.grad"].mean) == ("out", 1.0)
    assert (alone["0"].site.kind, alone["0"].mean) == ("out.grad", 1.0)


def test_if_nothing_was_measured_the_message_names_the_cause() -> None:
    """Reading what never fired says why, as the ledger does."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with kedge.hook(model, "0, 0:out.grad", kedge.measure()) as stats:
        with torch.no_grad():
            model(torch.ones(1, 2))
        with pytest.raises(
            NotRecorded, match=r'^nothing was measured under "1": the sites hooked here are 0:out'
        ):
            stats["1"]
        with pytest.raises(
            NotRecorded,
            match=r'^nothing was measured under "0:out.grad": 0:out.grad  never fired: ',
        ):
            stats["0:out.grad"]
        with pytest.raises(SelectorError, match='^"\\*" may match several sites'):
            stats.records("*")
        assert stats.records("0:out.grad") == []
        model(torch.ones(1, 2)).sum().backward()
        assert stats["0:out.grad"].count == 2


def test_a_schedule_says_which_steps_are_measured() -> None:
    """Off schedule nothing is."""
    with kedge.hook(
        model := nn.Identity(), ":out", kedge.measure(), when=kedge.every(3, after=1)
    ) as stats:
        for i in range(8):
            model(torch.full((2,), float(i)))
    assert [(r.step, r.mean) for r in stats.records(":out")] == [(1, 1.0), (4, 4.0), (7, 7.0)]


class Kernels(TorchDispatchMode):
    """Collects the kernels that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(
    not native.available(), reason=f"the compiled part is missing: {native.why_not()}"
)
def test_a_full_measurement_on_the_host_runs_nothing_of_pytorch() -> None:
    """One pass of Kedge's own reads the memory; nothing is dispatched."""
    model, x = nn.Identity(), torch.randn(200, 100)
    with kedge.hook(model, ":out", kedge.measure()) as stats:
        model(x)
        with Kernels() as kernels:
            model(x)
        assert kernels.names == []
        assert stats[":out"].count == 20_000


def test_a_full_measurement_on_a_device_is_a_handful_of_kernels_and_no_synchronisation() -> None:
    """Memory is read six times, and no number is fetched from the device on its own."""
    x, table = torch.randn(20_000), DeviceTable(torch.device("cpu"), Departures())
    x[:3] = torch.tensor([0.0, math.inf, -math.inf])
    slot = table.slot(table.reserve(1))
    with Kernels() as kernels:
        reduce.full(x, slot)
    kept = [name for name in kernels.names if name != "aten.copy_.default"]
    assert kept[:5] == [
        "aten.dot.out", "aten.sum.IntList_out", "aten.amin.out", "aten.amax.out", "aten.count_nonzero.default",
    ]  # fmt: skip
    assert len(kept) <= 9, kept  # the rest counts what is not finite, and NaN
    assert "aten._local_scalar_dense.default" not in kernels.names
    row = table.take().numpy()[0][0]
    nan = math.nan
    assert row.tolist() == pytest.approx(
        [nan, math.inf, -math.inf, math.inf, 19_999, 2, 0], nan_ok=True
    )
    x[7] = nan
    slot = table.slot(table.reserve(1))
    reduce.full(x, slot)
    assert table.take().numpy()[0][0].tolist() == pytest.approx(
        [*[nan] * 4, 19_999, 3, 1], nan_ok=True
    )


def test_the_channels_of_a_value_on_a_device_belong_to_the_site_that_made_it() -> None:
    """The module that it goes into has its numbers, and no channels."""
    value = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]])
    tables = DeviceTables(Departures())
    made = tables.measure(0, value, "full", count=6, dim=1, draws=False, saturation=None)
    tables.repeat(1, made)

    columns = FinishedStep(0, FULL, *tables.end(), HostTable().end()).columns()

    assert columns["site"].tolist() == [0, 1]
    assert columns["sum"].tolist() == [0.0, 0.0]
    assert columns["sumsq"].tolist() == [8.0, 8.0]
    assert columns["active"] == [bytes([0b10100000]), b""]


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_where_there_are_no_events_nothing_is_timed(kind: str) -> None:
    """A device without events has no clock to charge measurements by."""
    table = DeviceTable(torch.device(kind), Departures())
    table.end(table.begin())
    assert table.spans == []


def test_time_on_a_device_counts_also_if_its_table_had_to_be_waited_for() -> None:
    """Before that the device does not tell it: a program far ahead of its device would seem to measure for nothing."""
    arrived: list[bool] = []
    step: Any = SimpleNamespace(
        number=0, level=FULL, ready=lambda: False, is_empty=lambda: False, snapshots={"there": None},
        columns=lambda: (arrived.append(True), {"site": []})[1], device_seconds=lambda: 0.5 * len(arrived),
    )  # fmt: skip
    finished = FinishedSteps(KeptSteps(None))
    finished.add(step, finite=False)
    finished.pass_on()
    assert finished.device_seconds == 0.5


def test_numbers_that_could_not_leave_a_device_leave_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is full for a moment loses none."""
    departures = Departures()
    copy = departures.add(torch.arange(3.0))

    def full(tensor: Tensor, *, beside: bool) -> Any:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(accelerators, "to_host", full)
        departures.send()
    other = departures.add(torch.ones(2))
    assert (copy.numpy().tolist(), other.numpy().tolist()) == ([0.0, 1.0, 2.0], [1.0, 1.0])


def test_steps_still_on_their_way_from_a_device_are_waited_for_when_many_have_come_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program goes on beside the copies, and memory does not fill with them."""
    monkeypatch.setattr(FinishedStep, "ready", lambda step: False)
    passed: list[int] = []
    meter = Meter("norm")
    meter.finished.sink = SimpleNamespace(stats=lambda step, columns: passed.append(step))
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.hook(model, ":out", meter):
        for _ in range(11):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        assert passed == [0, 1]
        meter.finish()
    assert passed == [*range(11)]


def test_a_step_leaves_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sites there are, their table is taken once a step."""
    taken: list[int] = []
    end = HostTable.end
    monkeypatch.setattr(HostTable, "end", lambda self: (taken.append(self.used), end(self))[1])
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(300)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.hook(model, "*, *:out.grad", kedge.measure("norm")) as stats:
        for _ in range(3):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        stats["299"]
    assert taken == [600, 600, 600]


def test_threads_measure_into_one_table() -> None:
    """Nothing is lost or mixed up when several threads run one model at the same time."""
    model, sizes = nn.Sequential(nn.Identity(), nn.ReLU()), range(1, 5)
    with kedge.session() as s:
        stats = s.hook(model, "*", kedge.measure(keep=None))
        work = [
            threading.Thread(
                target=lambda n=n: [model(torch.full((n, 1000), float(n))) for _ in range(50)]
            )
            for n in sizes
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    for site in ("0", "1"):
        records = stats.records(site)
        assert sum(r.calls for r in records) == 200
        assert sum(r.count for r in records) == 50 * 1000 * sum(sizes)
        assert sum(r.nonzero for r in records) == 50 * 1000 * sum(sizes)
        assert sum(r.sum for r in records) == 50 * 1000 * sum(n * n for n in sizes)


def test_measuring_changes_no_bit() -> None:
    """Outputs, gradients and random numbers are those of a run that nobody measured."""

    def run(*, measuring: bool) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        x = torch.randn(5, 4, requires_grad=True)
        with kedge.session() as s:
            if measuring:
                s.hook(model, "**, **:in, **:out.grad, **:param.grad", kedge.measure())
            out = model(x)
            out.square().sum().backward()
        return [out, x.grad, [p.grad for p in model.parameters()], torch.get_rng_state()]

    assert_same_bits(run(measuring=True), run(measuring=False))


def test_squares_of_millions_are_added_up_without_loss() -> None:
    """One float32 sum over so many terms would be wrong by a percent."""
    for dtype in (torch.bfloat16, torch.float32):
        assert measured(torch.full((1 << 24,), 1.5, dtype=dtype), "norm").rms == pytest.approx(
            1.5, rel=1e-6
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: kedge.measure("all"),
            r"^measure\('all'\) is unknown; use 'full', 'norm' or 'finite'; the place comes before it",
        ),
        (
            lambda: kedge.measure(keep=0),
            r"^measure\(keep=0\) would keep nothing; use 1 or more, or None for all$",
        ),
    ],
)
def test_a_measure_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    """What can be asked for is said at once."""
    with pytest.raises(ValueError, match=message):
        make()


def test_reading_every_site_goes_through_the_columns_once() -> None:
    """Each read would otherwise cost as much as all sites together; a newer step is read again."""
    listed: list[int] = []

    class Counted(np.ndarray):
        def tolist(self) -> Any:
            listed.append(len(self))
            return super().tolist()

    kept = KeptSteps(None)
    seats = [
        MeasuredSite(Site(name), i, (), "float32", None, (), None) for i, name in enumerate("abc")
    ]
    kept.stats(0, {"site": np.arange(3).view(Counted)})
    kept.stats(1, {"site": np.arange(2).view(Counted)})
    for _ in range(3):
        assert [found for seat in seats for found in kept.present([seat])] == seats
    assert listed == [2, 3]
    assert kept.present(seats[:2]) == seats[:2]
    kept.stats(2, {"site": np.arange(1).view(Counted)})
    assert kept.present(seats[:1]) == seats[:1]
    assert listed == [2, 3, 1]
