"""The features of a `ray.data.Dataset`: the model in a pool of actors, which write what it gives into a shared folder.

# Note [Numbered rows]
Where the user names no column, a sample's place is the number of its row, as the data set has them when order is kept:
that does not depend on how many machines read it, nor on how it is cut into blocks. To number them, all rows have to be
in Ray's object store at once, from where it moves to the disk what has no room.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.data.block import BlockAccessor
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

from kedge.atomic_write import told
from kedge.errors import BeingWritten, ExtractionFailed, KedgeError
from kedge.features.dataset.cluster import Cluster
from kedge.features.dataset.compute import TakesFeatures
from kedge.features.dataset.engine import about_run, check_folder
from kedge.features.dataset.folder import LOCK, only_writer, ranks_of, repair
from kedge.features.dataset.manifest import read_manifest, settle
from kedge.features.dataset.options import Options
from kedge.features.dataset.progress import progress
from kedge.features.dataset.ray_worker import Job, Seats, Worker, pickled, with_numbers
from kedge.features.dataset.reading import FeatureSet, open_features, places_of
from kedge.features.dataset.samples import why

#: So many seconds a worker that was killed may take to let go of its files.
PATIENCE = 30.0
#: What Ray Data says of its own steps and bars.
_LOGGERS = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}


def extract_on_ray(
    features: TakesFeatures, dataset: ray.data.Dataset, out: str | os.PathLike[str], options: Options
) -> FeatureSet:
    """Write the features of every row into a folder that all machines share; as `extract_dataset`, which see.

    Raises:
        BadSample: The model cannot take a sample, and none is to be skipped.
        ExtractionFailed: The data set cannot be read, workers died too often, or keys stand for several samples.
        OtherRun: The folder holds the features of another run.
        BeingWritten: Another process writes there.
        RecordingError: The folder cannot be written to; the disk is full, say.
    """
    folder = Path(out).resolve()
    _see_that_there_is_room(options.cluster)
    with told(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    about = about_run(features, (), options)
    check_folder(folder, {name: value for name, value in about.items() if name != "data"})
    with only_writer(folder, 0), _quietly(), _without_bars(dataset):
        _repair(folder)
        rows, samples = (dataset, None) if _has_keys(options) else _numbered(dataset)
        data = {"samples": samples} if samples is not None else {"key": _named(options.keys)}
        wanted = {**about, "data": data}
        check_folder(folder, wanted)
        job = Job(_on_cpu(features), folder, replace(options, rank=None), wanted, samples)
        count = 0
        if samples != 0:
            with _without_bars(rows):
                count = _run(rows, job)
        if read_manifest(folder) is None:
            settle(folder, wanted)
        _see_that_each_counts_once(folder, count)
    return open_features(folder)


def _has_keys(options: Options) -> bool:
    return callable(options.keys) or isinstance(options.keys, str)


def _named(keys: Any) -> str:
    return keys if isinstance(keys, str) else str(getattr(keys, "__qualname__", type(keys).__qualname__))


def _see_that_there_is_room(cluster: Cluster) -> None:
    """Refuse what would wait for ever: workers that leave no CPU to read with."""
    there, asked = float(ray.cluster_resources().get("CPU", 0.0)), cluster.workers * cluster.cpus
    if asked > max(0.0, there - 1):
        raise ExtractionFailed(
            f"{cluster.workers} workers with {cluster.cpus:g} CPUs each leave none of the cluster's {there:g} to read "
            "the data with; take fewer, or cluster=Cluster(cpus=) less for each, or add machines first"
        )


def _on_cpu(features: TakesFeatures) -> TakesFeatures:
    """Have the model where every worker can open it."""
    if not isinstance(features, nn.Module):
        return features
    held = chain(features.parameters(), features.buffers())
    if all(value.device.type == "cpu" for value in held):
        return features
    return copy.deepcopy(features).cpu()


def _numbered(dataset: ray.data.Dataset) -> tuple[ray.data.Dataset, int]:
    """Give each row its number; see Note [Numbered rows]."""
    order = dataset.context.execution_options
    kept, order.preserve_order = order.preserve_order, True
    number: Any = ray.remote(with_numbers)
    numbered, count = [], 0
    try:
        with _explained():
            for bundle in dataset.iter_internal_ref_bundles():
                for block, about in zip(bundle.block_refs, bundle.metadata, strict=True):
                    rows = about.num_rows or 0
                    numbered += [number.remote(block, count)] if rows else []
                    count += rows
            return ray.data.from_arrow_refs(numbered), count
    finally:
        order.preserve_order = kept


def _run(rows: ray.data.Dataset, job: Job) -> int:
    """Have the workers take all rows.

    Returns:
        How many rows they have seen.
    """
    cluster, progressed = job.options.cluster, job.options.progress
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    seats: Any = (
        ray.remote(num_cpus=0)(Seats).options(scheduling_strategy=here).remote(cluster.workers + cluster.deaths)
    )
    acts = rows.map_batches(
        Worker,
        batch_size=cluster.whole_rows,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=cluster.workers),
        fn_constructor_args=(ray.put(pickled(job)), seats),
        num_cpus=cluster.cpus,
        num_gpus=cluster.gpus or None,
    )
    count = 0
    try:
        with closing(_returned(acts)) as returned, progress(job.samples, progressed) as advance:
            for seen, taken, error in returned:
                if error is not None:
                    raise error
                count += seen
                advance(taken if job.samples is None else seen)
    finally:
        _end(seats)
        _repair(job.folder)
    return count


def _end(seats: Any) -> None:
    """End the workers at once: what they still compute is not waited for, and must not be written later."""
    try:
        workers = ray.get(seats.held.remote())
    except ray.exceptions.RayActorError:  # its machine is gone; the others Ray ends with the pool
        return
    for worker in [*workers, seats]:
        ray.kill(worker)


def _returned(acts: ray.data.Dataset) -> Generator[tuple[int, int, KedgeError | None]]:
    """Run the pool; give what its calls return: rows seen, samples taken, an error."""
    with _explained():
        for bundle in acts.iter_internal_ref_bundles():
            for block in ray.get(list(bundle.block_refs)):
                for one in BlockAccessor.for_block(block).to_arrow().to_pylist():
                    yield one["rows"], one["taken"], pickle.loads(one["error"])  # noqa: S301 - our own workers'


@contextmanager
def _explained() -> Iterator[None]:
    """Say of an error of Ray's what is under it."""
    try:
        yield
    except KedgeError:
        raise
    except Exception as error:
        raise ExtractionFailed(
            f"Ray could not read the data set, or lost its workers: {_under(error)}; "
            "what was computed before is written, and the same run goes on from there"
        ) from error


