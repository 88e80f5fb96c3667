"""Runs of a model that leave no trace in it, and what its modules pass on in them.

# Note [No trace]
A trial runs the model many times. Whatever a run changes is put back: buffers such as running
statistics, attributes such as counters and caches, the flags of training, the random state. Each
run begins with the same random numbers unless a trial wants others. A `train` of a program's own may
freeze parameters, or merge others into them, as it is called for `eval()`: only then they are copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import NeverFiredWarning
from kedge.examination.model_inputs import ModelInputs
from kedge.hooks.session import hook
from kedge.offload.account.tensors import SavedTensors
from kedge.offload.recompute.state import StateToPutBack
from kedge.offload.saved_tensors import saved
from kedge.recipes.model_run import preserved_state
from kedge.sites import leaves
from kedge.torch_internals.module_tables import parameters_in
from kedge.torch_internals.random_numbers import RandomNumbers
from kedge.torch_internals.source_lines import calling_frame, source_of
from kedge.torch_internals.torchscript import modes_of


@dataclass(frozen=True)
class Passed:
    """A tensor that a module received or returned in a run.

    Attributes:
        path: The path of the module; "" for the model itself.
        kind: "in" or "out".
        leaf: The name of the tensor within the value.
        value: The tensor.
        line: The line of the program that called the module; "" if none is known.
    """

    path: str
    kind: str
    leaf: str
    value: Tensor
    line: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the others of a call."""
        return self.path, self.kind, self.leaf


class ModelRuns:
    """A run of the model under examination; see Note [No trace].

    Args:
        model: The model.
        inputs: The inputs that it had in the program.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        self.model = model
        self.inputs = inputs

    def outputs(
        self, inputs: ModelInputs | None = None, *, training: bool = False, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of the model's output, by name.

        Args:
            inputs: Other inputs than those of the program.
            training: Whether the modules keep the modes that they have in the program; otherwise
                all are in evaluation mode.
            seed: The beginning of the random numbers; that of the program if None.
        """
        with self._state(training=training, seed=seed), torch.no_grad():
            return _outputs(self.model, inputs or self.inputs)

    def graph(
        self, inputs: ModelInputs | None = None, *, training: bool = True, apart: bool = True
    ) -> dict[str, Tensor]:
        """Return the tensors of the model's output with the graph behind them.

        Args:
            inputs: Other inputs than those of the program.
            training: As for `outputs`.
            apart: Whether the model is given copies, so that the graph does not reach the inputs.
        """
        with self._state(training=training, seed=None):
            return _outputs(self.model, inputs or self.inputs, apart=apart)

    def passed(
        self,
        inputs: ModelInputs | None = None,
        *,
        training: bool = False,
        seed: int | None = None,
        graded: bool = False,
    ) -> list[Passed]:
        """Return what every module received and returned, in the order in which it happened."""
        noted: list[Passed] = []
        note = _noting(noted, copies=not graded)
        with ExitStack() as stack:
            stack.enter_context(self._state(training=training, seed=seed))
            stack.enter_context(torch.set_grad_enabled(graded))
            # A module without a call is no news here.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", NeverFiredWarning)
            stack.enter_context(hook(self.model, "**, **:in", note))
            _outputs(self.model, inputs or self.inputs)
        return noted

    def saved(self, inputs: ModelInputs | None = None) -> SavedTensors:
        """Return the account of what a call keeps for its backward, in the modes of the program."""
        given = (inputs or self.inputs).apart()
        with self._state(training=True, seed=None):
            return saved(self.model)(*given.args, **given.kwargs)

    def saved_with_loss(self, whole: Callable[[], Tensor], models: list[nn.Module]) -> SavedTensors:
        """Return the account of the whole step, up to its loss.

        Args:
            whole: Computes the loss, and calls the model for it.
            models: All models that it calls, whose parameters are in memory in any case.
        """

        def step(_models: list[nn.Module] = models) -> Tensor:  # by its default they are found
            return whole()

        with self._state(training=True, seed=None):
            account: SavedTensors = saved(step)
        return account

    @contextmanager
    def _state(self, *, training: bool, seed: int | None) -> Iterator[None]:
        modes = modes_of(self.model)
        numbers = RandomNumbers()
        state = StateToPutBack(self.model)
        parameters = []
        if not training and _has_own_modes(modes):
            parameters = [
                (param, param.requires_grad, param.detach().clone())
                for param in parameters_in(self.model).values()
            ]
        with preserved_state(self.model):
            try:
                if not training:
                    self.model.eval()
                if seed is not None:
                    torch.manual_seed(seed)
                yield
            finally:
                for module, mode in modes.items():
                    module.training = mode
                for param, is_trained, value in parameters:
                    param.requires_grad_(is_trained)
                    param.data.copy_(value)
                state.put_back()
                numbers.restore()


def _has_own_modes(modules: Iterable[nn.Module]) -> bool:
    """Whether a module does more than to set flags as its mode changes."""
    return any(
        type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval
        for module in modules
    )


def _outputs(model: nn.Module, inputs: ModelInputs, *, apart: bool = True) -> dict[str, Tensor]:
    given = inputs
    if apart:
        given = inputs.apart()
    output = model(*given.args, **given.kwargs)
    return {name or "output": value for name, value in leaves.find(output)}


def _noting(noted: list[Passed], *, copies: bool) -> Callable[[Tensor, Any], None]:
    def note(value: Tensor, event: Any) -> None:
        kept = value
        if copies:
            kept = value.detach().clone()
        frame = calling_frame(event.module)
        line = ""
        if frame is not None:
            line = str(source_of(frame))
        site = event.site
        noted.append(Passed(site.path, site.kind, site.leaf or "", kept, line))

    return note
