"""Inside `nn.MultiheadAttention`, where PyTorch itself turns function modes off, and the fused way, which it would not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.testing import assert_same_bits, training_step


def attention(**options: Any) -> nn.MultiheadAttention:
    """A small attention of seeded weights."""
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "dropout": {"dropout": 0.3},
    "key and value biases": {"add_bias_kv": True, "add_zero_attn": True},
    "other sizes": {"kdim": 4, "vdim": 6},
}
CALLS: dict[str, dict[str, Any]] = {
    "weights": {},
    "no weights": {"need_weights": False},
    "causal": {
        "is_causal": True,
        "attn_mask": torch.triu(torch.ones(5, 5), 1).bool(),
        "need_weights": False,
    },
}


def inputs(options: dict[str, Any]) -> list[Tensor]:
    """Query, key and value that fit."""
    torch.manual_seed(1)
    return [torch.randn(5, 5, n) for n in (8, options.get("kdim", 8), options.get("vdim", 8))]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS)
def test_observing_the_inside_changes_no_bit(options: str, call: str) -> None:
    """Outputs, weights, gradients and random numbers are those of attention that nobody watches."""
    model, qkv = attention(**OPTIONS[options]), inputs(OPTIONS[options])

    def loss(m: nn.Module) -> Any:
        out, weights = m(*qkv, **CALLS[call])
        return (out, weights), out.sum() + (0 if weights is None else weights.square().sum())

    def watched(m: nn.Module) -> Any:
        with kedge.session() as s:
            s.hook(m, "/*:out, /*:in, /*:out.grad, /*:in.grad", kedge.record())
            got = loss(m)
            torch.autograd.backward(got[1], retain_graph=True)
            m.zero_grad()
        return got

    assert_same_bits(training_step(model, loss), training_step(model, watched))


def test_what_is_inside_can_be_read() -> None:
    """The softmax of attention is a site, with the values that attention returns as its weights."""
    model, (q, k, v) = attention(), inputs({})
    with kedge.session() as s:
        acts = s.hook(model, "/*:out", kedge.record())
        out, weights = model(q, k, v, average_attn_weights=False)
        names = [e.site.op[0] for e, _ in s.timeline()]
    assert torch.equal(acts["/softmax"].view(5, 2, 5, 5), weights)
    assert torch.equal(acts["/multi_head_attention_forward:out[0]"], out)
    assert names.count("linear") == 4
    assert {"bmm", "softmax"} <= set(names)
    assert names[-2:] == ["multi_head_attention_forward"] * 2


def test_the_inside_can_be_edited() -> None:
    """An edit of the softmax is an edit of the weights, and gradients go through it."""
    model, (q, k, v) = attention(), inputs({})
    with kedge.hook(model, "/softmax", lambda w: torch.full_like(w, 0.2)):
        out, weights = model(q, k, v)
    assert torch.equal(weights, torch.full_like(weights, 0.2))
    values = F.linear(v, model.in_proj_weight[16:], model.in_proj_bias[16:]).mean(0)
    assert torch.allclose(out, model.out_proj(values).expand_as(out), atol=1e-6)


def test_scaled_dot_product_attention_is_inside() -> None:
    """Without weights the inside is the fused operation that every device has."""
    model, (q, k, v) = attention(), inputs({})
    with kedge.hook(
        model,
        "/scaled_dot_product_attention:out, /scaled_dot_product_attention:out.grad",
        kedge.record(),
    ) as acts:
        model(q, k, v, need_weights=False)[0].sum().backward()
    assert acts["/scaled_dot_product_attention:out"].shape == (5, 2, 5, 4)
    assert acts["/scaled_dot_product_attention:out.grad"].shape == (5, 2, 5, 4)


@pytest.mark.parametrize("mask", [None, "padding", "attention"])
def test_the_fused_way_is_taken_and_told(mask: str | None) -> None:
    """Attention that takes its fused way takes it under a hook too, to the last bit; the ledger says that it did."""
    model, x = attention(batch_first=True).eval(), inputs({})[0]
    kwargs: dict[str, Any] = {"need_weights": False}
    if mask == "padding":
        kwargs["key_padding_mask"] = (
            torch.zeros(5, 5).bool().index_fill(1, torch.tensor([4]), value=True)
        )
    if mask == "attention":
        kwargs["attn_mask"] = torch.triu(torch.ones(5, 5), 1).bool()
    with torch.no_grad():
        bare = model(x, x, x, **kwargs)[0]
        s = kedge.session()
        s.hook(model, "/softmax, /linear", kedge.record())
        got = model(x, x, x, **kwargs)[0]
        ledger = s.ledger()
        s.end(quiet=True)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(x, x, x, **kwargs)[0]
            with kedge.hook(model, "/linear", kedge.record()):
                assert torch.equal(model(x, x, x, **kwargs)[0], slow)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(bare, got)
    assert ledger["/softmax"].cause is not None
    assert "fused path" in ledger["/softmax"].cause.why


def test_the_fused_way_is_taken_where_the_inputs_are_given_by_name() -> None:
    """A hook changes no bit of such a call either."""
    model, x = attention(batch_first=True).eval(), inputs({})[0]
    given = {"query": x, "key": x, "value": x, "need_weights": False}
    with torch.no_grad():
        bare = model(**given)[0]
        with kedge.session() as s:
            s.hook(model, "/linear", kedge.record())
            got = model(**given)[0]
            cause = s.ledger()["/linear"].cause
            s.end(quiet=True)
    assert torch.equal(bare, got)
    assert cause is not None
    assert "fused path" in cause.why


def test_whether_it_is_fused_is_found_for_each_call() -> None:
    """One attention may go either way; the calls that are not fused are seen."""
    model, x = attention(batch_first=True).eval(), inputs({})[0]
    with torch.no_grad(), kedge.hook(model, "/linear#0:out", kedge.record(keep=None)) as acts:
        model(x, x, x)
        model(x, x.clone(), x)
        model(x, x, x)
    assert len(acts.records("/linear")) == 1


def test_an_encoder_layer_has_operations_of_its_own() -> None:
    """The operations of a transformer's layer are seen beside those of its attention, with no bit changed."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), torch.randn(5, 3, 8)

    def loss(m: nn.Module) -> Any:
        out = m(x)
        return out, out.square().sum()

    def watched(m: nn.Module) -> Any:
        with kedge.hook(m, "**/*:out", kedge.record()) as acts:
            got = loss(m)
        assert acts["/relu"].shape == (5, 3, 16)
        assert acts["self_attn/scaled_dot_product_attention"].shape == (3, 2, 5, 4)
        return got

    assert_same_bits(training_step(model, loss), training_step(model, watched))
