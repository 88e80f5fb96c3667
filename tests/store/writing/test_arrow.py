"""The Arrow stream: what is written, and how much of a damaged one is read."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.errors import NotARecording, RecordingError
from kedge.store.columns import BINARY, COLUMNS, OFFSETS, Columns
from kedge.store.writing.arrow import StatsWriter
from tests.store.tables import columns_of, read_table


def read_stats(paths: list[Path]) -> tuple[Columns, bool]:
    """Read the columns of one or several files, and whether one of them is torn."""
    read = [read_table(path) for path in paths]
    return columns_of(*(table for table, _ in read)), any(torn for _, torn in read)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place for a file of statistics."""
    return tmp_path / "stats-0.arrows"


@pytest.fixture
def writer(path: Path) -> Iterator[StatsWriter]:
    """A writer of that file, closed at last."""
    with closing(StatsWriter(path)) as writer:
        yield writer


def _columns(rows: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {"site": np.arange(rows), "calls": rng.integers(1, 9, rows)}
    columns |= {name: rng.normal(size=rows) for name in ("sum", "sumsq", "min", "max")}
    columns |= {
        name: rng.integers(-1, 1 << 40, rows) for name in ("count", "nonzero", "nonfinite", "nan")
    }
    columns["level"] = rng.integers(1, 3, rows)
    columns |= {name: rng.integers(-1, 257, rows) for name in ("sampled", "saturated")}
    columns |= {name: [rng.bytes(int(rng.integers(0, 5))) for _ in range(rows)] for name in BINARY}
    return columns


def _write(path: Path, sizes: list[int]) -> list[dict[str, Any]]:
    batches = [_columns(rows, seed) for seed, rows in enumerate(sizes)]
    with closing(StatsWriter(path)) as writer:
        for step, batch in enumerate(batches):
            writer.write(step * 10, batch)
    return batches


def _held(columns: Columns, name: str) -> list[bytes]:
    ends = columns[name + OFFSETS].tolist()
    data = columns[name].tobytes()
    return [data[start:end] for start, end in pairwise(ends)]


def _assert_read(columns: Columns, batches: list[dict[str, Any]]) -> None:
    sizes = [len(batch["site"]) for batch in batches]
    assert columns["step"].tolist() == np.repeat(np.arange(len(batches)) * 10, sizes).tolist()
    for name, (dtype, _) in COLUMNS.items():
        assert columns[name].dtype == dtype
        if name != "step":
            assert columns[name].tolist() == [
                value for batch in batches for value in np.asarray(batch[name]).tolist()
            ]
    for name in BINARY:
        assert _held(columns, name) == [held for batch in batches for held in batch[name]]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 7), max_size=6))
def test_batches_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    """Batches of any size, empty ones too, come back to the last bit and bound for bound."""
    path = tmp_path_factory.mktemp("arrow") / "s.arrows"
    batches = _write(path, sizes)
    columns, truncated = read_stats([path])

    _assert_read(columns, batches)
    assert not truncated


def test_special_floats_survive(path: Path, writer: StatsWriter) -> None:
    """NaN, the infinities, negative zero and the smallest numbers come back to the last bit."""
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, np.finfo(np.float64).max])
    writer.write(0, {"site": range(6), "sum": values})

    assert read_stats([path])[0]["sum"].tobytes() == values.tobytes()


def test_pyarrow_reads_what_is_written(tmp_path: Path) -> None:
    """Another Arrow library finds the columns, the types and the values that the docs promise."""
    path = tmp_path / "s.arrows"
    batches = _write(path, [3, 2])
    table = pa.ipc.open_stream(path).read_all()

    expected = {name: np.dtype(dtype).name for name, (dtype, _) in COLUMNS.items()} | dict.fromkeys(
        BINARY, "binary"
    )
    types = {field.name: str(field.type).replace("double", "float64") for field in table.schema}
    assert types == expected
    assert table["sum"].to_pylist() == [
        value for batch in batches for value in batch["sum"].tolist()
    ]
    for name in BINARY:
        assert table[name].to_pylist() == [held for batch in batches for held in batch[name]]
    assert sum(column.null_count for column in table.columns) == 0


