"""The small programs on which every tool is tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it


def layers() -> tuple[nn.Sequential, Tensor]:
    """Make three modules in a row, and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.eval(), torch.randn(5, 4)


class Parts(nn.Module):
    """Returns a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"h": self.a(x), "rest": [self.b(x), x.exp()]}


class Overwrites(nn.Module):
    """Works in place, out of sight of its own lines, on a part of what a child returned."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x)
        zero_first(parts["rest"])
        return parts["h"] + parts["rest"][0] + parts["rest"][1]


class Sums(nn.Module):
    """Uses every part once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x)
        return parts["h"].sin() + parts["rest"][0].cos() * parts["rest"][1]


def zero_first(tensors: list[Tensor]) -> None:
    """Set the first tensor to zero."""
    tensors[0].zero_()


class Scaled(nn.Module):
    """Takes its second argument by keyword alone."""

    def forward(self, x: Tensor, *, by: Tensor) -> Tensor:
        return x * by


class Keyword(nn.Module):
    """Calls a module with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled = nn.Linear(4, 4), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, by=self.first(x).sin())


class Thrice(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).tanh()
        return x


class Block(nn.Module):
    """A residual block whose operations stand between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden)


class Rectified(nn.Module):
    """A net whose ReLUs are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(1, 4, 3), nn.Linear(144, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).flatten(1)
        return self.out(F.relu(self.hidden(x)))


def made(build: type[nn.Module], *shape: int) -> tuple[nn.Module, Tensor]:
    """Make a model in evaluation mode, and an input of a shape, by default of five samples."""
    torch.manual_seed(0)
    model = build().eval()
    return model, torch.randn(*(shape or (5, 4)))


def rectified() -> tuple[nn.Module, Tensor]:
    """Make the net of functional ReLUs and two images."""
    return made(Rectified, 2, 1, 8, 8)


def gpt(layers: int = 2, **more: Any) -> tuple[Any, Tensor]:
    """Make a small GPT-2 from its configuration alone, and the tokens of a sentence."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, **sizes, **ends, **more)).eval()
    return model, torch.randint(1, 50, (1, 6))


def llama(layers: int = 2) -> Any:
    """Make a small Llama from its configuration alone."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **heads, **sizes)).eval()
