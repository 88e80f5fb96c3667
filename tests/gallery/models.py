"""The networks of the gallery, built from torch alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fill(layer: nn.Linear, weight: list[list[float]], bias: list[float]) -> nn.Linear:
    """Set the weights of a layer."""
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    return layer


class TwoLayers(nn.Module):
    """Two linear layers whose outputs and gradients can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        rows = [[1.0, 2, 3], [-4.0, -5, -6], [7.0, 8, 9], [-10.0, -11, -12]]
        self.fc1 = fill(nn.Linear(3, 4), rows, [1, 2, 3, 4])
        self.relu = nn.ReLU()
        self.fc2 = fill(nn.Linear(4, 1), [[1, 2, 3, 4]], [1])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.relu(self.fc1(x)))


class Sum(nn.Module):
    """Adds three arguments."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + b + c


class Witness(nn.Module):
    """Ones everywhere, and a diary of what its forward gave and got."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = fill(nn.Linear(2, 2), [[1, 1], [1, 1]], [1, 1])
        self.fc2 = fill(nn.Linear(2, 1), [[1, 1]], [1])
        self.relu = nn.ReLU()
        self.relu6 = nn.ReLU6()
        self.diary: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named_children():
            before, x = x, layer(x)
            self.diary[name] = before, x
        return x


class Functional(nn.Module):
    """A convolutional net whose forward calls functions between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv(x)))
        return self.fc(x.view(x.size(0), -1))


class ConvNet(nn.Module):
    """A convolution, a ReLU and a linear layer for one image of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(160, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.conv(x)).view(-1))


class Affine(nn.Module):
    """Two wide linear layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.relu(self.fc1(x)))


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or a 3x3 between two 1x1; one in-place ReLU for all of them."""

    def __init__(self, before: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        shapes = [(before, width, 3, stride), (width, after, 3, 1)]
        if bottleneck:
            shapes = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shapes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        way = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            way = norm(conv(way))
            if i < len(self.convs) - 1:
                way = self.relu(way)
        way += self.downsample(x)
        return self.relu(way)


class ResNet(nn.Module):
    """A residual net for 1,000 classes, with the names that everybody knows."""

    def __init__(self, depths: tuple[int, int, int, int], *, bottleneck: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for i, depth in enumerate(depths):
            width, grown = 64 << i, (64 << i) * (4 if bottleneck else 1)
            first = Block(before, width, 2 if i else 1, bottleneck=bottleneck)
            others = (Block(grown, width, 1, bottleneck=bottleneck) for _ in range(depth - 1))
            setattr(self, f"layer{i + 1}", nn.Sequential(first, *others))
            before = grown
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for name, child in self.named_children():
            x = child(x.flatten(1) if name == "fc" else x)
        return x


def resnet18() -> ResNet:
    """Make a ResNet-18."""
    return ResNet((2, 2, 2, 2), bottleneck=False)


def resnet50() -> ResNet:
    """Make a ResNet-50."""
    return ResNet((3, 4, 6, 3), bottleneck=True)


class VGG16(nn.Module):
    """Thirteen convolutions and three linear layers; these are narrower than the original's 4,096."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_vgg_layers())
        hidden = 64
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def _vgg_layers() -> Iterator[nn.Module]:
    before = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            yield nn.Conv2d(before, width, 3, padding=1)
            yield nn.ReLU(inplace=True)
            before = width
        yield nn.MaxPool2d(2)
