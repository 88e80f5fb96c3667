"""Settings for the computation and storage of a data set's features, and the processes that share the work."""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self, cast, get_args

import torch.distributed

from kedge.errors import ExtractionFailed
from kedge.features.dataset.keys_and_fields import LABELS, Field
from kedge.features.reduce.reducer import Reducer

#: Seconds between two checks of the first rank whether the others have finished.
_PACE = 0.1


@dataclass(frozen=True)
class SharingRank:
    """One of several processes that share the work.

    Attributes:
        rank: The number of this process, from 0.
        world: The number of processes.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Self:
        """Return the rank from PyTorch, or else from the environment variables of torchrun; 0 of 1 without either."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
            return cls(int(rank), int(world))
        return cls()

    def takes(self, number: int) -> bool:
        """Whether the block with this number belongs to this process."""
        return number % self.world == self.rank


def wait_for_others(rank: SharingRank) -> bool:
    """At the first rank, wait until all ranks have called this; the others only record their call. Once per process.

    Under torchrun the ranks share a store in its agent, which ends all ranks if one fails, so the
    wait cannot last for ever. Other launchers have no such store.

    Args:
        rank: The rank of this process.

    Returns:
        Whether the ranks could communicate; if so, at the first rank all have called this.
    """
    if rank.world == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    attempt = (
        f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    )
    noted = [f"kedge/{attempt}/{number}" for number in range(rank.world)]
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(*place, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        store.set(noted[rank.rank], "through")
        while rank.rank == 0 and not store.check(noted):
            time.sleep(_PACE)
    except (KeyError, ValueError, RuntimeError):  # an unknown environment or store
        return False
    return True


OnBad = Literal["raise", "skip"]
Items = Literal["samples", "batches"]
FormatName = Literal["safetensors", "zarr", "parquet"]


@dataclass(frozen=True)
class Cluster:
    """The workers of a Ray cluster that compute the features of a `ray.data.Dataset`.

    Attributes:
        workers: The number of processes that run the model, on any of the machines.
        batch_size: The number of samples in a batch of the model.
        rows: The number of samples that a worker receives at once, rounded up to whole batches.
            Their features are written together, so this is the loss when a worker dies, and about
            the size of a shard.
        cpus: The number of the cluster's CPUs reserved for each worker; reading and writing need
            some as well.
        gpus: The number of its GPUs for each worker. If not 0, workers move the model and its
            batches there.
        deaths: The number of workers that may die and be replaced; one more ends the run.
    """

    workers: int = 2
    batch_size: int = 32
    rows: int = 1024
    cpus: float = 0.5
    gpus: float = 0
    deaths: int = 8

    def __post_init__(self) -> None:
        """Check the settings."""
        least = {"workers": 1, "batch_size": 1, "rows": 1, "cpus": 0, "gpus": 0, "deaths": 0}
        for name, lowest in least.items():
            given = getattr(self, name)
            if given < lowest:
                raise ExtractionFailed(f"{name}={given!r}: it must be at least {lowest}")

    @property
    def whole_rows(self) -> int:
        """The number of samples for a worker, in whole batches."""
        return -(-self.rows // self.batch_size) * self.batch_size


@dataclass(frozen=True)
class Options:
    """Settings for the computation and storage of a data set's features.

    Attributes:
        batch: A function from a batch of the loader to the model's arguments: a tensor, a tuple of
            positional or a dict of keyword arguments. By default a tensor is the argument, a dict
            holds keyword arguments, and the first entry of a tuple or list counts.
        keys: The samples' keys: a sequence with one for each sample of the data set, or a function
            from a batch of the loader to one for each of its samples. By default the sample's
            index. For a `ray.data.Dataset` the name of the column of keys, or a function; one of
            these is required there.
        labels: What is stored as the samples' labels: the index or the name of an entry of the
            batch, or a function from a batch to an entry for each of its samples; True for the
            second entry. Labels are numbers, of any type and shape, or texts. An entry of a dict
            that is named here is not passed to the model, unless `batch` is given.
        fields: What else is stored with the features, by name, each as for `labels`: ``{"path":
            2}``.
        reduce: For each name of a value in the result the reducer, or several, to update with it;
            such values are not stored.
        keep: Names in `reduce` whose values are stored too.
        version: The version of the program's own functions (transforms, `batch=`, `keys=`, the
            loader's `collate_fn`), in place of digests: a run continues in a folder as long as the
            functions' names and this text are the same.
        on_bad: The treatment of a sample that cannot be loaded, or that the model cannot take:
            "raise" stops, "skip" leaves the sample out and records that.
        format: The format of shards: "safetensors", or with the extra of that name "zarr" or
            "parquet".
        device: The device for batches; by default that of the model's first parameter.
        shard_bytes: The size at which a shard is written, less for the first ones; as many bytes
            again may wait meanwhile.
        shard_seconds: The age at which a shard is written, so that a kill loses no more than that.
        progress: Whether to show a progress bar; None: on a terminal, but not in CI; elsewhere a
            line is written now and then.
        split: Whether the ranks of a distributed run share out the loader's samples; False if each
            rank's loader already yields a part of its own. A loader with a `DistributedSampler` is
            recognised.
        items: What a ``DataLoader(batch_size=None)`` yields: "samples" or "batches". By default
            that is read from its items: with a number or a text in them they are samples, and a
            sampler of lists yields batches.
        rank: The rank of this process; None: from torchrun or `torch.distributed`.
        cluster: The workers for a `ray.data.Dataset`, and their resources.
    """

    batch: Callable[[Any], Any] | None = None
    keys: Sequence[Any] | Callable[[Any], Sequence[Any]] | None = None
    labels: Field | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    reduce: Mapping[str, Reducer | Sequence[Reducer]] = field(default_factory=dict)
    keep: Sequence[str] = ()
    version: str | None = None
    on_bad: OnBad = "raise"
    format: FormatName = "safetensors"
    device: Any = None
    shard_bytes: int = 64 << 20
    shard_seconds: float = 60.0
    progress: bool | None = None
    split: bool = True
    items: Items | None = None
    rank: SharingRank | None = None
    cluster: Cluster = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        """Check the settings."""
        for name, known in (("on_bad", OnBad), ("format", FormatName), ("items", Items)):
            given = getattr(self, name)
            if given not in get_args(known) and not (name == "items" and given is None):
                choices = ", ".join(map(repr, get_args(known)))
                raise ExtractionFailed(f"{name}={given!r}: use one of {choices}")
        if not isinstance(self.reduce, Mapping):
            raise ExtractionFailed(
                f"reduce={self.reduce!r}: give a dict of reducers by the names of values, such as "
                '{"layer4": kedge.recipes.Mean()}'
            )
        strange = [name for name in self.keep if name not in self.reduce]
        if strange:
            raise ExtractionFailed(
                f"keep={strange!r}: name only sites of reduce=; all others are kept in any case"
            )
        if not isinstance(self.fields, Mapping):
            raise ExtractionFailed(
                f"fields= is a {type(self.fields).__name__}; give a name to each entry "
                "of the batch: fields={'path': 2}"
            )
        if LABELS in self.fields and self._has_labels:
            raise ExtractionFailed(
                f"labels= and fields= both give the field {LABELS!r}; give one of them"
            )
        for name, entry in self.stored_fields.items():
            is_entry = callable(entry) or isinstance(entry, (int, str))
            if name and isinstance(name, str) and is_entry and entry is not False:
                continue
            if name == LABELS and LABELS not in self.fields:
                raise ExtractionFailed(
                    f"labels={reprlib.repr(entry)}: give the index or the name of the "
                    "entry of each batch that holds its labels, or a function of the "
                    "batch; a list of all labels need not be stored: labels[int(key)] "
                    "is the one of a key in taken.samples"
                )
            raise ExtractionFailed(
                f"fields={{{name!r}: {reprlib.repr(entry)}}}: give a name to the index "
                "or the name of an entry of the batch, or to a function of the batch"
            )
        if not (self.keys is None or callable(self.keys) or hasattr(self.keys, "__len__")):
            # An iterator yields keys once, and they are read twice.
            object.__setattr__(self, "keys", list(self.keys))

    @property
    def stored_fields(self) -> dict[str, Field]:
        """What is stored beside the features, labels included."""
        if self._has_labels:
            return {LABELS: cast("Field", self.labels), **self.fields}
        return dict(self.fields)

    @property
    def _has_labels(self) -> bool:
        return not (self.labels is None or self.labels is False)  # 0 is the first entry

    @property
    def reducers(self) -> dict[str, list[Reducer]]:
        """The reducers of each site, as lists."""
        reducers = {}
        for name, some in self.reduce.items():
            reducers[name] = list(some) if isinstance(some, Sequence) else [some]
        return reducers
