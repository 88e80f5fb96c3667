"""Interventions as a value: sites and actions, attached together, written to a file and read again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from kedge.calls.arguments import described
from kedge.errors import InterventionError, KedgeError
from kedge.files.given_path import given_path
from kedge.hooks.handle import Hooked
from kedge.recipes.interventions.ablation import Ablation, Means, Resample, resample
from kedge.recipes.interventions.joint_hook import hook_all
from kedge.recipes.interventions.steering import Steering
from kedge.sites.select import Selector, selects
from kedge.written_actions import Vocabulary, WrittenTensors

FORMAT = 1
"""The number of the file's format."""
_KEY = "kedge.interventions"


def _made_by(action: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the public name that makes an action of a recipe, and its arguments."""
    if isinstance(action, Steering):
        return "Steering", {
            "direction": action.direction,
            "strength": action.strength,
            "keep_norm": action.keep_norm,
            "positions": action.positions,
            "dim": action.dim,
        }
    if isinstance(action, Ablation):
        given = {"by": action.by, "positions": action.positions, "dim": action.dim}
        return "Ablation", given
    if isinstance(action, Means):
        sums = {name: [total, count] for name, (total, count) in action.sums.items()}
        return "Means", {"over": action.over, "sums": sums}
    if isinstance(action, Resample):
        return "resample", {"seed": action.generator.initial_seed()}
    return None


def _means(over: Any, sums: Mapping[str, Any]) -> Means:
    found = Means(over)
    found.sums = {name: (total, count) for name, (total, count) in sums.items()}
    return found


_VOCABULARY = Vocabulary(
    {"Ablation": Ablation, "Means": _means, "Steering": Steering, "resample": resample}, _made_by
)


class Interventions:
    """Sites of a model and the actions there, which can be written to a file.

    The file holds JSON and tensors, in the format of safetensors. Nothing in it is code, so it can be
    read from somebody else.

    Args:
        actions: For each selector an action, or several in their order.

    Raises:
        SelectorError: If the text of a selector cannot be read.
        InterventionError: If there is no action.

    Examples:
        >>> calm = recipes.Interventions({"relu": kedge.scale(0.5), "fc": kedge.add(1.0)})
        >>> with calm.on(model):
        ...     output = model(images)
    """

    def __init__(self, actions: Mapping[str, Any]) -> None:
        if not isinstance(actions, Mapping) or not actions:
            raise InterventionError(
                f"Interventions({described(actions)}): give a dict of selectors and actions, such as "
                '{"layer4": kedge.scale(0.5)}'
            )
        self.actions: dict[str, tuple[Any, ...]] = {}
        for where, given in actions.items():
            if not selects(where):
                raise InterventionError(
                    f"Interventions: {described(where)} is not a selector; it is a text, "
                    'such as "layer4"'
                )
            several = given if isinstance(given, Sequence) else [given]
            wrong = [each for each in several if not callable(each) and not hasattr(each, "bind")]
            if wrong or not several:
                raise InterventionError(
                    f'Interventions: {described(given)} at "{where}" is not an action, '
                    "such as kedge.scale(0.5), or a list of actions"
                )
            self.actions[str(Selector(where))] = tuple(several)

    def __iter__(self) -> Iterator[str]:
        """The selectors."""
        return iter(self.actions)

    def __len__(self) -> int:
        """The number of selectors."""
        return len(self.actions)

    def __getitem__(self, where: str) -> tuple[Any, ...]:
        """The actions of a selector."""
        return self.actions[where]

    def __repr__(self) -> str:
        """The actions by selector."""
        return f"Interventions({self.actions!r})"

    def on(self, model: nn.Module) -> Hooked[Any]:
        """Attach them to a model, all or none.

        Returns:
            The handle, used as a ``with`` block, or ended by ``remove()``.
        """
        return hook_all(model, [(where, *actions) for where, actions in self.actions.items()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a file.

        Raises:
            InterventionError: If an action holds a function of the program, or the file cannot be
                written.
        """
        tensors = WrittenTensors()
        sites = {}
        for where, actions in self.actions.items():
            sites[where] = [_VOCABULARY.written(action, tensors) for action in actions]
        about = {"format": FORMAT, "kedge": metadata.version("kedge"), "sites": sites}
        target = given_path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        content = save(tensors.named, metadata={_KEY: json.dumps(about, allow_nan=False)})
        try:
            temporary.write_bytes(content)
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise InterventionError(
                f"cannot write {target}: {error.strerror}; name another place"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Self:
        """Read them from a file; nothing is unpickled.

        Args:
            path: The file.
            device: Where its tensors go: the device of the model.

        Raises:
            InterventionError: If the file is not one of interventions, is incomplete, was written by
                a later version, or holds what this version does not know.
        """
        about, tensors = _content(given_path(path), device)
        try:
            actions = {}
            for where, entries in about["sites"].items():
                actions[where] = [_VOCABULARY.read(entry, tensors) for entry in entries]
            return cls(actions)
        except (KedgeError, LookupError, TypeError, AttributeError, ValueError) as error:
            what = str(error)
            if not isinstance(error, KedgeError):
                what = f"its description is damaged ({type(error).__name__}: {error})"
            raise InterventionError(f"cannot read interventions from {path}: {what}") from error


def _content(path: Path, device: str | torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description in a file, and its tensors.

    Raises:
        InterventionError: It cannot be read.
    """
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            text = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InterventionError(
            f"cannot read interventions from {path}: {error}; if the file exists, it is incomplete "
            "or of another kind"
        ) from error
    if text is None:
        raise InterventionError(
            f"cannot read interventions from {path}: it is a file of tensors without interventions, "
            "which Interventions.save writes"
        )
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InterventionError(
            f"cannot read interventions from {path}: its description is damaged ({error})"
        ) from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        by = about.get("kedge") if isinstance(about, dict) else None
        raise InterventionError(
            f"cannot read interventions from {path}: its format is {found}, written by Kedge {by}, and "
            f"this is Kedge {metadata.version('kedge')}, which reads format {FORMAT}"
        )
    return about, tensors
