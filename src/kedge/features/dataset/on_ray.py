"""Extraction from a `ray.data.Dataset`: actors compute features, and tasks write them to a folder that all machines share.

# Note [Every row once]
Ray repeats the call of an actor that died, and passes the result of a call to one task, which
writes it. All actors skip the samples of earlier runs by one and the same list, so a repeated call
returns the same result. Only a task that died after it wrote could write twice: each task leaves a
mark before it writes, and a task that finds its own mark skips the samples already in the folder.
Marks are in a folder that belongs to the run; if that is missing, the run has ended and tasks do
not write.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
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
from kedge.features.dataset.batch import Columns, SampleBatch, why
from kedge.features.dataset.compute import BatchComputer, TakesFeatures, compute, usable
from kedge.features.dataset.folder.files import LOCK, only_writer, ranks_of, repair
from kedge.features.dataset.folder.manifest import (
    about_content,
    about_run,
    check_folder,
    read_manifest,
    settle,
)
from kedge.features.dataset.folder.reading import FeatureSet, open_features, places_of
from kedge.features.dataset.folder.writing import Shards
from kedge.features.dataset.keys_and_fields import BatchFields, SampleKeys, must_be_names, texts
from kedge.features.dataset.options import Options
from kedge.files.atomic_write import told
from kedge.files.given_path import given_path
from kedge.stderr import shows_progress
from kedge.torch_internals.module_tables import buffers_in, parameters_in

#: Seconds that a task which still writes may take to release its files.
PATIENCE = 30.0
_MARKS = ".ray-"

Rows = Mapping[str, Any]

_LOGGERS = {
    "ray.data": logging.WARNING,
    "ray.data.exceptions": logging.CRITICAL,
    "ray.data._internal.execution.streaming_executor_state": logging.CRITICAL,
    "ray.data._internal.progress": logging.ERROR,
}


def extract_on_ray(
    features: TakesFeatures,
    dataset: ray.data.Dataset,
    out: str | os.PathLike[str],
    options: Options,
) -> FeatureSet:
    """Write the features of every row to a folder that all machines share; see `extract_dataset`.

    Raises:
        BadSample: The model cannot take a sample, and bad samples are not to be skipped.
        ExtractionFailed: ``keys=`` names no column, the data set cannot be read, workers died too
            often, or two samples share a key.
        OtherRun: The folder holds the features of another run.
        BeingWritten: Another process writes there.
        RecordingError: The folder cannot be written to; for example, the disk is full.
    """
    folder = given_path(out).resolve()
    keys, cluster = options.keys, options.cluster
    if not (callable(keys) or isinstance(keys, str)):
        columns = dataset.columns(fetch_if_missing=False)
        there = f" of {', '.join(map(repr, columns))}" if columns else ""
        given = "is not given" if keys is None else f"is a {type(keys).__name__}"
        raise ExtractionFailed(
            f"keys= {given}, and the rows of a ray.data.Dataset have no index; name "
            f"the column{there} that has a unique value in each row, such as "
            "keys='path', or give a function that makes keys from columns"
        )
    # The workers must leave a CPU for reading, or the run would wait for ever.
    cpus = float(ray.cluster_resources().get("CPU", 0.0))
    if cluster.workers * cluster.cpus > max(0.0, cpus - 1):
        raise ExtractionFailed(
            f"{cluster.workers} workers with {cluster.cpus:g} CPUs each leave none of "
            f"the cluster's {cpus:g} to read the data with; use fewer workers, or "
            "fewer CPUs for each with cluster=Cluster(cpus=), or add machines first"
        )
    with told(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    named = keys
    if not isinstance(keys, str):
        named = str(getattr(keys, "__qualname__", type(keys).__qualname__))
    wanted = {**about_run(features, (), options), "data": {"key": named}}
    check_folder(folder, wanted)
    with only_writer(folder, 0), _ended(folder) as marks:
        run = Run(folder, replace(options, rank=None), wanted, marks)
        rows = _run(dataset, _on_cpu(features), run)
        if read_manifest(folder) is None:
            settle(folder, wanted)
    _see_that_each_counts_once(folder, rows)
    return open_features(folder)


def _on_cpu(features: TakesFeatures) -> TakesFeatures:
    """Return the model on the CPU, where every worker can unpickle it."""
    if not isinstance(features, nn.Module):
        return features
    held = chain(parameters_in(features).values(), buffers_in(features).values())
    if all(value.device.type == "cpu" for value in held):
        return features
    return copy.deepcopy(features).cpu()


@contextmanager
def _ended(folder: Path) -> Iterator[Path]:
    """Context of a run, with its new folder of marks; before and after, wait until tasks of ended runs stop writing."""
    _end(folder)
    marks = folder / f"{_MARKS}{token_hex(4)}"
    with told(f"write to {folder}"):
        marks.mkdir()
    try:
        yield marks
    finally:
        _end(folder)


def _end(folder: Path) -> None:
    """Remove the half-written files of dead tasks, once other processes have stopped writing."""
    for marks in folder.glob(f"{_MARKS}*"):
        shutil.rmtree(marks, ignore_errors=True)
    repair(folder, 0)  # this process holds the lock of rank 0
    for rank in sorted(set(ranks_of(folder, LOCK)) - {0}):
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with only_writer(folder, rank):
                    repair(folder, rank)
                    break
            except BeingWritten:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _run(dataset: ray.data.Dataset, features: TakesFeatures, run: Run) -> int:
    """Compute and write the features.

    Returns:
        The number of rows that Ray read.

    Raises:
        KedgeError: The error inside Ray's.
    """
    cluster = run.options.cluster
    done = frozenset(place for place, _ in places_of(run.folder))
    writing = replace(run.options, batch=None, keys=None, labels=None, fields={})
    sink = ShardSink(pickled(replace(run, options=writing)))
    computed = dataset.map_batches(
        Worker,
        batch_size=cluster.whole_rows,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=cluster.workers),
        fn_constructor_args=(ray.put(pickled((run, features, done))),),
        num_cpus=cluster.cpus,
        num_gpus=cluster.gpus or None,
    )
    try:
        with _shown(computed, run.options.progress):
            computed.write_datasink(sink, concurrency=cluster.workers)
    except Exception as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, KedgeError):
            raise cause from None
        raise ExtractionFailed(
            f"Ray could not read the data set, or lost its workers: {_under(error)}; "
            "the features computed before are written, and the same run continues from "
            "there"
        ) from error
    return sink.rows


def _under(error: Exception) -> str:
    """Return the line that describes the original error; Ray keeps an error of another process as text only."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return why(error)
    first, *_ = str(error).partition("\n\nThe above exception was the direct cause")
    return first.strip().rpartition("\n")[2]


