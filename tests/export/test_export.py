"""The Parquet file: what it holds is what the recording says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kedge.errors import RecordingError
from kedge.store.export import parquet
from kedge.store.export.parquet import write_parquet
from kedge.store.export.wide_table import WIDE
from kedge.store.recording import Recording
from kedge.store.rows import STATISTICS


@pytest.fixture
def table(path: Path, tmp_path: Path):
    """The exported table."""
    write_parquet(Recording.open(path), tmp_path / "out.parquet")
    return pq.read_table(tmp_path / "out.parquet")


def test_every_row_is_there_by_site_and_step(table, path: Path) -> None:
    """A row for each site and step that fired, sites in data-flow order and steps rising, with what the sites are."""
    assert list(zip(table["site"].to_pylist(), table["step"].to_pylist(), strict=True)) == [
        (site, step)
        for site in ("conv:out", "conv:out.grad", "log:out")
        for step in (0, 10, 20, 30)
    ]
    assert table.column_names == list(WIDE)
    last = table.slice(11).to_pylist()[0]
    assert [last[name] for name in ("path", "kind", "type", "dtype", "level")] == [
        "log",
        "out",
        "Log",
        "float16",
        2,
    ]


@pytest.mark.parametrize("name", [name for name in STATISTICS if name in WIDE])
def test_statistics_are_those_of_the_recording(table, path: Path, name: str) -> None:
    """Each derived column is what the recording's own reader derives, at every site and step."""
    recording = Recording.open(path)
    for site in recording.sites[:3]:
        chosen = [row for row in table.to_pylist() if row["site"] == site.site]
        ours = np.array([np.nan if row[name] is None else row[name] for row in chosen], dtype=float)
        np.testing.assert_array_equal(ours, recording.rows(site).statistic(name))


def test_what_was_not_measured_is_null_and_what_is_not_a_number_is_nan(table) -> None:
    """Null says "not measured" in every column; NaN stays where elements made it so."""
    rows = {(row["site"], row["step"]): row for row in table.to_pylist()}
    gradient, broken, whole = rows["conv:out.grad", 0], rows["log:out", 20], rows["conv:out", 0]

    assert [
        gradient[name]
        for name in ("rms", "min", "absmax", "nonzero", "zero", "sampled", "saturated", "q50")
    ] == [None] * 8
    assert gradient["mean"] == 0.2
    assert gradient["nonfinite"] == 0
    assert np.isnan(
        [broken[name] for name in ("mean", "rms", "std", "min", "max", "absmax", "sum")]
    ).all()
    assert broken["nonfinite"] == 3
    assert (whole["saturated"], whole["zero"], whole["sampled"]) == (0.25, 0.5, 8)


def test_the_file_says_what_run_it_is(path: Path, tmp_path: Path) -> None:
    """The metadata has the manifest, the end, and what each column means."""
    write_parquet(Recording.open(path), tmp_path / "out.parquet")
    about = json.loads(pq.read_schema(tmp_path / "out.parquet").metadata[b"kedge"])

    assert about["manifest"]["script"] == "train.py"
    assert about["end"]["steps"] == 40
    assert set(about["columns"]) == set(WIDE)


def test_it_is_compressed_for_its_columns(path: Path, tmp_path: Path) -> None:
    """Columns are compressed by zstd, floats in split bytes, texts by dictionary."""
    write_parquet(Recording.open(path), tmp_path / "out.parquet")
    group = pq.ParquetFile(tmp_path / "out.parquet").metadata.row_group(0)
    found = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}

    assert {column.compression for column in found.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in found["rms"].encodings
    assert "RLE_DICTIONARY" in found["site"].encodings


def test_many_rows_are_written_in_groups(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written group by group, so that a large recording need not fit into memory, and holds every row."""
    monkeypatch.setattr(parquet, "GROUP", 5)
    write_parquet(Recording.open(path), tmp_path / "out.parquet")
    file = pq.ParquetFile(tmp_path / "out.parquet")

    assert file.num_row_groups == 2
    assert file.metadata.num_rows == 12


def test_a_file_appears_whole_or_not_at_all(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When writing fails, an old file stays and nothing else is left behind."""
    (tmp_path / "out.parquet").write_text("old")
    monkeypatch.setattr(
        parquet, "_groups", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(
        RecordingError, match="cannot write .*out.parquet: No space left on device; free some space"
    ):
        write_parquet(Recording.open(path), tmp_path / "out.parquet")

    assert (tmp_path / "out.parquet").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.parquet", "train.kedge"]


def test_an_empty_recording_is_an_empty_table(tmp_path: Path) -> None:
    """Without a row the file has its columns and no row."""
    write_parquet(Recording.build(["a:out"]), tmp_path / "out.parquet")

    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


def test_the_command_names_the_file_after_the_recording(kedge, path: Path, tmp_path: Path) -> None:
    """Without -o the file lies in the working directory under the run's name, and is not overwritten unasked."""
    done = kedge("export", "train.kedge", "--parquet")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("train.parquet: 12 rows of 4 sites, ")
    assert pq.read_table(tmp_path / "train.parquet").num_rows == 12

    again = kedge("export", "train.kedge", "--parquet")
    assert again.returncode == 2
    assert (
        again.stderr
        == "kedge: cannot write train.parquet: it exists already; replace it with --force, or name another file with -o\n"
    )
    assert kedge("export", "train.kedge", "--parquet", "--force").returncode == 0
    assert kedge("export", "train.kedge", "--parquet", "-o", "x.parquet").returncode == 0
    assert (
        "name another file with -o"
        in kedge("export", "train.kedge", "--parquet", "--force", "-o", ".").stderr
    )


def test_the_command_says_what_to_install(kedge, path: Path) -> None:
    """Without pyarrow the message names the extra that brings it."""
    done = kedge("export", "train.kedge", "--parquet", missing="pyarrow")

    assert done.returncode == 2
    assert done.stderr == (
        "kedge: kedge export needs the package pyarrow, which is not installed: pip install 'kedge[export]'\n"
    )


def test_only_regular_files_are_replaced(kedge, path: Path, tmp_path: Path) -> None:
    """--force leaves a device, a pipe, a link and a folder where they are, and no file beside them."""
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "link.parquet").symlink_to("elsewhere")
    (tmp_path / "null.parquet").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe.parquet")
    before = sorted(tmp_path.iterdir())
    for name in ("link.parquet", "null.parquet", "pipe.parquet", "/dev/full"):
        done = kedge("export", "train.kedge", "--parquet", "--force", "-o", name)
        assert done.returncode == 2
        assert done.stderr == (
            f"kedge: cannot write {name}: it exists already, and is not a regular file; name another file with -o\n"
        )

    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert Path("/dev/full").is_char_device()


def test_the_temporary_file_of_an_export_is_new(kedge, path: Path, tmp_path: Path) -> None:
    """A link under the name that a temporary file had before is not followed."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".out.parquet.part").symlink_to("precious")

    assert kedge("export", "train.kedge", "--parquet", "-o", "out.parquet").returncode == 0
    assert (tmp_path / "precious").read_text() == "kept"
    assert (tmp_path / "out.parquet").stat().st_mode & 0o777 == (
        tmp_path / "train.kedge/sites.json"
    ).stat().st_mode & 0o777
