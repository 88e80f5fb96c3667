"""Short names for some of a model's parameters: that of a block, if all in it are among them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kedge.compare.wording import NAMED
from kedge.short_text import counted, listed
from kedge.sites.folding import folded_names


def names_of_parameters(chosen: Collection[str], known: Collection[str]) -> str:
    """Return names for some parameters: ``blocks.2``, ``h.0-47.attn, head.weight``.

    Args:
        chosen: The paths of the parameters.
        known: The paths of all parameters of which these were chosen.
    """
    others = set[str]().union(*map(_prefixes, set(known).difference(chosen)))
    if not others and len(chosen) > 1:
        return f"all {counted(len(chosen), 'parameter')}"
    if not others:
        return next(iter(chosen), "no parameter")
    blocks = (next(part for part in _prefixes(path) if part not in others) for path in chosen)
    return listed(folded_names(dict.fromkeys(blocks)), NAMED)


def share_of(chosen: Collection[str], known: Collection[str]) -> str:
    """Return the number of some parameters among all that are known: ``6 of 34 parameters``."""
    every = set(known).union(chosen)
    return f"{len(chosen)} of {counted(len(every), 'parameter')}"


def _prefixes(path: str) -> Iterator[str]:
    """Yield the modules around a parameter, the outermost first, and its own path."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
