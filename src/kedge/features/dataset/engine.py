"""Extraction of a whole data set's features into a folder, without the samples already there."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kedge.errors import ExtractionFailed, KedgeError, OtherRun
from kedge.features.dataset.cluster import is_of_ray
from kedge.features.dataset.compute import BatchComputer, TakesFeatures, bad_sample
from kedge.features.dataset.folder.files import only_writer
from kedge.features.dataset.folder.fingerprint import identity
from kedge.features.dataset.folder.manifest import (
    about_content,
    about_fields,
    about_functions,
    about_keys,
    about_model,
    about_pooling,
    about_reducers,
    about_sites,
    check_same,
    read_manifest,
    settle,
)
from kedge.features.dataset.folder.reading import FeatureSet, open_features, places_of
from kedge.features.dataset.folder.shards import Shards
from kedge.features.dataset.folder.writer import ShardWriter
from kedge.features.dataset.options import OnBad, Options
from kedge.features.dataset.ranks import SharingRank
from kedge.features.dataset.reduced_layout import reduced_as_laid_out
from kedge.features.dataset.samples.batch import Columns, VisitedPlaces
from kedge.features.dataset.samples.fields import BatchFields
from kedge.features.dataset.samples.loading import (
    BatchSource,
    is_loader,
    is_stream,
    sample_by_sample,
)
from kedge.features.dataset.samples.names import SampleKeys, must_be_names, must_be_possible
from kedge.features.dataset.samples.placed import LoadedBatch, why
from kedge.features.forward import FeatureForward
from kedge.files.atomic_write import told
from kedge.files.given_path import given_path
from kedge.short_text import seconds
from kedge.stderr import SpacedLines, shows_progress


def extract_dataset(
    features: TakesFeatures,
    loader: Any,
    out: str | os.PathLike[str],
    options: Options | None = None,
) -> FeatureSet:
    """Write the features of every sample of a loader to a folder, or continue an earlier run of the same extraction.

    Args:
        features: A callable with the interface of a model that returns features by name, such as
            from `kedge.extract`.
        loader: A `DataLoader`, any iterable of batches, or a `ray.data.Dataset`.
        out: The folder; created if it does not exist.
        options: All other settings.

    Returns:
        The features in the folder at the end.

    Raises:
        BadSample: A sample cannot be loaded or the model cannot take it, and bad samples are not to
            be skipped.
        ExtractionFailed: The loader fails, or its batches or the features are unusable; a name in
            reduce= does not belong to a value; or the device cannot be used.
        OtherRun: The folder holds the features of another run.
        BeingWritten: Another process writes there.
        RecordingError: The folder cannot be written to; for example, the disk is full.
    """
    options = options or Options()
    must_be_possible(features, options.reduce)
    forward = getattr(features, "work", None)
    if isinstance(forward, FeatureForward):
        forward.warn_of_training()
    if is_of_ray(loader):
        found: FeatureSet = import_module("kedge.features.dataset.on_ray").extract_on_ray(
            features, loader, out, options
        )
        return found
    loader = sample_by_sample(loader, options.items)
    rank, folder = options.rank or SharingRank.here(), given_path(out)
    with told(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = about_run(features, loader, options)
    check_folder(folder, wanted)
    with only_writer(folder, rank.rank):
        done = VisitedPlaces(BatchSource(loader).length)
        keys = SampleKeys(options.keys, BatchSource(loader).length, _mark_done(done, folder))
        source = BatchSource(
            loader, rank, options.split, done, in_batches=options.items == "batches"
        )
        fields = BatchFields(options.stored_fields)
        work = BatchComputer(
            features,
            batch=options.batch,
            device=options.device,
            proven=len(done) > 0,
            left_out=fields.entries,
        )
        # A stored error would keep the loader's workers alive through its traceback, so close the
        # generators here.
        with (
            work.held(),
            reduced_as_laid_out(forward, options.reducers),
            closing(_loaded(source)) as loads,
            closing(compute(map(fields, loads), keys, work, options.on_bad)) as computed,
        ):
            _write(
                features,
                computed,
                FeatureDestination(folder, rank, options, wanted),
                source.left if rank.rank == 0 else None,
            )
    return open_features(folder)


def about_run(features: Any, loader: Any, options: Options) -> dict[str, Any]:
    """Return a run's description as known before it begins; a run that continues needs the same description."""
    length = BatchSource(loader).length
    data: dict[str, Any] = {"type": "stream"} if length is None else {"samples": length}
    if is_loader(loader) and is_stream(loader):
        data["workers"] = max(1, loader.num_workers)
    collated = (
        {"collate": identity(loader.collate_fn, options.version)} if is_loader(loader) else {}
    )
    return {
        "files": options.format,
        "model": about_model(features),
        "sites": about_sites(features),
        "functions": about_functions(features, options.version),
        "keys": about_keys(options.keys, options.version),
        "batch": identity(options.batch, options.version),
        "fields": about_fields(options.stored_fields, options.version),
        "version": "none" if options.version is None else repr(options.version),
        **collated,
        "data": data,
        "reduce": about_reducers(options.reducers),
    }


