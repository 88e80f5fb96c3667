"""A training step that is examined: one model with its inputs, and the loss and the optimizers of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.examination.loss_facts import LossFacts, Target
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.model_runs import ModelRuns
from kedge.torch_internals.module_tables import parameters_in


@dataclass(frozen=True)
class SeenTraining:
    """How a program trains, as far as it was seen.

    Attributes:
        optimizers: The optimizers that have stepped.
        passes: How many backward passes were seen; 0 where nobody looked.
        reached: Parameters that the loss depends on and an optimizer holds.
        lacking: Those of them that had no gradient as the optimizer was about to step.
        kept: Whether gradients of the step before were there when the next backward pass began.
        moved: Whether a parameter has changed.
    """

    optimizers: tuple[Optimizer, ...]
    passes: int = 0
    reached: int = 0
    lacking: int = 0
    kept: bool = False
    moved: bool = False


def held_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of optimizers."""
    return [
        param
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    ]


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
        changed_frozen: Names of frozen parameters that the first step of an optimizer changed.
    """

    name: str
    model: nn.Module
    inputs: ModelInputs
    loss: LossFacts | None = None
    training: SeenTraining | None = None
    others: Sequence[nn.Module] = ()
    batch_size: int | None = None
    changed_frozen: Sequence[str] = ()

    @cached_property
    def run(self) -> ModelRuns:
        """Runs the model."""
        return ModelRuns(self.model, self.inputs)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return parameters_in(self.model)

    def targets(self) -> Iterator[Target]:
        """Yield the targets that the step's loss is known to have."""
        if self.loss is not None:
            yield from self.loss.targets

    @cached_property
    def batch_dims(self) -> dict[str, int]:
        """The dimension of the samples in each input that has one, by its name; see `samples_of`."""
        found = {}
        for name, value in self.inputs.numbers().items():
            dim = samples_of(value, self.samples)
            if dim is not None:
                found[name] = dim
        return found

    @property
    def knows_samples(self) -> bool:
        """Whether it is certain which dimension counts the samples, and not only likely."""
        size = self.batch_size
        if size is None:
            return False
        shapes = [list(value.shape) for value in self.inputs.numbers().values()]
        has_both = any(shape[:2] == [size, size] for shape in shapes)
        return any(size in shape for shape in shapes) and not has_both

    @cached_property
    def samples(self) -> int | None:
        """How many samples the inputs hold: the loader's batch, else the size of their first dimension."""
        values = [value for value in self.inputs.numbers().values() if value.dim() > 0]
        if self.batch_size is not None and any(self.batch_size in v.shape for v in values):
            return self.batch_size
        if not values:
            return None
        return values[0].shape[0]


def samples_of(value: Tensor, samples: int | None) -> int | None:
    """Return the dimension of a tensor that has as many places as there are samples: the first, else the second.

    None if neither has.
    """
    for dim in (0, 1):
        if value.dim() > dim and value.shape[dim] == samples:
            return dim
    return None
