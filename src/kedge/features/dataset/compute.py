"""A batch in, its features out: what a process does that has the model, wherever batches come from and features go.

# Note [Which sample it was]
When the model fails on a batch, each of its samples is tried alone. Those that fail alone are bad, and the rest is
computed together once more. When none fails alone, it is not a sample's fault and the error is raised; nor is it when
all fail, unless the model still takes what it took before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kedge.errors import BadSample, ExtractionFailed, KedgeError
from kedge.features.dataset.devices import usable
from kedge.features.dataset.samples.batch import Columns, FailedSample, SampleBatch
from kedge.features.dataset.samples.inputs import called_with, given, moved, narrowed
from kedge.features.dataset.samples.names import name_of
from kedge.features.dataset.samples.placed import bad

_NOT_A_SAMPLES_FAULT = (KedgeError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class TakesFeatures(Protocol):
    """What is called like a model and gives its features by name, with the samples in the first dimension."""

    def __call__(self, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        """Compute the features of a batch."""


class BatchComputer:
    """Computes the features of batches; it can be pickled and sent to where the model is to run.

    Args:
        features: What is called like a model and gives features by name.
        batch: Makes the model's arguments from a batch; see `Options`.
        device: Where batches are moved to; by default where the model's first parameter is.
        proven: Whether the model is known to work on other samples of the data set.

    Raises:
        ExtractionFailed: Nothing can be computed on that device.
    """

    def __init__(
        self,
        features: TakesFeatures,
        *,
        batch: Callable[[Any], Any] | None = None,
        device: Any = None,
        proven: bool = False,
    ) -> None:
        self.features, self.batch = features, batch
        self.device = _device_of(features) if device is None else usable(device)
        self._proven = proven
        self._taken: tuple[Any, int] | None = None  # a batch that the model took
        self._preparing = False  # batch= was called, and has not returned

    def __call__(self, batch: SampleBatch) -> Columns:
        """Compute the features of a batch.

        Raises:
            ExtractionFailed: The model fails, and not because of single samples.
        """
        if not batch.places:
            return Columns([], [], {}, batch.bad)
        try:
            values, copied = self._features(batch.data, len(batch.places))
        except _NOT_A_SAMPLES_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            return self._without_bad(batch, error)
        self._taken = self._taken or (batch.data, len(batch.places))  # not the last: its memory is for the next one
        return Columns(batch.places, batch.keys, values, batch.bad, copied)

    def held(self) -> AbstractContextManager[Any]:
        """A block in which what computes features leaves its hooks on the model between batches, if it has any."""
        held: Callable[[], AbstractContextManager[Any]] = getattr(self.features, "held", nullcontext)
        return held()

    def _features(self, data: Any, size: int) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        data = moved(data, self.device)
        self._preparing = self.batch is not None
        args, kwargs = called_with(data) if self.batch is None else given(self.batch(data))
        self._preparing = False
        with torch.no_grad():
            found = self.features(*args, **kwargs)
            return {name: _own(name, value, size) for name, value in found.items()}, _copied(found.values())

    def _without_bad(self, batch: SampleBatch, error: Exception) -> Columns:
        """Find the samples that the model cannot take; see Note [Which sample it was]."""
        size = len(batch.places)
        taker = f"batch= ({name_of(self.batch)})" if self._preparing else "the model"
        failed = {row: found for row in range(size) if (found := self._alone(batch, row)) is not None}
        if not failed or (len(failed) == size and not self._still_works()):
            raise ExtractionFailed(
                f"{taker} cannot take a batch of {size} samples, from {batch.keys[0]!r} to {batch.keys[-1]!r}: "
                f"{type(error).__name__}: {error}; {'each alone it can' if not failed else 'nor any of them alone'}"
            ) from error
        rest = [row for row in range(size) if row not in failed]
        left = batch._replace(
            places=[batch.places[row] for row in rest],
            keys=[batch.keys[row] for row in rest],
            data=narrowed(batch.data, rest, size),
            bad=[*batch.bad, *failed.values()],
        )
        return self(left)

    def _still_works(self) -> bool:
        """Whether the model takes what it took before."""
        if self._taken is None:
            return self._proven
        try:
            self._features(*self._taken)
        except Exception:  # noqa: BLE001 - as above
            return False
        return True

    def _alone(self, batch: SampleBatch, row: int) -> FailedSample | None:
        try:
            self._features(narrowed(batch.data, [row], len(batch.places)), 1)
        except _NOT_A_SAMPLES_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return bad(batch.places[row], error)._replace(key=batch.keys[row])
        return None


def bad_sample(found: Sequence[FailedSample]) -> BadSample:
    """Make the error about samples that have no features, of which the first is named."""
    first, more = found[0], f" (and {len(found) - 1} more of its batch)" if len(found) > 1 else ""
    way = "a stream cannot go on after that" if first.ends else "mend it, or leave such samples out with on_bad='skip'"
    error = BadSample(f"no features of sample {first.key!r}{more}: {first.why}; {way}")
    if first.details:
        error.add_note(first.details.rstrip())
    return error


def _own(name: str, value: Any, size: int) -> Tensor:
    """Copy a value into memory of its own, so that nothing else is kept alive and nothing can overwrite it."""
    if not isinstance(value, Tensor) or not value.ndim or len(value) != size:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ExtractionFailed(
            f"{name!r} gives {shape} for a batch of {size} samples: the first dimension must be theirs; "
            "give the site a transform that makes it so"
        )
    plain: Tensor = value.detach()
    if plain.device.type == "cpu":
        return plain.clone(memory_format=torch.contiguous_format)
    return plain.contiguous().to("cpu", non_blocking=plain.device.type == "cuda")


def _copied(values: Iterable[Tensor]) -> torch.cuda.Event | None:
    """Mark the moment at which copies from a CUDA device are complete, which are not waited for here."""
    device = next((value.device for value in values if value.device.type == "cuda"), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _device_of(features: Any) -> torch.device | None:
    first = next(features.parameters(), None) if isinstance(features, nn.Module) else None
    return None if first is None else first.device