class FeatureDestination(NamedTuple):
    """The destination of features.

    Attributes:
        folder: The folder.
        rank: The rank of this process.
        options: How features are written.
        wanted: The description of the run.
    """

    folder: Path
    rank: SharingRank
    options: Options
    wanted: Mapping[str, Any]


def check_folder(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Check that a folder is empty, or belongs to the wanted run as far as its description is known.

    Raises:
        OtherRun: The folder holds something else.
        ExtractionFailed: The run has reducers for values that it does not have, which an earlier
            Kedge allowed.
    """
    others = [
        name
        for name in sorted(path.name for path in folder.iterdir())
        if not name.startswith((".", "writer-"))
    ]
    found = read_manifest(
        folder
    )  # after the listing, because another rank may be writing the first files
    if found is not None:
        check_same(folder, found, wanted)
        if "columns" in found:
            must_be_names(wanted["reduce"], found["columns"])
    elif others:
        raise OtherRun(
            f"cannot write to {folder}, which holds other files ({others[0]}); name a new folder"
        )


def _mark_done(done: VisitedPlaces, folder: Path) -> Iterator[tuple[str, str]]:
    """Mark the samples in a folder as done; return their places and keys."""
    known = list(places_of(folder)) if read_manifest(folder) is not None else []
    for place, _ in known:
        done.add(place)
    return iter(known)


def _write(
    features: Any, computed: Iterator[Columns], destination: FeatureDestination, total: int | None
) -> None:
    """Write computed features in a thread, and the run's manifest as soon as the first batch is computed."""
    # Loaders start their workers with the first batch, and forking is safer before the thread
    # starts.
    first: list[Columns] = []
    for columns in computed:
        first.append(columns)
        if columns.values:
            break
    known: dict[str, Any] = {}
    if first and first[-1].values:
        must_be_names(destination.options.reduce, first[-1].values)
        known = about_content(first[-1]) | about_pooling(features)
    settle(destination.folder, {**destination.wanted, **known})
    options = destination.options
    shards = Shards(destination.folder, destination.rank.rank, options)
    shown = options.progress if destination.rank.rank == 0 else False
    with (
        ShardWriter(shards, options.shard_bytes) as writer,
        progress_bar(shown, Console(stderr=True)) as bar,
    ):
        bar.add_task("features", total=total)
        [task] = bar.tasks
        log = SpacedLines() if bar.disable and shown is None else None
        for columns in chain(first, computed):
            writer.put(columns)
            bar.advance(task.id, len(columns.places) + len(columns.bad))
            if log is not None and not log.wait:
                log.tell(told_progress(task))


def told_progress(task: Task) -> str:
    """Return the progress as a line: the number of samples, their rate, and the time left."""
    of = "" if task.total is None else f" of {task.total:,.0f}"
    rate = "" if task.speed is None else f", {task.speed:,.0f}/s"
    left = "" if task.time_remaining is None else f", {seconds(task.time_remaining)} left"
    return f"{task.description}: {task.completed:,.0f}{of} samples{rate}{left}"


class SampleRate(ProgressColumn):
    """Samples per second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


def progress_bar(shown: bool | None, console: Console) -> Progress:
    """Return the progress bar of an extraction; with `shown` None it is visible on a terminal, but not in CI."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        SampleRate(),
        TimeRemainingColumn(),
    )
    hidden = not (shows_progress(console) if shown is None else shown)
    return Progress(*columns, console=console, disable=hidden, refresh_per_second=5)


def compute(
    loads: Iterable[LoadedBatch], keys: SampleKeys, work: BatchComputer, on_bad: OnBad
) -> Generator[Columns]:
    """Yield the features of each batch; the good samples of a batch come before the error about its bad ones."""
    for loaded in loads:
        columns = work(keys(loaded))
        del loaded
        raised = [one for one in columns.bad if on_bad == "raise" or one.ends]
        yield columns._replace(bad=[one for one in columns.bad if one not in raised])
        if raised:
            raise bad_sample(raised)


def _loaded(source: BatchSource) -> Generator[LoadedBatch]:
    """Yield the batches of a loader."""
    batches, count = iter(source), 0
    while True:
        try:
            loaded = next(batches)
        except StopIteration:
            return
        except KedgeError:
            raise
        except Exception as error:
            raise ExtractionFailed(
                f"the loader failed after {count:,} samples: {why(error)}; the features computed before are written, "
                "and the same run continues from there"
            ) from error
        count += len(loaded.places)
        yield loaded
        del loaded  # otherwise two batches are in memory while the next one is loaded
