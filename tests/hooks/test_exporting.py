"""What leaves the process - exported and traced programs - carries edits, and nothing of Kedge."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import kedge


def test_an_exported_program_has_the_edits_and_no_operator_of_kedges():
    """An exported program must load where there is no Kedge: observers stay out of it, edits are part of it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4, requires_grad=True)
    expected = model(x) * 3
    with kedge.session() as s:
        s.hook(
            model, "**:out, **:in, **:param, **:out.grad, **:in.grad, **:in.share", kedge.record()
        )
        s.hook(model, "1", kedge.scale(3))
        exported = torch.export.export(model, (x,))
        model(x).sum().backward()

    assert "kedge" not in exported.graph_module.code
    assert torch.equal(exported.module()(x), expected)


def test_a_hooked_model_can_be_sent_to_another_process_without_a_warning():
    """Hooks on parameters stay behind when a parameter's memory is shared, and nothing is said of them."""
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(), kedge.session() as s:
        warnings.simplefilter("error")
        s.hook(model, "weight:param.grad", kedge.record())
        model.share_memory()
        torch.utils.hooks.warn_if_has_hooks(model.weight)
        model(torch.ones(1, 2)).sum().backward()

    assert model.weight.is_shared()
