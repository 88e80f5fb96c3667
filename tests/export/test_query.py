"""SQL over a recording: right answers, clear errors, and nothing but reading."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from kedge.errors import QueryError
from kedge.rules.registry import check
from kedge.store.export.sql import ask
from kedge.store.export.wide_table import WIDE
from kedge.store.recording import Recording
from kedge.store.writing.folder import create

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "query.md"


@pytest.fixture
def asked(path: Path):
    """Ask the recording."""
    recording = Recording.open(path)
    return lambda sql: ask(recording, sql, lambda: check(recording))


def test_the_answer_is_what_the_recording_says(asked, path: Path) -> None:
    """A column of a site, filtered and ordered by SQL, is the recording's own series."""
    names, rows = asked("SELECT step, mean FROM stats WHERE site = 'conv:out' ORDER BY step")

    assert names == ["step", "mean"]
    assert rows == list(
        zip((0, 10, 20, 30), Recording.open(path).series("conv:out", "mean").tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT count(*) FROM stats", [(12,)]),
        ("SELECT count(rms), count(q50), sum(nonfinite) FROM stats", [(8, 4, 6)]),
        ("SELECT site FROM stats WHERE step = 20 AND isnan(rms)", [("log:out",)]),
        ("SELECT count(*) FROM stats WHERE step >= 20 AND kind = 'out' AND calls = 1", [(4,)]),
        ("SELECT s.type, max(t.step) FROM stats t JOIN sites s USING (site) WHERE s.id = 2 GROUP BY ALL", [("Log", 30)]),
        ("SELECT site, shape, sources FROM sites WHERE path = 'conv' AND kind = 'out'", [("conv:out", [2, 5], [None])]),
        ("SELECT file, line FROM sites WHERE file IS NOT NULL", [("net.py", 7)]),
        ("SELECT site FROM sites EXCEPT SELECT site FROM stats", [("idle:out",)]),
        ("SELECT code, severity, site, step FROM findings", [("NAN-BORN", "error", "log:out", 20)]),
        ("FROM events SELECT kind, event->>'text' WHERE kind = 'note'", [("note", "hello")]),
        ("WITH w AS (SELECT step, lag(step) OVER (ORDER BY step) AS b FROM stats WHERE site = 'log:out') "
         "SELECT max(step - b) FROM w", [(10,)]),
        ("EXPLAIN SELECT 1", None),
        ("SUMMARIZE stats", None),
        ("FROM stats LIMIT 0", []),
    ],
)  # fmt: skip
def test_queries(asked, sql: str, expected: list | None) -> None:
    """All tables answer, joined, filtered and grouped, whichever columns are read and filtered by."""
    _, rows = asked(sql)

    assert rows == expected if expected is not None else rows


def test_the_columns_are_those_of_the_export(asked) -> None:
    """Stats has the columns of the Parquet file, in its order."""
    assert [row[0] for row in asked("DESCRIBE stats")[1]] == list(WIDE)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", "syntax error at or near"),
        ("SELECT nope FROM stats", 'Referenced column "nope" not found'),
        ("SELECT * FROM losses", "losses does not exist"),
        ("SELECT 1; SELECT 2", "it is 2 statements; give exactly one"),
        ("", "it is 0 statements"),
        ("DROP TABLE stats", "it is DROP, and a recording is only read"),
        ("CREATE TABLE t AS SELECT 1", "it is CREATE"),
        ("COPY stats TO 'stolen.csv'", "it is COPY"),
        ("EXPLAIN ANALYZE COPY stats TO 'stolen.csv'", "file system operations are disabled"),
        ("SELECT * FROM read_csv('/etc/passwd')", "file system operations are disabled"),
        ("SELECT * FROM recording", "recording does not exist"),
        ("SET enable_external_access = true", "it is SET"),
        ("SELECT CAST('a' AS INTEGER)", "Could not convert string 'a' to INT32"),
    ],
)
def test_what_cannot_be_run_is_explained(
    asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str, message: str
) -> None:
    """Bad SQL, and SQL that would write or reach for anything else, is an error that says why; nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QueryError, match="^the query cannot be run: ") as caught:
        asked(sql)

    assert message in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["train.kedge"]


def test_only_what_is_asked_for_is_computed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query computes the columns that it reads or filters by, and runs the rules only for findings."""
    recording, computed = Recording.open(path), set()
    for name, column in WIDE.items():
        spied = lambda site, rows, name=name, of=column.of: (computed.add(name), of(site, rows))[1]
        monkeypatch.setitem(WIDE, name, type(column)(column.type, column.meaning, spied))

    def never() -> list:
        raise AssertionError("the rules ran for nothing")

    ask(recording, "SELECT avg(rms) FROM stats WHERE kind = 'out'", never)

    assert computed == {"rms", "kind"}


