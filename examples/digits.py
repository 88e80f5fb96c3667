"""Train a small network on scikit-learn's handwritten digits: a healthy one, or one with an honest mistake.

    python examples/digits.py --model healthy

The mistakes are ones that people make:

* ``deep-sigmoid``: ten sigmoid layers, so that hardly any gradient reaches the first of them;
* ``dying-relu``: a learning rate so large that the ReLUs fall silent and never recover;
* ``log-of-zero``: log and softmax apart, and a temperature that falls without a floor, until a
  probability is too small for a float and its logarithm is that of zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

BATCH = 64
TEST_IMAGES = 360


class ConvNet(nn.Module):
    """Two convolutions and two linear layers, with batch normalization or without; gives logits."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1, bias=not norm)
        self.norm1 = nn.BatchNorm2d(32) if norm else nn.Identity()
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1, bias=not norm)
        self.norm2 = nn.BatchNorm2d(64) if norm else nn.Identity()
        self.relu2 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(64 * 4 * 4, 128, bias=not norm)
        self.norm3 = nn.BatchNorm1d(128) if norm else nn.Identity()
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu1(self.norm1(self.conv1(images)))
        x = self.pool(self.relu2(self.norm2(self.conv2(x))))
        x = self.relu3(self.norm3(self.fc1(x.flatten(1))))
        return self.fc2(x)


class DeepSigmoid(nn.Module):
    """Ten hidden layers, each with a sigmoid; gives logits."""

    def __init__(self, depth: int = 10, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Sigmoid()]
        self.hidden = nn.Sequential(*layers)
        self.output = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.hidden(images.flatten(1)))


class Log(nn.Module):
    """The natural logarithm."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Sharpening(nn.Module):
    """Log-probabilities at a temperature that falls a little with every training batch."""

    def __init__(self, net: nn.Module, factor: float = 0.98) -> None:
        super().__init__()
        self.net = net
        self.softmax = nn.Softmax(dim=1)
        self.log = Log()
        self.factor = factor
        self.temperature = 1.0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.temperature *= self.factor
        return self.log(self.softmax(self.net(images) / self.temperature))


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained."""

    build: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy


RECIPES = {
    "healthy": Recipe(lambda: ConvNet(norm=True), torch.optim.Adam, lr=0.001),
    "deep-sigmoid": Recipe(DeepSigmoid, torch.optim.SGD, lr=0.1),
    "dying-relu": Recipe(lambda: ConvNet(norm=False), torch.optim.Adam, lr=0.1),
    "log-of-zero": Recipe(
        lambda: Sharpening(ConvNet(norm=True)), torch.optim.Adam, lr=0.001, loss=functional.nll_loss
    ),
}


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Load the 1797 images, 8 by 8 pixels, and their labels, in an order that the seed decides."""
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target)[order]


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of the outputs whose largest entry is the label's."""
    return (outputs.argmax(dim=1) == labels).float().mean().item()


def train(
    model: nn.Module, recipe: Recipe, images: Tensor, labels: Tensor, *, steps: int, lr: float
) -> None:
    """Train on random batches, and say now and then how it goes."""
    optimizer = recipe.optimizer(model.parameters(), lr=lr)
    model.train()
    for step in range(steps):
        batch = torch.randint(len(images), (BATCH,))
        outputs = model(images[batch])
        loss = recipe.loss(outputs, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"step {step:4}  loss {loss.item():.4f}  accuracy {accuracy(outputs, labels[batch]):.1%}"
            )


def main(arguments: list[str] | None = None) -> None:
    """Train the model that the command line asks for, and test it on images it has not seen."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--model", choices=list(RECIPES), default="healthy")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="learning rate; each model has its own")
    args = parser.parse_args(arguments)

    torch.set_num_threads(
        1
    )  # layers this small gain little from a second core, and lose much if it is busy
    torch.manual_seed(args.seed)
    recipe = RECIPES[args.model]
    images, labels = digits(args.seed)
    model = recipe.build()
    lr = recipe.lr if args.lr is None else args.lr
    train(model, recipe, images[TEST_IMAGES:], labels[TEST_IMAGES:], steps=args.steps, lr=lr)

    model.eval()
    with torch.no_grad():
        print(f"test accuracy {accuracy(model(images[:TEST_IMAGES]), labels[:TEST_IMAGES]):.1%}")


if __name__ == "__main__":
    main()
