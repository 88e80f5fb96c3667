"""What runs in the actors of Ray's pool: the model, and the writing of what it gives.

# Note [What Ray knows to be done]
A call takes some rows and returns when their features are on the disk. If its actor dies, Ray makes the call again in
a new process; that one reads what is in the folder, and leaves out what the dead one had written. So nothing is lost,
and nothing is there twice. Each process has a seat, that is a rank of its own, and so no two write the same files.
"""

from __future__ import annotations

import pickle
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.data.block import Block, BlockAccessor
from torch import nn

from kedge.errors import BeingWritten, ExtractionFailed, KedgeError
from kedge.features.dataset.batch import Places
from kedge.features.dataset.compute import TakesFeatures, Work
from kedge.features.dataset.devices import usable
from kedge.features.dataset.engine import compute
from kedge.features.dataset.folder import LOCK, only_writer
from kedge.features.dataset.keys import Keys, texts
from kedge.features.dataset.manifest import about_columns, settle
from kedge.features.dataset.options import Options
from kedge.features.dataset.reading import places_of
from kedge.features.dataset.reducer_names import must_be_names
from kedge.features.dataset.samples import Loaded, why
from kedge.features.dataset.shards import Shards
from kedge.features.dataset.writer import Writer

#: The column with the number of a row, where the user names no other.
ROW = "kedge_row"

Rows = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """What every worker has to know.

    Attributes:
        features: What gives the features.
        folder: Where they go.
        options: How.
        wanted: What run they are of.
        samples: How many rows there are, where they are numbered.
    """

    features: TakesFeatures
    folder: Path
    options: Options
    wanted: Mapping[str, Any]
    samples: int | None


class Seats:
    """An actor that gives each process of a worker a number, and knows which rows it is at.

    Args:
        allowed: How many processes there may be.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._held: list[Any] = []
        self._at: dict[int, str] = {}

    def take(self, worker: Any) -> tuple[int, str | None]:
        """Give a number from 1; or, if there were too many, say which rows most of them were at."""
        self._held.append(worker)
        suspect = Counter(self._at.values()).most_common(1)
        return len(self._held), (suspect[0][0] if suspect else "no row") if len(self._held) > self._allowed else None

    def begin(self, seat: int, rows: str) -> None:
        """Note what a worker begins with."""
        self._at[seat] = rows

    def end(self, seat: int) -> None:
        """Note that it is through."""
        self._at.pop(seat, None)

    def held(self) -> list[Any]:
        """Give the actors that took a number, in the order of numbers."""
        return self._held


class Worker:
    """Takes the features of rows, and writes them; see Note [What Ray knows to be done].

    Args:
        job: Refers to a `Job`, pickled.
        seats: The actor `Seats`.
    """

    def __init__(self, job: Any, seats: Any) -> None:
        self._pickled, self._seats = job, seats
        self._failed: KedgeError | None = None
        self._begun = False

    def __call__(self, rows: dict[str, np.ndarray[Any, Any]]) -> dict[str, list[Any]]:
        """Take the features of some rows; an error is returned, for Ray would wrap it."""
        count, taken = len(next(iter(rows.values()))), 0
        if self._failed is None:
            try:
                taken = self._take(rows, count)
            except KedgeError as error:
                error.add_note(f"on {gethostname()}: {''.join(traceback.format_exception(error))}")
                self._failed = error
        return {"rows": [count], "taken": [taken], "error": [pickle.dumps(self._failed)]}

    def _take(self, rows: Rows, count: int) -> int:
        if not self._begun:
            self._begin()
        places = self._places(rows)
        rest = [row for row in range(count) if places[row] not in self._done]
        if rest:
            ray.get(self._seats.begin.remote(self._seat, f"{places[rest[0]]!r} to {places[rest[-1]]!r}"))
            self._write(rows, places, rest)
            ray.get(self._seats.end.remote(self._seat))
        for row in rest:
            self._done.add(places[row])
        return len(rest)

    def _places(self, rows: Rows) -> list[str]:
        """Say where the rows are: their numbers, or what the user calls them."""
        keys = self._job.options.keys
        if keys is None or not (callable(keys) or isinstance(keys, str)):
            return texts(rows[ROW])
        if not callable(keys) and keys not in rows:
            raise ExtractionFailed(f"keys={keys!r}: there is no such column; there are {', '.join(map(repr, rows))}")
        found = texts(keys(_data(rows)) if callable(keys) else rows[keys])
        (key, times), *_ = Counter(found).most_common(1)
        if times > 1:
            raise ExtractionFailed(f"the key {key!r} stands for {times} samples; each sample needs a key of its own")
        return found

    def _write(self, rows: Rows, places: list[str], rest: list[int]) -> None:
        options, folder = self._job.options, self._job.folder
        loads = _batches(self._inputs(rows), places, rest, options)
        results = compute(loads, self._keys, self._work, options.on_bad)
        with self._work.held(), Writer(self._shards, options.shard_bytes) as writer, closing(results):
            for columns in results:
                if columns.values:
                    must_be_names(options.reduce, columns.values)
                    settle(folder, {**self._job.wanted, "columns": about_columns(columns.values)})
                writer.put(columns)

    def _inputs(self, rows: Rows) -> Rows:
        """Give the columns that the model, or the user's function, is to see."""
        options = self._job.options
        left_out = {ROW, options.keys if isinstance(options.keys, str) and options.batch is None else ROW}
        return {name: column for name, column in rows.items() if name not in left_out}

    def _begin(self) -> None:
        self._job = job = opened(ray.get(self._pickled))
        options = job.options
        if not (job.folder / LOCK.format(rank=0)).exists():
            raise ExtractionFailed(
                f"there is no folder {job.folder} on {gethostname()}: the machines of the cluster must share it"
            )
        self._seat, self._lock = self._sit()
        self._done = Places(job.samples)
        for place, _ in places_of(job.folder):
            self._done.add(place)
        named = None if callable(options.keys) or isinstance(options.keys, str) else options.keys
        self._keys = Keys(named, job.samples)
        self._shards = Shards(job.folder, self._seat, options)
        self._work = _work(job, len(self._done) > 0)
        self._begun = True

    def _sit(self) -> tuple[int, ExitStack]:
        """Take a seat on which nobody sits, until the process ends."""
        while True:
            seat, suspect = ray.get(self._seats.take.remote(ray.get_runtime_context().current_actor))
            if suspect is not None:
                raise ExtractionFailed(
                    f"{self._job.options.cluster.deaths + 1} workers died, while they were at {suspect}; "
                    "Ray's logs say of what, which may be memory: then take a smaller cluster=Cluster(batch_size=)"
                )
            lock = ExitStack()
            try:
                lock.enter_context(only_writer(self._job.folder, seat))
            except BeingWritten:
                continue
            return seat, lock


