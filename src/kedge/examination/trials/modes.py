"""Whether the model is in training mode while it is trained.

Cannot see: a mode that changes after the first steps, such as after an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import counted, listed

TRIAL = "modes"


def modes(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether layers that behave otherwise in training are all in evaluation mode."""
    did = "looked at the modes of the layers while the model is trained"
    named = [(name, module) for name, module in step.model.named_modules() if _differs(module)]
    if not named:
        return
    idle = [name or type(module).__name__ for name, module in named if not module.training]
    if len(idle) < len(named):
        yield Result(TRIAL, "ok", did, f"{len(named) - len(idle)} of {len(named)} are in training")
        return
    came = (
        f"{counted(len(idle), 'layer')} of dropout and normalization are in evaluation mode: "
        f"{listed(idle, 4)}"
    )
    means = "Nothing is dropped, and no statistics follow. model.train() is missing, if not meant."
    yield Result(TRIAL, "look", did, came, means)


def _differs(module: nn.Module) -> bool:
    """Whether a layer does something else in training than in evaluation."""
    drops = type(module).__name__.endswith("Dropout") and getattr(module, "p", 0) > 0
    return drops or bool(getattr(module, "track_running_stats", False))
