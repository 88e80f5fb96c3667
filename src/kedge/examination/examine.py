"""`examine`: the trials of one model, on inputs that somebody hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.calls.arguments import OF_THE_LOSS, called_as, described, not_a_model, noting
from kedge.errors import WrongCall
from kedge.examination.examination import TRIALS, Examination, examined
from kedge.examination.gradients import held_by
from kedge.examination.loss_facts import LossFacts, facts_of
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.result import Result
from kedge.examination.state import TrainingState
from kedge.examination.step import ExaminedStep, SeenTraining
from kedge.examination.steps import trials_of_steps
from kedge.examination.tape import Tape, Writing
from kedge.hooks.roots import unwrapped
from kedge.offload.recompute.state import StateToPutBack
from kedge.recipes.model_run import arguments, preserved_state
from kedge.torch_internals.random_numbers import RandomNumbers

_OF_THE_INPUTS = (
    "[kedge] inputs is what the model is called with, a tuple for several arguments; "
    "labels are for the loss: loss=lambda output: loss_fn(output, labels)"
)


@called_as("kedge.examine(model, inputs, loss=loss, optimizer=optimizer)")
def examine(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    skip: Collection[str] = (),
) -> Examination:
    """Try a model before it is trained: what it depends on, what reaches its parameters, whether it learns a batch.

    Afterwards weights, buffers, gradients, modes, optimizers and random state are as they were, and
    so are the attributes of modules that a forward changes, such as counters and caches. ``kedge
    examine train.py`` does the same to the models of a program, which it finds by itself.

    Args:
        model: The model, in the mode in which it is trained.
        inputs: One batch: a tensor, a tuple of arguments, or a dict of arguments by name. The first
            dimension counts the samples.
        loss: Computes the loss, a tensor of one element, from the model's output. Without it, the
            trials that need a loss are not made.
        optimizer: The optimizer of the training, or several.
        skip: Names of trials to leave out.

    Returns:
        The results, as an `Examination` that prints.

    Raises:
        WrongCall: If an argument is of another type, or no trial has such a name.

    Examples:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> found = kedge.examine(
        ...     model.train(),
        ...     images,
        ...     loss=lambda output: torch.nn.functional.cross_entropy(output, labels),
        ...     optimizer=optimizer,
        ... )
        >>> found.verdict
        'ok'
    """
    if not isinstance(model, nn.Module):
        raise WrongCall(f"examine takes a torch.nn.Module, not {not_a_model(model)}")
    if loss is not None and not callable(loss):
        raise WrongCall(
            f"examine(loss={described(loss)}): loss is a function of the model's output"
        )
    if isinstance(skip, str):
        skip = (skip,)
    unknown = [name for name in skip if name not in TRIALS]
    if unknown:
        raise WrongCall(f"examine(skip={unknown[0]!r}): the trials are {', '.join(TRIALS)}")

    inner = unwrapped(model)
    args, kwargs = arguments(inputs)
    step = ExaminedStep(
        type(inner).__name__,
        inner,
        ModelInputs.of_call(inner, args, kwargs),
        training=_training(optimizer),
    )
    numbers = RandomNumbers()
    try:
        with torch.enable_grad():
            if loss is not None:
                step.loss = _loss_facts(step, loss)
                step.whole = _whole(step, loss)
            results = [*examined(step, skip)]
            if step.whole is not None and step.training is not None:
                results += _by_steps(step, step.whole, step.training.optimizers, skip)
    finally:
        numbers.restore()
    return Examination((step.name,), tuple(results))


def _training(given: Any) -> SeenTraining | None:
    if given is None:
        return None
    if isinstance(given, Optimizer):
        return SeenTraining((given,))
    if not isinstance(given, tuple | list) or not all(isinstance(o, Optimizer) for o in given):
        raise WrongCall(
            f"examine(optimizer={described(given)}): optimizer is a torch.optim.Optimizer, or a "
            "list of them"
        )
    return SeenTraining(tuple(given))


def _loss_facts(step: ExaminedStep, loss: Callable[[Any], Tensor]) -> LossFacts:
    state = StateToPutBack(step.model)
    try:
        with preserved_state(step.model):
            given = step.inputs.apart()
            with noting(TypeError, _OF_THE_INPUTS):
                output = step.model(*given.args, **given.kwargs)
            tape = Tape()
            with Writing(tape), noting(TypeError, OF_THE_LOSS):
                value = loss(output)
            if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
                raise WrongCall(
                    "examine(loss=...): the loss is a tensor of one real number, not "
                    f"{described(value)}"
                )
            return facts_of([value], "", tape)
    finally:
        state.put_back()


def _whole(step: ExaminedStep, loss: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    """Return what computes the loss with the weights of the moment, and the same random numbers."""

    def compute() -> Tensor:
        torch.manual_seed(0)
        given = step.inputs.apart()
        return loss(step.model(*given.args, **given.kwargs))

    return compute


def _by_steps(
    step: ExaminedStep,
    compute: Callable[[], Tensor],
    optimizers: Sequence[Optimizer],
    skip: Collection[str],
) -> list[Result]:
    """Make the trials that take steps; parameters keep the gradients that they have."""
    trained = {*step.model.parameters(), *held_by(optimizers)}
    gradients = {param: param.grad for param in trained}
    state = TrainingState([step.model], optimizers)
    samples = None
    if step.samples is not None:
        samples = step.samples.count
    try:
        expected = float(compute().detach())
        return list(trials_of_steps(optimizers, state, compute, expected, samples, skip))
    finally:
        state.restore()
        for param, gradient in gradients.items():
            param.grad = gradient
