"""The code that runs in the processes of a Ray cluster: actors that compute features, and tasks that write them as shards.

# Note [Every row once]
Ray repeats the call of an actor that died, and passes the result of a call to one task, which
writes it. All actors skip the samples of earlier runs by one and the same list, so a repeated call
returns the same result. Only a task that died after it wrote could write twice: each task leaves a
mark before it writes, and a task that finds its own mark skips the samples already in the folder.
Marks are in a folder that belongs to the run; if that is missing, the run has ended and tasks do
not write.
"""

from __future__ import annotations

import pickle
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from socket import gethostname
from typing import Any

import cloudpickle
import numpy as np
import ray
import ray.data
import torch
from ray.data.block import BlockAccessor
from torch import nn

from kedge.errors import BeingWritten, ExtractionFailed, KedgeError
from kedge.features.dataset.compute import BatchComputer, TakesFeatures, compute
from kedge.features.dataset.devices import usable
from kedge.features.dataset.folder.files import only_writer
from kedge.features.dataset.folder.manifest import about_content, settle
from kedge.features.dataset.folder.reading import places_of
from kedge.features.dataset.folder.shards import Shards
from kedge.features.dataset.options import Options
from kedge.features.dataset.samples.batch import Columns
from kedge.features.dataset.samples.fields import BatchFields
from kedge.features.dataset.samples.names import SampleKeys, must_be_names, texts
from kedge.features.dataset.samples.placed import LoadedBatch, why

Rows = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The facts about a run that all its processes share.

    Attributes:
        folder: The folder of features.
        options: How features are computed and written.
        wanted: The description of the run.
        marks: A folder that belongs to this run and exists while it runs.
    """

    folder: Path
    options: Options
    wanted: Mapping[str, Any]
    marks: Path


class Worker:
    """An actor that computes the features of rows.

    Args:
        job: Ray's reference to the pickled tuple of a `Run`, the model that returns features, and
            the places of finished samples.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._begun = False

    def __call__(self, rows: dict[str, np.ndarray[Any, Any]]) -> Iterator[dict[str, list[Any]]]:
        """Yield the features of some rows batch by batch, and errors too, because Ray would wrap a raised one."""
        try:
            yield from self._taken(rows)
        except KedgeError as error:
            error.add_note(f"on {gethostname()}: {''.join(traceback.format_exception(error))}")
            yield _sent(0, error)

    def _taken(self, rows: Rows) -> Iterator[dict[str, list[Any]]]:
        if not self._begun:
            self._begin()
        places = _places(rows, self._options.keys)
        rest = [row for row, place in enumerate(places) if place not in self._done]
        yield _sent(len(places) - len(rest), None)
        if rest:
            self._mark.write_text(f"{places[rest[0]]!r} to {places[rest[-1]]!r}", encoding="utf-8")
            loads = _batches(rows, places, rest, self._options)
            with (
                self._work.held(),
                closing(
                    compute(loads, SampleKeys(None), self._work, self._options.on_bad)
                ) as computed,
            ):
                for columns in computed:
                    columns.wait()
                    yield _sent(len(columns.places) + len(columns.bad), columns._replace(copied=()))
            self._mark.write_text("", encoding="utf-8")

    def _begin(self) -> None:
        run, features, done = opened(ray.get(self._job))
        if not run.marks.is_dir():
            raise ExtractionFailed(
                f"there is no folder {run.folder} on {gethostname()}: the machines of the cluster must share it"
            )
        self._options, self._done = run.options, done
        self._mark = _note_process(run)
        self._work = _work(features, run.options, len(done) > 0)
        self._begun = True


def _note_process(run: Run) -> Path:
    """Return a new file for the rows that a process is working on; files of dead processes remain.

    Raises:
        ExtractionFailed: Too many processes have died.
    """
    cluster, started = (
        run.options.cluster,
        [path.read_text(encoding="utf-8") for path in run.marks.glob("process-*")],
    )
    if len(started) >= cluster.workers + cluster.deaths:
        suspect = Counter(filter(None, started)).most_common(1)
        raise ExtractionFailed(
            f"{cluster.deaths + 1} workers died, while they computed {suspect[0][0] if suspect else 'no row'}; Ray's "
            "logs name the cause; if it is memory, use a smaller cluster=Cluster(batch_size=)"
        )
    mark = run.marks / f"process-{token_hex(8)}"
    mark.touch()
    return mark


