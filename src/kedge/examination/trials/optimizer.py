"""Whether the optimizers hold what is trained, and nothing that is gone.

Cannot see: parameters that are trained by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.short_text import counted, listed
from kedge.torch_internals.module_tables import parameters_in

TRIAL = "optimizer"
DID = "compared the optimizers' parameters with the models'"


def optimizer(step: ExaminedStep) -> Iterator[Result]:
    """Yield what is trained and not held, and what is held and in no model."""
    if step.optimizers is None:
        yield Result(TRIAL, "untried", DID, "no optimizer is known")
        return
    held = {
        id(param): param
        for each in step.optimizers
        for group in each.param_groups
        for param in group["params"]
    }
    reached = frozenset(map(id, step.parameters.values()))
    if step.loss is not None:
        reached = step.loss.reached
    trained = {n: p for n, p in step.parameters.items() if p.requires_grad and id(p) in reached}
    missing = [name for name, param in trained.items() if id(param) not in held]

    known = set(map(id, step.parameters.values()))
    for other in step.others:
        known |= set(map(id, parameters_in(other).values()))
    strangers = [param for key, param in held.items() if key not in known]
    idle = [param for param in strangers if step.loss is None or id(param) not in step.loss.reached]

    if missing:
        came = (
            f"{counted(len(missing), 'parameter')} that the loss depends on are in no optimizer: "
            f"{listed(missing, 4)}"
        )
        means = "They get gradients and never change. "
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
        came = f"{counted(len(idle), 'tensor')} of the optimizers are in no model that ran: {shapes}"
        means = "They may belong to a part that was replaced, or to a model that is called later."
        yield Result(TRIAL, "look", DID, came, means)
    else:
        came = f"all {counted(len(trained), 'parameter')} that the loss depends on are held"
        yield Result(TRIAL, "ok", DID, came)
