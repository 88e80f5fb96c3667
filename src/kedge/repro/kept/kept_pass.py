"""A backward pass that was kept, with the step around it: its folder in a recording.

The folder is ``step-STEP-PASS``. Beside the state of the program at the pass, as a snapshot has it,
it contains ``pass.json`` with the variables that the lines of the loss take, and their tensors in
``pass.safetensors``. See Note [Plain files] in `kedge.repro.kept.plain_values`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kedge.errors import NotARecording
from kedge.frames import SourceLine
from kedge.repro.kept.step_inputs import StepInputs

_ABOUT, _TENSORS = "pass.json", "pass.safetensors"
_NAME = re.compile(r"step-\d+-\d+")
_LOSS, _GRADIENT, _SPARSE, _RANDOM = "loss.", "gradient.", "sparse-gradient.", "random."
"""What the names of the tensors begin with; a sparse gradient is kept as a dense one."""


@dataclass(frozen=True)
class KeptModel:
    """How a model was at a pass, beside its tensors.

    Attributes:
        type: The name of its class.
        in_eval: The paths of its modules that are in evaluation mode.
        frozen: The names of its parameters that need no gradient.
        attributes: Plain attributes of its modules that change from step to step, by path and name.
    """

    type: str
    in_eval: Sequence[str]
    frozen: Sequence[str]
    attributes: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class KeptOptimizer:
    """How an optimizer was at a pass, beside its tensors.

    Attributes:
        type: The name of its class.
        stepped: Whether it stepped after the pass, before the next one.
        entries: Its JSON, as a snapshot has it.
    """

    type: str
    stepped: bool
    entries: Mapping[str, Any]


@dataclass(frozen=True)
class KeptPass:
    """A backward pass that was kept.

    Attributes:
        step: The number of the step.
        number: The number of the pass in the step, from 0.
        is_bad: Whether it was kept because its loss or its gradients were bad.
        inputs: What its lines take.
        losses: What it began at.
        scale: What a `GradScaler` has multiplied them by.
        models: The models, by the names of their files.
        optimizers: The optimizers, by the names of their files.
        gradients: The gradients that were there before it, by the model and the parameter; None if
            that is not known.
        random_numbers: The states in which PyTorch's generators may have been when the lines
            began, by device.
        python_numbers: Those of Python and NumPy; None if they are not known.
    """

    step: int
    number: int
    is_bad: bool
    inputs: StepInputs
    losses: Sequence[Tensor]
    scale: float
    models: Mapping[str, KeptModel]
    optimizers: Mapping[str, KeptOptimizer]
    gradients: Mapping[str, Tensor] | None
    random_numbers: Sequence[Mapping[str, Tensor]]
    python_numbers: Mapping[str, Any] | None

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"step-{self.step}-{self.number}"

    def write(self, place: Path) -> None:
        """Write its files to a folder."""
        tensors = dict(self.inputs.tensors)
        tensors |= {f"{_LOSS}{at}": loss for at, loss in enumerate(self.losses)}
        for name, gradient in (self.gradients or {}).items():
            if gradient.is_sparse:
                tensors[f"{_SPARSE}{name}"] = gradient.to_dense()
            else:
                tensors[f"{_GRADIENT}{name}"] = gradient
        for at, states in enumerate(self.random_numbers):
            tensors |= {f"{_RANDOM}{at}.{device}": state for device, state in states.items()}
        about = {
            "step": self.step,
            "number": self.number,
            "bad": self.is_bad,
            "line": asdict(self.inputs.line),
            "column": self.inputs.column,
            "names": self.inputs.names,
            "left_out": list(self.inputs.left_out),
            "scale": self.scale,
            "models": {name: asdict(model) for name, model in self.models.items()},
            "optimizers": {
                name: {"type": each.type, "stepped": each.stepped}
                for name, each in self.optimizers.items()
            },
            "knows_gradients": self.gradients is not None,
            "random": self.python_numbers,
        }
        (place / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / _TENSORS)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a pass.

        Raises:
            NotARecording: A file of it is missing or damaged.
        """
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            tensors = load_file(folder / _TENSORS)
            optimizers = {
                name: KeptOptimizer(
                    **each,
                    entries=json.loads((folder / f"{name}.json").read_text(encoding="utf-8")),
                )
                for name, each in about["optimizers"].items()
            }
            inputs = StepInputs(
                SourceLine(**about["line"]),
                about["names"],
                tensors,
                about["left_out"],
                about.get("column"),
            )
            gradients = None
            if about["knows_gradients"]:
                gradients = _beginning(tensors, _GRADIENT)
                for name, gradient in _beginning(tensors, _SPARSE).items():
                    gradients[name] = gradient.to_sparse(1)
            return cls(
                about["step"],
                about["number"],
                about["bad"],
                inputs,
                list(_beginning(tensors, _LOSS).values()),
                about["scale"],
                {name: KeptModel(**each) for name, each in about["models"].items()},
                optimizers,
                gradients,
                _states(tensors),
                about["random"],
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _damaged(folder, error) from error


def state_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of a model or an optimizer of a kept pass.

    Args:
        folder: The folder of the pass.
        name: The name of its file.

    Raises:
        NotARecording: The file is missing or damaged.
    """
    try:
        return load_file(folder / f"{name}.safetensors")
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> NotARecording:
    return NotARecording(
        f"{folder} has no step that can run again: {error}; record the run once more"
    )


def kept_in(recording: Path) -> list[Path]:
    """Return the folders of the kept passes of a recording, in their order."""
    named = (folder for folder in recording.iterdir() if _NAME.fullmatch(folder.name))
    return sorted(named, key=place_of)


def first_to_see(folders: Sequence[Path]) -> tuple[int, int]:
    """Return the step and the pass to look at first: the first bad one, else the last."""
    bad = (folder for folder in folders if KeptPass.read(folder).is_bad)
    return place_of(next(bad, folders[-1]))


def place_of(folder: Path) -> tuple[int, int]:
    """Return the step and the pass of a kept pass, by the name of its folder."""
    _, step, number = folder.name.split("-")
    return int(step), int(number)


def _beginning(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _states(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, state in _beginning(tensors, _RANDOM).items():
        at, _, device = name.partition(".")
        found.setdefault(at, {})[device] = state
    return [found[at] for at in sorted(found)]
