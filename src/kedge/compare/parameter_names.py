"""Short names for some of a model's parameters: the name of a block, if all parameters in it are among them."""

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
    others = {part for path in set(known).difference(chosen) for part in _prefixes(path)}
    if not others:
        return (
            f"all {counted(len(chosen), 'parameter')}"
            if len(chosen) > 1
            else next(iter(chosen), "no parameter")
        )
    blocks = (next(part for part in _prefixes(path) if part not in others) for path in chosen)
    return listed(folded_names(dict.fromkeys(blocks)), NAMED)


def share_of(chosen: Collection[str], known: Collection[str]) -> str:
    """Return the number of some parameters, of which all others are known: ``6 of 34 parameters``."""
    return f"{len(chosen)} of {counted(len(set(known).union(chosen)), 'parameter')}"


def _prefixes(path: str) -> Iterator[str]:
    """Yield the modules around a parameter, the outermost first, and its own path."""
    parts = path.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
