"""Rows by site: however batches are laid out, they are what a plain reading gives; and spoilt heads end the reading."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.errors import NotARecording
from kedge.store.columns import BINARY, COLUMNS, LATER, OFFSETS, Columns
from kedge.store.reading.table import StatsTable, tabulate
from kedge.store.writing.arrow import StatsWriter
from tests.store.tables import columns_of, read_table

NUMBERS = [name for name in COLUMNS if name != "site"]


def batch(sites: list[int], seed: int) -> dict[str, Any]:
    """Make rows of these sites that differ in every column."""
    rng, many = np.random.default_rng(seed), len(sites)
    columns: dict[str, Any] = {
        "site": sites,
        "calls": rng.integers(1, 9, many),
        "level": rng.integers(1, 3, many),
    }
    columns |= {name: rng.normal(size=many) for name in ("sum", "sumsq", "min", "max")}
    columns |= {
        name: rng.integers(1, 1 << 40, many) for name in ("count", "nonzero", "nonfinite", "nan")
    }
    columns |= {name: rng.integers(0, 257, many) for name in ("sampled", "saturated")}
    columns["active"] = [rng.bytes(int(rng.integers(0, 4))) for _ in sites]
    columns["exponents"] = [bytes([3]) + rng.bytes(2 * int(rng.integers(0, 4))) for _ in sites]
    return columns


def written(path: Path, patterns: list[list[int]]) -> None:
    """Write one batch for each pattern of sites."""
    with closing(StatsWriter(path)) as writer:
        for step, sites in enumerate(patterns):
            writer.write(step, batch(sites, step))


def plain(columns: Columns, site: int) -> list[tuple[Any, ...]]:
    """Return the rows of a site one by one, as they lie in the file."""
    found = np.flatnonzero(columns["site"] == site).tolist()
    held = {
        n: [columns[n][a:b].tobytes() for a, b in pairwise(columns[n + OFFSETS].tolist())]
        for n in BINARY
    }
    return [
        (*(columns[name][i].item() for name in NUMBERS), *(held[name][i] for name in BINARY))
        for i in found
    ]


def gathered(table: StatsTable, site: int) -> list[tuple[Any, ...]]:
    """Return the rows of a site as the table finds them."""
    rows = table.all(7).of(site)
    columns = [getattr(rows, name).tolist() for name in NUMBERS] + [
        getattr(rows, name) for name in BINARY
    ]
    return list(zip(*columns, strict=True))


PATTERNS = st.lists(
    st.permutations(range(5)).flatmap(lambda p: st.integers(0, 5).map(lambda n: list(p[:n]))),
    max_size=90,
)


@settings(max_examples=40, deadline=None)
@given(patterns=PATTERNS, usual=st.integers(0, 70))
def test_rows_are_found_whatever_the_patterns(
    tmp_path_factory: pytest.TempPathFactory, patterns: list[list[int]], usual: int
) -> None:
    """Batches of few patterns, of many, in any order and of any size, give each site its rows in the order of steps."""
    path = tmp_path_factory.mktemp("table") / "s.arrows"
    written(path, [*patterns, *[[0, 1, 2, 3, 4]] * usual, *patterns[:2]])
    table, torn = read_table(path)
    columns = columns_of(read_table(path)[0])

    assert not torn
    assert table.full_steps.tolist() == sorted(set(columns["step"][columns["level"] == 2].tolist()))
    for site in range(7):
        assert gathered(table, site) == plain(columns, site)


def test_a_table_in_memory_is_as_one_in_a_file(tmp_path: Path) -> None:
    """Rows given one by one are found as those of a file are."""
    written(tmp_path / "s.arrows", [[0, 1], [1, 0], [1]])
    columns = columns_of(read_table(tmp_path / "s.arrows")[0])
    names = (*NUMBERS, *BINARY)
    rows = [
        {"site": site, **dict(zip(names, row, strict=True))}
        for site in (0, 1)
        for row in plain(columns, site)
    ]

    for site in (0, 1, 2):
        assert gathered(tabulate(rows), site) == plain(columns, site)


@pytest.mark.parametrize("other", [0, 35, 69, None])
def test_what_is_the_same_in_every_batch_is_given_to_its_site(
    tmp_path: Path, other: int | None
) -> None:
    """A column with one value for each site in all batches is that value, and one batch that differs is not passed over."""
    with closing(StatsWriter(tmp_path / "s.arrows")) as writer:
        for step in range(70):
            more = 1 if step == other else 0
            writer.write(
                step,
                {
                    "site": [2, 0, 1],
                    "count": [30, 10, 20 + more],
                    "calls": [3, 1, 2],
                    "sum": [0.5] * 3,
                },
            )
    table, _ = read_table(tmp_path / "s.arrows")

    for site, count in ((0, 10), (1, 20), (2, 30)):
        expected = [count + (step == other and site == 1) for step in range(70)]
        rows = table.all(3).of(site)
        assert rows.count.tolist() == expected
        assert set(rows.calls.tolist()) == {site + 1}
        assert rows.step.tolist() == list(range(70))


def test_steps_that_differ_within_a_batch_are_reported(tmp_path: Path) -> None:
    """Batches of another program, with rows of several steps each, give each site its own steps."""
    columns = {name: np.zeros(40, dtype) for name, (dtype, _) in COLUMNS.items()}
    columns |= {"step": np.arange(40) // 2 * 10 + np.arange(40) % 2, "site": np.arange(40) % 2}
    columns["level"][:] = 1 + (np.arange(40) % 4 > 1)
    _write_as_another_program(tmp_path / "s.arrows", columns)
    found, _ = read_table(tmp_path / "s.arrows")

    assert found.all(2).of(1).step.tolist() == list(range(1, 200, 10))
    assert found.full_steps.tolist() == [
        step + site for step in range(10, 200, 20) for site in (0, 1)
    ]


@pytest.mark.parametrize("alike", [True, False])
def test_what_an_older_version_did_not_record_is_unknown(tmp_path: Path, alike: bool) -> None:
    """Its recordings have no count of NaN: it is not measured, and not 0, unless the figures show that there is none."""
    columns = {
        name: np.zeros(40, dtype) for name, (dtype, _) in COLUMNS.items() if name not in LATER
    }
    columns |= {"step": np.arange(40) // 4, "site": np.arange(40) % 4, "count": np.full(40, 6)}
    if not alike:  # the sites of every batch are another pattern, which is sorted
        columns["site"] = (np.arange(40) + np.arange(40) // 4) % 4
    bad = np.array([0, 2, 2, 2])[columns["site"]]
    columns["nonfinite"] = bad
    for name, value in (
        ("sum", [0, np.nan, np.nan, np.inf]),
        ("sumsq", [0, np.nan, np.inf, np.inf]),
    ):
        columns[name] = np.array(value)[columns["site"]]
    for name, value in (("min", [0, np.nan, -np.inf, 0]), ("max", [0, np.nan, np.inf, np.inf])):
        columns[name] = np.array(value)[columns["site"]]
    _write_as_another_program(tmp_path / "s.arrows", columns)
    found, _ = read_table(tmp_path / "s.arrows")

    counts = {"nan": [0, np.nan, 0, 0], "inf": [0, np.nan, 2, 2], "nonfinite": [0, 2, 2, 2]}
    for site in range(4):
        rows = found.all(4).of(site)
        assert rows.nan.tolist() == [-1] * 10
        assert rows.has_nan.tolist() == [site == 1] * 10
        for name, expected in counts.items():
            np.testing.assert_array_equal(rows.statistic(name), [expected[site]] * 10, err_msg=name)


def _write_as_another_program(path: Path, columns: Columns) -> None:
    schema = {name: pa.array(values.astype(COLUMNS[name][0])) for name, values in columns.items()}
    table = pa.table({**schema, **{name: pa.array([b""] * 40, pa.binary()) for name in BINARY}})
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=4)


def test_rows_of_one_step_are_merged_wherever_they_lie(tmp_path: Path) -> None:
    """A site that is twice in a batch, and once more in a later one for the same step, is one row."""
    path = tmp_path / "s.arrows"
    with closing(StatsWriter(path)) as writer:
        for step, sites in ((5, [0, 1, 0]), (3, [0, 1, 0]), (5, [0])):
            writer.write(
                step, {"site": sites, "count": [1] * len(sites), "sum": [2.0] * len(sites)}
            )
    rows = read_table(path)[0].all(2).of(0)

    assert (rows.step.tolist(), rows.count.tolist(), rows.sum.tolist()) == (
        [3, 5],
        [2, 3],
        [4.0, 6.0],
    )


def spoilt(content: bytes, place: int, value: int) -> bytes:
    """Change one byte."""
    return content[:place] + bytes([value]) + content[place + 1 :]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_spoilt_head_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of any head may be anything: batches before it are read, and what follows is read or left out, no more.

    Only places of texts and bytes that lie outside of their batch are refused, since they would
    read what is not theirs.
    """
    path = tmp_path_factory.mktemp("spoilt") / "s.arrows"
    with closing(StatsWriter(path)) as writer:
        starts = [path.stat().st_size]
        for step in range(3):
            writer.write(step, batch([0, 1, 2], step))
            starts.append(path.stat().st_size)
    content = path.read_bytes()
    which = data.draw(st.integers(0, 2))
    length = 8 + int.from_bytes(content[starts[which] + 4 : starts[which] + 8], "little")
    place = starts[which] + data.draw(st.integers(0, length - 1))
    before = columns_of(read_table(path)[0])
    path.write_bytes(spoilt(content, place, data.draw(st.integers(0, 255))))
    try:
        after, table = columns_of(read_table(path)[0]), read_table(path)[0]
    except NotARecording as error:
        if "lie outside of their batch" in str(error):
            return
        raise

    for name in COLUMNS:
        assert after[name][: 3 * which].tolist() == before[name][: 3 * which].tolist()
    assert sum(len(table.all(3).of(site)) for site in range(3)) <= len(after["step"]) <= 9


