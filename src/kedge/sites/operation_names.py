"""The names of operations, from those of their autograd nodes.

Without torch, for recordings have them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_WORDS = re.compile(
    r"(?<=[a-z])(?=[A-Z])"  # Nll|Loss
    r"|(?<=\d[A-Z])(?=[A-Z])"  # MaxPool2D|With
    r"|(?<=[A-Z]\d)(?=[A-Z][a-z])"  # L1|Loss, but not Col2Im
)


@lru_cache(maxsize=1024)
def plain_name(node: str) -> str:
    """Return the usual name of the operation behind a node: ``nll_loss`` for ``NllLossBackward0``."""
    name = re.sub(r"(Backward\d*|<.*>)$", "", node.rpartition("::")[2])
    return _WORDS.sub("_", name).lower()


def recorded_name(node: str | None) -> str:
    """Return the name of the operation behind a recorded node, as `plain_name` does.

    Empty if no operation is known.
    """
    if node is None or "Backward" not in node:
        return ""
    return plain_name(node)


def recorded_names(nodes: Iterable[object]) -> list[str]:
    """Return the names of the operations behind recorded nodes.

    Other nodes keep their own.
    """
    return [recorded_name(str(node)) or str(node) for node in nodes]