def test_a_growing_recording_is_asked(tmp_path: Path, kedge) -> None:
    """A run is asked while it is written, and goes on to be written."""
    with create(tmp_path / "r.kedge", {}, force=False) as writer:
        writer.sites([{"id": 0, "site": "a:out"}], [])
        writer.stats(0, {"site": [0], "count": [1], "sum": [1.0]})
        done = kedge("query", "r.kedge", "SELECT step, mean FROM stats", "--csv")
        writer.stats(1, {"site": [0], "count": [1], "sum": [2.0]})
        later = kedge("query", "r.kedge", "SELECT step, mean FROM stats", "--csv")

    assert (done.stdout, later.stdout) == ("step,mean\n0,1.0\n", "step,mean\n0,1.0\n1,2.0\n")
    assert (done.stderr, done.returncode) == ("", 0)


def test_the_ranks_are_asked_as_one(tmp_path: Path) -> None:
    """Rows of one site and step from several ranks are one row."""
    rows = [
        {"step": 0, "site": "a:out", "rank": rank, "count": 2, "sum": 1.0 + rank} for rank in (0, 1)
    ]
    recording = Recording.build(["a:out"], rows)

    assert ask(recording, "SELECT step, count, mean FROM stats", list)[1] == [(0, 4, 0.75)]


def test_the_command_draws_a_table(kedge, path: Path) -> None:
    """The answer is drawn with its titles and its number of rows; null looks different from an empty text."""
    done = kedge("query", "train.kedge", "SELECT site, step, rms, type FROM stats WHERE step = 0")

    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["site", "step", "rms", "type"] in lines
    assert ["conv:out", "0", "3", "Conv2d"] in lines
    assert ["conv:out.grad", "0", "null", "Conv2d"] in lines
    assert lines[-1] == ["3", "rows"]


def test_a_long_answer_is_cut_unless_asked_for(kedge, path: Path) -> None:
    """The first hundred rows are drawn, and all of them with --all."""
    query = "SELECT unnest(range(150)) AS number"
    short, whole = (kedge("query", "train.kedge", query, *more).stdout for more in ((), ("--all",)))

    assert "150 rows, the first 100 shown: --all shows every row" in short
    assert len(re.findall(r"^\s*\d+\s*$", short, re.MULTILINE)) == 100
    assert len(re.findall(r"^\s*\d+\s*$", whole, re.MULTILINE)) == 150


def test_json_and_csv_hold_every_value(kedge, path: Path) -> None:
    """Programs get all rows; JSON has words where it has no numbers, and null for null."""
    query = "SELECT site, step, rms, min, [1, 2] AS pair FROM stats WHERE kind != 'out' OR site = 'log:out' ORDER BY ALL"
    rows = json.loads(kedge("query", "train.kedge", query, "--json").stdout)
    assert [row["rms"] for row in rows] == [None] * 4 + [2.0, 2.0, "nan", "nan"]
    assert rows[0] == {"site": "conv:out.grad", "step": 0, "rms": None, "min": None, "pair": [1, 2]}

    table = list(csv.reader(io.StringIO(kedge("query", "train.kedge", query, "--csv").stdout)))
    assert table[0] == ["site", "step", "rms", "min", "pair"]
    assert [row[2] for row in table[1:]] == [""] * 4 + ["2.0", "2.0", "nan", "nan"]


def test_the_query_may_come_from_the_standard_input(kedge, path: Path) -> None:
    """A dash in place of the query reads it."""
    assert (
        kedge("query", "train.kedge", "-", "--csv", input="SELECT count(*) AS n FROM stats").stdout
        == "n\n12\n"
    )


@pytest.mark.parametrize("package", ["duckdb", "pyarrow"])
def test_the_command_says_what_to_install(kedge, path: Path, package: str) -> None:
    """Without one of its packages the message names the extra that brings it."""
    done = kedge("query", "train.kedge", "SELECT 1", missing=package)

    assert done.returncode == 2
    assert (
        done.stderr
        == f"kedge: kedge query needs the package {package}, which is not installed: pip install 'kedge[query]'\n"
    )


def test_bad_sql_is_one_message(kedge, path: Path) -> None:
    """The command prints what DuckDB says and the tables there are, and exits with 2."""
    done = kedge("query", "train.kedge", "SELECT nope FROM stats")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        'kedge: the query cannot be run: Binder Error: Referenced column "nope" not found'
    )
    assert done.stderr.endswith("The tables are stats, sites, findings, events.\n")


def test_the_page_lists_every_column() -> None:
    """docs/how-to/query.md has each column of stats with its meaning, in order."""
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)

    assert [(name, meaning) for name, meaning in listed if name in WIDE] == [
        (name, column.meaning) for name, column in WIDE.items()
    ]


def test_infinities_are_kept(path: Path) -> None:
    """An infinite statistic is infinite in SQL."""
    recording = Recording.build(
        ["a:out"], [{"step": 0, "site": 0, "count": 1, "sum": np.inf, "sumsq": np.inf}]
    )

    assert ask(recording, "SELECT isinf(rms) FROM stats", list)[1] == [(True,)]
