"""The base class of reducers, which keep a summary of any number of samples in constant memory.

# Note [Exact summaries]
A summary depends on the samples alone: not on their batches, their order, or the order of merges.
Counts and selections (`Histogram`, `TopK`) are equal to the last bit. Sums (`Mean`, `Covariance`)
are equal up to the rounding of float64. `Quantiles` is a sketch: equal up to the error that it
states.

# Note [Positions]
A value ``[n, c, h, w]`` has ``h * w`` positions for each sample and channel. A summary that counts
each position as a sample means something else than one that pools a sample's positions first. So
nothing is guessed: the caller must choose, and a reducer without that choice refuses values with
several positions.

A mean over positions is added up in float64 along a fixed tree of halves. Each addition is then one
of two given numbers, and a sample's mean has the same bits in any batch and on any device.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from kedge.errors import ReducerError, SettingsDiffer
from kedge.torch_internals.accelerators import with_doubles

State = dict[str, Tensor]

_SETTINGS = "settings"


class Reducer(ABC):
    """The base class of reducers, which summarize samples batch by batch.

    A reducer is created with its settings, copied for each site, and merged over processes. It can
    be deep-copied and pickled at any time. See Note [Exact summaries].

    Attributes:
        settings: The name of the class and its arguments, which must be equal in two reducers to
            merge.
        layout: What is done with values of more than two dimensions.
        channels: The number of channels; None before the first sample.
    """

    def __init__(self, *, positions: Positions | None, channel: int, **settings: Any) -> None:
        self.settings = {
            "reducer": type(self).__name__,
            **settings,
            "positions": positions,
            "channel": channel,
        }
        self.layout = ChannelLayout(positions, channel)
        self.channels: int | None = None

    def update(self, values: Tensor, keys: Sequence[str] | None = None) -> None:
        """Add a batch.

        Args:
            values: ``[n, ...]``, on any device, of any real type; not modified.
            keys: The samples' keys, one for each. Only selections need them.

        Raises:
            ReducerError: If the values cannot be summarized, or have another number of channels
                than earlier ones.
        """
        if not isinstance(values, Tensor):
            raise ReducerError(
                f"a reducer needs a tensor [n, ...] and got a {type(values).__name__}"
            )
        if values.dim() == 0:
            raise ReducerError(
                "a reducer needs a batch of samples [n, ...] and got a single number"
            )
        if keys is not None and len(keys) != len(values):
            raise ReducerError(
                f"{len(values)} samples came with {len(keys)} keys; each sample needs one"
            )
        if len(values):
            with _plainly():
                self._take(values, keys)

    def merge(self, other: Self) -> None:
        """Add the samples of another reducer, which remains unchanged.

        Raises:
            SettingsDiffer: If the other reducer is of another class, or has other settings.
        """
        self._must_match(other.settings, "merge two reducers")
        if other.channels is not None:
            self._fix_channels(other.channels)
            with _plainly():
                self._merge(other)

    def state(self) -> State:
        """Return the summary and the settings as CPU tensors with memory of their own."""
        text = json.dumps(self.settings, sort_keys=True).encode()
        channels = -1 if self.channels is None else self.channels
        state = {
            _SETTINGS: torch.tensor(list(text), dtype=torch.uint8),
            "channels": torch.tensor(channels),
        }
        for name, value in self._state().items():
            state[name] = value.detach().cpu().contiguous().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace this reducer's summary by a state.

        Raises:
            SettingsDiffer: If the state belongs to another class, or to other settings.
        """
        self._must_match(settings_of(state), "load a state")
        channels = int(state["channels"])
        self.channels = None if channels < 0 else channels
        with _plainly():
            self._load({name: value.clone() for name, value in state.items()})

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the summary; `n` is the number of samples in it."""

    @abstractmethod
    def _take(self, values: Tensor, keys: Sequence[str] | None, /) -> None:
        """Add a batch of at least one sample."""

    @abstractmethod
    def _merge(self, other: Self) -> None:
        """Add a nonempty reducer with the same settings and channels."""

    @abstractmethod
    def _state(self) -> State:
        """Return the summary as tensors."""

    @abstractmethod
    def _load(self, state: State) -> None:
        """Replace the summary; this reducer owns the tensors."""

    def _pieces(self, values: Tensor) -> Iterator[Tensor]:
        """Yield rows ``[rows, channels]`` of a batch, after checking their number of channels."""
        for rows in self.layout.pieces(values):
            self._fix_channels(rows.shape[1])
            yield rows

    def _fix_channels(self, channels: int) -> None:
        if self.channels is None:
            self.channels = channels
        elif self.channels != channels:
            raise ReducerError(
                f"{self.settings['reducer']} has seen values of {self.channels} "
                f"channels and got {channels}; use one reducer for each kind of value"
            )

    def _must_match(self, settings: Mapping[str, Any], what: str) -> None:
        if settings == self.settings:
            return
        differing = []
        for name in dict.fromkeys([*self.settings, *settings]):
            here = self.settings.get(name)
            there = settings.get(name)
            if here != there:
                differing.append(f"{name} is {here!r} here and {there!r} there")
        raise SettingsDiffer(
            f"cannot {what} of different settings: {'; '.join(differing)}; make both "
            "with the same arguments"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with tensors on the CPU, so that a machine without the device can unpickle it."""
        state = dict(vars(self))
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.cpu()
        return state

    def __repr__(self) -> str:
        """Return the call that creates the reducer."""
        settings = dict(self.settings)
        reducer = settings.pop("reducer")
        return f"{reducer}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def settings_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the settings in a state.

    Raises:
        ReducerError: If it is not a reducer's state.
    """
    if _SETTINGS not in state:
        raise ReducerError(
            f"this is not the state of a reducer: it holds {sorted(state)} and no {_SETTINGS!r}"
        )
    settings: dict[str, Any] = json.loads(bytes(state[_SETTINGS].tolist()))
    return settings


@contextmanager
def _plainly() -> Iterator[None]:
    """Context outside inference mode and grad mode, so that tensors made in it can be changed later."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