def _see_that_each_counts_once(folder: Path, count: int) -> None:
    """Check that there are as many samples as rows, and that reducers counted each sample once."""
    places = [place for place, _ in places_of(folder)]
    known = len(set(places))
    if known < count:
        raise ExtractionFailed(
            f"Ray read {count:,} rows, and there are {known:,} samples: keys= does not "
            "distinguish all rows; name a column that has a unique value in each row"
        )
    manifest = read_manifest(folder) or {}
    if len(places) > known and manifest.get("reduce"):
        raise ExtractionFailed(
            "Ray restarted a worker that was still alive, so reducers have counted "
            f"{len(places) - known:,} samples twice and {folder} is inconsistent; "
            "start again in an empty folder"
        )


@contextmanager
def _shown(dataset: ray.data.Dataset, shown: bool | None) -> Iterator[None]:
    """Context that shows Ray Data's bars if wanted, and silences its logs of steps and of errors raised here anyway."""
    if shown is None:
        shown = shows_progress(sys.stderr)
    context = dataset.context
    bars = context.enable_progress_bars
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    context.enable_progress_bars = shown
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


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
            details = "".join(traceback.format_exception(error))
            error.add_note(f"on {gethostname()}: {details}")
            yield _sent(0, error)

    def _taken(self, rows: Rows) -> Iterator[dict[str, list[Any]]]:
        if not self._begun:
            self._begin()
        places = _places(rows, self._options.keys)
        rest = [row for row, place in enumerate(places) if place not in self._done]
        yield _sent(len(places) - len(rest), None)
        if not rest:
            return
        first, last = places[rest[0]], places[rest[-1]]
        self._mark.write_text(f"{first!r} to {last!r}", encoding="utf-8")
        loads = _batches(rows, places, rest, self._options)
        computed = compute(loads, SampleKeys(None), self._work, self._options.on_bad)
        with self._work.held(), closing(computed):
            for columns in computed:
                columns.wait()
                count = len(columns.places) + len(columns.bad)
                yield _sent(count, columns._replace(copied=()))
        self._mark.write_text("", encoding="utf-8")

    def _begin(self) -> None:
        run, features, done = opened(ray.get(self._job))
        if not run.marks.is_dir():
            raise ExtractionFailed(
                f"there is no folder {run.folder} on {gethostname()}: the machines of "
                "the cluster must share it"
            )
        options = run.options
        self._options, self._done = options, done
        self._mark = _note_process(run)

        device = None if options.device is None else usable(options.device)
        assigned = ray.get_runtime_context().get_accelerator_ids()
        if device is None and any(assigned.values()):
            device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None and isinstance(features, nn.Module):
            features.to(device)
        self._work = BatchComputer(
            features, batch=options.batch, device=device, proven=len(done) > 0
        )
        self._begun = True


