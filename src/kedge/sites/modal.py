"""Modules that compute differently in training and in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kedge.frames import is_installed
from kedge.short_text import listed
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.torchscript import is_training

_NAMED = 3

MODAL = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    ),
)
"""The modules of PyTorch that do."""


def drops(module: nn.Module) -> bool:
    """Whether a module of `MODAL` has an effect: a dropout of 0 has none."""
    return bool(getattr(module, "p", 1.0) > 0)


def asks_for_mode(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class of the program reads ``self.training``.

    That is how `torch.nn.functional.dropout` is told, and noise in a gate. An installed library
    reads it for much else, such as a gradient checkpoint.
    """
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code is not None and "training" in code.co_names and not is_installed(code.co_filename)


def in_training(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and modules of a model that compute as in training: dropout, and statistics of the batch."""
    for name, module in modules_in(model).items():
        if not is_training(module) or not isinstance(module, MODAL):
            continue
        if drops(module) and _depends(module):
            yield name, module


def shown_training(model: nn.Module) -> str:
    """Return the first modules that compute as in training, as a message names them.

    Empty if there are none.
    """
    found = [f"{type(module).__name__} {name or 'itself'}" for name, module in in_training(model)]
    return listed(found, _NAMED)


def _depends(module: nn.Module) -> bool:
    """Whether a module's mode matters.

    Without running statistics a normalization has those of the batch in both.
    """
    return bool(getattr(module, "track_running_stats", True))
