"""How many digits of the output are right, and whether bfloat16 and float16 would do.

A copy of the model computes in float64 beside the program's own precision, in evaluation mode, and
what each module returns is compared, of a few samples: the relative error of a tensor is the norm of the difference
over the norm of the exact one. Then the model is run under `torch.autocast`.

Cannot see: models that fix a precision in their code, or cannot be copied; the backward pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kedge.examination.differences import changed
from kedge.examination.model_runs import ModelRuns, Passed
from kedge.examination.result import Result, Verdict, in_short
from kedge.examination.step import ExaminedStep
from kedge.short_text import brief, sized
from kedge.torch_internals.module_tables import parameters_in

TRIAL = "precision"
MOST_BYTES = 2_000_000_000
"""Bytes of parameters above which the model is not copied."""
COARSE = 1e-2
"""The relative error of the output from which on it is something to look at."""
LOST = 30.0
"""Times by which a module has to raise the error to be named."""
HIGHEST = 65_504.0
"""The largest number of float16."""


def precision(step: ExaminedStep) -> Iterator[Result]:
    """Yield the error of the program's own precision, and what half of it would give."""
    did = "ran the model in float64 beside its own precision, in eval()"
    size = sum(p.numel() * p.element_size() for p in parameters_in(step.model).values())
    if size > MOST_BYTES:
        yield Result(TRIAL, "untried", did, f"the model has {sized(size)} of parameters")
        return
    try:
        exact = ModelRuns(
            copy.deepcopy(step.model).double(), step.few.inputs.converted(torch.float64)
        )
        wide = _by_key(exact.passed())
    except Exception as refusal:  # noqa: BLE001 - whatever the program's code does in float64
        yield Result(TRIAL, "untried", did, f"it cannot: {in_short(refusal)}")
        return

    own = step.few.passed()
    if any(_differs(*pair) for pair in zip(own, step.few.passed(), strict=False)):
        yield Result(TRIAL, "untried", did, "the output differs from run to run")
        return
    errors = [(each, _error(each.value, wide.get(each.key))) for each in own]
    known = [(each, error) for each, error in errors if error is not None]
    if not known:
        yield Result(TRIAL, "untried", did, "no value could be compared")
        return
    last, error = known[-1]
    dtype = str(last.value.dtype).removeprefix("torch.")
    came = f"{dtype} has {_digits(error)} of the output right"
    worst = _largest_step(known)
    verdict: Verdict = "ok"
    means = where = ""
    if worst is not None:
        came += f"; most are lost in {worst.path or step.name}"
        where = worst.line
    if error > COARSE:
        verdict = "look"
        means = "Differences of large numbers, or powers of them, lose digits there."
    yield Result(TRIAL, verdict, did, came, means, where)
    yield from _halves(step, wide, own)


def _halves(
    step: ExaminedStep, wide: Mapping[tuple[str, str, str], Tensor], own: list[Passed]
) -> Iterator[Result]:
    """Yield what autocast to each type of 16 bits would give."""
    did = "ran it under autocast to 16 bits"
    if not own:
        return
    device = own[0].value.device.type
    parts = []
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        try:
            with torch.autocast(device, dtype=dtype):
                half = step.few.passed()
        except Exception as refusal:  # noqa: BLE001 - whatever the program's code does there
            parts.append(f"{name} cannot ({type(refusal).__name__})")
            continue
        error = _error(half[-1].value, wide.get(half[-1].key))
        if error is not None:
            parts.append(f"{name} has {_digits(error)} right")
    largest = max((_magnitude(each.value) for each in own), default=0.0)
    if largest > 0:
        parts.append(f"the largest value is {brief(largest)}, of 65504 in float16")
    verdict: Verdict = "ok"
    means = ""
    if largest > HIGHEST:
        verdict = "look"
        means = "float16 would overflow; bfloat16 has the range of float32."
    if parts:
        yield Result(TRIAL, verdict, did, "; ".join(parts), means)


def _differs(one: Passed, other: Passed) -> bool:
    return bool(changed(one.value, other.value).any())


def _by_key(noted: list[Passed]) -> dict[tuple[str, str, str], Tensor]:
    """Return the values by place; of several calls that of the last."""
    return {each.key: each.value for each in noted}


def _error(value: Tensor, exact: Tensor | None) -> float | None:
    if exact is None or exact.shape != value.shape or not value.is_floating_point():
        return None
    norm = float(exact.double().norm())
    if norm == 0 or not math.isfinite(norm):
        return None
    error = float((value.double() - exact.double()).norm()) / norm
    return error if math.isfinite(error) else None


def _digits(error: float) -> str:
    if error == 0:
        return "all digits"
    return f"{max(-math.log10(error), 0):.1f} digits"


def _largest_step(known: list[tuple[Passed, float]]) -> Passed | None:
    """Return the value whose error is most above that of the one before it, if that is much."""
    found, most = None, LOST
    before = 0.0
    for each, error in known:
        if before > 0 and error / before > most:
            found, most = each, error / before
        before = max(error, torch.finfo(each.value.dtype).eps)
    return found


def _magnitude(value: Tensor) -> float:
    if not value.is_floating_point() or value.numel() == 0:
        return 0.0
    return float(torch.nan_to_num(value.abs(), nan=0.0, posinf=0.0).max())
