"""What autograd held over one step, as a tree of modules, operations and tensors.

The tree is drawn as text and on a page. Blocks that hold the same stand as one, as in
``h.0-47.attn``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kedge.json_input.classes import as_json
from kedge.short_text import percent, shortened, sized
from kedge.sites.folding import WHOLE, Folding
from kedge.store.held_tensors import HeldTensors, TensorKind
from kedge.store.saved_account import BytesOverStep
from kedge.store.saved_tables import named

Segments = tuple[str, ...]

LEFT_OUT = "(smaller tensors)"
#: The least share of a box that has a line in the picture, and the most lines.
LEAST = 0.02
MOST_LINES = 32
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass
class HeldNode:
    """A box of the flame graph.

    Attributes:
        label: Its name in the box around it.
        level: "module", "operation" or "tensor".
        bytes: The bytes held in it.
        storages: The number of storages.
        inside: The boxes in it, by level and name, in the order of the first save.
    """

    label: str
    level: str
    bytes: int = 0
    storages: int = 0
    inside: dict[tuple[str, str], HeldNode] = field(default_factory=dict)

    def add(self, steps: list[tuple[str, str]], size: int, storages: int) -> None:
        """Add bytes to this box and to those that lead to their tensor: their levels and names."""
        node = self
        node.bytes += size
        node.storages += storages
        for level, label in steps:
            node = node.inside.setdefault((level, label), HeldNode(label, level))
            node.bytes += size
            node.storages += storages

    def joined(self) -> HeldNode:
        """Return the same with each module and the only other one in it as one: ``transformer.h``."""
        label = self.label
        inside = {key: node.joined() for key, node in self.inside.items()}
        if self.level == "module" and label and len(inside) == 1:
            (only,) = inside.values()
            if only.level == "module":
                label = f"{label}.{only.label}"
                inside = only.inside
        return HeldNode(label, self.level, self.bytes, self.storages, inside)

    def walk(
        self,
        depth: int = 0,
        before: int = 0,
    ) -> Iterator[tuple[HeldNode, int, int]]:
        """Yield this box and those in it, each with its depth and the bytes to its left."""
        yield self, depth, before
        for node in self.inside.values():
            yield from node.walk(depth + 1, before)
            before += node.bytes


def held_tree(tensors: HeldTensors, moment: int) -> HeldNode:
    """Return the tensors held at a moment as a tree; its root has all bytes."""
    folded = folded_paths(tensors)
    root = HeldNode("", "module")
    for kind, span in tensors.at(moment):
        names: Segments = (named(None),)
        if kind.path is not None:
            names = folded[kind.path]
        steps = [("module", name) for name in names]
        steps.append(("operation", kind.node or "(unknown)"))
        steps.append(("tensor", described(kind)))
        root.add(steps, span.bytes, span.storages)
    if tensors.rest and tensors.rest[moment]:
        root.add([("tensor", LEFT_OUT)], tensors.rest[moment], 0)
    return root.joined()


def described(kind: TensorKind) -> str:
    """Return the name of a tensor in its operation's box: ``self float32 8x128x768``."""
    shape = "x".join(map(str, kind.shape)) or "scalar"
    parts = [kind.field, kind.dtype, shape]
    if kind.origin == "input":
        parts.append("input")
    return " ".join(filter(None, parts))


def segments_of(path: str) -> Segments:
    """Return the names of the modules around a module, and its own; none for the model itself."""
    return tuple(path.split(".")) if path else ()


def folded_paths(tensors: HeldTensors) -> dict[str, Segments]:
    """Return the segments of each module's name, with ranges of blocks in place of their numbers.

    Blocks fold if everything in them holds tensors of the same kinds and bytes over the step, and
    there are many modules.
    """
    paths = list(dict.fromkeys(kind.path for kind in tensors.kinds if kind.path is not None))
    if len(paths) <= WHOLE:
        return {path: segments_of(path) for path in paths}
    blocks = _Blocks(tensors)
    names: dict[Segments, str] = {}
    folding = Folding[Segments](".".join, blocks.content)
    for siblings in blocks.inside.values():
        for fold in folding.fold(siblings):
            names |= dict.fromkeys(fold.members, fold.name.rpartition(".")[2])

    folded = {}
    for path in paths:
        folded[path] = tuple(map(names.__getitem__, _prefixes(segments_of(path))))
    return folded


def _prefixes(segments: Segments) -> Iterator[Segments]:
    """Yield a module's holders, the outermost first, and itself."""
    for end in range(1, len(segments) + 1):
        yield segments[:end]


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


class IcicleLine(NamedTuple):
    """A line of the picture.

    Attributes:
        name: The name, indented.
        bar: The bar.
        size: The bytes.
        share: The share in the whole.
        level: "module", "operation" or "tensor".
    """

    name: str
    bar: str
    size: str
    share: str
    level: str


def icicle(root: HeldNode, width: int = 40, names: int = 44) -> Iterator[IcicleLine]:
    """Yield the lines of a tree, without its root: the largest boxes, in their order.

    Args:
        root: The tree.
        width: The characters of the widest bar.
        names: The characters of the longest name.
    """
    _, *boxes = root.walk()
    above = 0
    sizes = sorted((node.bytes for node, *_ in boxes), reverse=True)
    if len(sizes) > MOST_LINES:  # of boxes of one size, all or none have a line
        above = sizes[MOST_LINES]
    chosen = []
    for box in boxes:
        size = box[0].bytes
        if size > above and size >= LEAST * root.bytes:
            chosen.append(box)

    for node, depth, before in chosen or boxes[:MOST_LINES]:
        indent = "  " * (depth - 1)
        name = indent + shortened(node.label, max(names - len(indent), 12))
        share = node.bytes / root.bytes
        bar = _bar(before / root.bytes * width, share * width)
        yield IcicleLine(name, bar, sized(node.bytes), percent(share), node.level)


def _bar(begin: float, length: float) -> str:
    """Return a bar that begins at a whole character and ends at an eighth of one."""
    start = int(begin)
    eighths = max(round((begin + length - start) * 8), 1)
    return " " * start + _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def icicle_text(root: HeldNode) -> str:
    """Return the picture as plain text."""
    lines = list(icicle(root))
    wide = max((len(line.name) for line in lines), default=0)
    return "\n".join(
        f"{line.name:{wide}}  {line.size:>8}  {line.share:>7}  {line.bar}" for line in lines
    )


def memory_content(course: BytesOverStep, resident: int) -> dict[str, Any]:
    """Return the bytes over a step with the tensors held, and the names under which alike blocks fold.

    Args:
        course: The bytes over the step.
        resident: The bytes of saved parameters and buffers.
    """
    content: dict[str, Any] = as_json(course) | {"resident": resident}
    if content["tensors"] is not None:
        folded = folded_paths(course.tensors)
        content["tensors"]["folded"] = [folded.get(path) for path in content["tensors"]["path"]]
    return content
