"""Text generation calls a model many times: each token is a forward pass of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import kedge
from tests.architectures.zoo import BY_NAME
from tests.marks import sampled

TOKENS = 6
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
decoders = pytest.mark.parametrize(
    "name", sampled(["gpt2", "llama", "mixtral", "mamba"], ["gpt2", "mamba"])
)


def generate(model: nn.Module, ids: torch.Tensor) -> Any:
    """Sample some tokens and keep the scores of each."""
    torch.manual_seed(3)
    options = {
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": True,
        "output_logits": True,
    }
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options
    )  # type: ignore[operator]
    return result, torch.get_rng_state()


def prompt() -> torch.Tensor:
    """Two prompts of four tokens."""
    return torch.tensor([[1, 8, 9, 10], [1, 11, 12, 13]])


@decoders
def test_generating_under_observation_draws_the_same_tokens(name: str) -> None:
    """Tokens, scores and the generator's state are those of a model nobody watches."""
    model = BY_NAME[name].build().eval()
    bare, state = generate(model, prompt())
    with kedge.session() as s:
        s.hook(model, "**:out, **:out.grad, **:in.grad, **:param.grad, **:in", kedge.record())
        watched, watched_state = generate(model, prompt())
    assert torch.equal(bare.sequences, watched.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, watched.logits, strict=True))
    assert torch.equal(state, watched_state)


@decoders
def test_the_last_pass_is_kept_of_a_generation(name: str) -> None:
    """With ``keep=1`` one reads what the last token's pass made, under the plain name."""
    model = BY_NAME[name].build().eval()
    with kedge.hook(model, "**:out", kedge.record()) as acts:
        result, _ = generate(model, prompt())
        assert torch.equal(acts["lm_head"][:, -1], result.logits[-1])
        assert [r.event.pass_ for r in acts.records("lm_head")] == [TOKENS - 1]


@decoders
def test_every_pass_of_a_generation_can_be_kept(name: str) -> None:
    """With ``keep=None`` there is one record a token, in order, each the scores of that token."""
    model = BY_NAME[name].build().eval()
    with kedge.hook(model, "lm_head", kedge.record(keep=None)) as acts:
        result, _ = generate(model, prompt())
        records = acts.records("lm_head")
    assert [r.event.pass_ for r in records] == list(range(TOKENS))
    assert [r.event.call for r in records] == [0] * TOKENS
    assert all(
        torch.equal(r.value[:, -1], scores)
        for r, scores in zip(records, result.logits, strict=True)
    )


@decoders
def test_gradients_of_a_generation_say_why_there_are_none(name: str) -> None:
    """Generation runs without grad, and the ledger says so of every gradient."""
    model = BY_NAME[name].build().eval()
    with kedge.session() as s:
        s.hook(model, "lm_head:out.grad, lm_head:in.grad", lambda grad: None)
        generate(model, prompt())
        whys = [e.cause.why if e.cause else "" for e in s.ledger()]
    assert whys == ["its value requires no grad: the forward ran under no_grad"] * 2


def test_an_encoder_called_apart_is_a_pass_of_its_own() -> None:
    """T5's generation calls the encoder once, outside the model's forward, then the model once a token."""
    model = BY_NAME["t5"].build().eval()
    with kedge.hook(model, "encoder:out, lm_head:out", kedge.record(keep=None)) as acts:
        result, _ = generate(model, prompt())
        encoded, scored = acts.records("encoder"), acts.records("lm_head")
    assert len(encoded) == 1
    assert len({r.event.pass_ for r in [*encoded, *scored]}) == 1 + TOKENS
    assert all(
        torch.equal(r.value[:, -1], scores) for r, scores in zip(scored, result.logits, strict=True)
    )
