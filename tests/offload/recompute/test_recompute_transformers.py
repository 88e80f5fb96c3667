"""Models of transformers: their layers are run again with masks by keyword, and with a cache that they write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from tests.offload.recompute.programs import check

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


def llama() -> nn.Module:
    """Return a small Llama."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    """Return a small GPT-2."""
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config).train()


def t5() -> nn.Module:
    """Return a small T5."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).train()


def llama_with_its_own() -> nn.Module:
    """Return a small Llama that checkpoints its layers itself."""
    model: Any = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("to", [kedge.Rebuild(), kedge.Disk()], ids=["rebuild", "disk"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    ("make", "recompute"),
    [
        (llama, "model.layers.*"),
        (llama, "model.layers.*.self_attn, model.layers.*.mlp"),
        (llama_with_its_own, "model.layers.*"),
        (gpt2, "transformer.h.*"),
        (t5, "encoder.block.*, decoder.block.*"),
    ],
)
def test_gradients(make: Callable[[], nn.Module], recompute: str, use_cache: bool, to: Any) -> None:
    """Gradients, buffers and random numbers are those of the bare model."""
    words = torch.arange(24).view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0

    def step(model: nn.Module) -> None:
        model(
            input_ids=words, attention_mask=mask, labels=words, use_cache=use_cache
        ).loss.backward()

    account = check(make, recompute, step, to=to)
    assert account.total.recomputed.number
