"""Whether the output depends on what the model is given: on all of it, on each input, on each feature.

Inputs are set to zero, all of them and one by one, and the output is compared, in evaluation mode.
Features of floating-point inputs (places of the last dimension, channels of images) without a
gradient in any sample are changed too: without effect, nothing depends on them.

Cannot see: an input whose zeros mean what it holds, such as a mask of which nothing is hidden;
tensors inside objects of the program's own classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kedge.examination.differences import differ, numbers_in
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import counted, listed, spans

TRIAL = "data-used"
STRAIGHT = 1e-4
"""The share of a difference by which its middle may be off a straight line, as rounding makes it."""
DID = "compared the output with that for other inputs, in eval()"


def data_used(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether the data is used at all, and the inputs and features that are not."""
    given = step.inputs.numbers()
    if not given:
        yield Result(TRIAL, "untried", DID, "the model is given no tensors that could be changed")
        return
    before = step.outputs
    if not before:
        yield Result(TRIAL, "untried", DID, "the model returns no tensor of real numbers")
        return
    if not any(bool(value.isfinite().any()) for value in before.values()):
        yield Result(TRIAL, "untried", DID, "no element of the output is finite")
        return
    if differ(before, numbers_in(step.run.outputs())):
        yield Result(TRIAL, "untried", DID, "the output differs from run to run")
        return

    unused = [name for name, value in given.items() if _is_unused(step, before, name, value)]
    if unused and len(unused) == len([name for name, value in given.items() if value.any()]):
        came = f"it stays the same when {listed(list(given))} is zero"
        zeros = [n for n, p in step.parameters.items() if p.dim() > 1 and not p.any()]
        if zeros:
            means = f"As long as these weights are zero, it has to: {listed(zeros, 4)}."
            yield Result(TRIAL, "look", DID, came, means)
            return
        means = "The model does not look at its data: what it learns is the same for all samples."
        yield Result(TRIAL, "wrong", DID, came, means)
        return

    features = dict(_unused_features(step, before, unused))
    if unused:
        came = f"it stays the same when any of these is zero: {listed(unused)}"
        means = (
            "Nothing depends on them. A mask among them is ignored; what only training reads, such "
            "as targets, is meant."
        )
        yield Result(TRIAL, "look", DID, came, means)
    for name, places in features.items():
        came = f"nothing depends on {counted(len(places), 'feature')} of `{name}`: {spans(places)}"
        means = "A part of the input is cut off or overwritten on its way, or meant to be ignored."
        yield Result(TRIAL, "look", DID, came, means)
    if unused or features:
        return
    straight = list(_straight(step))
    yield from straight
    if not straight:
        yield Result(TRIAL, "ok", DID, f"it depends on {listed([*given])}")


def _straight(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether the output follows the only input in a straight line, through several layers of weights."""
    given = step.inputs.tensors()
    layers = [name for name, param in step.parameters.items() if param.dim() > 1]
    if len(given) != 1 or len(layers) < 2:
        return
    ((name, value),) = given.items()
    if not value.is_floating_point() or value.dim() < 2 or value.shape[0] < 2:
        return
    one = value.detach()
    other = one.roll(1, 0)
    halfway = numbers_in(step.run.outputs(_with(step.inputs, name, (one + other) / 2)))
    ends = numbers_in(step.run.outputs(_with(step.inputs, name, other)))
    for key, first in step.outputs.items():
        if key not in ends or not ends[key].shape == halfway[key].shape == first.shape:
            return
        bent = (first.double() + ends[key].double()) / 2 - halfway[key].double()
        if float(bent.norm()) > STRAIGHT * float((first - ends[key]).double().norm()):
            return
    came = (
        f"halfway between two samples it is halfway between their outputs: it follows `{name}` in a "
        f"straight line, through {counted(len(layers), 'layer')} of weights"
    )
    means = "One layer could do the same: no activation stands between them."
    yield Result(TRIAL, "look", DID, came, means)


def _is_unused(step: ExaminedStep, before: dict[str, Tensor], name: str, value: Tensor) -> bool:
    """Whether the output is the same when an input is zero, which it was not."""
    if not value.any():
        return False
    try:
        after = step.run.outputs(_with(step.inputs, name, torch.zeros_like(value)))
    except Exception:  # noqa: BLE001 - the model refuses such an input, so it does look at it
        return False
    return not differ(before, numbers_in(after))


def _with(inputs: ModelInputs, name: str, value: Tensor) -> ModelInputs:
    return inputs.with_tensors({name: value})


def _unused_features(
    step: ExaminedStep, before: dict[str, Tensor], unused: list[str]
) -> Iterator[tuple[str, list[int]]]:
    """Yield each input that has features on which nothing depends, with their places."""
    floats = {}
    for name, value in step.inputs.numbers().items():
        if value.is_floating_point() and value.dim() > 1 and name not in unused:
            floats[name] = value.detach().clone().requires_grad_()
    if not floats:
        return
    outputs = step.run.graph(step.inputs.with_tensors(floats), training=False, apart=False)
    graded = [value for value in outputs.values() if value.requires_grad]
    if not graded:
        return
    weights = [torch.randn_like(value) for value in graded]
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        graded, list(floats.values()), weights, allow_unused=True
    )
    for (name, value), gradient in zip(floats.items(), gradients, strict=True):
        if gradient is None:
            continue  # it may be rounded, or looked up in a table
        dim = _feature_dim(value)
        rest = [each for each in range(value.dim()) if each != dim]
        silent = (gradient == 0).all(dim=rest)
        places = silent.nonzero().flatten().tolist()
        if not places or len(places) == value.shape[dim]:
            continue
        changed = value.detach().clone()
        index = torch.tensor(places, device=value.device)
        noise = torch.randn_like(changed.index_select(dim, index))
        changed.index_copy_(dim, index, noise + changed.std())
        after = numbers_in(step.run.outputs(_with(step.inputs, name, changed)))
        if not differ(before, after):
            yield name, places


def _feature_dim(value: Tensor) -> int:
    """Return the dimension of features: the channels of images and volumes, else the last."""
    return 1 if value.dim() >= 4 else value.dim() - 1
