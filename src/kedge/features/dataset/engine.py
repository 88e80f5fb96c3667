"""Extraction of a whole data set's features into a folder, without the samples already there."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

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

from kedge.errors import ExtractionFailed, KedgeError
from kedge.features.dataset.batch import Columns, SampleBatch, VisitedPlaces, why
from kedge.features.dataset.compute import BatchComputer, TakesFeatures, compute
from kedge.features.dataset.folder.files import only_writer
from kedge.features.dataset.folder.manifest import (
    about_content,
    about_pooling,
    about_run,
    check_folder,
    read_manifest,
    settle,
)
from kedge.features.dataset.folder.reading import FeatureSet, open_features, places_of
from kedge.features.dataset.folder.writing import Shards, ShardWriter
from kedge.features.dataset.keys_and_fields import (
    BatchFields,
    SampleKeys,
    must_be_names,
    must_be_possible,
)
from kedge.features.dataset.loading import BatchSource, sample_by_sample
from kedge.features.dataset.options import Options, SharingRank
from kedge.features.dimensions import Arguments, Layout
from kedge.features.forward import FeatureForward
from kedge.features.reduce.reducer import Reducer
from kedge.files.atomic_write import told
from kedge.files.given_path import given_path
from kedge.short_text import seconds
from kedge.stderr import SpacedLines, shows_progress

if TYPE_CHECKING:  # Ray is there if its data set is
    from kedge.features.dataset.on_ray import extract_on_ray  # noqa: F401


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
        on_ray = import_module("kedge.features.dataset.on_ray")
        found: FeatureSet = on_ray.extract_on_ray(features, loader, out, options)
        return found

    loader = sample_by_sample(loader, options.items)
    rank = options.rank or SharingRank.here()
    folder = given_path(out)
    with told(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = about_run(features, loader, options)
    check_folder(folder, wanted)
    with only_writer(folder, rank.rank):
        length = BatchSource(loader).length
        done = VisitedPlaces(length)
        finished = []
        if read_manifest(folder) is not None:
            finished = list(places_of(folder))
        for place, _ in finished:
            done.add(place)
        keys = SampleKeys(options.keys, length, finished)
        del finished  # as much memory as all keys
        in_batches = options.items == "batches"
        source = BatchSource(loader, rank, options.split, done, in_batches)
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
            _reduced_as_laid_out(forward, options.reducers),
            closing(_loaded(source)) as loads,
            closing(compute(map(fields, loads), keys, work, options.on_bad)) as computed,
        ):
            # Loaders start their workers with the first batch, and forking is safer before the
            # writing thread starts.
            first: list[Columns] = []
            known: dict[str, Any] = {}
            for columns in computed:
                first.append(columns)
                if columns.values:
                    must_be_names(options.reduce, columns.values)
                    known = about_content(columns) | about_pooling(features)
                    break
            settle(folder, {**wanted, **known})
            total = source.left if rank.rank == 0 else None
            shards = Shards(folder, rank.rank, options)
            shown = options.progress if rank.rank == 0 else False
            _write(chain(first, computed), shards, options.shard_bytes, shown, total)
    return open_features(folder)


def is_of_ray(data: object) -> bool:
    """Whether data are a Ray data set; does not import Ray."""
    kinds = [kind for kind in type(data).__mro__ if kind.__name__ == "Dataset"]
    return any(kind.__module__.partition(".")[0] == "ray" for kind in kinds)


def _loaded(source: BatchSource) -> Generator[SampleBatch]:
    """Yield the batches of a source; an error of its loader says what to do."""
    batches = iter(source)
    count = 0
    while True:
        try:
            loaded = next(batches)
        except StopIteration:
            return
        except KedgeError:
            raise
        except Exception as error:
            raise ExtractionFailed(
                f"the loader failed after {count:,} samples: {why(error)}; the "
                "features computed before are written, and the same run continues from "
                "there"
            ) from error
        count += len(loaded.places)
        yield loaded
        del loaded  # otherwise two batches are in memory while the next one is loaded


@contextmanager
def _reduced_as_laid_out(forward: Any, reducers: Mapping[str, Sequence[Reducer]]) -> Iterator[None]:
    """Context of an extraction in which a reducer that would take positions for channels is an error.

    Args:
        forward: The features' forwards; nothing is known about those of features not from Kedge.
        reducers: The reducers of each value.
    """
    if not (reducers and isinstance(forward, FeatureForward)):
        yield
        return

    def inspect(name: str, layout: Layout, given: Arguments) -> None:
        for reducer in reducers.get(name, ()):
            if hasattr(reducer, "layout"):
                _check_layout(name, reducer, layout, given)

    followed = forward.follows
    forward.follows, forward.inspect = True, inspect
    try:
        yield
    finally:
        forward.follows, forward.inspect = followed, None


def _check_layout(name: str, reducer: Reducer, layout: Layout, given: Arguments) -> None:
    """Raise ExtractionFailed if a reducer of a value would take another dimension for the channels, or count padding."""
    positions = reducer.layout.positions
    channel = reducer.layout.channel
    if not layout.positions or positions in (None, "elements"):
        return
    shown = f"reduce: {reducer.settings['reducer']} of {name!r}"
    aside = (layout.samples, *layout.positions)
    channels = [dim for dim in range(layout.dims) if dim not in aside]
    per_channel = reducer.settings.get("per", "channel") == "channel"
    if per_channel and channels and channels != [channel % layout.dims]:
        raise ExtractionFailed(
            f"{shown} takes dimension {channel} for the channels, and the model has "
            f"them in dimension {channels[0]} of {layout.dims}; give "
            f"channel={channels[0] - layout.dims}, or pool the values first, with "
            "--transform or Pool"
        )
    for mask in given.masks():
        covers = any(sources & mask.covers for sources in layout.sources)
        if covers and not bool(mask.kept.all()):
            raise ExtractionFailed(
                f"{shown} would count padding, which {mask.name} marks; pool the "
                "values first, such as with --transform mean or "
                "kedge.features.pooling.Pool('mean'), or use batches of one sample"
            )


def _write(
    computed: Iterable[Columns], shards: Shards, limit: int, shown: bool | None, total: int | None
) -> None:
    """Write computed features in a thread, and show how far that is."""
    with (
        ShardWriter(shards, limit) as writer,
        progress_bar(shown, Console(stderr=True)) as bar,
    ):
        bar.add_task("features", total=total)
        [task] = bar.tasks
        log = SpacedLines() if bar.disable and shown is None else None
        for columns in computed:
            writer.put(columns)
            bar.advance(task.id, len(columns.places) + len(columns.bad))
            if log is not None and not log.wait:
                log.tell(told_progress(task))


def told_progress(task: Task) -> str:
    """Return the progress as a line: the number of samples, their rate, and the time left."""
    told = f"{task.description}: {task.completed:,.0f}"
    if task.total is not None:
        told += f" of {task.total:,.0f}"
    told += " samples"
    if task.speed is not None:
        told += f", {task.speed:,.0f}/s"
    if task.time_remaining is not None:
        told += f", {seconds(task.time_remaining)} left"
    return told


class SampleRate(ProgressColumn):
    """Samples per second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        speed = task.finished_speed or task.speed
        shown = "" if speed is None else f"{speed:,.0f}/s"
        return Text(shown, style="progress.data.speed")


def progress_bar(shown: bool | None, console: Console) -> Progress:
    """Return the progress bar of an extraction; with `shown` None it is visible on a terminal, but not in CI."""
    if shown is None:
        shown = shows_progress(console)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        SampleRate(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not shown, refresh_per_second=5)
