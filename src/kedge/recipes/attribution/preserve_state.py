"""Running a model without changing its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from kedge.errors import InTrainingMode, warn
from kedge.sites.modal import shown_training
from kedge.torch_internals import dynamo
from kedge.torch_internals.accelerators import same_random_numbers
from kedge.torch_internals.module_tables import modules_in, own_buffers


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Run a model eagerly in a block, and restore its random number generators and its statistics afterwards.

    ``no_grad``, inference mode and compiled code outside have no effect in the block.
    """
    with ExitStack() as stack:
        stack.enter_context(same_random_numbers())
        stack.callback(_give_back, _gathered(model))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        if dynamo.is_loaded():  # importing it takes a second, and without it nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def warn_of_training(model: nn.Module) -> None:
    """Warn if dropout or normalization computes as in training, so that results are not those of the model in use."""
    names = shown_training(model)
    if names:
        warn(
            InTrainingMode(
                f"the model is in training mode ({names}): dropout removes values and batch normalization uses the statistics of "
                "the batch, so the result is not that of the model in use. Call model.eval() first. The running statistics and "
                "the random state are left as they were"
            )
        )


def _gathered(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Return copies of the buffers that training may change, such as batch normalization's statistics."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in modules_in(model).values()
        if module.training
        for name, buffer in own_buffers(module).items()
        if buffer is not None
    ]


def _give_back(gathered: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for module, name, buffer, before in gathered:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, before):
                buffer.copy_(before)
