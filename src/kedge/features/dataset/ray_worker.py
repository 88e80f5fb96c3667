"""What runs in the processes of a Ray cluster: actors that compute features, and tasks that write them as shards.

# Note [Every row once]
Ray makes the call of an actor that died again, and gives what a call returns to one task, which writes it. What an earlier
run has written, actors leave out by a list that is the same for all, so a repeated call returns the same. Only a task that
died after it wrote could write twice: before it writes it leaves a mark, and where it finds its mark it leaves out what is
in the folder. The marks are in a folder of the run's own, and without that no task writes: the run has ended then.
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
from kedge.features.dataset.compute import BatchComputer, TakesFeatures
from kedge.features.dataset.devices import usable
from kedge.features.dataset.engine import compute
from kedge.features.dataset.folder.files import only_writer
from kedge.features.dataset.folder.manifest import about_columns, settle
from kedge.features.dataset.folder.reading import places_of
from kedge.features.dataset.folder.shards import Shards
from kedge.features.dataset.options import Options
from kedge.features.dataset.samples.batch import Columns
from kedge.features.dataset.samples.names import SampleKeys, must_be_names, texts
from kedge.features.dataset.samples.placed import LoadedBatch, why

Rows = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What all processes of a run know of it.

    Attributes:
        folder: Where features go.
        options: How they are taken and written.
        wanted: What run they are of.
        marks: A folder of this run's own, which is there as long as it runs.
    """

    folder: Path
    options: Options
    wanted: Mapping[str, Any]
    marks: Path


class Worker:
    """An actor that computes the features of rows.

    Args:
        job: Refers to a `Run`, what gives the features, and the places of the samples that are done, pickled.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._begun = False

    def __call__(self, rows: dict[str, np.ndarray[Any, Any]]) -> Iterator[dict[str, list[Any]]]:
        """Yield the features of some rows batch by batch; an error is yielded too, as Ray would wrap it."""
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
            loads = _batches(_inputs(rows, self._options), places, rest, self._options)
            with (
                self._work.held(),
                closing(compute(loads, SampleKeys(None), self._work, self._options.on_bad)) as computed,
            ):
                for columns in computed:
                    columns.wait()
                    yield _sent(len(columns.places) + len(columns.bad), columns._replace(copied=None))
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
    """Make the file in which a process says which rows it is at; those of dead ones stay.

    Raises:
        ExtractionFailed: Too many have died.
    """
    cluster, said = run.options.cluster, [path.read_text(encoding="utf-8") for path in run.marks.glob("process-*")]
    if len(said) >= cluster.workers + cluster.deaths:
        suspect = Counter(filter(None, said)).most_common(1)
        raise ExtractionFailed(
            f"{cluster.deaths + 1} workers died, while they were at {suspect[0][0] if suspect else 'no row'}; "
            "Ray's logs say of what, which may be memory: then take a smaller cluster=Cluster(batch_size=)"
        )
    mark = run.marks / f"process-{token_hex(8)}"
    mark.touch()
    return mark


class ShardSink(ray.data.Datasink):  # type: ignore[misc]
    """Writes what workers yield; see Note [Every row once].

    Args:
        run: A `Run`, pickled.

    Attributes:
        rows: How many rows came, when all is written.
    """

    def __init__(self, run: bytes) -> None:
        self._run = run
        self.rows = 0

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Write the features of some rows.

        Returns:
            How many rows they are.
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
        """Note how many rows all tasks have written."""
        self.rows = sum(write_result.write_returns)


def _seat(folder: Path, lock: ExitStack) -> int:
    """Take a rank whose files no other process writes; those of dead ones are free again."""
    rank = 0
    while True:
        rank += 1
        with suppress(BeingWritten):
            lock.enter_context(only_writer(folder, rank))
            return rank


def _written_before(run: Run, task: int) -> set[str]:
    """Return the places of what is in the folder if this task was begun before, and died; else none."""
    try:
        (run.marks / f"task-{task}").touch(exist_ok=False)
    except FileExistsError:
        return {place for place, _ in places_of(run.folder)}
    except FileNotFoundError as error:
        raise ExtractionFailed(f"nothing more is written to {run.folder}: the run has ended") from error
    return set()


def _add(shards: Shards, run: Run, sent: bytes, written: set[str]) -> None:
    """Take in the features of a batch; raise an error when what came before it is written."""
    columns: Columns | KedgeError | None = pickle.loads(sent)  # noqa: S301 - our own workers'
    if isinstance(columns, KedgeError):
        shards.write()
        raise columns
    if columns is None:
        return
    if columns.values:
        must_be_names(run.options.reduce, columns.values)
        settle(run.folder, {**run.wanted, "columns": about_columns(columns.values)})
    shards.add(columns.without(written) if written else columns)


def _sent(rows: int, sent: Columns | KedgeError | None) -> dict[str, list[Any]]:
    """Return a row of Ray's: how many rows of the data set were seen, and what came of them."""
    return {"rows": [rows], "sent": [pickle.dumps(sent)]}


def pickled(sent: object) -> bytes:
    """Return what can be sent to workers.

    Raises:
        ExtractionFailed: That is not possible.
    """
    try:
        return bytes(cloudpickle.dumps(sent))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ExtractionFailed(f"the features, or an option, cannot be sent to workers: {why(error)}") from error


def opened(sent: bytes) -> Any:
    """Open what was sent.

    Raises:
        ExtractionFailed: Something in it cannot be imported here.
    """
    try:
        return pickle.loads(sent)  # noqa: S301 - our own program's
    except (ImportError, AttributeError) as error:
        raise ExtractionFailed(
            f"the features, or an option, cannot be opened on {gethostname()}: {why(error)}; what they refer to must be "
            "importable by the workers, or be defined in the script itself"
        ) from error


def _places(rows: Rows, keys: Any) -> list[str]:
    """Return what the user calls the rows."""
    if not callable(keys) and keys not in rows:
        raise ExtractionFailed(f"keys={keys!r}: there is no such column; there are {', '.join(map(repr, rows))}")
    found = texts(keys(_data(rows)) if callable(keys) else rows[keys])
    (key, times), *_ = Counter(found).most_common(1)
    if times > 1:
        raise ExtractionFailed(f"the key {key!r} stands for {times} samples; each sample needs a key of its own")
    return found


def _inputs(rows: Rows, options: Options) -> Rows:
    """Return the columns that the model, or the user's function, is to see."""
    left_out = options.keys if isinstance(options.keys, str) and options.batch is None else None
    return {name: column for name, column in rows.items() if name != left_out}


def _work(features: TakesFeatures, options: Options, proven: bool) -> BatchComputer:
    device = None if options.device is None else usable(options.device)
    if device is None and ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        device = torch.device("cuda")
    if device is not None and isinstance(features, nn.Module):
        features.to(device)
    return BatchComputer(features, batch=options.batch, device=device, proven=proven)


def _batches(rows: Rows, places: list[str], rest: list[int], options: Options) -> Iterator[LoadedBatch]:
    """Cut rows into batches for the model."""
    size = options.cluster.batch_size
    alone = next(iter(rows)) if len(rows) == 1 and options.batch is None else None
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        data = _data({name: column[part] for name, column in rows.items()})
        yield LoadedBatch([places[row] for row in part], data if alone is None else data[alone], [])


def _data(rows: Rows) -> dict[str, Any]:
    """Make tensors of the columns that hold numbers, and lists of others."""
    return {
        name: torch.from_numpy(np.array(column)) if column.dtype.kind in "biufc" else column.tolist()
        for name, column in rows.items()
    }
