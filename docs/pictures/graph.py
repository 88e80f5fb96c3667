"""Draw `graph.svg`, the picture of docs/how-to/graph.md: the graph of a ResNet-50's training step.

python docs/pictures/graph.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import kedge
from kedge.figures.graph import graph


def main() -> None:
    """Write the picture beside this file."""
    torch.manual_seed(0)
    model, images = (
        ResNetForImageClassification(ResNetConfig(num_labels=1000)),
        torch.randn(1, 3, 224, 224),
    )
    with kedge.hook(model, "resnet.encoder.stages.3:out.grad", kedge.record()):
        loss = model(images, labels=torch.tensor([1])).loss
        drawn = graph(lambda: model(images, labels=torch.tensor([1])).loss, model)
        loss.backward()
    text = drawn.svg(expand="resnet.encoder.stages.0.layers.0")
    Path(__file__).with_name("graph.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
