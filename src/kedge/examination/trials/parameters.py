"""Parameters that the loss does not depend on, where the way to them is cut, and frozen ones that change.

The graph of the loss was followed to the parameters as the backward pass began. For those that it
does not reach, the model is run once more: a parameter that the model's output depends on belongs
to an output that the loss leaves out; otherwise its module was not called, or the graph ends behind
it, as after `detach`, `.data`, a conversion to NumPy or `no_grad`.

Cannot see: parameters that are reached, and multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from kedge.examination.gradients import held_by
from kedge.examination.loss_facts import LossFacts
from kedge.examination.model_runs import Passed
from kedge.examination.result import Result, Verdict
from kedge.examination.step import ExaminedStep, SeenTraining
from kedge.short_text import counted, listed
from kedge.torch_internals.autograd_nodes import behind, is_leaf
from kedge.torch_internals.module_tables import own_parameters
from kedge.torch_internals.torchscript import is_training

TRIAL = "parameters"
DID = "followed the graph of the loss to the parameters"


def parameters(step: ExaminedStep) -> Iterator[Result]:
    """Yield the parameters that are not reached, with the reason, and the frozen ones that change."""
    yield from _frozen(step)
    if step.loss is None:
        yield _without_loss(step)
        return
    trained = {name: p for name, p in step.parameters.items() if p.requires_grad}
    missed = [name for name, p in trained.items() if id(p) not in step.loss.reached]
    if not trained:
        means = (
            "Nothing in this model is trained. If it is not meant to be frozen: requires_grad_()."
        )
        yield Result(TRIAL, "look", DID, "no parameter requires a gradient", means)
        return
    if len(missed) == len(trained):
        yield _without_loss(step)
        return
    if not missed:
        yield Result(TRIAL, "ok", DID, f"it depends on all {counted(len(trained), 'parameter')}")
        return

    noted = step.run.passed(training=True, graded=True)
    called = {each.path for each in noted}
    output = [each.value for each in noted if each.path == "" and each.kind == "out"]
    nodes = set(behind(value.grad_fn for value in output))
    reached = {id(node.variable) for node in nodes if is_leaf(node)}  # type: ignore[attr-defined]

    uncalled, unused, cut = [], [], []
    for name in missed:
        owner = name.rpartition(".")[0]
        if id(trained[name]) in reached:
            unused.append(name)
        elif owner not in called:
            uncalled.append(name)
        else:
            cut.append(name)
    of = f"of {counted(len(trained), 'parameter')}, the loss does not depend on"
    if uncalled:
        came = f"{of} {len(uncalled)} of modules that are not called: {listed(uncalled, 4)}"
        means = (
            "Call the module, or do without it. A parent that uses its weight itself may be meant."
        )
        yield Result(TRIAL, "look", DID, came, means)
    if unused:
        came = f"{of} {len(unused)}, though the model's output does: {listed(unused, 4)}"
        means = "A part of the output is not in the loss."
        yield Result(TRIAL, "look", DID, came, means, step.loss.where)
    if cut:
        yield _cut(step, noted, nodes, cut, f"{of} {len(cut)} whose modules are called")


def _cut(
    step: ExaminedStep,
    noted: Sequence[Passed],
    nodes: Collection[Node],
    cut: list[str],
    said: str,
) -> Result:
    came = f"{said}: {listed(cut, 4)}"
    end = _end_of_graph(noted, nodes)
    if end is None:
        means = "Their modules run under no_grad, or on values that are taken out of the graph."
        return Result(TRIAL, "look", DID, came, means)
    came += f"; the graph ends behind {end.path or step.name}"
    held: list[Tensor] = []
    if step.training is not None:
        held = step.training.held()
    is_trained = any(step.parameters[name] is param for name in cut for param in held)
    if is_trained and _goes_on_without_graph(noted, end):
        means = (
            "What it returns is taken out of the graph: by detach(), .data, .item(), NumPy, an "
            "integer or an argmax."
        )
        return Result(TRIAL, "wrong", DID, came, means, end.line)
    means = (
        "What it returns is not used, or taken out of the graph, as that of a target is on purpose."
    )
    return Result(TRIAL, "look", DID, came, means, end.line)


def _goes_on_without_graph(noted: Sequence[Passed], end: Passed) -> bool:
    """Whether a module behind the end of the graph is given real numbers without a gradient."""
    at = next(i for i, each in enumerate(noted) if each is end)
    given = {each.value.data_ptr() for each in noted if each.path == "" and each.kind == "in"}
    return any(
        each.kind == "in"
        and each.value.is_floating_point()
        and not each.value.requires_grad
        and each.value.data_ptr() not in given
        for each in noted[at + 1 :]
    )


def _without_loss(step: ExaminedStep) -> Result:
    training = step.training
    own = set(map(id, step.parameters.values()))
    owners = []
    if training is not None and training.gradients is not None and training.gradients.passes:
        owners = [each for each in training.optimizers if not own.isdisjoint(_ids(each))]
    if step.loss is None and not owners:
        return Result(TRIAL, "untried", DID, "no loss is known")
    came = "the loss depends on no parameter of this model"
    means = "What it returns is taken out of the graph on its way to the loss, as by detach()."
    reached: set[int] = set()
    if training is not None:
        reached.update(training.reached)
    if step.loss is not None:
        reached.update(step.loss.reached)
    if any(not reached.isdisjoint(_ids(each)) for each in owners):
        means += " It is meant if this step trains another model, and a later one this."
        return Result(TRIAL, "look", DID, came, means)
    return Result(TRIAL, "wrong", DID, came, means)


def _ids(optimizer: Optimizer) -> set[int]:
    return set(map(id, held_by([optimizer])))


def without_models(training: SeenTraining, losses: Sequence[LossFacts]) -> Iterator[Result]:
    """Yield what the loss of a step depends on in which no model was called with gradients on."""
    if not training.optimizers:
        return
    reached = {key for facts in losses for key in facts.reached}
    held = held_by(training.optimizers)
    missed = [param for param in held if id(param) not in reached]
    if not missed:
        yield Result(TRIAL, "ok", DID, f"it depends on all {counted(len(held), 'parameter')}")
        return
    shapes = listed([str(tuple(param.shape)) for param in missed], 4)
    came = (
        f"of {counted(len(held), 'tensor')} of the optimizer, the loss does not depend on "
        f"{len(missed)}: {shapes}; no model was called with gradients on"
    )
    means = (
        "A model that is to be trained runs under no_grad, or the loss leaves out what it returns."
    )
    yield Result(TRIAL, "look", DID, came, means, losses[0].where)


def _end_of_graph(noted: Sequence[Passed], nodes: Collection[Node]) -> Passed | None:
    """Return the last output of a module that is in a graph, but not in that of the model's output."""
    found = None
    for each in noted:
        node = each.value.grad_fn
        if each.kind == "out" and node is not None and node not in nodes:
            found = each
    return found