def with_columns(table: pa.Table, add: dict[str, pa.Array]) -> pa.Table:
    """Put columns of another version before those of this one."""
    for name, values in add.items():
        table = table.add_column(0, name, values)
    return table


ADDED: list[tuple[str, Callable[[int], pa.Array]]] = [
    ("a number", lambda n: pa.array(range(n), pa.int16())),
    ("a flag", lambda n: pa.array([True] * n)),
    ("a text", lambda n: pa.array(["x"] * n)),
    ("a list", lambda n: pa.array([[1.0, 2.0]] * n)),
    ("a struct", lambda n: pa.array([{"a": 1, "b": "c"}] * n)),
    ("vectors", lambda n: pa.array([[1.0, 2.0]] * n, pa.list_(pa.float32(), 2))),
    ("a date", lambda n: pa.array([0] * n, pa.timestamp("us"))),
]


@pytest.mark.parametrize(("name", "make"), ADDED)
def test_columns_of_a_later_version_are_passed_over(
    tmp_path: Path, name: str, make: Callable[[int], pa.Array]
) -> None:
    """Columns of other types that this version does not know, before those it knows, change nothing."""
    path = tmp_path / "s.arrows"
    written(path, [[0, 1], [1, 0]])
    table = pa.ipc.open_stream(path).read_all()
    later = with_columns(table, {name: make(table.num_rows)})
    with pa.ipc.new_stream(tmp_path / "later.arrows", later.schema) as stream:
        stream.write_table(later)

    for site in (0, 1):
        ours = gathered(read_table(tmp_path / "later.arrows")[0], site)
        assert ours == gathered(read_table(path)[0], site)
        assert len(ours) == 2


def test_what_cannot_be_passed_over_is_named(tmp_path: Path) -> None:
    """A column whose place in a batch is not known is an error that names it, not a wrong number."""
    path = tmp_path / "s.arrows"
    written(path, [[0, 1]])
    table = pa.ipc.open_stream(path).read_all()
    later = with_columns(table, {"odd": pa.array(["x"] * table.num_rows).dictionary_encode()})
    with pa.ipc.new_stream(tmp_path / "later.arrows", later.schema) as stream:
        stream.write_table(later)

    with pytest.raises(NotARecording, match="its column 'odd' has the Arrow type"):
        read_table(tmp_path / "later.arrows")


def test_compressed_batches_are_no_rows(tmp_path: Path) -> None:
    """Batches that another program compressed are reported as left out, not misread."""
    path = tmp_path / "s.arrows"
    written(path, [[0, 1]])
    table = pa.ipc.open_stream(path).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(tmp_path / "small.arrows", table.schema, options=options) as stream:
        stream.write_table(table)

    found, torn = read_table(tmp_path / "small.arrows")
    assert (found.parts, torn) == ((), True)