def _under(error: Exception) -> str:
    """Say what an error in another process was, which Ray has as text alone, under the errors that wrap it."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return why(error)
    first, *_ = str(error).partition("\n\nThe above exception was the direct cause")
    return first.strip().rpartition("\n")[2]


def _repair(folder: Path) -> None:
    """Remove what dead workers left half-written, when nobody writes any more."""
    repair(folder, 0)  # whose lock is ours
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


def _see_that_each_counts_once(folder: Path, count: int) -> None:
    """Compare the rows that came with the samples that are there; reducers must have counted none of them twice."""
    places = [place for place, _ in places_of(folder)]
    known = len(set(places))
    if known < count:
        raise ExtractionFailed(
            f"{count:,} rows came, and there are {known:,} samples: keys= does not tell all rows apart; "
            "name a column in which each row has a value of its own, or none"
        )
    if len(places) > known and (read_manifest(folder) or {}).get("reduce"):
        raise ExtractionFailed(
            f"reducers have counted {len(places) - known:,} samples twice, as Ray gave them to two workers that both "
            f"lived; what is in {folder} is not what was asked for: begin anew in another folder"
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Have Ray Data not log its steps."""
    loggers = {logging.getLogger(name): level for name, level in _LOGGERS.items()}
    levels = {logger: logger.level for logger in loggers}
    try:
        for logger, level in loggers.items():
            logger.setLevel(level)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def _without_bars(dataset: ray.data.Dataset) -> Iterator[None]:
    """Have Ray Data draw no bars beside ours."""
    kept, dataset.context.enable_progress_bars = dataset.context.enable_progress_bars, False
    try:
        yield
    finally:
        dataset.context.enable_progress_bars = kept
