"""How the features of a `ray.data.Dataset` are taken; nothing of Ray is imported for it."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.errors import ExtractionFailed


@dataclass(frozen=True)
class Cluster:
    """How the features of a `ray.data.Dataset` are taken by the workers of a Ray cluster.

    Attributes:
        workers: How many processes run the model, on whichever machines.
        batch_size: How many samples the model is given at once.
        rows: How many samples a worker is given at once. Their features are written together, so this is what a worker's
            death costs, and about what a shard holds.
        cpus: How many of the cluster's CPUs each worker has for itself; to read and to write needs some as well.
        gpus: How many of its GPUs. With any, the model and its batches are moved there.
        deaths: So many workers may die, and others take their places; with the next the run ends.
    """

    workers: int = 2
    batch_size: int = 32
    rows: int = 1024
    cpus: float = 0.5
    gpus: float = 0
    deaths: int = 8

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name, least in (("workers", 1), ("batch_size", 1), ("rows", 1), ("cpus", 0), ("gpus", 0), ("deaths", 0)):
            if getattr(self, name) < least:
                raise ExtractionFailed(f"{name}={getattr(self, name)!r}: it must be at least {least}")

    @property
    def whole_rows(self) -> int:
        """The samples for a worker, as whole batches."""
        return -(-self.rows // self.batch_size) * self.batch_size


def is_of_ray(data: object) -> bool:
    """Whether data are a data set of Ray, without importing it."""
    return any(kind.__module__.partition(".")[0] == "ray" and kind.__name__ == "Dataset" for kind in type(data).__mro__)
