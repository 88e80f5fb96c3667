"""The names of operations, from those of their autograd nodes; without torch, for recordings have them too."""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"(?<=[a-z])(?=[A-Z])"  # Nll|Loss
    r"|(?<=\d[A-Z])(?=[A-Z])"  # MaxPool2D|With
    r"|(?<=[A-Z]\d)(?=[A-Z][a-z])"  # L1|Loss, but not Col2Im
)


def plain_name(node: str) -> str:
    """Return the usual name of the operation behind a node: ``nll_loss`` for ``NllLossBackward0``."""
    name = re.sub(r"(Backward\d*|<.*>)$", "", node.rpartition("::")[2])
    return _WORDS.sub("_", name).lower()
