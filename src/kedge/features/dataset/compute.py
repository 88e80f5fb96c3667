"""The features of a batch: the computation in a process with the model, for any source of batches.

# Note [Which sample it was]
When the model fails on a batch, each sample is tried alone. Samples that fail alone are bad, and
the rest are computed together once more. If no sample fails alone, the batch is at fault and the
error is raised. If all fail, the error is raised too, unless the model still takes an earlier
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kedge.errors import BadSample, ExtractionFailed, KedgeError
from kedge.features.axes.arguments import batch_of
from kedge.features.dataset.devices import usable
from kedge.features.dataset.options import OnBad
from kedge.features.dataset.samples.batch import Columns, FailedSample, SampleBatch
from kedge.features.dataset.samples.inputs import called_with, given, moved, narrowed
from kedge.features.dataset.samples.names import SampleKeys, name_of
from kedge.features.dataset.samples.placed import LoadedBatch, bad
from kedge.torch_internals.accelerators import to_host
from kedge.torch_internals.module_tables import parameters_in

_NOT_A_SAMPLES_FAULT = (KedgeError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class TakesFeatures(Protocol):
    """A callable with the interface of a model that returns features by name, with samples in the first dimension."""

    def __call__(self, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        """Return the features of a batch."""


class BatchComputer:
    """Computation of the features of batches; it can be pickled and sent to the process that runs the model.

    Args:
        features: A callable with the interface of a model that returns features by name.
        batch: A function from a batch to the model's arguments; see `Options`.
        device: The device for batches; by default that of the model's first parameter.
        proven: Whether the model is known to work on other samples of the data set.
        left_out: The entries of a dict batch that are not passed to the model, unless `batch` is
            given.

    Raises:
        ExtractionFailed: The device cannot be used.
    """

    def __init__(
        self,
        features: TakesFeatures,
        *,
        batch: Callable[[Any], Any] | None = None,
        device: Any = None,
        proven: bool = False,
        left_out: Container[str] = (),
    ) -> None:
        self.features, self.batch, self._left_out = features, batch, left_out
        self.device = _device_of(features) if device is None else usable(device)
        self._proven = proven
        self._taken: tuple[Any, int] | None = None  # a batch that the model took, and its size
        self._preparing = False  # whether batch= is running

    def __call__(self, batch: SampleBatch) -> Columns:
        """Return the features of a batch.

        Raises:
            ExtractionFailed: The model fails, and not because of single samples.
        """
        if not batch.places:
            return Columns([], [], {}, batch.bad)
        try:
            found = self._features(batch.data, len(batch.places))
        except _NOT_A_SAMPLES_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            return self._without_bad(batch, error)
        # The first batch: a reference to the last would keep its memory from the next.
        self._taken = self._taken or (batch.data, len(batch.places))
        copied = tuple(event for _, event in found.values() if event is not None)
        values = {name: value for name, (value, _) in found.items()}
        return Columns(batch.places, batch.keys, values, batch.bad, copied, batch.fields)

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which the features keep their hooks on the model between batches, if they have hooks."""
        held: Callable[[], AbstractContextManager[Any]] = getattr(
            self.features, "held", nullcontext
        )
        return held()

    def _features(self, data: Any, size: int) -> dict[str, tuple[Tensor, torch.Event | None]]:
        data = moved(data, self.device)
        self._preparing = self.batch is not None
        args, kwargs = (
            called_with(data, self._left_out) if self.batch is None else given(self.batch(data))
        )
        self._preparing = False
        with torch.no_grad(), batch_of(size):
            return {
                name: _own(name, value, size)
                for name, value in self.features(*args, **kwargs).items()
            }

    def _without_bad(self, batch: SampleBatch, error: Exception) -> Columns:
        """Return the features of the samples that the model can take; see Note [Which sample it was]."""
        size = len(batch.places)
        taker = f"batch= ({name_of(self.batch)})" if self._preparing else "the model"
        failed = {
            row: found for row in range(size) if (found := self._alone(batch, row)) is not None
        }
        if not failed or (len(failed) == size and not self._still_works()):
            raise ExtractionFailed(
                f"{taker} cannot take a batch of {size} samples, from {batch.keys[0]!r} to {batch.keys[-1]!r}: "
                f"{type(error).__name__}: {error}; "
                f"{'it can take each sample alone' if not failed else 'it cannot take any sample alone either'}"
            ) from error
        rest = [row for row in range(size) if row not in failed]
        left = batch.only(rest, narrowed(batch.data, rest, size))
        return self(left._replace(bad=[*batch.bad, *failed.values()]))

    def _still_works(self) -> bool:
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


def bad_sample(found: Sequence[FailedSample]) -> BadSample:
    """Return the error about samples without features; it names the first."""
    first, more = found[0], f" (and {len(found) - 1} more of its batch)" if len(found) > 1 else ""
    remedy = (
        "a stream cannot continue after this"
        if first.ends
        else "fix it, or leave such samples out with on_bad='skip' (--on-bad skip)"
    )
    error = BadSample(f"no features of sample {first.key!r}{more}: {first.why}; {remedy}")
    if first.details:
        error.add_note(first.details.rstrip())
    return error


def _own(name: str, value: Any, size: int) -> tuple[Tensor, torch.Event | None]:
    """Return a copy of a value in CPU memory of its own, which keeps nothing else alive and cannot be overwritten.

    With it comes the event of its arrival; None if it is there.
    """
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").lstrip("_")
        dense = "v.to_padded_tensor(0.0)" if value.is_nested else "v.to_dense()"
        raise ExtractionFailed(
            f"{name!r} is a {kind} tensor, and samples are stored as rows of a dense one: give the site a transform, such as "
            f"lambda v: {dense}"
        )
    if not isinstance(value, Tensor) or not value.ndim or len(value) != size:
        shape = (
            f"shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise ExtractionFailed(
            f"{name!r} has {shape} for a batch of {size} samples: the first dimension must be that of the samples; "
            "give the site a transform that returns such a tensor"
        )
    plain: Tensor = value.detach()
    if plain.device.type == "cpu":
        return plain.clone(memory_format=torch.contiguous_format), None
    return to_host(plain.contiguous())


def _device_of(features: Any) -> torch.device | None:
    if not isinstance(features, nn.Module):
        return None
    first = next(iter(parameters_in(features).values()), None)
    return None if first is None else first.device
