"""What a program computed between its models and its loss, written down so that it can be computed again.

# Note [The tape]
Between the call of a model and the backward pass a program computes its loss, in code that cannot be
called by itself. So it is written down while it runs: each call of a model, and, outside of models,
each function of PyTorch with its arguments. Computed again, the models run with the weights that
they have then, what depends on them follows, and everything else, such as the targets, stays as it
was. Numbers that the program has read from tensors stay too. Whether the tape is right is seen when
it is first played: with the same weights and random numbers, the loss has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kedge.sites import leaves
from kedge.torch_internals.random_numbers import RandomNumbers

MOST_ENTRIES = 20_000
"""Entries above which a tape is given up: a loop that never comes to a loss."""


@dataclass(frozen=True)
class _Entry:
    """A call of a model or a function.

    Attributes:
        call: What was called.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        results: The tensors that it returned, by name within the result.
        graded: Whether gradients were enabled.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: dict[str, Tensor]
    graded: bool


class Tape:
    """The calls between the first model of a step and its loss; see Note [The tape]."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._random_numbers = RandomNumbers()
        self._autocast = _autocast_in_force()
        self._losses: tuple[Tensor, ...] = ()
        self._scale = 1.0
        self.value = 0.0
        """The loss, as the program computed it."""

    def add(self, call: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        """Add a call of a model or a function, if it returned a tensor."""
        results = dict(leaves.find(output))
        if results and len(self._entries) < MOST_ENTRIES:
            graded = torch.is_grad_enabled()
            self._entries.append(_Entry(call, tuple(args), dict(kwargs), results, graded))

    def calls_of(
        self, function: Callable[..., Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments of each call of a function."""
        for entry in self._entries:
            if entry.call is function:
                yield entry.args, dict(entry.kwargs)

    def end_at(self, losses: Sequence[Tensor], scale: Tensor | None) -> None:
        """End at the losses of a backward pass.

        Args:
            losses: The tensors that are differentiated.
            scale: The scale by which a `GradScaler` has multiplied them; None without one.
        """
        self._losses = tuple(losses)
        if scale is not None:
            self._scale = float(scale)
        self.value = sum(float(loss.detach().sum()) for loss in losses) / self._scale

    def loss(self) -> Tensor:
        """Compute the loss again, with the weights that the models have now.

        Raises:
            Exception: Whatever the program's code raises when it is called with other values.
        """
        self._random_numbers.restore()
        new: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            for entry in self._entries:
                args, kwargs = _replaced((entry.args, entry.kwargs), new)
                with torch.set_grad_enabled(entry.graded):
                    made = dict(leaves.find(entry.call(*args, **kwargs)))
                for name, before in entry.results.items():
                    if name in made:
                        new[id(before)] = made[name]
        losses = [new.get(id(each), each).sum() for each in self._losses]
        return torch.stack(losses).sum() / self._scale


class TapeWriter:
    """Writes tapes: one begins with the first call of a model after the last has ended."""

    def __init__(self) -> None:
        self._tape: Tape | None = None
        self._modes: dict[nn.Module, bool] = {}
        self._writing: Writing | None = None

    def pause(self, module: nn.Module) -> None:
        """Write nothing while a model runs.

        It begins a tape if there is none, or if the model had another mode there: what came before
        was an evaluation.
        """
        self.close()
        if self._tape is not None and self._modes.get(module, module.training) != module.training:
            self._tape = None
        if self._tape is None:
            self._tape = Tape()
            self._modes = {}
        self._modes[module] = module.training

    def add_model(self, module: nn.Module, given: Any, output: Any) -> None:
        """Add the call of a model, and write down what is called from now on."""
        if self._tape is None or self._writing is not None:
            return
        args, kwargs = given
        self._tape.add(module, args, kwargs, output)
        self._writing = Writing(self._tape)
        self._writing.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Tape | None:
        """End the tape, and return it; None if no model was called.

        `Tensor.backward` is a function that the mode passes on, which cannot leave it.
        """
        tape, self._tape = self._tape, None
        if self._writing is not None:
            self._writing.tape = None
        return tape

    def close(self) -> None:
        """Write nothing from now on."""
        if self._writing is not None:
            self._writing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._writing = None


class Writing(TorchFunctionMode):
    """Writes each function of PyTorch that is called in its context on a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape: Tape | None = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, and write it down."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.tape is not None:
            self.tape.add(func, args, kwargs, output)
        return output


def _replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    found = {name: new[id(t)] for name, t in leaves.find(value) if id(t) in new}
    if not found:
        return value
    return leaves.put(value, found)


def _autocast_in_force() -> list[tuple[str, torch.dtype]]:
    """Return the devices for which autocast is on, with its types."""
    devices = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        devices.append(accelerator.type)
    return [
        (device, torch.get_autocast_dtype(device))
        for device in devices
        if torch.is_autocast_enabled(device)
    ]
