"""Draw `examination.png`, the picture of docs/how-to/examine.md: a language model without its causal mask.

python docs/pictures/examination.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import kedge
from kedge.examination.picture import draw

LETTERS = 40


class Language(nn.Module):
    """A transformer of one layer, whose attention sees all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits for each position."""
        logits: Tensor = self.head(self.block(self.embed(text)))
        return logits


def main() -> None:
    """Examine the model, and write the picture beside this file."""
    torch.manual_seed(0)
    text = torch.randint(0, LETTERS, (12, 33))
    model = Language()
    found = kedge.examine(
        model,
        text[:, :-1],
        loss=lambda logits: functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
    )
    draw(found, str(Path(__file__).with_name("examination.png")))


if __name__ == "__main__":
    main()