def _frozen(step: ExaminedStep) -> Iterator[Result]:
    did = "compared frozen parameters before and after a step"
    frozen = [name for name, p in step.parameters.items() if not p.requires_grad]
    for name, module in step.model.named_modules():
        is_meant = vars(module).get("requires_grad") is False
        if is_meant and any(param.requires_grad for param in module.parameters()):
            came = f"requires_grad = False was set on the module {name or step.name}, which trains"
            means = (
                "PyTorch does not read that attribute. Call requires_grad_(False) on the module."
            )
            verdict: Verdict = "wrong"
            if not type(module).__module__.startswith("torch."):
                verdict = "look"  # a class of the program's own may read it
            yield Result(TRIAL, verdict, did, came, means)
    if step.changed_frozen:
        came = f"{counted(len(step.changed_frozen), 'frozen parameter')} changed: "
        came += listed(list(step.changed_frozen), 4)
        means = (
            "An average of other weights is meant to. Otherwise: requires_grad=False stops "
            "gradients, and not weight decay of a gradient that is left from before, or code that "
            "writes to the weights."
        )
        yield Result(TRIAL, "look", did, came, means)
    moving = [
        name
        for name, module in step.model.named_modules()
        if is_training(module) and _keeps_statistics(module) and _is_frozen(module)
    ]
    if frozen and moving:
        came = f"{counted(len(moving), 'frozen layer')} updates running statistics: "
        came += listed(moving, 4)
        means = (
            "Their weights are frozen, and their mean and variance still follow each batch. "
            "Call eval() on them, after every train()."
        )
        yield Result(TRIAL, "look", "looked at the modes of frozen layers", came, means)


def _keeps_statistics(module: nn.Module) -> bool:
    return getattr(module, "track_running_stats", False) and hasattr(module, "running_mean")


def _is_frozen(module: nn.Module) -> bool:
    own = own_parameters(module).values()
    return len(own) > 0 and not any(p is not None and p.requires_grad for p in own)
