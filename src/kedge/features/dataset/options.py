"""How the features of a data set are taken, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kedge.errors import ExtractionFailed
from kedge.features.dataset.cluster import Cluster
from kedge.features.dataset.ranks import SharingRank
from kedge.features.reduce.reducer import Reducer

OnBad = Literal["raise", "skip"]
FormatName = Literal["safetensors", "zarr", "parquet"]


@dataclass(frozen=True)
class Options:
    """How the features of a data set are taken, and how they are written.

    Attributes:
        batch: Makes what the model is called with from a batch of the loader: a tensor, a tuple of positional or
            a dict of keyword arguments. Without it a tensor is the model's argument, of a tuple or list the first
            entry is, and a dict holds keyword arguments.
        keys: What samples are called: a sequence with one for each sample of the data set, or a function that
            gives one for each sample of a batch of the loader. By default the sample's index. Of a
            `ray.data.Dataset` the name of the column that holds them, or a function; one of these is needed there.
        reduce: For each name that a value has in the result the reducer, or several, that takes it in; such values are
            not kept then.
        keep: Names in `reduce` whose values are kept as well.
        version: What the program's own functions (transforms, `batch=`, `keys=`, the loader's `collate_fn`) go by, in place
            of digests: a folder goes on as long as their names and this text are the same.
        on_bad: What happens with a sample that cannot be loaded, or that the model cannot take: "raise" stops,
            "skip" leaves it out and writes that down.
        format: How shards are written: "safetensors", or with an extra of that name "zarr" or "parquet".
        device: Where batches are moved to; by default where the model's first parameter is.
        shard_bytes: A shard is written when it has so many bytes, the first ones earlier; as many again may wait meanwhile.
        shard_seconds: A shard is written when it is so old, so that no more than that is lost by a kill.
        progress: Whether progress is shown; None: if stderr is a terminal.
        split: Whether each rank of a distributed run takes its part of what the loader gives; False if the loaders
            of the ranks give each its own part already. A loader with a `DistributedSampler` is recognised.
        rank: Which rank this is; None: as torchrun or `torch.distributed` says.
        cluster: How many workers take the features of a `ray.data.Dataset`, and what each is given.
    """

    batch: Callable[[Any], Any] | None = None
    keys: Sequence[Any] | Callable[[Any], Sequence[Any]] | None = None
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
    rank: SharingRank | None = None
    cluster: Cluster = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        """Refuse what is not known."""
        for name, known in (("on_bad", OnBad), ("format", FormatName)):
            if getattr(self, name) not in get_args(known):
                choices = ", ".join(map(repr, get_args(known)))
                raise ExtractionFailed(f"{name}={getattr(self, name)!r}: take one of {choices}")
        strange = [name for name in self.keep if name not in self.reduce]
        if strange:
            raise ExtractionFailed(
                f"keep={strange!r}: only sites of reduce= are to be named, all others are kept anyway"
            )
        if not (self.keys is None or callable(self.keys) or hasattr(self.keys, "__len__")):
            object.__setattr__(self, "keys", list(self.keys))  # an iterator gives them once, and they are read twice

    @property
    def reducers(self) -> dict[str, list[Reducer]]:
        """The reducers of each site, as lists."""
        return {name: list(some) if isinstance(some, Sequence) else [some] for name, some in self.reduce.items()}