def pickled(job: Job) -> bytes:
    """Make what can be sent to workers.

    Raises:
        ExtractionFailed: That is not possible.
    """
    try:
        return bytes(ray.cloudpickle.dumps(job))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ExtractionFailed(f"the features, or an option, cannot be sent to workers: {why(error)}") from error


def opened(sent: bytes) -> Job:
    """Open what was sent.

    Raises:
        ExtractionFailed: Something in it cannot be imported here.
    """
    try:
        job: Job = pickle.loads(sent)  # noqa: S301 - our own program's
    except (ImportError, AttributeError) as error:
        raise ExtractionFailed(
            f"the features, or an option, cannot be opened on {gethostname()}: {why(error)}; what they refer to must be "
            "importable by the workers, or be defined in the script itself"
        ) from error
    return job


def _work(job: Job, proven: bool) -> Work:
    device = None if job.options.device is None else usable(job.options.device)
    if device is None and ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        device = torch.device("cuda")
    if device is not None and isinstance(job.features, nn.Module):
        job.features.to(device)
    return Work(job.features, batch=job.options.batch, device=device, proven=proven)


def _batches(rows: Rows, places: list[str], rest: list[int], options: Options) -> Iterator[Loaded]:
    """Cut rows into batches for the model."""
    size = options.cluster.batch_size
    alone = next(iter(rows)) if len(rows) == 1 and options.batch is None else None
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        data = _data({name: column[part] for name, column in rows.items()})
        yield Loaded([places[row] for row in part], data if alone is None else data[alone], [])


def _data(rows: Rows) -> dict[str, Any]:
    """Make tensors of the columns that hold numbers, and lists of others."""
    return {
        name: torch.from_numpy(np.array(column)) if column.dtype.kind in "biufc" else column.tolist()
        for name, column in rows.items()
    }


def with_numbers(block: Block, start: int) -> pa.Table:
    """Give the rows of a block their numbers."""
    table = BlockAccessor.for_block(block).to_arrow()
    return table.append_column(ROW, pa.array(np.arange(start, start + table.num_rows)))
