"""Poolings over positions: which dimensions they are, and which of them are padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import ActionError, ExtractError, InTrainingMode
from kedge.features.pooling import Pool

LENGTHS = (4, 5, 7)
MASK = torch.tensor([[int(place < length) for place in range(7)] for length in LENGTHS])
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def ids() -> torch.Tensor:
    """Make the tokens of three sentences."""
    return torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(1))


def made(name: str, **settings: object) -> nn.Module:
    """Make a small model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return model


def bert() -> nn.Module:
    """Make an encoder."""
    return made(
        "Bert",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
    )


def gpt() -> nn.Module:
    """Make a decoder."""
    return made(
        "GPT2", n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    )


ALONE = {
    "mean": lambda tokens: tokens.mean(0),
    "tokens": lambda tokens: tokens.mean(0),
    "max": lambda tokens: tokens.amax(0),
    "first": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
}


@pytest.mark.parametrize("how", ALONE)
def test_padding_is_left_out(how: str) -> None:
    """Each sentence has the value that it has alone, without padding."""
    model, tokens = bert(), ids()
    found = kedge.extract(model, {"encoder.layer.1": Pool(how)})(
        input_ids=tokens, attention_mask=MASK
    )
    with torch.no_grad():
        alone = [
            model(tokens[i : i + 1, :length]).last_hidden_state[0]
            for i, length in enumerate(LENGTHS)
        ]

    torch.testing.assert_close(
        found["encoder.layer.1"], torch.stack([ALONE[how](one) for one in alone])
    )


@pytest.mark.parametrize("how", ["first", "last"])
def test_padding_may_be_on_the_left(how: str) -> None:
    """The first and the last token are those that the mask leaves."""
    model, given = gpt(), {"input_ids": ids(), "attention_mask": MASK.flip(1)}
    found = kedge.extract(model, {"h.1": Pool(how)})(**given)["h.1"]
    whole = kedge.extract(model, ["h.1"])(**given)["h.1"]
    tokens = [whole[i, 7 - length :] for i, length in enumerate(LENGTHS)]

    torch.testing.assert_close(found, torch.stack([ALONE[how](one) for one in tokens]))


def test_later_batches_of_other_lengths_are_pooled_alike() -> None:
    """What the first batch has shown holds for batches of other shapes, and of one sample."""
    model, tokens = bert(), ids()
    features = kedge.extract(model, {"encoder.layer.1": Pool("mean")})
    together = features(input_ids=tokens, attention_mask=MASK)["encoder.layer.1"]
    for i, length in enumerate(LENGTHS):
        one = slice(i, i + 1)
        alone = features(input_ids=tokens[one, :length], attention_mask=MASK[one, :length])[
            "encoder.layer.1"
        ]
        torch.testing.assert_close(alone[0], together[i])


def test_a_mask_is_that_of_its_own_tokens() -> None:
    """The encoder's mask does not apply to the decoder, although it has as many tokens."""
    model = made("T5", d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=50)
    given = {"input_ids": ids(), "attention_mask": MASK, "decoder_input_ids": ids()}
    sites = ("encoder.final_layer_norm", "decoder.final_layer_norm")
    found = kedge.extract(model, dict.fromkeys(sites, Pool("mean")))(**given)
    whole = kedge.extract(model, list(sites))(**given)
    kept = [whole[sites[0]][i, :length].mean(0) for i, length in enumerate(LENGTHS)]

    torch.testing.assert_close(found[sites[0]], torch.stack(kept))
    torch.testing.assert_close(found[sites[1]], whole[sites[1]].mean(1))


def test_padding_that_cannot_be_found_again_is_an_error() -> None:
    """Frames made by a convolution are not the mask's positions; without padding, or on demand, they are pooled."""
    model = Frames()
    given = {"input_values": torch.randn(3, 14), "attention_mask": MASK.repeat_interleave(2, 1)}
    with pytest.raises(
        ExtractError, match=r"attention_mask, 14 positions.* the 6 positions.*padding=keep"
    ):
        kedge.extract(model, {"fc": Pool("mean")})(**given)
    whole = kedge.extract(model, ["fc"])(**given)["fc"].mean(1)
    kept = kedge.extract(model, {"fc": Pool("mean", padding="keep")})(**given)["fc"]
    full = kedge.extract(model, {"fc": Pool("mean")})(given["input_values"], torch.ones(3, 14))[
        "fc"
    ]

    torch.testing.assert_close(kept, whole)
    torch.testing.assert_close(full, whole)


