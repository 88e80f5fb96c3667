"""The same names for every architecture, and a logit lens whose last row is the model's own answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import InterventionError, NoSiteMatched
from kedge.recipes.lens import logit_lens
from kedge.recipes.transformer_parts import blocks
from kedge.testing import assert_same_bits, assert_unhooked

_GPT = {"vocab_size": 53, "n_embd": 32, "n_layer": 3, "n_head": 4}
_WIDE = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = {**_WIDE, "intermediate_size": 64, "num_key_value_heads": 2}
_OPT = {**_WIDE, "ffn_dim": 64}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT, "transformer.h.1", "attn", "mlp"),
    "GPTJForCausalLM": ("GPTJConfig", {**_GPT, "rotary_dim": 4}, "transformer.h.1", "attn", "mlp"),
    "LlamaForCausalLM": ("LlamaConfig", _LLAMA, "model.layers.1", "self_attn", "mlp"),
    "MistralForCausalLM": ("MistralConfig", _LLAMA, "model.layers.1", "self_attn", "mlp"),
    "MixtralForCausalLM": ("MixtralConfig", {**_LLAMA, "num_local_experts": 4}, "model.layers.1", "self_attn", "mlp"),
    "Qwen2ForCausalLM": ("Qwen2Config", _LLAMA, "model.layers.1", "self_attn", "mlp"),
    "GemmaForCausalLM": ("GemmaConfig", {**_LLAMA, "head_dim": 8}, "model.layers.1", "self_attn", "mlp"),
    "Gemma2ForCausalLM": ("Gemma2Config", {**_LLAMA, "head_dim": 8}, "model.layers.1", "self_attn", "mlp"),
    "CohereForCausalLM": ("CohereConfig", _LLAMA, "model.layers.1", "self_attn", "mlp"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {**_WIDE, "intermediate_size": 64}, "gpt_neox.layers.1", "attention", "mlp"),
    "OPTForCausalLM": ("OPTConfig", {**_OPT, "word_embed_proj_dim": 32}, "model.decoder.layers.1", "self_attn", "fc2"),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 53, "hidden_size": 32, "n_layer": 3, "n_head": 4}, "transformer.h.1", "self_attention", "mlp"),
    "FalconForCausalLM": ("FalconConfig", _WIDE, "transformer.h.1", "self_attention", "mlp"),
    "PhiForCausalLM": ("PhiConfig", {**_WIDE, "intermediate_size": 64}, "model.layers.1", "self_attn", "mlp"),
}  # fmt: skip
"""The class, its configuration, its second block, and its attention and MLP inside."""

TOKENS = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(4))


def made(name: str, config: str, options: dict[str, Any]) -> nn.Module:
    """Make a small model of transformers, with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**options)
    return getattr(transformers, name)(settings).eval()


def answer(model: nn.Module, given: Any) -> Tensor:
    """Return a model's own scores."""
    with torch.no_grad():
        return (model(**given) if isinstance(given, dict) else model(given)).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_names_serve_every_architecture(name: str) -> None:
    """And the last row of the lens is the model's own, to the bit; each other row differs."""
    config, options, block, attention, mlp = ARCHITECTURES[name]
    model = made(name, config, options)
    named = blocks(model, TOKENS)

    assert len(named) == len(named.layers) == 3
    assert named.layers[1].partition(":")[0] == block
    assert named.attentions[1] == f"{block}.{attention}:out[0]"
    assert named.mlps[1] == f"{block}.{mlp}:out"
    assert isinstance(model.get_submodule(named.embedding.partition(":")[0]), nn.Embedding)
    assert named.unembedding == "lm_head:out"
    assert "Norm" in type(model.get_submodule(named.norm.partition(":")[0])).__name__

    lens = logit_lens(model, TOKENS)
    assert lens.shape == (3, 2, 7, 53)
    assert_same_bits(lens[-1], answer(model, TOKENS))
    assert not torch.equal(lens[0], lens[-1])
    assert_same_bits(logit_lens(model, TOKENS, positions=-1), lens[:, :, -1])
    assert_unhooked(model)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma2ForCausalLM", "BloomForCausalLM"])
