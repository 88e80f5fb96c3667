"""The features of a whole data set, into a folder: what is there is not computed again."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from kedge.atomic_write import told
from kedge.errors import ExtractionFailed, KedgeError, OtherRun
from kedge.features.dataset.cluster import is_of_ray
from kedge.features.dataset.compute import BatchComputer, TakesFeatures, bad_sample
from kedge.features.dataset.folder.files import only_writer
from kedge.features.dataset.folder.fingerprint import identity
from kedge.features.dataset.folder.manifest import (
    about_columns,
    about_functions,
    about_keys,
    about_model,
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
from kedge.features.dataset.samples.batch import Columns, VisitedPlaces
from kedge.features.dataset.samples.loading import BatchSource, is_loader, is_stream
from kedge.features.dataset.samples.names import SampleKeys, must_be_names, must_be_possible
from kedge.features.dataset.samples.placed import LoadedBatch, why


def extract_dataset(
    features: TakesFeatures, loader: Any, out: str | os.PathLike[str], options: Options | None = None
) -> FeatureSet:
    """Write the features of every sample that a loader gives; go on where an earlier run of the same stopped.

    Args:
        features: What is called like a model and gives features by name, such as `kedge.extract` makes.
        loader: A `DataLoader`, any iterable of batches, or a `ray.data.Dataset`.
        out: The folder; it is made if it is not there.
        options: Everything else.

    Returns:
        What the folder holds then.

    Raises:
        BadSample: A sample cannot be loaded, or the model cannot take it, and none is to be skipped.
        ExtractionFailed: The loader ends with an error, or gives what features cannot be taken of; or a name in
            reduce= is none of a value, or the device cannot be used.
        OtherRun: The folder holds the features of another run.
        BeingWritten: Another process writes there.
        RecordingError: The folder cannot be written to; the disk is full, say.
    """
    options = options or Options()
    must_be_possible(features, options.reduce)
    if is_of_ray(loader):
        found: FeatureSet = import_module("kedge.features.dataset.on_ray").extract_on_ray(
            features, loader, out, options
        )
        return found
    rank, folder = options.rank or SharingRank.here(), Path(out)
    with told(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = about_run(features, loader, options)
    check_folder(folder, wanted)
    with only_writer(folder, rank.rank):
        done = VisitedPlaces(BatchSource(loader).length)
        keys = SampleKeys(options.keys, BatchSource(loader).length, _meet(done, folder))
        source = BatchSource(loader, rank, options.split, done)
        work = BatchComputer(features, batch=options.batch, device=options.device, proven=len(done) > 0)
        # An error that somebody keeps would keep the loader's workers alive, so it is closed here.
        with (
            work.held(),
            closing(_loaded(source)) as loads,
            closing(compute(loads, keys, work, options.on_bad)) as computed,
        ):
            _write(computed, FeatureDestination(folder, rank, options, wanted), source.left if rank.rank == 0 else None)
    return open_features(folder)


def about_run(features: Any, loader: Any, options: Options) -> dict[str, Any]:
    """Describe a run as far as it is known before it begins; one that goes on has to be described the same."""
    length = BatchSource(loader).length
    data: dict[str, Any] = {"type": "stream"} if length is None else {"samples": length}
    if is_loader(loader) and is_stream(loader):
        data["workers"] = max(1, loader.num_workers)
    collated = {"collate": identity(loader.collate_fn, options.version)} if is_loader(loader) else {}
    return {
        "files": options.format,
        "model": about_model(features),
        "sites": about_sites(features),
        "functions": about_functions(features, options.version),
        "keys": about_keys(options.keys, options.version),
        "batch": identity(options.batch, options.version),
        "version": "none" if options.version is None else repr(options.version),
        **collated,
        "data": data,
        "reduce": about_reducers(options.reducers),
    }


class FeatureDestination(NamedTuple):
    """Where features go.

    Attributes:
        folder: The folder.
        rank: Which process this is.
        options: How they are written.
        wanted: What run they are of.
    """

    folder: Path
    rank: SharingRank
    options: Options
    wanted: Mapping[str, Any]


def check_folder(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Check that a folder is empty, or of the run that is wanted as far as that is known.

    Raises:
        OtherRun: It is not.
        ExtractionFailed: The run has reducers for values that it does not have, which an earlier Kedge let pass.
    """
    others = [name for name in sorted(path.name for path in folder.iterdir()) if not name.startswith((".", "writer-"))]
    found = read_manifest(folder)  # after that, as another rank may just be writing the first files
    if found is not None:
        check_same(folder, found, wanted)
        if "columns" in found:
            must_be_names(wanted["reduce"], found["columns"])
    elif others:
        raise OtherRun(f"cannot write to {folder}, which holds something else ({others[0]}); name a new folder")


def _meet(done: VisitedPlaces, folder: Path) -> Iterator[tuple[str, str]]:
    """Note which samples are done."""
    known = list(places_of(folder)) if read_manifest(folder) is not None else []
    for place, _ in known:
        done.add(place)
    return iter(known)


def _write(computed: Iterator[Columns], shelf: FeatureDestination, total: int | None) -> None:
    """Write what is computed, in a thread; the folder says what run it is of as soon as the first batch is there."""
    # Loaders start their workers with the first batch; to fork is safer before there is a thread.
    first: list[Columns] = []
    for columns in computed:
        first.append(columns)
        if columns.values:
            break
    known = {}
    if first and first[-1].values:
        must_be_names(shelf.options.reduce, first[-1].values)
        known = {"columns": about_columns(first[-1].values)}
    settle(shelf.folder, {**shelf.wanted, **known})
    options = shelf.options
    shards = Shards(shelf.folder, shelf.rank.rank, options)
    shown = options.progress if shelf.rank.rank == 0 else False
    with ShardWriter(shards, options.shard_bytes) as writer, progress_bar(shown, Console(stderr=True)) as bar:
        task = bar.add_task("features", total=total)
        for columns in chain(first, computed):
            writer.put(columns)
            bar.advance(task, len(columns.places) + len(columns.bad))


class SampleRate(ProgressColumn):
    """Samples a second."""

    def render(self, task: Task) -> Text:
        """Return it as text."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


def progress_bar(shown: bool | None, console: Console) -> Progress:
    """Make the bar that shows how far an extraction is; None: if the console is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), SampleRate(), TimeRemainingColumn())
    hidden = not (console.is_terminal if shown is None else shown)
    return Progress(*columns, console=console, disable=hidden, refresh_per_second=5)


def compute(loads: Iterable[LoadedBatch], keys: SampleKeys, work: BatchComputer, on_bad: OnBad) -> Generator[Columns]:
    """Compute batch by batch; a bad sample's good neighbours are handed out before it is raised."""
    for loaded in loads:
        columns = work(keys(loaded))
        del loaded
        raised = [one for one in columns.bad if on_bad == "raise" or one.ends]
        yield columns._replace(bad=[one for one in columns.bad if one not in raised])
        if raised:
            raise bad_sample(raised)


def _loaded(source: BatchSource) -> Generator[LoadedBatch]:
    """Load batch by batch."""
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
                f"the loader failed after {count:,} samples: {why(error)}; "
                "what was computed before is written, and the same run goes on from there"
            ) from error
        count += len(loaded.places)
        yield loaded
        del loaded  # or two batches would be in memory while the next one is loaded