def test_what_pyarrow_writes_is_read(tmp_path: Path) -> None:
    """A stream written by another Arrow library, its columns in another order and one more, is read alike."""
    path = tmp_path / "s.arrows"
    batches = _write(path, [3, 2])
    table = pa.ipc.open_stream(path).read_all()
    names = ["extra", *reversed(table.column_names)]
    table = table.append_column("extra", pa.array(range(5))).select(names)
    with pa.ipc.new_stream(tmp_path / "p.arrows", table.schema) as stream:
        stream.write_table(table)

    _assert_read(read_stats([tmp_path / "p.arrows"])[0], batches)


def test_what_is_left_out_was_not_measured(path: Path, writer: StatsWriter) -> None:
    """Only the site must be given; the other columns have values that mean "not measured"."""
    writer.write(5, {"site": [2]})
    columns, _ = read_stats([path])

    assert {
        name: columns[name].tolist()
        for name in ("step", "site", "calls", "count", "nonzero", "level")
    } == {
        "step": [5],
        "site": [2],
        "calls": [1],
        "count": [0],
        "nonzero": [-1],
        "level": [2],
    }
    assert np.isnan([columns[name][0] for name in ("sum", "sumsq", "min", "max")]).all()
    assert [_held(columns, name) for name in BINARY] == [[b""], [b""]]


@pytest.mark.parametrize(("name", "values"), [("sum", [1.0]), ("exponents", [b""] * 3)])
def test_a_column_of_another_length_is_refused(
    path: Path, writer: StatsWriter, name: str, values: list[Any]
) -> None:
    """A batch whose columns differ in length is an error, and nothing of it is written."""
    before = path.stat().st_size
    with pytest.raises(
        ValueError, match=f"column '{name}' has {len(values)} values and column 'site' has 2"
    ):
        writer.write(0, {"site": [0, 1], name: values})

    assert path.stat().st_size == before


def test_a_batch_is_there_as_soon_as_it_is_written(path: Path, writer: StatsWriter) -> None:
    """Without any closing, each batch can be read once the call that wrote it returns."""
    for step in range(3):
        assert len(read_stats([path])[0]["step"]) == step
        writer.write(step, {"site": [0]})

    assert read_stats([path])[0]["step"].tolist() == [0, 1, 2]
    assert not read_stats([path])[1]


def test_a_file_cut_at_any_byte_keeps_its_whole_batches(path: Path, writer: StatsWriter) -> None:
    """Wherever in its first or its last message a file ends, the batches before are read and the tear is reported."""
    ends = [0, path.stat().st_size]
    batches = [_columns(3, seed) for seed in range(2)]
    for step, batch in enumerate(batches):
        writer.write(step * 10, batch)
        ends.append(path.stat().st_size)
    content = path.read_bytes()
    schema = 8 + int.from_bytes(content[4:8], "little")

    for cut in (*range(ends[-1], ends[-2] - 1, -1), *range(ends[1] - 1, -1, -1)):
        os.truncate(path, cut)
        columns, truncated = read_stats([path])
        whole = sum(end <= cut for end in ends[2:])
        assert truncated == (cut not in {schema, *ends}), cut
        _assert_read(columns, batches[:whole])


def test_what_follows_the_end_of_a_stream_is_reported(path: Path, writer: StatsWriter) -> None:
    """Zeros at the end, as a power failure leaves them, cost no batch and are not taken for an end."""
    batch = _columns(3)
    writer.write(0, batch)
    with path.open("ab") as file:
        file.write(b"\0" * 4096)
    columns, truncated = read_stats([path])

    _assert_read(columns, [batch])
    assert truncated


def test_damage_ends_the_reading(path: Path, writer: StatsWriter) -> None:
    """Reading ends at a batch whose head was overwritten, and the damage is reported."""
    batch = _columns(3)
    writer.write(0, batch)
    place = path.stat().st_size
    writer.write(10, batch)
    content = bytearray(path.read_bytes())
    content[place : place + 64] = b"\xfe" * 64
    path.write_bytes(content)
    columns, truncated = read_stats([path])

    _assert_read(columns, [batch])
    assert truncated


