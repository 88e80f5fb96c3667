"""The state of a program, kept in a folder of its recording: models, optimizers and random numbers.

# Note [Plain files]
The folder is to be read without Kedge, and without a pickle. Tensors are safetensors, everything
else is JSON, where ``{"tensor": NAME}`` stands for the tensor of that name in the file beside it.
The values are read from the tables of modules and optimizers: `state_dict` is code of the program,
which may wait for other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from kedge.files.atomic_write import new_folder
from kedge.repro.package import copy_on_cpu
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.module_tables import lasting_tensors
from kedge.torch_internals.random_state import RandomState
from kedge.watch.models.optimizers import params_of
from kedge.watch.models.roots import RootModule


def write_snapshot(
    folder: Path, step: int, roots: Iterable[RootModule], optimizers: Mapping[int, Optimizer]
) -> None:
    """Write the state of a program to a new folder; see Note [Plain files].

    Args:
        folder: The folder.
        step: The number of the step.
        roots: The models.
        optimizers: The optimizers, by their numbers.

    Raises:
        RecordingError: It cannot be written.
    """
    random_numbers = generator_states(), RandomState().entries()
    with new_folder(folder) as place:
        models = _write_models(place, roots)
        names = _write_optimizers(place, optimizers)
        own, beside = random_numbers
        save_file(own, place / "random.safetensors")
        about = {"step": step, "models": models, "optimizers": names, "random": beside}
        (place / "snapshot.json").write_text(json.dumps(about), encoding="utf-8")


def _write_models(place: Path, roots: Iterable[RootModule]) -> list[str]:
    names = []
    for root in roots:
        module = root.module()
        if module is None:
            continue
        tensors = {
            name: copy_on_cpu(value)
            for name, value in lasting_tensors(module).items()
            if not is_lazy(value)
        }
        if tensors:
            name = "-".join(part for part in ("model", root.prefix) if part)
            save_file(tensors, place / f"{name}.safetensors")
            names.append(name)
    return names


def _write_optimizers(place: Path, optimizers: Mapping[int, Optimizer]) -> list[str]:
    names = []
    for index, optimizer in sorted(optimizers.items()):
        name = "optimizer"
        if len(optimizers) > 1:
            name = f"optimizer-{index}"
        packed = PackedOptimizer(optimizer)
        text = json.dumps(packed.entries())
        (place / f"{name}.json").write_text(text, encoding="utf-8")
        save_file(packed.tensors, place / f"{name}.safetensors")
        names.append(name)
    return names


@dataclass
class PackedOptimizer:
    """An optimizer's state as JSON, with its tensors beside it.

    Attributes:
        optimizer: The optimizer.
        tensors: Copies of its tensors, by the names that the JSON has; filled by `entries`.
        left_out: The names of what is neither a tensor nor a value of JSON.
    """

    optimizer: Optimizer
    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def entries(self) -> dict[str, Any]:
        """Return the JSON: that of ``state_dict()``, but for ``state``, a list of number and entry."""
        numbers = {id(param): i for i, param in enumerate(params_of(self.optimizer))}
        groups = []
        for at, group in enumerate(self.optimizer.param_groups):
            held = [numbers[id(param)] for param in group["params"]]
            rest = {name: value for name, value in group.items() if name != "params"}
            groups.append({**self._packed(f"group.{at}", rest), "params": held})
        state = [
            [numbers[id(param)], self._packed(f"state.{numbers[id(param)]}", entry)]
            for param, entry in self.optimizer.state.items()
            if id(param) in numbers
        ]
        return {"state": state, "param_groups": groups, "left_out": self.left_out}

    def _packed(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors[name] = copy_on_cpu(value)
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {str(key): self._packed(f"{name}.{key}", each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._packed(f"{name}.{at}", each) for at, each in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self.left_out.append(name)
        return None
