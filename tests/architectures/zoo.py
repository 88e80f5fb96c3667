"""Tiny architectures of `transformers` with random weights, each with a batch and a scalar loss.

Every one is built from a configuration, so that nothing is downloaded, keeps its dropout and its
stochastic depth on, and trains a step in a fraction of a second. Each property is shown on a
`SAMPLE` of them, and on all by `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    ConvNextConfig,
    ConvNextForImageClassification,
    ElectraConfig,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    OPTConfig,
    OPTForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.marks import sampled

Batch = dict[str, Tensor]

_VOCAB = 64
_IDS = {"vocab_size": _VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ = {**_IDS, "decoder_start_token_id": 1}


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo.

    Attributes:
        name: As in a test's id.
        family: Which kind of architecture it stands for.
        model: The class.
        config: Its configuration class.
        options: What makes it tiny.
        batch: Makes the inputs, labels included, from the random state.
    """

    name: str
    family: str
    model: Callable[[Any], nn.Module]
    config: Callable[..., Any]
    options: Mapping[str, Any]
    batch: Callable[[], Batch]

    def build(self, seed: int = 0) -> nn.Module:
        """Make the model in training mode, its weights drawn from the seed."""
        torch.manual_seed(seed)
        return self.model(self.config(**self.options)).train()

    def inputs(self, seed: int = 1) -> Batch:
        """Make the batch of a seed."""
        torch.manual_seed(seed)
        return self.batch()

    def loss(self, output: Any) -> Tensor:
        """Return the scalar to differentiate: the model's own loss."""
        loss: Tensor = output.loss
        return loss


def _text() -> Batch:
    ids = torch.randint(3, _VOCAB, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _sentences() -> Batch:
    return {**_text(), "labels": torch.tensor([0, 2])}


def _replaced_tokens() -> Batch:
    return {**_text(), "labels": torch.randint(0, 2, (2, 9))}


def _pairs() -> Batch:
    return {**_text(), "labels": torch.randint(3, _VOCAB, (2, 7))}


def _image(size: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 2])}


def _masks() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2, 32, 32))}


def _sound() -> Batch:
    return {"input_values": torch.randn(2, 800), "labels": torch.randint(3, _VOCAB, (2, 4))}


def _spectrum() -> Batch:
    return {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, _VOCAB, (2, 7))}


_ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
}
_LLAMA = {**_ENCODER, "num_key_value_heads": 1, "attention_dropout": 0.1}
_BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1,
}  # fmt: skip
_T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
}

ZOO = (
    Architecture(
        "resnet", "convolutional", ResNetForImageClassification, ResNetConfig,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_labels": 3}, _image(32),
    ),
    Architecture(
        "convnext", "convolutional", ConvNextForImageClassification, ConvNextConfig,
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.3, "num_labels": 3}, _image(32),
    ),
    Architecture(
        "mobilenet_v2", "convolutional", MobileNetV2ForImageClassification, MobileNetV2Config,
        {"image_size": 32, "depth_multiplier": 0.25, "num_labels": 3}, _image(32),
    ),
    Architecture("bert", "encoder", BertForMaskedLM, BertConfig, {**_IDS, **_ENCODER}, _text),
    Architecture(
        "roberta", "encoder", RobertaForSequenceClassification, RobertaConfig, {**_IDS, **_ENCODER, "num_labels": 3}, _sentences
    ),
    Architecture(
        "electra", "encoder", ElectraForPreTraining, ElectraConfig, {**_IDS, **_ENCODER, "embedding_size": 8}, _replaced_tokens
    ),
    Architecture(
        "gpt2", "decoder", GPT2LMHeadModel, GPT2Config, {**_IDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20},
        _text,
    ),
    Architecture("llama", "decoder", LlamaForCausalLM, LlamaConfig, {**_IDS, **_LLAMA}, _text),
    Architecture(
        "gpt_neox", "decoder", GPTNeoXForCausalLM, GPTNeoXConfig,
        {**_IDS, **_ENCODER, "hidden_dropout": 0.1, "attention_dropout": 0.1}, _text,
    ),
    Architecture(
        "opt", "decoder", OPTForCausalLM, OPTConfig,
        {**_IDS, **_ENCODER, "ffn_dim": 32, "word_embed_proj_dim": 8, "layerdrop": 0.3}, _text,
    ),
    Architecture("t5", "encoder-decoder", T5ForConditionalGeneration, T5Config, {**_SEQ, **_T5}, _pairs),
    Architecture(
        "bart", "encoder-decoder", BartForConditionalGeneration, BartConfig,
        {**_SEQ, **_BART, "encoder_layerdrop": 0.3}, _pairs,
    ),
    Architecture(
        "mixtral", "mixture of experts", MixtralForCausalLM, MixtralConfig,
        {**_IDS, **_LLAMA, "num_local_experts": 4, "output_router_logits": True, "router_jitter_noise": 0.1}, _text,
    ),
    Architecture(
        "switch", "mixture of experts", SwitchTransformersForConditionalGeneration, SwitchTransformersConfig,
        {**_SEQ, **_T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "expert_capacity": 4}, _pairs,
    ),
    Architecture(
        "mamba", "state space", MambaForCausalLM, MambaConfig,
        {**_IDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, _text,
    ),
    Architecture(
        "vit", "vision", ViTForImageClassification, ViTConfig,
        {**_ENCODER, "image_size": 16, "patch_size": 8, "num_labels": 3, "hidden_dropout_prob": 0.1}, _image(16),
    ),
    Architecture(
        "swin", "vision", SwinForImageClassification, SwinConfig,
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
         "drop_path_rate": 0.3, "num_labels": 3}, _image(16),
    ),
    Architecture(
        "segformer", "vision", SegformerForSemanticSegmentation, SegformerConfig,
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
         "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8,
         "num_labels": 3}, _masks,
    ),
    Architecture(
        "wav2vec2", "speech", Wav2Vec2ForCTC, Wav2Vec2Config,
        {**_IDS, **_ENCODER, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 4],
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "mask_time_prob": 0.2,
         "layerdrop": 0.3}, _sound,
    ),
    Architecture(
        "whisper", "speech", WhisperForConditionalGeneration, WhisperConfig,
        {**_SEQ, **_BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}, _spectrum,
    ),
)  # fmt: skip
BY_NAME = {a.name: a for a in ZOO}
#: One of each kind that differs most: convolutions, an encoder, a decoder whose weights are tied, a
#: mixture of experts.
SAMPLE = ("resnet", "bert", "gpt2", "mixtral")
architectures = pytest.mark.parametrize(
    "architecture", sampled(ZOO, [BY_NAME[name] for name in SAMPLE]), ids=lambda a: a.name
)
