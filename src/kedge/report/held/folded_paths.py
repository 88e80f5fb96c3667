"""Names of modules for a flame graph: blocks that hold the same stand as one, as in ``h.0-47.attn``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from kedge.sites.folding import WHOLE, Folding
from kedge.store.held_tensors import HeldTensors

Segments = tuple[str, ...]


def segments_of(path: str) -> Segments:
    """Return the names of the modules around a module, and its own; none for the model itself."""
    return tuple(path.split(".")) if path else ()


def folded_paths(tensors: HeldTensors) -> dict[str, Segments]:
    """Return the segments of each module's name, with the ranges of blocks in place of their numbers.

    Blocks fold if everything in them holds tensors of the same kinds and bytes over the step, and
    there are many modules.
    """
    paths = list(dict.fromkeys(kind.path for kind in tensors.kinds if kind.path is not None))
    if len(paths) <= WHOLE:
        return {path: segments_of(path) for path in paths}
    blocks = _Blocks(tensors)
    names: dict[Segments, str] = {}
    for siblings in blocks.inside.values():
        for fold in Folding[Segments](".".join, blocks.content).fold(siblings):
            names |= {member: fold.name.rpartition(".")[2] for member in fold.members}
    return {path: tuple(names[part] for part in _prefixes(segments_of(path))) for path in paths}


def _prefixes(segments: Segments) -> Iterator[Segments]:
    """Yield a module's holders, the outermost first, and itself."""
    yield from (segments[:end] for end in range(1, len(segments) + 1))


class _Blocks:
    """Modules, by what they hold.

    Attributes:
        inside: The modules in each module, in the order in which they first saved something.
    """

    def __init__(self, tensors: HeldTensors) -> None:
        sizes: Counter[int] = Counter()
        for span in tensors.spans:
            sizes[span.kind] += span.bytes
        self.inside: dict[Segments, dict[Segments, None]] = {}
        self._held: dict[Segments, set[Hashable]] = {}
        for number, kind in enumerate(tensors.kinds):
            own = segments_of(kind.path or "")
            for part in _prefixes(own):
                self.inside.setdefault(part[:-1], {})[part] = None
                held = (
                    own[len(part) :],
                    kind.node,
                    kind.field,
                    kind.shape,
                    kind.dtype,
                    kind.origin,
                    sizes[number],
                )
                self._held.setdefault(part, set()).add(held)

    def content(self, block: Segments) -> Hashable:
        """Return all that a module and those in it hold, by their names in it."""
        return frozenset(self._held[block])