Positions = Literal["samples", "mean", "max", "elements"]

PIECE = 1 << 20
"""The number of elements processed at once on a CPU: 8 MiB in float64, which nearly fits into its cache."""
FARTHER = 16
"""The factor for other devices, where launching work dominates the time."""
_PLAIN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
    }
)


@dataclass(frozen=True)
class ChannelLayout:
    """The dimension of the channels, and the treatment of positions; see Note [Positions].

    Attributes:
        positions: "samples": each position is a sample of its own; "mean" or "max": a sample's
            positions are pooled first; "elements": each element of a sample is a channel of its
            own; None: values have a single position.
        channel: The dimension of the channels in a batch: 1 for images, -1 for tokens.
    """

    positions: Positions | None
    channel: int

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.positions not in (None, *get_args(Positions)):
            raise ReducerError(
                f"positions={self.positions!r}: use one of "
                f"{', '.join(map(repr, get_args(Positions)))}, or None for values that "
                "have one position only"
            )
        if self.channel == 0:
            raise ReducerError(
                "channel=0 is the dimension of the samples; use 1 for images, -1 for tokens"
            )

    def pieces(self, values: Tensor) -> Iterator[Tensor]:
        """Yield the rows of a batch in pieces small enough for memory.

        Yields:
            Tensors ``[rows, channels]``.
        """
        for piece in self.split(values):
            yield self.rows(piece)

    def split(self, values: Tensor) -> Iterator[Tensor]:
        """Yield the samples of a batch in pieces small enough for memory."""
        values = numbers(values)
        whole = values.numel() // len(values)
        if whole == 0:
            raise ReducerError(
                f"values of shape {list(values.shape)} hold no elements; there is nothing to reduce"
            )
        most = PIECE if values.device.type == "cpu" else PIECE * FARTHER
        yield from values.split(max(1, most // whole))

    def places(self, values: Tensor) -> Tensor:
        """Return the position of each element of `rows`, as ``[rows, channels]`` or ``[rows, 1]``.

        Positions count from 0, over all dimensions of positions together. It is 0 where there is a
        single one, and -1 for a mean of several.
        """
        count = 1
        if self.positions != "elements" and values.dim() > 2:
            values = values.movedim(self.channel, 1).flatten(2)
            count = values.shape[2]
        n = len(values)
        if count > 1 and self.positions == "samples":
            return torch.arange(count, device=values.device).repeat(n)[:, None]
        if count > 1 and self.positions == "max":
            return values.argmax(2)  # the first of equal ones
        alone = 0 if count == 1 else -1
        return torch.full((n, 1), alone, device=values.device)

    def rows(self, values: Tensor) -> Tensor:
        """Return a batch as ``[rows, channels]``, in float64 if positions were averaged."""
        if values.dim() == 1:
            return values[:, None]
        if self.positions == "elements":
            return values.flatten(1)
        if not -values.dim() < self.channel < values.dim():
            raise ReducerError(
                f"channel={self.channel}: values of shape {list(values.shape)} have no "
                "such dimension"
            )
        if values.dim() == 2:
            return values
        values = values.movedim(self.channel, 1).flatten(2)
        count = values.shape[2]
        if count == 1:
            return values[:, :, 0]
        if self.positions == "samples":
            return values.transpose(1, 2).reshape(-1, values.shape[1])
        if self.positions == "mean":
            return mean_of_positions(values)
        if self.positions == "max":
            return values.amax(2)
        raise ReducerError(
            f"values have {count} positions for each sample and channel, and "
            "positions= does not say how to reduce them; give positions='samples', "
            "'mean', 'max' or 'elements'"
        )


def mean_of_positions(values: Tensor) -> Tensor:
    """Return the mean over the last dimension in float64, the same bits in every batch; see Note [Positions]."""
    count = values.shape[-1]
    total = values.double()
    while (width := total.shape[-1]) > 1:
        half = width // 2
        odd = total[..., 2 * half :]
        total = total[..., :half] + total[..., half : 2 * half]
        if width % 2:
            total = torch.cat([total, odd], -1)
    return total[..., 0] / count


def numbers(values: Tensor) -> Tensor:
    """Return a batch detached and dense, in a type that PyTorch can compare and add; raise ReducerError if impossible."""
    if values.is_complex() or values.is_nested or values.is_meta or values.is_quantized:
        kind = "quantized"
        if values.is_complex():
            kind = "complex"
        elif values.is_nested:
            kind = "nested"
        elif values.is_meta:
            kind = "meta"
        raise ReducerError(
            f"a reducer needs real numbers and got a {kind} tensor; give it values "
            "that have an order"
        )
    values = values.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = with_doubles(values)
    return values if values.dtype in _PLAIN else values.double()
