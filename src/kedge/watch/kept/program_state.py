"""The state of a program: models, optimizers and random numbers, copied, and written to a folder.

The values are read from the tables of modules and optimizers: `state_dict` is code of the program,
which may wait for other ranks. See Note [Plain files] in `kedge.repro.kept.plain_values`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from kedge.files.atomic_write import new_folder
from kedge.repro.kept.plain_values import PlainValues
from kedge.repro.package import copy_on_cpu
from kedge.torch_internals.module_tables import buffers_in, lasting_tensors
from kedge.torch_internals.random_numbers import RandomNumbers
from kedge.torch_internals.tensors import have_same_bits
from kedge.watch.models.optimizers import params_of
from kedge.watch.models.roots import RootModule


def write_snapshot(
    folder: Path, step: int, roots: Iterable[RootModule], optimizers: Mapping[int, Optimizer]
) -> None:
    """Write the state of a program to a new folder.

    Args:
        folder: The folder.
        step: The number of the step.
        roots: The models.
        optimizers: The optimizers, by their numbers.

    Raises:
        RecordingError: It cannot be written.
    """
    random_numbers = RandomNumbers()
    state = ProgramState.now(roots, optimizers)
    with new_folder(folder) as place:
        state.write(place)
        save_file(random_numbers.generators, place / "random.safetensors")
        about = {
            "step": step,
            "models": list(state.models),
            "optimizers": list(state.optimizers),
            "random": random_numbers.entries(),
        }
        (place / "snapshot.json").write_text(json.dumps(about), encoding="utf-8")


@dataclass(frozen=True)
class ProgramState:
    """Models and optimizers, copied.

    Attributes:
        models: The parameters and buffers of each model, by the names of `state_dict`.
        optimizers: The JSON of each optimizer, and its tensors.
    """

    models: Mapping[str, dict[str, Tensor]]
    optimizers: Mapping[str, tuple[dict[str, Any], dict[str, Tensor]]]

    @classmethod
    def now(
        cls,
        roots: Iterable[RootModule],
        optimizers: Mapping[int, Optimizer],
        before: ProgramState | None = None,
    ) -> Self:
        """Return the state of this moment.

        Args:
            roots: The models.
            optimizers: The optimizers, by their numbers.
            before: An earlier state; tensors that have not changed since are its own.
        """
        models = {}
        for name, module in named_models(roots):
            known: Mapping[str, Tensor] = {}
            if before is not None:
                known = before.models.get(name, {})
            tensors = {
                at: copied(value, known.get(at)) for at, value in tensors_with_data(module).items()
            }
            if tensors:
                models[name] = tensors
        packed = {}
        for index, optimizer in sorted(optimizers.items()):
            name = "optimizer"
            if len(optimizers) > 1:
                name = f"optimizer-{index}"
            packed[name] = _packed(optimizer)
        return cls(models, packed)

    def with_buffers(self, roots: Iterable[RootModule], buffers: Mapping[int, Tensor]) -> Self:
        """Return it with other copies of buffers, by the identity of each."""
        models = {name: dict(tensors) for name, tensors in self.models.items()}
        for name, module in named_models(roots):
            for at, value in buffers_in(module).items():
                if at in models.get(name, {}) and id(value) in buffers:
                    models[name][at] = buffers[id(value)]
        return replace(self, models=models)

    def write(self, place: Path) -> None:
        """Write its files to a folder."""
        for name, tensors in self.models.items():
            save_file(tensors, place / f"{name}.safetensors")
        for name, (entries, tensors) in self.optimizers.items():
            (place / f"{name}.json").write_text(json.dumps(entries), encoding="utf-8")
            save_file(tensors, place / f"{name}.safetensors")


def named_models(roots: Iterable[RootModule]) -> Iterable[tuple[str, nn.Module]]:
    """Yield the models that still exist, with the names of their files."""
    for root in roots:
        module = root.module()
        if module is not None:
            yield "-".join(part for part in ("model", root.prefix) if part), module


def tensors_with_data(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that `state_dict` has, but for lazy ones and those on the meta device."""
    return {
        name: value
        for name, value in lasting_tensors(module).items()
        if not (is_lazy(value) or value.is_meta)
    }


def copied(value: Tensor, before: Tensor | None) -> Tensor:
    """Return a copy of a tensor in the CPU's memory; the earlier copy, if it still has the same bits."""
    if before is not None and value.is_cpu and have_same_bits(value.detach(), before):
        return before
    return copy_on_cpu(value)


def _packed(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON of an optimizer, and its tensors.

    The JSON is that of ``state_dict()``, but for ``state``, a list of number and entry, and
    ``left_out``, the names of what JSON cannot have.
    """
    values = PlainValues()
    numbers = {id(param): i for i, param in enumerate(params_of(optimizer))}
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        held = [numbers[id(param)] for param in group["params"]]
        rest = {name: value for name, value in group.items() if name != "params"}
        groups.append({**values.packed(f"group.{at}", rest), "params": held})
    state = [
        [numbers[id(param)], values.packed(f"state.{numbers[id(param)]}", entry)]
        for param, entry in optimizer.state.items()
        if id(param) in numbers
    ]
    entries = {"state": state, "param_groups": groups, "left_out": values.left_out}
    return entries, values.tensors
