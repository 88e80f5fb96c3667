"""The models of the benchmarks, written out in plain PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        plain = stride == 1 and inside == width
        self.downsample = (
            None
            if plain
            else nn.Sequential(
                nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inside, h, w] to [n, width, h / stride, w / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + shortcut)


class ResNet18(nn.Module):
    """ResNet-18: 11.7 million parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 128, 256, 512)
        for i in range(1, 5):
            blocks = [
                Block(widths[i - 1], widths[i], 1 if i == 1 else 2),
                Block(widths[i], widths[i], 1),
            ]
            setattr(self, f"layer{i}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [n, 3, h, w] to logits [n, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, with a shortcut; four times as wide outside."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        plain = stride == 1 and inside == 4 * width
        self.downsample = (
            None
            if plain
            else nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, inside, h, w] to [n, 4 * width, h / stride, w / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


class DeepResNet(nn.Module):
    """ResNet-50 (depths 3, 4, 6, 3: 25.6 million parameters) and its deeper kin, as torchvision builds them."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inside = 64
        for i, depth in enumerate(depths):
            width = 64 * 2**i
            stride = 1 if i == 0 else 2
            blocks = [
                Bottleneck(inside if j == 0 else 4 * width, width, stride if j == 0 else 1)
                for j in range(depth)
            ]
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
            inside = 4 * width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [n, 3, h, w] to logits [n, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, t, width] to the same shape."""
        n, t, width = x.shape
        q, k, v = (
            y.view(n, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(y.transpose(1, 2).reshape(n, t, width)))


class Layer(nn.Module):
    """A transformer block with the norms in front."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        if dropout:
            self.mlp.append(nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, t, width] to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2-like decoder: 12 layers, width 384, 27 million parameters, unless told otherwise."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 384,
        heads: int = 6,
        words: int = 8192,
        length: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Map word numbers [n, t] to logits [n, t, words]."""
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.ln_f(self.h(self.wte(words) + self.wpe(places))))


class Encoder(nn.Module):
    """One layer of a vision transformer: attention of all patches, then two linear ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, patches, width] to the same."""
        inside = self.norm1(x)
        x = x + self.attention(inside, inside, inside, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer."""

    def __init__(
        self, layers: int, width: int, heads: int, size: int, patch: int = 8, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(Encoder(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, size, size] to [n, classes]."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Twice(nn.Sequential):
    """Two 3x3 convolutions, each with batch norm and ReLU."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(inside, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A U-Net: each level of the way down is an input of that level of the way up."""

    def __init__(self, width: int, levels: int, classes: int = 10) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(map(Twice, [3, *widths], widths))
        self.up = nn.ModuleList(
            Twice(wide + narrow, narrow) for narrow, wide in itertools.pairwise(widths)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, h, w] to [n, h, w, classes]."""
        beside = []
        for level, block in enumerate(self.down):
            if level:
                x = F.max_pool2d(x, 2)
            x = block(x)
            beside.append(x)
        for block, other in zip(reversed(self.up), reversed(beside[:-1]), strict=True):
            x = block(torch.cat([other, F.interpolate(x, scale_factor=2)], 1))
        return self.head(x).permute(0, 2, 3, 1)


def resnet(batch: int = 8, size: int = 96) -> tuple[nn.Module, Tensor, Tensor]:
    """Make the ResNet-18-sized model with a batch and its labels."""
    torch.manual_seed(0)
    return ResNet18(), torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))


def gpt(batch: int = 4, length: int = 128) -> tuple[nn.Module, Tensor, Tensor]:
    """Make the GPT-2-like model with a batch and its next words."""
    torch.manual_seed(0)
    words = torch.randint(0, 8192, (batch, length + 1))
    return GPT(length=length), words[:, :-1], words[:, 1:].reshape(-1)


def step(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    logits = model(x)
    F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y).backward()
    optimizer.step()