class ShardSink(ray.data.Datasink):  # type: ignore[misc]
    """Sink that writes the output of workers; see Note [Every row once].

    Args:
        run: A `Run`, pickled.

    Attributes:
        rows: The number of rows received, known once all are written.
    """

    def __init__(self, run: bytes) -> None:
        self._run = run
        self.rows = 0

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Write the features of some rows.

        Returns:
            The number of rows.
        """
        run: Run = opened(self._run)
        seen = 0
        with ExitStack() as lock:
            rank = _seat(run.folder, lock)
            written = _written_before(run, ctx.task_idx)
            shards = Shards(run.folder, rank, run.options)
            for block in blocks:
                for row in BlockAccessor.for_block(block).to_arrow().to_pylist():
                    seen += row["rows"]
                    _add(shards, run, row["sent"], written)
            shards.write()
        return seen

    def on_write_complete(self, write_result: Any) -> None:
        """Store the number of rows that all tasks have written."""
        self.rows = sum(write_result.write_returns)


def _seat(folder: Path, lock: ExitStack) -> int:
    """Lock and return a rank whose files no other process writes; ranks of dead processes are free again."""
    rank = 0
    while True:
        rank += 1
        with suppress(BeingWritten):
            lock.enter_context(only_writer(folder, rank))
            return rank


def _written_before(run: Run, task: int) -> set[str]:
    """Return the places of all samples in the folder if an earlier attempt of this task died, else an empty set."""
    try:
        (run.marks / f"task-{task}").touch(exist_ok=False)
    except FileExistsError:
        return {place for place, _ in places_of(run.folder)}
    except FileNotFoundError as error:
        raise ExtractionFailed(
            f"nothing more is written to {run.folder}: the run has ended"
        ) from error
    return set()


def _add(shards: Shards, run: Run, sent: bytes, written: set[str]) -> None:
    """Add the features of a batch to the shards; raise a received error after the batches before it are written."""
    columns: Columns | KedgeError | None = pickle.loads(sent)  # noqa: S301 - our own workers'
    if isinstance(columns, KedgeError):
        shards.write()
        raise columns
    if columns is None:
        return
    if columns.values:
        must_be_names(run.options.reduce, columns.values)
        settle(run.folder, {**run.wanted, **about_content(columns)})
    shards.add(columns.without(written) if written else columns)


def _sent(rows: int, sent: Columns | KedgeError | None) -> dict[str, list[Any]]:
    """Return a Ray row: the number of rows of the data set that were seen, and their result."""
    return {"rows": [rows], "sent": [pickle.dumps(sent)]}


def pickled(sent: object) -> bytes:
    """Return an object as bytes for the workers.

    Raises:
        ExtractionFailed: The object cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(sent))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ExtractionFailed(
            f"the features, or an option, cannot be sent to workers: {why(error)}"
        ) from error


def opened(sent: bytes) -> Any:
    """Return an object from its bytes.

    Raises:
        ExtractionFailed: The object refers to something that cannot be imported here.
    """
    try:
        return pickle.loads(sent)  # noqa: S301 - our own program's
    except (ImportError, AttributeError) as error:
        raise ExtractionFailed(
            f"the features, or an option, cannot be loaded on {gethostname()}: {why(error)}; the workers must be "
            "able to import the objects that these refer to, unless the script itself defines them"
        ) from error


def _places(rows: Rows, keys: Any) -> list[str]:
    if not callable(keys) and keys not in rows:
        raise ExtractionFailed(
            f"keys={keys!r}: there is no such column; there are {', '.join(map(repr, rows))}"
        )
    found = texts(keys(_data(rows)) if callable(keys) else rows[keys])
    (key, times), *_ = Counter(found).most_common(1)
    if times > 1:
        raise ExtractionFailed(
            f"the key {key!r} belongs to {times} samples; each sample needs a key of its own"
        )
    return found


def _inputs(rows: Rows, options: Options) -> Rows:
    named = [options.keys, *options.stored_fields.values()] if options.batch is None else []
    return {name: column for name, column in rows.items() if name not in named}


def _work(features: TakesFeatures, options: Options, proven: bool) -> BatchComputer:
    device = None if options.device is None else usable(options.device)
    if device is None and any(ray.get_runtime_context().get_accelerator_ids().values()):
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and isinstance(features, nn.Module):
        features.to(device)
    return BatchComputer(features, batch=options.batch, device=device, proven=proven)


def _batches(
    rows: Rows, places: list[str], rest: list[int], options: Options
) -> Iterator[LoadedBatch]:
    size, fields, inputs = (
        options.cluster.batch_size,
        BatchFields(options.stored_fields),
        _inputs(rows, options),
    )
    alone = next(iter(inputs)) if len(inputs) == 1 and options.batch is None else None
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        data = _data({name: column[part] for name, column in rows.items()})
        loaded = fields(LoadedBatch([places[row] for row in part], data, []))
        yield loaded._replace(
            data=data[alone] if alone is not None else {name: data[name] for name in inputs}
        )


def _data(rows: Rows) -> dict[str, Any]:
    return {
        name: torch.from_numpy(np.array(column))
        if column.dtype.kind in "biufc"
        else column.tolist()
        for name, column in rows.items()
    }