def test_a_row_is_what_the_model_gives_with_that_state(name: str) -> None:
    """The tail is the model's own, also where it caps its scores."""
    config, options, *_ = ARCHITECTURES[name]
    model = made(name, config, options)
    named = blocks(model, TOKENS)
    lens = logit_lens(model, TOKENS)

    with kedge.hook(model, named.layers[0], kedge.record()) as acts:
        answer(model, TOKENS)
    with kedge.hook(model, named.layers[-1], kedge.replace(acts[named.layers[0]])):
        assert_same_bits(lens[0], answer(model, TOKENS))


def test_every_name_is_hooked() -> None:
    """An edit at each of them changes the answer."""
    config, options, *_ = ARCHITECTURES["LlamaForCausalLM"]
    model = made("LlamaForCausalLM", config, options)
    named = blocks(model, TOKENS)
    plain = answer(model, TOKENS)

    singles = (named.embedding, named.norm, named.unembedding)
    for text in (*named.layers, *named.attentions, *named.mlps, *singles):
        with kedge.hook(model, text, kedge.scale(0.5)):
            assert not torch.equal(answer(model, TOKENS), plain), text


def test_an_encoder_and_a_decoder_are_told_apart() -> None:
    """Not silently: one of them must be named."""
    wide = {"vocab_size": 53, "d_model": 32, "num_layers": 3, "num_heads": 4, "d_ff": 64, "d_kv": 8}
    model = made("T5ForConditionalGeneration", "T5Config", wide)
    given = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    with pytest.raises(NoSiteMatched, match=r'"encoder.block" \(3\), "decoder.block" \(3\)'):
        blocks(model, given)

    named = blocks(model, given, inside="decoder")
    assert named.layers[2] == "decoder.block.2:out[0]"
    assert named.attentions[0] == "decoder.block.0.layer.0.SelfAttention:out[0]"
    assert named.mlps[0] == "decoder.block.0.layer.2.DenseReluDense:out"
    assert_same_bits(logit_lens(model, given, inside="decoder")[-1], answer(model, given))


def test_what_cannot_be_told_is_refused_when_asked_for() -> None:
    """BERT adds and normalizes inside its attention; its blocks and its lens exist."""
    model = made("BertForMaskedLM", "BertConfig", {**_WIDE, "intermediate_size": 64})
    named = blocks(model, TOKENS)
    assert named.layers[0] == "bert.encoder.layer.0:out"
    with pytest.raises(NoSiteMatched, match=r"its attention alone cannot be told; it calls bert"):
        named.attentions
    with pytest.raises(NoSiteMatched, match="no final norm that can be told"):
        named.norm
    assert "unembedding" in str(named)
    assert "attentions" not in str(named)
    assert_same_bits(logit_lens(model, TOKENS)[-1], answer(model, TOKENS))


class Looped(nn.Module):
    """One block, called three times, as in ALBERT; the answer is of the last token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(53, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks, self.answer = nn.ModuleList([layer]), nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.answer(x[:, -1])


def test_each_call_of_a_shared_block_is_a_layer() -> None:
    """Of a model that is not of transformers, and that does more than call modules."""
    model = Looped()
    named = blocks(model, TOKENS)
    assert named.layers == ("blocks.0#0:out", "blocks.0#1:out", "blocks.0#2:out")
    lens = logit_lens(model, TOKENS)
    assert lens.shape == (3, 2, 5)
    with torch.no_grad():
        assert_same_bits(lens[-1], model(TOKENS))
        again = Looped()
        state = again.blocks[0](again.words(TOKENS))
        torch.testing.assert_close(lens[0], again.answer(state[:, -1]))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "no list": lambda: nn.Linear(4, 4),
    "a list of layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    "several classes": lambda: nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_blocks_is_refused(name: str) -> None:
    """With what to do instead."""
    with pytest.raises(NoSiteMatched, match="no list of blocks"):
        blocks(REFUSED[name](), torch.randn(2, 4))


def test_an_output_without_scores_is_refused() -> None:
    """Two tensors, and neither is called logits."""

    class Two(Looped):
        def forward(self, words: Tensor) -> Any:
            return super().forward(words), self.words(words)

    with pytest.raises(InterventionError, match="scores cannot be told"):
        logit_lens(Two(), TOKENS)
