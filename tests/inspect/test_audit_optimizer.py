"""The audit of an optimizer: its hooks, and the parameters that it holds."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kedge.inspection.audit import audit

WAYS = {
    "register_step_pre_hook": "optimizer-step-pre",
    "register_step_post_hook": "optimizer-step",
    "register_state_dict_pre_hook": "state-dict-pre",
    "register_state_dict_post_hook": "state-dict",
    "register_load_state_dict_pre_hook": "load-state-dict-pre",
    "register_load_state_dict_post_hook": "load-state-dict",
}


def nothing(*_: Any) -> None:
    """Be a hook of any kind."""


def test_every_hook_of_an_optimizer_is_found() -> None:
    """Its own, those of every optimizer, a replaced step, and those on its parameters."""
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for way in WAYS:
        getattr(optimizer, way)(nothing)
    w.register_hook(nothing)
    everywhere = register_optimizer_step_pre_hook(nothing)
    try:
        found = audit(optimizer, {"w": w})
    finally:
        everywhere.remove()

    assert [(e.kind, e.path, e.type, e.name) for e in found] == [
        ("optimizer-step-pre", "every optimizer", "", "nothing"),
        *((kind, "optimizer", "SGD", "nothing") for kind in WAYS.values()),
        ("tensor", "w", "Tensor", "nothing"),
    ]
    assert str(found).startswith("8 hooks on SGD: ")
    assert "on optimizer (SGD)\n" in str(found)
    StepLR(optimizer, 1)
    (step,) = audit(optimizer).of("replaced-step")
    assert (step.name, step.owner, step.notes) == (
        "SGD.step",
        "torch",
        ("by a learning-rate scheduler",),
    )


def test_the_parameters_are_listed_with_what_they_lack() -> None:
    """Those without a gradient, without a hook, and frozen ones; names from the optimizer, a model or a dict."""
    model, loose = nn.Linear(2, 2), torch.ones(3, requires_grad=True)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": [loose, frozen], "lr": 0.5}],
        lr=0.1,
        momentum=0.9,
    )
    model.weight.register_hook(nothing)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    optimizer.step()

    found = audit(optimizer, model)
    assert [
        (p.name, p.group, p.shape, p.trains, p.has_grad, p.has_state, p.hooks)
        for p in found.parameters
    ] == [
        ("weight", 0, (2, 2), True, True, True, 1),
        ("bias", 0, (2,), True, False, False, 0),
        ("group 1[0]", 1, (3,), True, False, False, 0),
        ("group 1[1]", 1, (1,), False, False, False, 0),
    ]
    assert dict(found.facts) == {
        "group 0": "2 parameters of 6 elements, lr 0.1, momentum 0.9",
        "group 1": "2 parameters of 4 elements, lr 0.5, momentum 0.9",
        "frozen": "group 1[1]; every step skips those, until they require grad",
        "no gradient": "bias, group 1[0]; a step now skips those",
        "no hook": "bias, group 1[0], group 1[1]; the others have one",
    }
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    assert [p.name for p in audit(named).parameters] == ["weight", "bias"]
    assert str(audit(named)).startswith("1 hook on SGD: 1 tensor")
    assert "<table" in audit(named)._repr_html_()


def test_the_effect_on_copies_is_as_said() -> None:
    """A pickled or copied optimizer has none of its own hooks, and no replaced step."""
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    for way in WAYS:
        getattr(optimizer, way)(nothing)
    StepLR(optimizer, 1)
    assert {e.on for entry in audit(optimizer) for e in entry.effects} == {"pickle"}
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert len(audit(other)) == 0
        assert str(audit(other)).startswith("this optimizer has no hooks\n\ngroup 0 ")
