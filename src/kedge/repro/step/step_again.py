"""A step that runs again in a copy of the process, and what is found in it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from kedge.json_input.classes import read_as
from kedge.repro.step.copied_process import CopiedProcess, can_copy
from kedge.store.events import ProducerEvent, RowsEvent
from kedge.torch_internals.accelerators import set_generator_states


class StepAgain:
    """One step that runs again in a copy of the process, which the program does not notice.

    Args:
        find: Runs in the copy; returns what it found as JSON, or nothing.
        kind: The class of the event that this is.
        step: The number of the step.
        site: The path of the loss.
        random_state: The state of PyTorch's random numbers at the beginning of the step; None if
            it is not known.
    """

    def __init__(
        self,
        find: Callable[[], bytes],
        kind: type[ProducerEvent | RowsEvent],
        step: int,
        site: str,
        random_state: Tensor | None,
    ) -> None:
        self.step = step
        self.site = site
        self._kind = kind
        self._copy = CopiedProcess(partial(_prepared, find, random_state))

    def found(self, seconds: float = 0.0) -> ProducerEvent | RowsEvent | None:
        """Return what was found; None as long as it is not known, or if it was nothing.

        Args:
            seconds: How long to wait.
        """
        result = self._copy.result(seconds)
        if not result:
            return None
        event: ProducerEvent | RowsEvent = read_as(self._kind, json.loads(result))
        return replace(event, step=self.step, loss=self.site)

    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._copy.result() is not None

    def close(self) -> None:
        """Wait for it no longer."""
        self._copy.close()


def can_run_again(losses: Sequence[Tensor], modules: Sequence[nn.Module]) -> bool:
    """Whether a step can run again in a copy: only on a CPU."""
    tensors = [*losses]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    return all(tensor.is_cpu for tensor in tensors) and can_copy()


def _prepared(find: Callable[[], bytes], random_state: Tensor | None) -> bytes:
    """Run in the copy, as the program's own code would in its step."""
    gc.disable()  # what would be freed is the program's
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    if random_state is not None:
        set_generator_states({"cpu": random_state})
    return find()
