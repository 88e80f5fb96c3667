"""The flame graph of one moment in a terminal: a line for each box, with its bar where it lies in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kedge.report.held.held_tree import HeldNode
from kedge.short_text import percent, shortened, sized

#: The least share of a box that has a line.
LEAST = 0.02
MOST_LINES = 32
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    boxes = [(node, depth, before) for node, depth, before in root.walk() if depth]
    sizes = sorted((node.bytes for node, *_ in boxes), reverse=True)
    above = (
        sizes[MOST_LINES] if len(sizes) > MOST_LINES else 0
    )  # of boxes of one size, all or none have a line
    chosen = [box for box in boxes if box[0].bytes > above and box[0].bytes >= LEAST * root.bytes]
    for node, depth, before in chosen or boxes[:MOST_LINES]:
        indent = "  " * (depth - 1)
        name = indent + shortened(node.label, max(names - len(indent), 12))
        bar = _bar(before / root.bytes * width, node.bytes / root.bytes * width)
        yield IcicleLine(name, bar, sized(node.bytes), percent(node.bytes / root.bytes), node.level)


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
