"""Models of several kinds keep at least as much less as is promised, and every gradient keeps its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kedge
from kedge.offload.offload import offload
from kedge.offload.rebuild import find

WIDTH, HEADS, WORDS = 64, 4, 97


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.before(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), 0.1)
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self):
        super().__init__()
        self.words, self.blocks = (
            nn.Embedding(WORDS, WIDTH),
            nn.Sequential(*(Block() for _ in range(4))),
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.norm(self.blocks(F.dropout(self.words(x), 0.1))))


class Bottleneck(nn.Module):
    """A block of a ResNet, in place as in torchvision."""

    def __init__(self, width):
        super().__init__()
        self.a, self.an = nn.Conv2d(width, width // 4, 1, bias=False), nn.BatchNorm2d(width // 4)
        self.b, self.bn = (
            nn.Conv2d(width // 4, width // 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(width // 4),
        )
        self.c, self.cn = nn.Conv2d(width // 4, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn(self.b(self.relu(self.an(self.a(x))))))
        y = self.cn(self.c(y))
        y += x
        return self.relu(y)


def resnet():
    """A small ResNet."""
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    return nn.Sequential(
        *stem,
        *(Bottleneck(64) for _ in range(5)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def mobile():
    """Depthwise convolutions, with the activations of mobile networks."""
    layers = []
    for act in (nn.Hardswish(inplace=True), nn.SiLU(), nn.ReLU6(inplace=True), nn.ELU(), nn.Mish()):
        layers += [
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            act,
            nn.Conv2d(16, 16, 1),
        ]
        layers += [nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, 16, 1), *layers)


def llama(keys=4):
    """A Llama with random weights."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=176, num_hidden_layers=4, num_attention_heads=HEADS,
            num_key_value_heads=keys, use_cache=False,
        )
    )  # fmt: skip


def vit():
    """A vision transformer with random weights."""
    transformers = pytest.importorskip("transformers")
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=HEADS, intermediate_size=256, image_size=32,
            patch_size=4, num_labels=5,
        )
    )  # fmt: skip


def words():
    """Token numbers."""
    return torch.randint(0, WORDS, (4, 128))


def pictures(size=64):
    """Pictures."""
    return torch.randn(4, 3, size, size)


CASES = {
    "gpt": (Gpt, words, 1.6),
    "resnet": (resnet, pictures, 2.0),
    "mobile": (mobile, pictures, 1.3),
    "llama": (llama, words, 1.6),
    "llama, shared keys": (lambda: llama(2), words, 1.6),
    "vit": (vit, lambda: pictures(32), 1.6),
}


def loss_of(model, x):
    """A number that all outputs take part in."""
    out = model(x)
    return getattr(out, "logits", out).float().square().mean()


def gradients(model, x, amp, offloaded=None):
    """The gradients of one step, with the noise of always."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with offloaded if offloaded is not None else torch.enable_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = loss_of(model, x)
        loss.backward()
    model.load_state_dict(state)
    return {name: p.grad for name, p in model.named_parameters()}


def kept(account):
    """The bytes that are held for backward, and would not be without it."""
    total = account.total
    owned = sum(total.kept[why].bytes for why in ("parameter", "buffer", "input"))
    return total.sum("kept").bytes - owned + total.extra


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("name", "lasting"),
    [
        *((name, False) for name in CASES),
        *((name, True) for name, case in CASES.items() if case[1] is not words),
    ],
)
def test_gradients_keep_their_bits_and_less_is_kept(name, lasting, amp):
    """Every gradient is the same to the last bit, channels last or not; no rule is dropped; that many times less is kept."""
    build, given, fewer = CASES[name]
    torch.manual_seed(0)
    model, x = build().train(), given()
    if lasting:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    plain = gradients(model, x, amp)
    block = offload(model, min_bytes=1024)
    for _ in range(2):
        found = gradients(model, x, amp, block)
        assert [
            p
            for p, grad in plain.items()
            if not (grad is found[p] is None or torch.equal(grad, found[p]))
        ] == []
    assert block.account.dropped == {}
    assert block.account.total.naive >= fewer * kept(block.account)


def test_a_rule_that_lies_is_found_out(monkeypatch):
    """A rule that makes another tensor than was saved is not used: the account says so, and gradients are right."""
    lies = []

    def lying(value, handle_of):
        recipe = find(value, handle_of)
        if recipe is not None and recipe.rule == "gelu":
            true = recipe._term
            recipe._term = lambda inputs: true(inputs).mul_(1 + 1e-6)
            lies.append(recipe.rule)
        return recipe

    monkeypatch.setattr("kedge.offload.offloading.find", lying)
    torch.manual_seed(0)
    model, x = Gpt().train(), words()
    plain = gradients(model, x, amp=False)
    block = kedge.offload(model, min_bytes=1024)
    found = gradients(model, x, False, block)

    assert lies
    assert list(block.account.dropped) == ["gelu"]
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert block.account.total.rebuilt["layer_norm"].number > 0
    assert "gelu" not in block.account.total.rebuilt
