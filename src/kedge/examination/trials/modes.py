"""Whether the model is in training mode while it is trained.

Cannot see: a mode that changes after the first steps, such as after an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import counted, listed
from kedge.torch_internals.torchscript import is_training

TRIAL = "modes"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def modes(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether layers that behave otherwise in training are all in evaluation mode."""
    did = "looked at the modes of the layers while the model is trained"
    yield from _of_nothing(step, did)
    named = [(name, module) for name, module in step.model.named_modules() if _differs(module)]
    if not named:
        return
    idle = [name or type(module).__name__ for name, module in named if not is_training(module)]
    if len(idle) < len(named):
        yield Result(TRIAL, "ok", did, f"{len(named) - len(idle)} of {len(named)} are in training")
        return
    came = (
        f"{counted(len(idle), 'layer')} of dropout and normalization are in evaluation mode: "
        f"{listed(idle, 4)}"
    )
    means = "Nothing is dropped, and no statistics follow. model.train() is missing, if not meant."
    yield Result(TRIAL, "look", did, came, means)


def _of_nothing(step: ExaminedStep, did: str) -> Iterator[Result]:
    """Yield layers that are in training, and can do nothing useful there."""
    training = [
        (name, module) for name, module in step.model.named_modules() if is_training(module)
    ]
    dropped = [name for name, each in training if isinstance(each, _DROPOUTS) and each.p >= 1]
    if dropped:
        came = f"everything is dropped in {listed(dropped, 4)}: p is 1"
        means = "Nothing of what it is given gets through, nor a gradient. p is the share to drop."
        yield Result(TRIAL, "wrong", did, came, means)
    norms = [name for name, each in training if isinstance(each, _BATCH_NORMS)]
    if norms and step.samples is not None and step.samples.count == 1:
        came = f"{counted(len(norms), 'batch norm')} normalized by a batch of one sample: "
        came += listed(norms, 4)
        means = (
            "A mean and a variance over one sample say little of others, and those that evaluation "
            "uses follow each of them. Use larger batches, or GroupNorm or LayerNorm."
        )
        yield Result(TRIAL, "look", did, came, means)


def _differs(module: nn.Module) -> bool:
    """Whether a layer does something else in training than in evaluation."""
    drops = type(module).__name__.endswith("Dropout") and getattr(module, "p", 0) > 0
    return drops or bool(getattr(module, "track_running_stats", False))
