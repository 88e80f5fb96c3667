"""The base class of reducers, which keep a summary of any number of samples in constant memory.

# Note [Exact summaries]
A summary depends on the samples alone: not on their batches, their order, or the order of merges.
Counts and selections (`Histogram`, `TopK`) are equal to the last bit. Sums (`Mean`, `Covariance`)
are equal up to the rounding of float64. `Quantiles` is a sketch: equal up to the error that it
states.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from kedge.errors import ReducerError, SettingsDiffer
from kedge.features.reduce.layout import ChannelLayout, Positions

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
        own = {
            name: value.detach().cpu().contiguous().clone() for name, value in self._state().items()
        }
        return {_SETTINGS: _bytes(text), "channels": torch.tensor(channels), **own}

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
                f"{self.settings['reducer']} has seen values of {self.channels} channels and got {channels}; use one "
                "reducer for each kind of value"
            )

    def _must_match(self, settings: Mapping[str, Any], what: str) -> None:
        if settings == self.settings:
            return
        names = dict.fromkeys([*self.settings, *settings])
        differing = [n for n in names if self.settings.get(n) != settings.get(n)]
        shown = "; ".join(
            f"{n} is {self.settings.get(n)!r} here and {settings.get(n)!r} there" for n in differing
        )
        raise SettingsDiffer(
            f"cannot {what} of different settings: {shown}; make both with the same arguments"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with tensors on the CPU, so that a machine without the device can unpickle it."""
        return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in vars(self).items()}

    def __repr__(self) -> str:
        """Return the call that creates the reducer."""
        settings = dict(self.settings)
        return f"{settings.pop('reducer')}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


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


def _bytes(text: bytes) -> Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)
