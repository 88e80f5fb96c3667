"""Puts the values of a kept step into the models and the optimizers that the program has made again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.repro.kept.kept_pass import (
    KeptOptimizer,
    KeptPass,
    kept_in,
    place_of,
    state_tensors,
)
from kedge.repro.kept.moving_attributes import put_attributes_back
from kedge.repro.kept.plain_values import unpacked
from kedge.torch_internals.accelerators import set_generator_states
from kedge.torch_internals.module_tables import modules_in, parameters_in
from kedge.torch_internals.random_state import set_random_state
from kedge.torch_internals.torchscript import has_mode
from kedge.watch.kept.program_state import tensors_with_data
from kedge.watch.models.optimizers import params_of


@dataclass
class KeptState:
    """The models and optimizers of a kept step, and those of the program that they belong to.

    Attributes:
        kept: The pass.
        models: The program's models, by the names of the kept ones.
        optimizers: Its optimizers, likewise.
        lacking: What was kept and is not in the program, in words.
        gradients: Those that were there before the pass, by the model and the parameter.
    """

    kept: KeptPass
    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    _tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kept: KeptPass,
        folder: Path,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
    ) -> KeptState:
        """Find the models and optimizers of a kept pass in the program.

        Those of one class, with tensors of the same names and shapes, are taken in their order.

        Args:
            kept: The pass.
            folder: Its folder.
            models: The models of the program.
            optimizers: Its optimizers.
        """
        state = cls(kept, gradients=dict(kept.gradients or {}))
        for name, model in kept.models.items():
            tensors = state_tensors(folder, name)
            state._tensors[name] = tensors
            taken = state.models.values()
            found = next((m for m in models if m not in taken and _fits(m, tensors)), None)
            if found is not None:
                state.models[name] = found
            else:
                state.lacking.append(f"the model {model.type}")
        for name, about in kept.optimizers.items():
            state._tensors[name] = state_tensors(folder, name)
            used = list(state.optimizers.values())
            left = [each for each in optimizers if all(each is not other for other in used)]
            fitting = next((each for each in left if state._holds(name, about, each)), None)
            if fitting is not None:
                state.optimizers[name] = fitting
            else:
                state.lacking.append(f"the optimizer {about.type}")
        return state

    def put_back(self) -> None:
        """Put everything back, with the gradients that were there before the pass."""
        for name, model in self.models.items():
            _put_into_model(self, name, model)
        for name, param in self.trained().items():
            gradient = self.gradients.get(name)
            param.grad = None
            if gradient is not None:
                param.grad = gradient.to(param.device, copy=True)
        for name, optimizer in self.optimizers.items():
            _put_into_optimizer(self.kept.optimizers[name], self._tensors[name], optimizer)

    def widen(self) -> None:
        """Make parameters, buffers, gradients and averages float64."""
        for model in self.models.values():
            model.double()
        for optimizer in self.optimizers.values():
            for param, entry in optimizer.state.items():
                param.data = param.data.double()
                for key, value in entry.items():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                        entry[key] = value.double()

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the models and the optimizers that need gradients, each once."""
        found = {
            id(param): (f"{name}.{at}", param)
            for name, model in self.models.items()
            for at, param in parameters_in(model).items()
        }
        for name, optimizer in self.optimizers.items():
            for at, param in enumerate(params_of(optimizer)):
                found.setdefault(id(param), (f"{name}.{at}", param))
        return {name: param for name, param in found.values() if param.requires_grad}

    def tensors(self, name: str) -> Mapping[str, Tensor]:
        """Return the kept tensors of a model."""
        return self._tensors[name]

    def _holds(self, name: str, about: KeptOptimizer, optimizer: Optimizer) -> bool:
        """Whether an optimizer is of the kept one's class, with as many parameters in as many groups."""
        if type(optimizer).__name__ != about.type:
            return False
        groups = about.entries["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in optimizer.param_groups]:
            return False
        params = list(params_of(optimizer))
        return all(
            value.shape == params[at].shape
            for at, value in _averages(about.entries, self._tensors[name])
        )


def put_generators_back(states: Mapping[str, Tensor], beside: Mapping[str, Any] | None) -> None:
    """Put the generators into the states that they had."""
    set_generator_states(states)
    if beside is not None:
        set_random_state(beside)


def following_models(folder: Path) -> dict[str, dict[str, Tensor]] | None:
    """Return the tensors of the models in the pass after a kept one; None if that was not kept.

    Args:
        folder: The folder of the kept one.
    """
    folders = kept_in(folder.parent)
    at = folders.index(folder) + 1
    if at == len(folders):
        return None
    step, number = place_of(folder)
    following = place_of(folders[at])
    if following not in ((step, number + 1), (step + 1, 0)):
        return None
    kept = KeptPass.read(folders[at])
    return {name: state_tensors(folders[at], name) for name in kept.models}


def _fits(model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    own = tensors_with_data(model)
    return {at: value.shape for at, value in own.items()} == {
        at: value.shape for at, value in tensors.items()
    }


def _put_into_model(state: KeptState, name: str, model: nn.Module) -> None:
    about = state.kept.models[name]
    kept = state.tensors(name)
    with torch.no_grad():
        for at, value in tensors_with_data(model).items():
            value.copy_(kept[at])
    put_attributes_back(model, about.attributes)
    for path, module in modules_in(model).items():
        if has_mode(module):
            module.training = path not in about.in_eval
    for at, param in parameters_in(model).items():
        param.requires_grad_(at not in about.frozen)


def _put_into_optimizer(
    about: KeptOptimizer, tensors: Mapping[str, Tensor], optimizer: Optimizer
) -> None:
    params = list(params_of(optimizer))
    for group, kept in zip(optimizer.param_groups, about.entries["param_groups"], strict=True):
        for key, entry in kept.items():
            if key != "params" and (entry is not None or group.get(key) is None):
                group[key] = unpacked(entry, tensors, group.get(key))
    optimizer.state.clear()
    for number, entry in about.entries["state"]:
        param = params[number]
        values = unpacked(entry, tensors)
        optimizer.state[param] = {key: _own_copy(value, param) for key, value in values.items()}


def _own_copy(value: Any, param: Tensor) -> Any:
    """Return a copy of an entry of an optimizer's state; averages are where the parameter is."""
    if not isinstance(value, Tensor):
        return value
    if value.dim():
        return value.to(param.device, copy=True)
    return value.clone()


def _averages(
    entries: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of a parameter, and its tensor of the optimizer's state with as many dimensions."""
    for number, entry in entries["state"]:
        average = entry.get("exp_avg") or entry.get("momentum_buffer")
        if average is not None:
            yield number, tensors[average["tensor"]]