def _foreign_stream(column: str) -> bytes:
    """Return an Arrow stream with one column of float64."""
    sink = io.BytesIO()
    table = pa.table({column: [1.0]})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


FOREIGN = [
    (b"PAR1" + b"\1" * 100, "it is not an Arrow stream"),
    (b"x", "it is not an Arrow stream"),
    (b"\xff\xff\xff\xff" + b"g" * 5000, "it is not an Arrow stream"),
    (b"\0" * 5000, "it is not an Arrow stream"),
    (_foreign_stream("loss"), "it has no column 'step' but loss"),
    (_foreign_stream("step"), "its column 'step' has the Arrow type 'g', not 'l'"),
]


@pytest.mark.parametrize(("content", "message"), FOREIGN)
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """A file of something else is an error that names the file and what it is not."""
    path = tmp_path / "s.arrows"
    path.write_bytes(content)
    with pytest.raises(NotARecording) as caught:
        read_stats([path])

    assert str(caught.value).startswith(
        f"{path} does not hold the statistics of a recording: {message}"
    )


def test_no_file_at_all_gives_no_row() -> None:
    """Without files there are columns of the right types, and no row."""
    columns, truncated = read_stats([])

    assert {
        name: (len(values), values.dtype) for name, values in columns.items() if name in COLUMNS
    } == {name: (0, np.dtype(dtype)) for name, (dtype, _) in COLUMNS.items()}
    assert not truncated


def test_several_files_are_one_table(tmp_path: Path) -> None:
    """The rows of several files follow each other, each with its own bits, and one tear is reported."""
    first, second = _write(tmp_path / "0.arrows", [3]), _write(tmp_path / "1.arrows", [2, 4])
    paths = [tmp_path / "0.arrows", tmp_path / "1.arrows"]
    columns, truncated = read_stats(paths)

    assert columns["sum"].tolist() == [
        value for batch in first + second for value in batch["sum"].tolist()
    ]
    for name in BINARY:
        assert _held(columns, name) == [held for batch in first + second for held in batch[name]]
    assert not truncated
    paths[0].write_bytes(paths[0].read_bytes()[:-20])
    assert read_stats(paths)[1]


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    """Starting on top of a file is an error, and the file stays."""
    path = tmp_path / "s.arrows"
    path.write_text("mine")
    with pytest.raises(RecordingError, match=f"^cannot start {path}: File exists; "):
        StatsWriter(path)

    assert path.read_text() == "mine"


def test_a_writer_closes_once(path: Path, writer: StatsWriter) -> None:
    """Closing twice ends the stream once."""
    writer.close()
    size = path.stat().st_size
    writer.close()

    assert path.stat().st_size == size


FULL_DISK = """
import resource, sys
from kedge.errors import RecordingError
from kedge.store.writing.arrow import StatsWriter

writer = StatsWriter(sys.argv[1])
columns = {"site": range(100)}
writer.write(0, columns)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
for step in range(1, 9):
    try:
        writer.write(step, columns)
    except RecordingError as error:
        print(step, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write(9, columns)
writer.close()
"""


def test_a_step_that_does_not_fit_spoils_no_other(
    tmp_path: Path, alone: Callable[..., list[str]]
) -> None:
    """When the disk takes only a part of a batch, that batch is an error, and those around it are whole."""
    path = tmp_path / "s.arrows"
    done = subprocess.run(alone(FULL_DISK, path), capture_output=True, text=True, check=True)
    failed = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    columns, truncated = read_stats([path])

    assert set(failed.values()) == {
        f"cannot write to {path}: File too large; check the disk, or name another place"
    }
    kept = [step for step in range(10) if str(step) not in failed]
    assert 0 < len(failed) < 8
    assert columns["step"].tolist() == np.repeat(kept, 100).tolist()
    assert not truncated
