"""Draw the pictures of docs/how-to/figures.md from a network that is trained on digits.

python docs/pictures/figures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import kedge
from kedge import figures
from kedge.recipes.attribution.attribution import gradient
from kedge.recipes.attribution.rectifiers import guided_backprop
from kedge.recipes.interventions.patching import patch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

from digits import RECIPES, digits, train  # noqa: E402


def main() -> None:
    """Write the pictures beside this file."""
    torch.manual_seed(0)
    recipe = RECIPES["healthy"]
    model = recipe.build()
    images, labels = digits(0)
    train(model, recipe, images, labels, steps=200, lr=recipe.lr)
    model.eval()
    some, classes = images[:360], labels[:360]
    names = ["conv1", "relu1", "conv2", "relu2", "pool", "fc1", "relu3", "fc2"]

    with kedge.session() as session:
        outputs = session.hook(model, ", ".join(names), kedge.record())
        grads = session.hook(model, ", ".join(f"{name}:out.grad" for name in names), kedge.record())
        functional.cross_entropy(model(some), classes).backward()
    values = {name: outputs[name] for name in names}
    gradients = {name: grads[f"{name}:out.grad"] for name in names}

    draw(
        "feature-maps",
        figures.feature_maps(values["relu1"], most=16, title=f"relu1, a digit {classes[0]}"),
    )
    draw("distributions", figures.distributions(values, gradients))
    draw("ridges", figures.distributions(values, gradients, kind="ridges"))
    draw("scatter", figures.scatter(values["relu3"], classes, title="relu3: 360 digits"))
    methods = {
        "gradient": gradient(model, classes[:4]),
        "guided backprop": guided_backprop(model, classes[:4]),
    }
    maps = {name: method(some[:4]) for name, method in methods.items()}
    said = [f"a {number}" for number in classes[:4].tolist()]
    draw("attributions", figures.attributions(maps, some[:4], labels=said))
    draw("memory-step", figures.memory(kedge.saved(model, backward=True)(some)))
    draw("effects", patched(images, labels))


class Reader(nn.Module):
    """Reads a digit row by row: eight tokens of eight pixels, four layers of attention; gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.places = nn.Linear(8, 32), nn.Parameter(torch.randn(8, 32) * 0.1)
        layers = [
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)
        ]
        self.layers, self.answer = nn.Sequential(*layers), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Answer from the last row."""
        return self.answer(self.layers(self.rows(images[:, 0]) + self.places)[:, -1])


def patched(images: torch.Tensor, labels: torch.Tensor) -> object:
    """Patch each row of one digit, layer by layer, into another's forward."""
    model = Reader()
    train(model, RECIPES["healthy"], images, labels, steps=300, lr=2e-3)
    model.eval()
    three, eight = (images[labels == number][:1] for number in (3, 8))
    sites = ", ".join(["rows", *(f"layers.{layer}" for layer in range(4))])
    found = patch(
        model, three, eight, sites, lambda logits: (logits[0, 3] - logits[0, 8]).item(), along=1
    )
    title = "a row of a 3 put into an 8: how much of the answer it brings back"
    return figures.effects(
        found,
        columns=[f"row {row}" for row in range(8)],
        unit="share of the way from 8 to 3",
        title=title,
    )


def draw(name: str, figure: object) -> None:
    """Save a figure in few bytes."""
    figure.savefig(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
