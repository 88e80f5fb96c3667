"""What is held at one moment of a step, as a tree: modules, in them operations, in them tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kedge.report.held.folded_paths import folded_paths
from kedge.store.held_tensors import HeldTensors, TensorKind
from kedge.store.saved_account import named

LEFT_OUT = "(smaller tensors)"


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
        """Add bytes to this box and to those that lead to their tensor, given their levels and names."""
        node = self
        for step in [None, *steps]:
            if step is not None:
                node = node.inside.setdefault(step, HeldNode(step[1], step[0]))
            node.bytes += size
            node.storages += storages

    def joined(self) -> HeldNode:
        """Return the same with each module that only holds one other module joined with it, as ``transformer.h``."""
        inside = {key: node.joined() for key, node in self.inside.items()}
        only = next(iter(inside.values()), None)
        if (
            self.level == "module"
            and self.label
            and len(inside) == 1
            and only is not None
            and only.level == "module"
        ):
            return HeldNode(
                f"{self.label}.{only.label}", "module", self.bytes, self.storages, only.inside
            )
        return HeldNode(self.label, self.level, self.bytes, self.storages, inside)

    def walk(self, depth: int = 0, before: int = 0) -> Iterator[tuple[HeldNode, int, int]]:
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
        names = (named(None),) if kind.path is None else folded[kind.path]
        steps = [("module", name) for name in names]
        root.add(
            [*steps, ("operation", kind.node or "(unknown)"), ("tensor", described(kind))],
            span.bytes,
            span.storages,
        )
    if tensors.rest and tensors.rest[moment]:
        root.add([("tensor", LEFT_OUT)], tensors.rest[moment], 0)
    return root.joined()


def described(kind: TensorKind) -> str:
    """Return the name of a tensor in its operation's box: ``self float32 8x128x768``."""
    shape = "x".join(map(str, kind.shape)) or "scalar"
    return " ".join(
        part
        for part in (kind.field, kind.dtype, shape, "input" if kind.origin == "input" else "")
        if part
    )
