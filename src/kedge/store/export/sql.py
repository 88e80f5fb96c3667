"""SQL queries over a recording, by DuckDB in memory: nothing is written and no lock is taken.

# Note [No thread at the end]
pyarrow's own scanner reads ahead in a thread, which may still wait for Python when the interpreter
ends: the process then aborts after a good answer. So the calling thread makes, filters and returns
the batches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from kedge.errors import QueryError
from kedge.store.events import RunEvent
from kedge.store.export.parquet import SCHEMA, batches
from kedge.store.export.wide_table import WIDE
from kedge.store.recording import Recording
from kedge.store.sites import SiteInfo

TABLES = ("stats", "sites", "findings", "events")
READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}

_FINDINGS = pa.schema(
    [
        ("code", pa.string()),
        ("severity", pa.string()),
        ("site", pa.string()),
        ("step", pa.int64()),
        ("message", pa.string()),
        ("evidence", pa.string()),
        ("confidence", pa.float64()),
        ("remedy", pa.string()),
    ]
)
_EVENTS = pa.schema(
    [("kind", pa.string()), ("step", pa.int64()), ("rank", pa.int64()), ("event", pa.string())]
)
_SITES = pa.schema(
    {
        "id": pa.int64(),
        "site": pa.string(),
        "path": pa.string(),
        "kind": pa.string(),
        "type": pa.string(),
        "root": pa.int64(),
        "shape": pa.list_(pa.int64()),
        "dtype": pa.string(),
        "channels": pa.int64(),
        "sources": pa.list_(pa.int64()),
        "owner": pa.string(),
        "node": pa.string(),
        "file": pa.string(),
        "line": pa.int64(),
    }
)


def ask(
    recording: Recording, sql: str, findings: Callable[[], Iterable[Any]]
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the answer to one query over a recording.

    Args:
        recording: The recording.
        sql: The query; it can read the tables ``stats``, ``sites``, ``findings`` and ``events``,
            and nothing else.
        findings: Returns the findings of the rules; called only if the query mentions findings.

    Returns:
        The names of the columns, and the rows.

    Raises:
        QueryError: It cannot be run, or would write.
    """
    found = findings() if re.search(r"\bfindings\b", sql, re.IGNORECASE) else ()
    with duckdb.connect(":memory:") as connection:
        connection.register("stats", _Stats(recording))
        connection.register("sites", _table(_SITES, map(_site, recording.sites)))
        connection.register("findings", _table(_FINDINGS, map(_finding, found)))
        connection.register("events", _table(_EVENTS, map(_event, recording.events)))
        for setting in ("python_enable_replacements", "enable_external_access"):
            connection.execute(f"SET {setting} = false")
        connection.execute("SET lock_configuration = true")
        try:
            _check(connection.extract_statements(sql))
            answer = connection.execute(sql)
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.Error as error:
            raise QueryError(
                f"the query cannot be run: {error}\n\nThe tables are {', '.join(TABLES)}."
            ) from error


def _check(statements: Sequence[Any]) -> None:
    """Check that a text is one query that only reads."""
    if len(statements) != 1:
        raise QueryError(
            f"the query cannot be run: it is {len(statements)} statements; give exactly one"
        )
    kind = statements[0].type
    if kind not in READING:
        raise QueryError(
            f"the query cannot be run: it is {kind.name}, and a recording is only read; give a SELECT, "
            f"or DESCRIBE and SUMMARIZE with one of the tables {', '.join(TABLES)}"
        )


class _Stats(ds.Dataset):  # type: ignore[misc]
    """The wide table, computed while DuckDB reads it: only the needed columns, site after site."""

    def __init__(self, recording: Recording) -> None:
        # The base class's constructor is for pyarrow's own data sets; DuckDB uses only the members
        # below.
        self._recording = recording

    @property
    def schema(self) -> Any:
        """The columns and their types."""
        return SCHEMA

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> Any:  # noqa: A002
        """Return a reader of these columns, for the rows that pass a filter."""
        filtered = set(re.findall(r"\w+", str(filter))) if filter is not None else set()
        names = [name for name in WIDE if columns is None or name in columns or name in filtered]
        # Counting rows needs no column, but a batch must have one.
        return _Scan(self._recording, names or ["step"], columns, filter)


class _Scan:
    """A scan of one table for DuckDB; see Note [No thread at the end]."""

    def __init__(
        self, recording: Recording, names: Sequence[str], columns: Sequence[str] | None, only: Any
    ) -> None:
        self._recording, self._names, self._only = recording, names, only
        self._columns = list(names if columns is None else columns)
        self._schema = pa.schema([SCHEMA.field(name) for name in self._columns])

    def to_reader(self) -> Any:
        """Return the rows, batch by batch."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[Any]:
        for batch in batches(self._recording, self._names):
            table = pa.Table.from_batches([batch])
            table = table if self._only is None else table.filter(self._only)
            yield from table.select(self._columns).to_batches()


def _site(site: SiteInfo) -> dict[str, Any]:
    own = {name: getattr(site, name) for name in _SITES.names if hasattr(site, name)}
    lists = {"shape": list(site.shape), "sources": list(site.sources)}
    called = {} if site.source is None else {"file": site.source.file, "line": site.source.line}
    return {"file": None, "line": None, **own, **lists, **called}


def _finding(finding: Any) -> dict[str, Any]:
    entry = finding.entry()
    return {**entry, "evidence": json.dumps(entry["evidence"], default=str)}


def _event(event: RunEvent) -> dict[str, Any]:
    entry = event.entry()
    written = json.dumps(entry)
    return {"kind": entry["kind"], "step": event.step, "rank": event.rank or 0, "event": written}


def _table(schema: Any, rows: Iterable[Mapping[str, Any]]) -> Any:
    return pa.Table.from_pylist(list(map(dict, rows)), schema=schema)
