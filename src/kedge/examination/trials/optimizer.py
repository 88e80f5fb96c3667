"""Whether the optimizers hold what is trained and nothing that is gone, and find gradients when they step.

Cannot see: parameters that are trained by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep, SeenTraining, held_by
from kedge.short_text import counted, listed
from kedge.torch_internals.module_tables import parameters_in

TRIAL = "optimizer"
DID = "compared the optimizers' parameters with those that the loss depends on"


def optimizer(step: ExaminedStep) -> Iterator[Result]:
    """Yield what is trained and not held, what is held and in no model, and steps without gradients."""
    if step.training is None:
        yield Result(TRIAL, "untried", DID, "no optimizer is known")
        return
    if not step.training.optimizers:
        yield _without_step(step.training)
        return
    yield from _at_steps(step.training)

    held = {id(param): param for param in held_by(step.training.optimizers)}
    names = {id(param): name for name, param in step.parameters.items()}
    reached: Sequence[Tensor] = list(step.parameters.values())
    if step.loss is not None:
        reached = list(step.loss.reached.values())
    known = {id(p) for other in step.others for p in parameters_in(other).values()}
    trained = [
        param
        for param in reached
        if isinstance(param, nn.Parameter) and param.requires_grad and id(param) not in known
    ]
    missing = [param for param in trained if id(param) not in held]
    in_reach = {id(param) for param in reached} | known | names.keys()
    idle = [param for key, param in held.items() if key not in in_reach]

    given = list(step.inputs.tensors().values())
    loose = [
        leaf
        for leaf in reached
        if not isinstance(leaf, nn.Parameter)
        and id(leaf) not in held
        and not _is_among(leaf, given)
    ]

    if missing:
        called = [names.get(id(param), f"one of {tuple(param.shape)}") for param in missing]
        came = (
            f"{counted(len(missing), 'parameter')} that the loss depends on are in no optimizer: "
            f"{listed(called, 4)}"
        )
        means = "They get gradients and never change. "
        if not all(id(param) in names for param in missing):
            means += (
                "model.parameters() does not have them all: modules in a plain list or dict are "
                "not part of a model; nn.ModuleList and nn.ModuleDict are. "
            )
        if idle:
            means += (
                f"The optimizer holds {counted(len(idle), 'tensor')} that no model has any more: "
                "it was made before a part of the model was replaced. Make it afterwards."
            )
        else:
            means += "Hand them to the optimizer, or freeze them with requires_grad_(False)."
        yield Result(TRIAL, "wrong", DID, came, means)
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


def _without_step(training: SeenTraining) -> Result:
    did = "waited for an optimizer to step"
    came = f"none did in {counted(training.passes, 'backward pass')}".replace("passs", "passes")
    if training.moved:
        return Result(TRIAL, "ok", did, came + "; the program changes its parameters itself")
    means = "Nothing is trained: optimizer.step() is missing, or comes after all batches."
    return Result(TRIAL, "wrong", did, came + ", and no parameter changed", means)


def _at_steps(training: SeenTraining) -> Iterator[Result]:
    did = "looked at the gradients as the optimizer was about to step"
    if training.reached and training.lacking == training.reached:
        came = f"none of {counted(training.reached, 'parameter')} had one that is not zero"
        means = "zero_grad() stands between backward() and step(), or all gradients are zero."
        yield Result(TRIAL, "wrong", did, came, means)
    if training.kept:
        did = "looked at the gradients as the second backward pass began"
        came = "those of the step before were still there"
        means = "Every step uses the sum of all gradients so far: zero_grad() is missing."
        yield Result(TRIAL, "wrong", did, came, means)


def _is_among(leaf: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether a leaf is an input of the model, of which there are copies."""
    return any(leaf.shape == each.shape and torch.equal(leaf, each) for each in given)
