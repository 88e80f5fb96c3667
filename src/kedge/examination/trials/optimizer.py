"""Whether the optimizers hold what is trained and nothing that is gone, find gradients when they step, and use them.

Cannot see: parameters that are trained by hand; a step without effect where it could be rounded away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kedge.examination.gradients import held_by
from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep, SeenTraining
from kedge.short_text import compact, counted, listed
from kedge.torch_internals.module_tables import parameters_in

TRIAL = "optimizer"
SHRUNK = 1e-3
"""The share of the norm of gradients below which they have been made small before the step."""
DID = "compared the optimizers' parameters with those that the loss depends on"


def optimizer(step: ExaminedStep) -> Iterator[Result]:
    """Yield what is trained and not held, what is held and in no model, and steps without gradients."""
    if step.training is None:
        yield Result(TRIAL, "untried", DID, "no optimizer is known")
        return
    if step.training.blind_steps:
        did = "waited for a backward pass"
        came = f"none came before {counted(step.training.blind_steps, 'step')}, and no gradient is there"
        means = "The optimizer has nothing to step by: loss.backward() is missing."
        yield Result(TRIAL, "wrong", did, came, means)
        return
    if not step.training.optimizers:
        yield _without_step(step.training)
        return
    is_finite = step.loss is None or math.isfinite(step.loss.value)
    yield from _at_steps(step.training, is_finite=is_finite)
    yield from _unmoved(step)

    if step.loss is None:
        yield Result(TRIAL, "untried", DID, "no loss of this model is known")
        return
    held = {id(param): param for param in step.training.held()}
    names = {id(param): name for name, param in step.parameters.items()}
    reached = list(step.loss.reached.values())
    known = {id(p) for other in step.others for p in parameters_in(other).values()}
    trained = [
        param
        for param in reached
        if isinstance(param, nn.Parameter) and param.requires_grad and id(param) not in known
    ]
    missing = [param for param in trained if id(param) not in held]
    in_reach = {id(param) for param in reached} | known | names.keys()
    idle = [param for param in held_by(step.training.optimizers) if id(param) not in in_reach]

    given = list(step.inputs.tensors().values())
    loose = [
        leaf
        for leaf in reached
        if not isinstance(leaf, nn.Parameter)
        and id(leaf) not in held
        and not _is_among(leaf, given)
    ]

    if missing:
        yield _missing(missing, names, idle, _are_shared(step.training))
    elif idle:
        shapes = listed([str(tuple(param.shape)) for param in idle], 4)
        came = (
            f"{counted(len(idle), 'tensor')} of the optimizers are in no model that ran: {shapes}"
        )
        means = "They may belong to a part that was replaced, or to a model that is called later."
        yield Result(TRIAL, "look", DID, came, means)
    elif loose:
        shapes = listed([str(tuple(tensor.shape)) for tensor in loose], 4)
        came = f"{counted(len(loose), 'tensor')} of the loss asks for a gradient and is no parameter: {shapes}"
        means = "No optimizer changes it. To train it, make it an nn.Parameter of the model."
        yield Result(TRIAL, "look", DID, came, means)
    elif trained:
        came = f"all {counted(len(trained), 'parameter')} that the loss depends on are held"
        yield Result(TRIAL, "ok", DID, came)


def _unmoved(step: ExaminedStep) -> Iterator[Result]:
    """Yield the parameters that the first step should have changed."""
    unmoved = set() if step.training is None else set(map(id, step.training.unmoved))
    found = {name: param for name, param in step.parameters.items() if id(param) in unmoved}
    if not found:
        return
    did = "compared parameters before and after a step of the optimizer"
    came = (
        f"{counted(len(found), 'parameter')} had a gradient, and a rate above zero, and did not "
        f"change: {listed(list(found), 4)}"
    )
    means = (
        "The step does not reach them. It is meant if the program puts them back, or if the "
        "optimizer collects the gradients of several steps."
    )
    if not any(param.is_contiguous() for param in found.values()):
        means += " They are not contiguous: some kernels write to a copy of such a tensor."
    yield Result(TRIAL, "look", did, came, means)


def _are_shared(training: SeenTraining) -> bool:
    """Whether two optimizers hold the same parameters; one that is wrapped by another counts once."""
    every = (*training.optimizers, *training.idle)
    sets = {id(each.param_groups): frozenset(map(id, held_by([each]))) for each in every}
    return len(sets) > len({*sets.values()})


def _missing(
    missing: Sequence[Tensor],
    names: Mapping[int, str],
    idle: Sequence[Tensor],
    are_shared: bool,
) -> Result:
    called = [names.get(id(param), f"one of {tuple(param.shape)}") for param in missing]
    came = (
        f"{counted(len(missing), 'parameter')} that the loss depends on are in no optimizer: "
        f"{listed(called, 4)}"
    )
    loose = [param for param in missing if id(param) not in names]
    if idle:
        means = (
            "They get gradients and never change. The optimizer holds "
            f"{counted(len(idle), 'tensor')} that no model has any more: it was made before a part "
            "of the model was replaced. Make it afterwards."
        )
        return Result(TRIAL, "wrong", DID, came, means)
    if len(loose) > 1:
        means = (
            f"They get gradients and never change. model.parameters() does not have {len(loose)} "
            "of them: modules in a plain list or dict are not part of a model; nn.ModuleList and "
            "nn.ModuleDict are."
        )
        return Result(TRIAL, "wrong", DID, came, means)
    if are_shared:
        means = (
            "They get gradients and never change, and two optimizers hold the same parameters. One "
            "of them was given those of the wrong model."
        )
        return Result(TRIAL, "look", DID, came, means)
    means = (
        "They get gradients and never change. If they are to stay as they are, "
        "requires_grad_(False) saves the time; if not, hand them to the optimizer."
    )
    return Result(TRIAL, "look", DID, came, means)


def _without_step(training: SeenTraining) -> Result:
    did = "waited for an optimizer to step"
    passes = 0
    if training.gradients is not None:
        passes = training.gradients.passes
    came = f"none did in {passes} backward pass{'' if passes == 1 else 'es'}"
    if training.moved:
        return Result(TRIAL, "ok", did, came + "; the program changes its parameters itself")
    means = "Nothing is trained: optimizer.step() is missing, or comes after all batches."
    return Result(TRIAL, "wrong", did, came + ", and no parameter changed", means)


def _at_steps(training: SeenTraining, *, is_finite: bool) -> Iterator[Result]:
    """Yield what is wrong with the gradients at steps; that of a loss that is not finite is said elsewhere."""
    seen = training.gradients
    if seen is None:
        return
    if seen.reached and seen.lacking == seen.reached:
        did = "looked at the gradients as the optimizer was about to step"
        came = f"none of {counted(seen.reached, 'parameter')} had one that is not zero"
        if seen.were_there:
            came += ", as they had at the end of the backward pass"
            means = "They are set to zero between backward() and step(): move zero_grad()."
            yield Result(TRIAL, "wrong", did, came, means)
        else:
            means = "The gradient of this batch is zero: the loss has no slope there."
            yield Result(TRIAL, "look", did, came, means)
    if seen.broken and is_finite:
        did = "looked at the gradients as the optimizer was about to step"
        came = f"{counted(seen.broken, 'parameter')} had one that is NaN or infinite"
        means = (
            "The step makes the weights NaN, though the loss is finite: such as the slope of a root "
            "or of a norm at zero. Add a small number inside of it."
        )
        yield Result(TRIAL, "wrong", did, came, means)
    elif seen.norms is not None and 0 < seen.norms[1] < SHRUNK * seen.norms[0]:
        did = "compared the gradients at the end of backward and as the optimizer was about to step"
        before, after = map(compact, seen.norms)
        came = f"their norm was {before}, and is {after}"
        means = (
            "Something in between makes them that small: a limit of clip_grad_norm_ or "
            "clip_grad_value_, or a division. With such a limit the rate has to be larger; Adam and "
            "its kind do not mind."
        )
        yield Result(TRIAL, "look", did, came, means)
    if training.keeps_gradients:
        did = "looked at the gradients as each backward pass after the first step began"
        came = "those of before were still there"
        means = "Every step uses the sum of all gradients so far: zero_grad() is missing."
        yield Result(TRIAL, "wrong", did, came, means)


def _is_among(leaf: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether a leaf is an input of the model, of which there are copies."""
    return any(leaf.shape == each.shape and torch.equal(leaf, each) for each in given)
