"""Whether a model of token sequences is trained to return its own input."""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kedge.frames import SourceLine
from kedge.store.events import TargetsEvent
from kedge.torch_internals import dynamo, modes
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.source_lines import source_of
from kedge.watch.models.backward_start import programs_line
from kedge.watch.models.roots import RootModule
from kedge.watch.records.samples import can_sample
from kedge.watch.steps.shield import WatchShield

_LOSSES = (functional.cross_entropy, functional.nll_loss)
_LEAST = 16
"""Positions from which on equal tokens are no accident."""
_STEPS = 3
"""Steps that are looked at."""


class _Compared(NamedTuple):
    """The targets of one loss, beside tokens that the model embedded.

    Attributes:
        same: Whether they are equal, position by position, and not all one number.
        before: Whether each is the token of the position before it.
        positions: How many they are.
        line: The line that computed the loss.
    """

    same: Tensor
    before: Tensor
    positions: int
    line: SourceLine | None


class LanguageTargets:
    """Compares the targets of one root's loss with the tokens that it embeds, in a few measured steps.

    A mode sees both, from the begin of a pass to that of the first one in another step. On a device
    the result stays there until the end of the run, since reading it would wait.
    """

    def __init__(self, root: RootModule, shield: WatchShield) -> None:
        self._root = root
        self._shield = shield
        self._steps = 0
        self._step = -1
        self._losses: list[_Compared] = []
        self._look: _Look | None = None
        self._thread: int | None = None
        self._embeds: bool | None = None

    def wants(self, step: int) -> bool:
        """Whether the operations of a step are to be looked at, and no pass of it has begun."""
        return self._steps < _STEPS and step != self._step and self._embeds is not False

    def begin(self, module: nn.Module, step: int) -> None:
        """Prepare for a look at a step, whose first pass begins."""
        if self._embeds is None:
            self._embeds = any(isinstance(m, nn.Embedding) for m in modules_in(module).values())
        if self._embeds and not dynamo.has_compiled() and not modes.is_transforming():
            self._steps += 1
            self._step = step
            self._look = _Look(self._losses, self._shield)

    def put_up(self) -> None:
        """Put the mode on the stack, if there is none of the program's; outside of own work.

        A block of the program that began before would take off the one on top when it ends.
        """
        if self._look is not None and self._thread is None and not modes.function_modes():
            self._thread = threading.get_ident()
            modes.push_function_mode(self._look)

    def take_down(self, step: int = -1) -> None:
        """Take the mode off the stack, unless it is to see this step; outside of own work."""
        if self._thread == threading.get_ident() and step != self._step:
            modes.take_off(self._look)
            self._thread = None
            self._look = None

    def notes(self) -> list[TargetsEvent]:
        """Return the note at the end of the run, if the targets are the inputs in every step."""
        for name in ("same", "before"):
            if self._losses and all(bool(getattr(loss, name)) for loss in self._losses):
                last = self._losses[-1]
                note = TargetsEvent(
                    step=self._step,
                    root=self._root.index,
                    positions=last.positions,
                    before=name == "before",
                    source=last.line,
                )
                return [note]
        return []


class _Look(TorchFunctionMode):
    """Sees which tokens are embedded, and the targets of the loss."""

    def __init__(self, losses: list[_Compared], shield: WatchShield) -> None:
        super().__init__()
        self.losses = losses
        self._tokens: list[Tensor] = []
        self._embeds = shield.around(self._embedded, "targets")
        self._loses = shield.around(self._targeted, "targets")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at its arguments if it embeds or is a loss and has not failed."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.embedding:
            self._embeds(args[0] if args else kwargs.get("input"))
        elif func in _LOSSES:
            target = args[1] if len(args) > 1 else kwargs.get("target")
            self._loses(target, kwargs.get("ignore_index", -100))
        return result

    def _embedded(self, tokens: Any) -> None:
        # A sequence of one token has no token before.
        if not _is_plain(tokens) or tokens.dim() < 2 or tokens.shape[-1] == 1:
            return
        if tokens.numel() >= _LEAST:
            self._tokens.append(tokens.detach())

    def _targeted(self, target: Any, ignored: int) -> None:
        if not _is_plain(target) or target.is_floating_point():
            return
        fitting = [
            each
            for each in self._tokens
            if each.numel() == target.numel() and each.device == target.device
        ]
        self._tokens.clear()
        if not fitting:
            return

        counts = target != ignored
        is_data = (target.amin() != target.amax()) & (counts.sum() >= _LEAST)
        same = before = torch.zeros_like(is_data)
        for tokens in fitting:
            placed, counted = target.reshape(tokens.shape), counts.reshape(tokens.shape)
            same = same | ((placed == tokens) | ~counted).all()
            # The last dimension is the sequence.
            equal, counted = placed[..., 1:] == tokens[..., :-1], counted[..., 1:]
            before = before | ((equal | ~counted).all() & (counted.sum() >= _LEAST))
        frame = programs_line(sys._getframe(2))
        line = None
        if frame is not None:
            line = source_of(frame)
        self.losses.append(_Compared(is_data & same, is_data & before, target.numel(), line))


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor with numbers, and of no subclass, which would see what is computed."""
    return type(value) is Tensor and can_sample(value)
