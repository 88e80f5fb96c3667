"""`Measurer`: each value once a step, however many sites it stands at."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from kedge import native
from kedge.actions.measure.host import HostTable

_native = pytest.importorskip(
    "kedge.native._native", reason=f"the compiled part is missing: {native.why_not()}"
)
FULL, NEW = native.CODES["full"], native.DONE | native.FRESH
V, OUT, IN = native.AS_VALUE, native.AS_OUTPUT, native.AS_INPUT


def test_a_value_is_measured_once_and_noted_at_each_site() -> None:
    """With the site whose output it was, told where an input has another source than the one before it."""
    table, x, y = HostTable(), torch.randn(3), torch.randn(3)
    measurer = table.measurer
    assert measurer is not None
    assert table.observe(x, 0, OUT, FULL, False) == NEW
    assert table.observe(x, 1, IN, FULL, False) == native.DONE | native.NEW_SOURCE
    assert measurer.source == 0
    assert table.observe(x, 1, IN, FULL, False) == native.DONE
    assert table.observe(y, 1, IN, FULL, False) == NEW | native.NEW_SOURCE
    assert measurer.source is None
    part = table.end()
    assert (part.sites.tolist(), part.at.tolist()) == ([0, 1, 1, 1], [0, 0, 0, 1])
    assert part.rows[:, 0].tolist() == pytest.approx(
        [x.double().sum().item(), y.double().sum().item()]
    )


def test_a_value_that_was_changed_is_another() -> None:
    """Its version says so; a tensor of inference has none, and is measured each time."""
    table, x = HostTable(), torch.zeros(3)
    assert table.observe(x, 0, V, FULL, False) == NEW
    assert table.observe(x.add_(1), 0, V, FULL, False) == NEW
    assert table.observe(x, 0, V, FULL, False) == native.DONE
    with torch.inference_mode():
        free = torch.ones(2)
    assert [table.observe(free, 0, V, FULL, False) for _ in range(2)] == [NEW, NEW]


def test_a_new_tensor_in_the_place_of_one_that_is_gone_is_measured() -> None:
    """Where a tensor was does not tell which it is, and nothing that was measured is kept alive."""
    table = HostTable()
    for i in range(200):
        value = torch.full((4,), float(i))
        gone = weakref.ref(value)
        assert table.observe(value, 0, V, FULL, False) == NEW
        del value
        assert gone() is None
    assert table.end().rows[:, 0].tolist() == [4.0 * i for i in range(200)]


def test_values_of_the_step_before_are_measured_again() -> None:
    """And the table is empty after its end."""
    table, x = HostTable(), torch.ones(3)
    table.observe(x, 0, V, FULL, True)
    assert len(table.end().rows) == 1
    assert (table.used, table.buckets.any(), np.isnan(table.rows).all()) == (0, False, True)
    assert table.observe(x, 0, V, FULL, False) == NEW
    part = table.end()
    assert (part.sampled.tolist(), part.histograms) == ([-1], [b""])


def test_a_table_grows_and_keeps_what_it_holds() -> None:
    """Rows, places and what was seen; the measurer says when there is no room."""
    table, values = HostTable(), [torch.full((2,), float(i)) for i in range(1000)]
    refusals = 0
    for i, value in enumerate(values):
        done = table.observe(value, i, V, FULL, True)
        if done == native.NO_ROOM:
            refusals += 1
            table.make_room(1)
            done = table.observe(value, i, V, FULL, True)
        assert done == NEW
    assert refusals == 2
    assert all(
        table.observe(value, i, V, FULL, True) == native.DONE
        for i, value in enumerate(values[:500])
    )
    part = table.end()
    assert part.rows[:, 0].tolist() == [2.0 * i for i in range(1000)]
    assert part.sampled.tolist() == [2] * 1000
    assert part.at[1000:].tolist() == list(range(500))


def test_what_decides_is_drawn_from_in_place_of_the_value() -> None:
    """As of a softmax, the largest of its outputs."""
    table, x = HostTable(), torch.tensor([[0.1, 0.9], [0.4, 0.6]])
    table.observe(x, 0, V, FULL, False)
    table.draw_for_last(x.amax(1))
    part = table.end()
    assert (part.sampled.tolist(), part.histograms) == ([2], [bytes([49, 2, 0])])
    with pytest.raises(ValueError, match="nothing was measured"):
        table.measurer.draw_for_last(x)


def test_many_are_measured_in_one_call() -> None:
    """Those that can be read, each at its site; the others are listed by their place."""
    table = HostTable()
    values = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.zeros(2)]
    assert table.observe_all([5, 6, 7], values, FULL, draws=True) == [1]
    part = table.end()
    assert (part.sites.tolist(), part.rows[:, 0].tolist(), part.sampled.tolist()) == (
        [5, 7],
        [3, 0],
        [3, 2],
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({0: np.zeros((4, 8), np.float32)}, "of the format d"),
        ({1: np.zeros(3, np.int32)}, "do not belong together"),
        ({2: np.zeros((4, 80), np.uint16)}, "do not belong together"),
        ({3: np.zeros((4, 4), np.int64)}, "do not belong together"),
        ({5: np.zeros(8, np.int32)}, "of the format q"),
        ({7: np.zeros(3, np.int64)}, "do not belong together"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong: dict[int, np.ndarray], message: str) -> None:
    """Nothing is written to them."""
    arrays = [
        *(np.zeros((4, 8)), np.zeros(4, np.int32), np.zeros((4, 83), np.uint16)),
        *(
            np.zeros((4, 5), np.int64),
            np.zeros(8, np.int32),
            np.zeros(8, np.int64),
            np.zeros(8, np.int32),
            np.zeros(2, np.int64),
        ),
    ]
    measurer = native.Measurer()
    measurer.use_arrays(*arrays)
    assert measurer.observe(torch.ones(2), 0, V, FULL, True) == NEW
    for i, array in wrong.items():
        arrays[i] = array
    with pytest.raises(ValueError, match=message):
        measurer.use_arrays(*arrays)


def test_wrong_arguments_are_errors() -> None:
    """A number below 0, one argument too few, lists of two lengths, no room."""
    with pytest.raises(ValueError, match="call use_arrays first"):
        native.Measurer().observe(torch.ones(2), 0, V, FULL, False)
    table = HostTable()
    with pytest.raises(ValueError, match="no site has the number -1"):
        table.observe(torch.ones(2), -1, V, FULL, False)
    with pytest.raises(TypeError, match="observe"):
        table.observe(torch.ones(2))
    with pytest.raises(ValueError, match="as many sites"):
        table.measurer.observe_all([torch.ones(2)], [1, 2], FULL, False)
    with pytest.raises(ValueError, match="no room"):
        table.measurer.observe_all([torch.ones(1)] * 300, range(300), FULL, False)
    for number in (-2, 1 << 62):
        with pytest.raises(ValueError, match="no site has the number"):
            HostTable().measurer.observe_all([torch.ones(1)], [number], FULL, False)


def test_its_flags_are_those_that_are_known_without_it() -> None:
    """They are written in C and in Python, where there may be no compiled part."""
    for name in (
        "REFUSED",
        "DONE",
        "FRESH",
        "NEW_SOURCE",
        "NO_ROOM",
        "NO_TABLE",
        "CAPTURED",
        "ACTIVE",
        "AS_VALUE",
        "AS_OUTPUT",
        "AS_INPUT",
    ):
        assert getattr(_native, name) == getattr(native, name)


def test_a_measurer_that_is_gone_leaves_nothing() -> None:
    """Neither its arrays nor its references stay."""
    table, x = HostTable(), torch.ones(3)
    table.observe(x, 0, V, FULL, True)
    rows = weakref.ref(table.rows)
    del table
    gc.collect()
    assert rows() is None
    assert weakref.getweakrefcount(x) == 0
