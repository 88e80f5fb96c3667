"""Extraction from a `ray.data.Dataset`: actors compute features, and tasks write them to a folder that all machines share."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any

import ray
import ray.data
from torch import nn

from kedge.errors import BeingWritten, ExtractionFailed, KedgeError
from kedge.features.dataset.cluster import Cluster
from kedge.features.dataset.compute import TakesFeatures
from kedge.features.dataset.folder.files import LOCK, only_writer, ranks_of, repair
from kedge.features.dataset.folder.manifest import about_run, check_folder, read_manifest, settle
from kedge.features.dataset.folder.reading import FeatureSet, open_features, places_of
from kedge.features.dataset.options import Options
from kedge.features.dataset.ray_worker import Run, ShardSink, Worker, pickled
from kedge.features.dataset.samples.placed import why
from kedge.files.atomic_write import told
from kedge.files.given_path import given_path
from kedge.stderr import shows_progress
from kedge.torch_internals.module_tables import buffers_in, parameters_in

#: Seconds that a task which still writes may take to release its files.
PATIENCE = 30.0
_MARKS = ".ray-"
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
    _see_that_rows_have_keys(dataset, options.keys)
    _see_that_there_is_room(options.cluster)
    with told(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = {**about_run(features, (), options), "data": {"key": _named(options.keys)}}
    check_folder(folder, wanted)
    with only_writer(folder, 0), _ended(folder) as marks:
        run = Run(folder, replace(options, rank=None), wanted, marks)
        rows = _run(dataset, _on_cpu(features), run)
        if read_manifest(folder) is None:
            settle(folder, wanted)
    _see_that_each_counts_once(folder, rows)
    return open_features(folder)


def _see_that_rows_have_keys(dataset: ray.data.Dataset, keys: Any) -> None:
    if callable(keys) or isinstance(keys, str):
        return
    columns = dataset.columns(fetch_if_missing=False)
    there = f" of {', '.join(map(repr, columns))}" if columns else ""
    given = "keys= is not given" if keys is None else f"keys= is a {type(keys).__name__}"
    raise ExtractionFailed(
        f"{given}, and the rows of a ray.data.Dataset have no index; name the column{there} that has a unique value "
        "in each row, such as keys='path', or give a function that makes keys from columns"
    )


def _named(keys: Any) -> str:
    return (
        keys
        if isinstance(keys, str)
        else str(getattr(keys, "__qualname__", type(keys).__qualname__))
    )


def _see_that_there_is_room(cluster: Cluster) -> None:
    """Check that the workers leave a CPU for reading; otherwise the run would wait for ever."""
    there, asked = float(ray.cluster_resources().get("CPU", 0.0)), cluster.workers * cluster.cpus
    if asked > max(0.0, there - 1):
        raise ExtractionFailed(
            f"{cluster.workers} workers with {cluster.cpus:g} CPUs each leave none of the cluster's {there:g} to "
            "read the data with; use fewer workers, or fewer CPUs for each with cluster=Cluster(cpus=), or add "
            "machines first"
        )


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
    for marks in folder.glob(f"{_MARKS}*"):
        shutil.rmtree(marks, ignore_errors=True)
    repair(folder, 0)  # this process holds the lock of rank 0
    for rank in sorted(set(ranks_of(folder, LOCK)) - {0}):
        _repair(folder, rank)


def _repair(folder: Path, rank: int) -> None:
    """Remove a dead task's half-written files, once other processes have stopped writing this rank."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with only_writer(folder, rank):
                repair(folder, rank)
                return
        except BeingWritten:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _run(dataset: ray.data.Dataset, features: TakesFeatures, run: Run) -> int:
    cluster = run.options.cluster
    done = frozenset(place for place, _ in places_of(run.folder))
    sink = ShardSink(
        pickled(
            replace(
                run, options=replace(run.options, batch=None, keys=None, labels=None, fields={})
            )
        )
    )
    computed = dataset.map_batches(
        Worker,
        batch_size=cluster.whole_rows,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=cluster.workers),
        fn_constructor_args=(ray.put(pickled((run, features, done))),),
        num_cpus=cluster.cpus,
        num_gpus=cluster.gpus or None,
    )
    with _explained(), _shown(computed, run.options.progress):
        computed.write_datasink(sink, concurrency=cluster.workers)
    return sink.rows


@contextmanager
def _explained() -> Iterator[None]:
    """Context that raises the error inside a Ray error."""
    try:
        yield
    except Exception as error:
        if isinstance(cause := getattr(error, "cause", error), KedgeError):
            raise cause from None
        raise ExtractionFailed(
            f"Ray could not read the data set, or lost its workers: {_under(error)}; the features computed before "
            "are written, and the same run continues from there"
        ) from error


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
            f"Ray read {count:,} rows, and there are {known:,} samples: keys= does not distinguish all rows; name a "
            "column that has a unique value in each row"
        )
    if len(places) > known and (read_manifest(folder) or {}).get("reduce"):
        raise ExtractionFailed(
            f"Ray restarted a worker that was still alive, so reducers have counted {len(places) - known:,} samples twice "
            f"and {folder} is inconsistent; start again in an empty folder"
        )


@contextmanager
def _shown(dataset: ray.data.Dataset, shown: bool | None) -> Iterator[None]:
    """Context that shows Ray Data's bars if wanted, and silences its logs of steps and of errors raised here anyway."""
    context = dataset.context
    bars, levels = (
        context.enable_progress_bars,
        {name: logging.getLogger(name).level for name in _LOGGERS},
    )
    context.enable_progress_bars = shows_progress(sys.stderr) if shown is None else shown
    _set_levels(_LOGGERS)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        _set_levels(levels)


def _set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
