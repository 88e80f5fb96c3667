"""A training step that is examined: one model with its inputs, and the loss and the optimizers of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.examination.differences import changed, numbers_in
from kedge.examination.gradients import Gradients, held_by
from kedge.examination.loss_facts import LossFacts, Target
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.model_runs import ModelRuns
from kedge.torch_internals.module_tables import parameters_in

FEW = 4
"""Samples with which the model runs where a few are as good as all."""
FEWEST = 4
"""Fewest samples of a batch by which a dimension is told."""


@dataclass(frozen=True)
class SeenTraining:
    """How a program trains, as far as it was seen.

    Attributes:
        optimizers: The optimizers that have stepped.
        idle: Those that exist, and have not.
        gradients: What was seen of the gradients; None where nobody looked.
        moved: Whether a parameter has changed.
        unmoved: Parameters that the first step of their optimizer had to change, and did not.
        state_bytes: What the optimizers keep for their parameters, in bytes; None before a step.
        keeps_gradients: Whether an optimizer that is about to step again does so with the gradients
            of its first step, too.
        reached: The ids of the tensors that the losses of the step depend on.
        blind_steps: How many steps came without any backward pass before, and without a gradient.
    """

    optimizers: tuple[Optimizer, ...]
    idle: tuple[Optimizer, ...] = ()
    gradients: Gradients | None = None
    moved: bool = False
    unmoved: tuple[Tensor, ...] = ()
    state_bytes: int | None = None
    keeps_gradients: bool = False
    reached: frozenset[int] = frozenset()
    blind_steps: int = 0

    @property
    def has_several(self) -> bool:
        """Whether several optimizers train, as of adversaries."""
        return len(self.optimizers) + len(self.idle) > 1

    def held(self) -> list[Tensor]:
        """Return the parameters of all optimizers."""
        return held_by((*self.optimizers, *self.idle))


@dataclass
class ExaminedStep:
    """One model of a training step.

    Attributes:
        name: The name of the model: that of its class.
        model: The model, with the weights that it had before its first step.
        inputs: The inputs of its call in the step.
        loss: What was seen of the loss; None if none is known.
        training: How the program trains; None if that is not known.
        others: The other models of the step, whose parameters optimizers may hold too.
        batch_size: How many samples a batch of the data loader has; None without a loader.
        data: The data set that the loader reads; None without one.
        changed_frozen: Names of frozen parameters that the first step of an optimizer changed.
        later: The inputs of a call in the next step; None if none was seen.
        whole: Computes the loss of the step again, with the model's call; None if that is not known.
    """

    name: str
    model: nn.Module
    inputs: ModelInputs
    loss: LossFacts | None = None
    training: SeenTraining | None = None
    others: Sequence[nn.Module] = ()
    batch_size: int | None = None
    data: Any = None
    changed_frozen: Sequence[str] = ()
    later: ModelInputs | None = None
    whole: Callable[[], Tensor] | None = None

    @cached_property
    def run(self) -> ModelRuns:
        """Runs the model."""
        return ModelRuns(self.model, self.inputs)

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """The real numbers of the model's output in evaluation mode."""
        return numbers_in(self.run.outputs())

    @cached_property
    def few(self) -> ModelRuns:
        """Runs the model with the first samples alone, where these have the outputs that they have in the batch."""
        batch = self.samples
        if batch is None or batch.count <= FEW or not self.outputs:
            return self.run
        shorter = {
            name: value.narrow(batch.dim, 0, FEW).detach().clone()
            for name, value in self.inputs.numbers().items()
            if batch.of(value)
        }
        runs = ModelRuns(self.model, self.inputs.with_tensors(shorter))
        try:
            outputs = numbers_in(runs.outputs())
        except Exception:  # noqa: BLE001 - the program's own code, which takes its own batch alone
            return self.run
        if outputs.keys() == self.outputs.keys() and all(
            batch.of(value) and _are_close(outputs[name], value.narrow(batch.dim, 0, FEW))
            for name, value in self.outputs.items()
        ):
            return runs
        return self.run

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return parameters_in(self.model)

    def targets(self) -> Iterator[Target]:
        """Yield the targets that the step's loss is known to have."""
        if self.loss is not None:
            yield from self.loss.targets

    @property
    def where(self) -> str:
        """The line that called backward; "" if none is known."""
        if self.loss is None:
            return ""
        return self.loss.where

    @cached_property
    def samples(self) -> SampleDimension | None:
        """The dimension of the inputs that counts the samples; None if no input has one."""
        shapes = [list(value.shape) for value in self.inputs.numbers().values()]
        if not shapes:
            return None
        size = self.batch_size
        first = SampleDimension(0, shapes[0][0], is_certain=False)
        if size is None or size < FEWEST:
            return first
        if any(shape[0] == size for shape in shapes):
            is_certain = all(shape.count(size) <= 1 for shape in shapes)
            return SampleDimension(0, size, is_certain=is_certain)
        if any(len(shape) > 1 and shape[1] == size for shape in shapes) and _are_sequences(shapes):
            return SampleDimension(1, size, is_certain=False)
        return first


@dataclass(frozen=True)
class SampleDimension:
    """The dimension that counts the samples of a batch.

    Attributes:
        dim: Its number, 0 or 1.
        count: How many samples there are.
        is_certain: Whether the data loader has such batches, and no other dimension this size.
    """

    dim: int
    count: int
    is_certain: bool

    def of(self, value: Tensor) -> bool:
        """Whether a tensor has this dimension."""
        return value.dim() > self.dim and value.shape[self.dim] == self.count


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not bool(changed(one, other).any())


def _are_sequences(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether all inputs have steps before their samples, as (steps, samples) or (steps, samples, features)."""
    return all(len(shape) in (2, 3) and shape[0] == shapes[0][0] for shape in shapes)