class Frames(nn.Module):
    """Takes audio, and makes fewer frames of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(1, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, input_values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.conv(input_values[:, None]).transpose(1, 2))
        return out


def test_a_class_token_is_said() -> None:
    """A mean over the tokens of a ViT counts the class token, and the words say so."""
    model = made(
        "ViT", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )  # fmt: skip
    features = kedge.extract(model, {"layernorm": Pool("mean")})
    found = features(pixel_values=IMAGES)["layernorm"]

    torch.testing.assert_close(
        found, kedge.extract(model, ["layernorm"])(pixel_values=IMAGES)["layernorm"].mean(1)
    )
    said = "mean over 17 positions of 32 channels (1 of them joined to 16, as class tokens are)"
    assert features.work.described == {"layernorm": said}


def test_sites_of_several_layouts_are_pooled_each_in_its_own() -> None:
    """Channels may be in dimension 1 and in the last one, in one model, and of equal sizes."""
    model = made("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    inner = "encoder.stages.0.layers.0.pwconv2"
    found = kedge.extract(model, dict.fromkeys(["encoder.stages.0", inner], Pool("mean")))(
        pixel_values=IMAGES
    )
    whole = kedge.extract(model, ["encoder.stages.0", inner])(pixel_values=IMAGES)

    assert whole["encoder.stages.0"].shape == whole[inner].shape == (3, 8, 8, 8)
    torch.testing.assert_close(found["encoder.stages.0"], whole["encoder.stages.0"].mean((2, 3)))
    torch.testing.assert_close(found[inner], whole[inner].mean((1, 2)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_say_which_dimension_is_the_sequence(
    kind: type, *, batch_first: bool
) -> None:
    """The rows are those of samples, also where the sequence comes first."""
    layer, values = kind(16, 8, batch_first=batch_first), torch.randn(3, 7, 16)
    given = values
    if not batch_first:
        given = values.transpose(0, 1)
    found = kedge.extract(layer, {":out[0]": Pool("last")})(given)[":out[0]"]
    whole = layer(given)[0].detach()

    torch.testing.assert_close(found, whole[:, -1] if batch_first else whole[-1])


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors"
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_mask_of_an_encoder_is_used(*, batch_first: bool) -> None:
    """PyTorch's encoders, of either order, have key_padding_mask; the fast path with nested tensors runs too."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first), 1
    ).eval()
    values = torch.randn(3, 7, 16)
    given = values
    if not batch_first:
        given = values.transpose(0, 1)
    found = kedge.extract(model, {":out": Pool("mean")})(given, src_key_padding_mask=MASK == 0)[
        ":out"
    ]
    with torch.no_grad():
        whole = model(given, src_key_padding_mask=MASK == 0)
    if not batch_first:
        whole = whole.transpose(0, 1)

    torch.testing.assert_close(
        found, torch.stack([whole[i, :n].mean(0) for i, n in enumerate(LENGTHS)])
    )


def test_what_is_not_known_is_an_error_that_names_the_way_out() -> None:
    """Two dimensions of channels show no position, and lost dimensions show nothing; naming the channels helps."""
    model, values = nn.Linear(7, 7), torch.randn(3, 5, 7)
    mixed = Mixing()
    with pytest.raises(
        ExtractError, match=r"do not show which dimensions are positions.*mean\(channels=-1\)"
    ):
        kedge.extract(mixed, {":out": Pool("mean")})(values)
    found = kedge.extract(mixed, {":out": Pool("mean", channels=-1)})(values)[":out"]

    torch.testing.assert_close(found, mixed(values).mean(1).detach())
    assert kedge.extract(model, {":out": Pool("mean")})(values)[":out"].shape == (3, 7)


class Mixing(nn.Module):
    """Sorts, which leaves no dimension as it was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unfold(1, 2, 1).sort(1).values.flatten(2)


def test_a_forward_that_the_features_did_not_begin_shows_no_dimensions() -> None:
    """Poolings need the arguments; the error in a block of collect() says so."""
    model = nn.Conv2d(3, 4, 3)
    with pytest.raises(ActionError, match="known only from a call of the features"):
        with kedge.extract(model, {":out": Pool("mean")}).collect():
            model(IMAGES)


@pytest.mark.parametrize(
    "given", [{"how": "median"}, {"how": "mean", "channels": 0}, {"how": "mean", "padding": "drop"}]
)
def test_impossible_poolings_are_refused(given: dict[str, object]) -> None:
    """They are refused where they are made."""
    with pytest.raises(ExtractError):
        Pool(**given)


def test_following_a_forward_changes_no_bit() -> None:
    """The first forward, whose operations are seen, returns the same bits as later ones."""
    features = kedge.extract(bert(), {"encoder.layer.1": Pool("flatten")})
    first, second = (
        features(input_ids=ids(), attention_mask=MASK)["encoder.layer.1"] for _ in range(2)
    )

    assert torch.equal(first, second)


def test_training_mode_is_said_once() -> None:
    """Features of a model in training mode are not those of the model in use; a graph for training needs no warning."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    features = kedge.extract(model, ["2"])
    with pytest.warns(
        InTrainingMode, match=r"BatchNorm1d 1, Dropout 2.*running statistics.*model\.eval\(\)"
    ):
        features(torch.randn(3, 4))
    features(torch.randn(5, 4))
    kedge.extract(model, ["2"], no_grad=False)(torch.randn(3, 4))