def _note_process(run: Run) -> Path:
    """Return a new file for the rows that a process is working on; files of dead processes remain.

    Raises:
        ExtractionFailed: Too many processes have died.
    """
    cluster = run.options.cluster
    started = [path.read_text(encoding="utf-8") for path in run.marks.glob("process-*")]
    if len(started) >= cluster.workers + cluster.deaths:
        suspect = Counter(filter(None, started)).most_common(1)
        computed = suspect[0][0] if suspect else "no row"
        raise ExtractionFailed(
            f"{cluster.deaths + 1} workers died, while they computed {computed}; Ray's "
            "logs name the cause; if it is memory, use a smaller "
            "cluster=Cluster(batch_size=)"
        )
    mark = run.marks / f"process-{token_hex(8)}"
    mark.touch()
    return mark


def _places(rows: Rows, keys: Any) -> list[str]:
    if callable(keys):
        found = texts(keys(_data(rows)))
    elif keys in rows:
        found = texts(rows[keys])
    else:
        raise ExtractionFailed(
            f"keys={keys!r}: there is no such column; there are {', '.join(map(repr, rows))}"
        )
    (key, times), *_ = Counter(found).most_common(1)
    if times > 1:
        raise ExtractionFailed(
            f"the key {key!r} belongs to {times} samples; each sample needs a key of its own"
        )
    return found


def _batches(
    rows: Rows, places: list[str], rest: list[int], options: Options
) -> Iterator[SampleBatch]:
    """Yield the rows that are left, as batches of the model's inputs with their fields."""
    fields = BatchFields(options.stored_fields)
    inputs = list(rows)
    if options.batch is None:
        aside = [options.keys, *options.stored_fields.values()]
        inputs = [name for name in rows if name not in aside]
    is_single = len(inputs) == 1 and options.batch is None
    size = options.cluster.batch_size
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        data = _data({name: column[part] for name, column in rows.items()})
        mine = [places[row] for row in part]
        batch = fields(SampleBatch(mine, mine, data, []))
        taken = data[inputs[0]] if is_single else {name: data[name] for name in inputs}
        yield batch._replace(data=taken)


def _data(rows: Rows) -> dict[str, Any]:
    data = {}
    for name, column in rows.items():
        if column.dtype.kind in "biufc":
            data[name] = torch.from_numpy(np.array(column))
        else:
            data[name] = column.tolist()
    return data


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
    for rank in count(1):
        with suppress(BeingWritten):
            lock.enter_context(only_writer(folder, rank))
            break
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
    if written:
        columns = columns.without(written)
    shards.add(columns)


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
            f"the features, or an option, cannot be loaded on {gethostname()}: "
            f"{why(error)}; the workers must be able to import the objects that these "
            "refer to, unless the script itself defines them"
        ) from error
