"""Train a small network on scikit-learn's handwritten digits, and draw what in an image its answers hang on.

    python examples/guided_backprop.py --save digits.png

Its ReLUs are calls of ``F.relu``, which is how most people write them: there is no module whose
backward could be changed. Drawn are the image, the gradient of the answer's score (whose size is
the saliency), its mean over noisy copies (SmoothGrad), guided backpropagation, and Grad-CAM at the
second convolution: red speaks for the digit, blue against it.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from kedge.figures import attributions
from kedge.recipes import grad_cam, gradient, guided_backprop, smoothgrad

BATCH = 64
STEPS = 400
TEST_IMAGES = 360
SHOWN = (0, 2, 3, 4, 6)
INK = 0.5


class ConvNet(nn.Module):
    """Two convolutions and two linear layers; gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Load the 1797 images, 8 by 8 pixels, and their labels, in an order that the seed decides."""
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target)[order]


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train on random batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,))
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def explained(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Ask in four ways what speaks for the label, and what against it."""
    return {
        "gradient": gradient(model, labels)(images),
        "SmoothGrad": smoothgrad(gradient(model, labels), samples=50, noise=0.2, at_once=10)(
            images
        ),
        "guided": guided_backprop(model, labels)(images),
        "Grad-CAM": grad_cam(model, "conv2", labels, positive=False)(images),
    }


def on_ink(found: Tensor, images: Tensor) -> float:
    """Return how much of what speaks for the label lies where the image has ink."""
    speaks = found.reshape(images.shape).clamp(min=0)
    return float(speaks[images > INK].sum() / speaks.sum())


def main(arguments: list[str] | None = None) -> None:
    """Train, test and draw."""
    parser = argparse.ArgumentParser(
        description="Draw what in an image of a digit a network's answer hangs on."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save", default="digits.png", metavar="FILE", help="where the picture goes"
    )
    args = parser.parse_args(arguments)

    torch.set_num_threads(1)  # layers this small gain little from a second core
    torch.manual_seed(args.seed)
    images, labels = digits(args.seed)
    model = ConvNet()
    train(model, images[TEST_IMAGES:], labels[TEST_IMAGES:])
    model.eval()
    answers = model(images[:TEST_IMAGES]).argmax(1)
    print(f"test accuracy {(answers == labels[:TEST_IMAGES]).float().mean():.1%}")

    tested, said = images[:TEST_IMAGES], labels[:TEST_IMAGES]
    for name, found in explained(model, tested, said).items():
        print(f"{name:10}  {on_ink(found, tested):.0%} of what speaks for the digit is on its ink")
    some = torch.tensor([int((said == digit).nonzero()[0]) for digit in SHOWN])
    maps = explained(model, images[some], labels[some])
    figure = attributions(
        maps, images[some], labels=[f"a {digit}" for digit in labels[some].tolist()]
    )
    figure.savefig(args.save)
    print(f"the picture is {args.save}")


if __name__ == "__main__":
    main()
