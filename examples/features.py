"""Train a small classifier on scikit-learn's handwritten digits, and draw a map of what its layers make of them.

    python examples/features.py --out features --picture features.png

The features of all 1797 images go into a folder, batch by batch; started again, it finds them
there. The map shows each image of the test set by the two principal components of a layer's
features.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.features.dataset import FeatureSet
from kedge.figures import scatter

TEST_IMAGES = 360


class Classifier(nn.Module):
    """Two convolutions and two linear layers; gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(64 * 4 * 4, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.conv2(functional.relu(self.conv1(images)))))
        return self.output(functional.relu(self.hidden(x.flatten(1))))


def digits() -> tuple[Tensor, Tensor]:
    """Load the images, 8 by 8 pixels, and their labels, in an order that is always the same."""
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target)[order]


def dataset() -> TensorDataset:
    """All images with their labels."""
    return TensorDataset(*digits())


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    """Train on random batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(steps: int = 100) -> Classifier:
    """Train a classifier on all but the test set; it is the same each time, and in every process."""
    torch.set_num_threads(1)  # layers this small gain little from a second core
    torch.manual_seed(0)
    images, labels = digits()
    model = Classifier()
    train(model, images[TEST_IMAGES:], labels[TEST_IMAGES:], steps)
    return model


def take(model: nn.Module, data: TensorDataset, out: Path) -> FeatureSet:
    """Write the features of every image into a folder."""
    sites = {"conv2": lambda values: values.mean((2, 3)), "/relu#2": None, ":out": None}
    features = kedge.extract(model.eval(), sites, rename={"/relu#2": "hidden", ":out": "logits"})
    return features.dataset(DataLoader(data, batch_size=128), out)


def main(arguments: list[str] | None = None) -> None:
    """Train, take the features, and draw the map."""
    parser = argparse.ArgumentParser(
        description="Take the features of handwritten digits and draw a map of them."
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder for the features (default: one that is removed afterwards)",
    )
    parser.add_argument("--picture", type=Path, default=Path("features.png"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(arguments)

    model, (images, labels) = trained(args.steps), digits()
    with tempfile.TemporaryDirectory() as folder:
        taken = take(model, TensorDataset(images, labels), args.out or Path(folder) / "features")
        print(taken)
        right = taken["logits"][:TEST_IMAGES].argmax(1) == labels[:TEST_IMAGES]
        hidden = taken["hidden"][:TEST_IMAGES]
    print(f"test accuracy {right.float().mean():.1%}")
    title = f"{TEST_IMAGES} digits that the network has not seen, by their hidden features"
    scatter(
        hidden, labels[:TEST_IMAGES], names=[str(digit) for digit in range(10)], title=title
    ).savefig(args.picture)
    print(f"wrote {args.picture}")


if __name__ == "__main__":
    main()
