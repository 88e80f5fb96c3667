"""The trainings that are measured: an MLP, ResNets and GPTs, each with one batch on the device."""

from __future__ import annotations

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from on_card.device import Device


class Training:
    """A model with its batch and its optimizer.

    Args:
        on: What it runs on.
        model: The model, there.
        x: Its batch.
        y: The labels.
        bf16: Whether the forward runs under autocast.
        adam: Whether the optimizer is AdamW; SGD without momentum otherwise.
    """

    def __init__(
        self,
        on: Device,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        bf16: bool = True,
        adam: bool = True,
    ) -> None:
        self.kind, self.bf16 = on.kind, bf16
        self.model, self.x, self.y = model, x, y
        self.optimizer: torch.optim.Optimizer
        if adam:
            fused = on.kind == "cuda"
            self.optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=fused)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(self) -> Tensor:
        """Take one step; return the loss, which nobody has waited for."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.bf16):
            logits = self.model(self.x)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


Made = tuple[nn.Module, Tensor, Tensor]


def mlp(on: Device, *, width: int = 256, layers: int = 10) -> Made:
    """Make an MLP and a batch of 128."""
    torch.manual_seed(0)
    with on.device:
        hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*hidden, nn.Linear(width, 10))
        return model, torch.randn(128, width), torch.randint(0, 10, (128,))


def resnet(on: Device, depths: tuple[int, ...], batch: int, size: int = 224) -> Made:
    """Make a ResNet of bottlenecks and a batch of images."""
    torch.manual_seed(0)
    with on.device:
        images = torch.randn(batch, 3, size, size)
        return models.DeepResNet(depths), images, torch.randint(0, 1000, (batch,))


def small_images(on: Device, batch: int = 2, size: int = 16) -> Made:
    """Make a net with convolutions and batch norms that is there to be tried."""
    torch.manual_seed(0)
    with on.device:
        first = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
        second = [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
        images = torch.randn(batch, 3, size, size)
        return nn.Sequential(*first, *second, *end), images, torch.randint(0, 10, (batch,))


def gpt(
    on: Device,
    *,
    layers: int,
    width: int,
    heads: int,
    length: int,
    batch: int = 8,
    words: int = 8192,
) -> Made:
    """Make a GPT with dropout and a batch of texts."""
    torch.manual_seed(0)
    with on.device:
        texts = torch.randint(0, words, (batch, length + 1))
        model = models.GPT(
            layers=layers, width=width, heads=heads, words=words, length=length, dropout=0.1
        )
        return model, texts[:, :-1], texts[:, 1:].reshape(-1)


def small_gpt(on: Device) -> Made:
    """Make a GPT that is there to be tried."""
    return gpt(on, layers=1, width=16, heads=2, length=8, batch=2, words=32)


def gpt_768(on: Device) -> Made:
    """Make the GPT of 12 layers and width 768."""
    return gpt(on, layers=12, width=768, heads=12, length=256)
