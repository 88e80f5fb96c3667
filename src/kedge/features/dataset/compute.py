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
from kedge.features.dataset.batch import (
    Columns,
    FailedSample,
    SampleBatch,
    bad,
    called_with,
    moved,
    narrowed,
)
from kedge.features.dataset.keys_and_fields import SampleKeys, name_of
from kedge.features.dataset.options import OnBad
from kedge.features.dimensions import batch_of
from kedge.torch_internals.accelerators import to_host
from kedge.torch_internals.module_tables import parameters_in

_OF_THE_MACHINE = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_NOT_A_SAMPLES_FAULT = (KedgeError, *_OF_THE_MACHINE)


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
        self.features = features
        self.batch = batch
        self._left_out = left_out
        self.device: torch.device | None = None
        if device is not None:
            self.device = usable(device)
        elif isinstance(features, nn.Module):
            for parameter in parameters_in(features).values():
                self.device = parameter.device
                break
        self._proven = proven
        self._taken: tuple[Any, int] | None = None  # a batch that it took, and its size
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
        if self._taken is None:
            # The first batch: a reference to the last would keep its memory from the next.
            self._taken = batch.data, len(batch.places)
        values: dict[str, Tensor] = {}
        copied: list[torch.Event] = []
        for name, (value, event) in found.items():
            values[name] = value
            if event is not None:
                copied.append(event)
        return Columns(batch.places, batch.keys, values, batch.bad, tuple(copied), batch.fields)

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which the features keep their hooks on the model between batches, if they have hooks."""
        held: Callable[[], AbstractContextManager[Any]] = getattr(
            self.features, "held", nullcontext
        )
        return held()

    def _features(self, data: Any, size: int) -> dict[str, tuple[Tensor, torch.Event | None]]:
        data = moved(data, self.device)
        if self.batch is None:
            args, kwargs = called_with(data, self._left_out)
        else:
            self._preparing = True
            made = self.batch(data)
            self._preparing = False
            args, kwargs = (made,), {}
            if isinstance(made, Mapping):
                args, kwargs = (), dict(made)
            elif isinstance(made, tuple):
                args = made
        with torch.no_grad(), batch_of(size):
            found = self.features(*args, **kwargs)
            return {name: _own(name, value, size) for name, value in found.items()}

    def _without_bad(self, batch: SampleBatch, error: Exception) -> Columns:
        """Return the features of the samples that the model can take; see Note [Which sample it was]."""
        size = len(batch.places)
        taker = f"batch= ({name_of(self.batch)})" if self._preparing else "the model"
        failed: dict[int, FailedSample] = {}
        for row in range(size):
            alone = self._failure(narrowed(batch.data, [row], size), 1)
            if alone is not None:
                found = bad(batch.places[row], alone)
                failed[row] = found._replace(key=batch.keys[row])

        if not failed or (len(failed) == size and not self._still_works()):
            alone_too = "it cannot take any sample alone either"
            if not failed:
                alone_too = "it can take each sample alone"
            raise ExtractionFailed(
                f"{taker} cannot take a batch of {size} samples, from "
                f"{batch.keys[0]!r} to {batch.keys[-1]!r}: {type(error).__name__}: "
                f"{error}; {alone_too}"
            ) from error
        rest = batch.only([row for row in range(size) if row not in failed])
        return self(rest._replace(bad=[*batch.bad, *failed.values()]))

    def _still_works(self) -> bool:
        if self._taken is None:
            return self._proven
        try:
            self._features(*self._taken)
        except Exception:  # noqa: BLE001 - as above
            return False
        return True

    def _failure(self, data: Any, size: int) -> Exception | None:
        """Return the error that the model raises for samples; None if it takes them."""
        try:
            self._features(data, size)
        except _NOT_A_SAMPLES_FAULT:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None


def usable(device: Any) -> torch.device:
    """Return a device, after a test computation on it.

    Args:
        device: The device's name, such as "cuda:1", or a `torch.device`.

    Raises:
        ExtractionFailed: The device does not exist or cannot compute; the message contains
            PyTorch's reason.
    """
    try:
        found = torch.device(device)
        # Without a driver, creating a device is not an error yet.
        torch.zeros(1, device=found).add_(1).cpu()
    except Exception as error:
        there = ["cpu"]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            numbers = range(torch.accelerator.device_count())
            there += [f"{accelerator.type}:{number}" for number in numbers]
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ExtractionFailed(
            f"device={str(device)!r} cannot be used: {reason}; use one of this "
            f"machine: {', '.join(there)}"
        ) from error
    return found


def compute(
    loads: Iterable[SampleBatch], keys: SampleKeys, work: BatchComputer, on_bad: OnBad
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
    first = found[0]
    more = f" (and {len(found) - 1} more of its batch)" if len(found) > 1 else ""
    remedy = "fix it, or leave such samples out with on_bad='skip' (--on-bad skip)"
    if first.ends:
        remedy = "a stream cannot continue after this"
    error = BadSample(f"no features of sample {first.key!r}{more}: {first.why}; {remedy}")
    if first.details:
        error.add_note(first.details.rstrip())
    return error


def _own(name: str, value: Any, size: int) -> tuple[Tensor, torch.Event | None]:
    """Return a copy of a value in CPU memory of its own, which keeps nothing else alive and cannot be overwritten.

    With it comes the event of its arrival; None if it is there.
    """
    is_tensor = isinstance(value, Tensor)
    if is_tensor and (value.is_nested or value.layout != torch.strided):
        kind = str(value.layout).removeprefix("torch.").lstrip("_")
        dense = "v.to_dense()"
        if value.is_nested:
            kind, dense = "nested", "v.to_padded_tensor(0.0)"
        raise ExtractionFailed(
            f"{name!r} is a {kind} tensor, and samples are stored as rows of a dense "
            f"one: give the site a transform, such as lambda v: {dense}"
        )
    if not is_tensor or not value.ndim or len(value) != size:
        shape = f"a {type(value).__name__}"
        if is_tensor:
            shape = f"shape {tuple(value.shape)}"
        raise ExtractionFailed(
            f"{name!r} has {shape} for a batch of {size} samples: the first dimension "
            "must be that of the samples; give the site a transform that returns such "
            "a tensor"
        )
    plain: Tensor = value.detach()
    if plain.device.type == "cpu":
        return plain.clone(memory_format=torch.contiguous_format), None
    return to_host(plain.contiguous())
