"""Settings for a `ray.data.Dataset`, without an import of Ray."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.errors import ExtractionFailed


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
        for name, least in (
            ("workers", 1),
            ("batch_size", 1),
            ("rows", 1),
            ("cpus", 0),
            ("gpus", 0),
            ("deaths", 0),
        ):
            if getattr(self, name) < least:
                raise ExtractionFailed(
                    f"{name}={getattr(self, name)!r}: it must be at least {least}"
                )

    @property
    def whole_rows(self) -> int:
        """The number of samples for a worker, in whole batches."""
        return -(-self.rows // self.batch_size) * self.batch_size


def is_of_ray(data: object) -> bool:
    """Whether data are a Ray data set; does not import Ray."""
    return any(
        kind.__module__.partition(".")[0] == "ray" and kind.__name__ == "Dataset"
        for kind in type(data).__mro__
    )
