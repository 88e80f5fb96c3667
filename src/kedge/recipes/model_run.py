"""A run of a model for a recipe: with one input, without a change of state, and with named values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.errors import InTrainingMode, warn
from kedge.flow import Event
from kedge.sites.modal import shown_training
from kedge.torch_internals import dynamo
from kedge.torch_internals.accelerators import same_random_numbers
from kedge.torch_internals.module_tables import modules_in, own_buffers
from kedge.torch_internals.torchscript import is_training

_CALL = re.compile(r"(?<!\\)#\d+")


def run(model: nn.Module, given: Any) -> Any:
    """Return a model's output for one input; see `arguments`."""
    args, kwargs = arguments(given)
    return model(*args, **kwargs)


def arguments(given: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of a model's call by position, and by name.

    A tuple or list holds those by position, a dict those by name; else it is one argument.
    """
    if isinstance(given, Mapping):
        return (), given
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    return (given,), {}


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Run a model eagerly in a block, and restore random state and statistics afterwards.

    ``no_grad``, inference mode and compiled code outside have no effect in the block.
    """
    with ExitStack() as stack:
        stack.enter_context(same_random_numbers())
        stack.callback(_give_back, _gathered(model))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        # Importing it takes a second, and without it nothing is compiled.
        if dynamo.is_loaded():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def warn_of_training(model: nn.Module) -> None:
    """Warn if dropout or normalization computes as in training."""
    names = shown_training(model)
    if names:
        warn(
            InTrainingMode(
                f"the model is in training mode ({names}): dropout removes values "
                "and batch normalization uses the statistics of the batch, "
                "so the result is not that of the model in use. "
                "Call model.eval() first. "
                "The running statistics and the random state are left as they were"
            )
        )


def _gathered(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """Return copies of the buffers that training may change, such as running statistics."""
    gathered = []
    for module in modules_in(model).values():
        if not is_training(module):
            continue
        for name, buffer in own_buffers(module).items():
            if buffer is not None and not is_lazy(buffer):
                gathered.append((module, name, buffer, buffer.detach().clone()))
    return gathered


def _give_back(gathered: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for module, name, buffer, before in gathered:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def name_of(event: Event) -> str:
    """Return the name of a value of one call, which is also a selector of it alone."""
    return str(event.site.at(call=event.call))


def without_call(name: str) -> str:
    """Return a name without its call."""
    return _CALL.sub("", name)


def shortened(names: Iterable[str]) -> list[str]:
    """Return the names, without the call if there is only one."""
    shown = list(names)
    plain = [without_call(name) for name in shown]
    for i, short in enumerate(plain):
        if plain.count(short) == 1:
            shown[i] = short
    return shown
