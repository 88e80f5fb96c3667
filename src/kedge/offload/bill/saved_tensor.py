"""The description of one saved tensor, without a reference to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kedge.torch_internals.source_lines import SourceLine

Origin = Literal["parameter", "buffer", "input", "made", "recomputed"]

_BLOCK, _SCALE = 256, 4
"""The numbers that share a scale in 8 bits, and the scale's bytes."""


@dataclass(frozen=True)
class SavedTensor:
    """One save of a tensor; a tensor that is saved several times has several.

    Attributes:
        number: The number of the save, from 0.
        path: The innermost module that was running; None outside of all.
        call: The number of that module's call in this forward, from 0.
        node: The autograd node that needs it; None if unknown.
        field: The node's name for it, such as ``"self"`` or ``"result"``.
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        bytes: Its own bytes, as if it were contiguous.
        storages: The numbers of its storages in this bill: one, unless it consists of several
            tensors.
        held: The bytes of these storages, of which it may be a part.
        version: Its version when it was saved: the number of changes in place before.
        origin: The origin of its storage: a parameter, a buffer, an input of the model, made in the
            forward, or recomputed by a checkpoint in backward.
        alias: Whether it is a view of another tensor, or of a part of its storage.
        output: Whether the node that needs it also made it.
        shared: The numbers of the other saves on its storage.
        source: The line of the program that saved it.
        rule: The rule that can rebuild it; None if there is none.
        extra: The bytes to keep for rebuilding it.
        movable: Whether `kedge.offload` could move it.
    """

    number: int
    path: str | None
    call: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bytes: int
    storages: tuple[int, ...]
    held: int
    version: int
    alias: bool
    source: SourceLine | None
    node: str | None = None
    field: str | None = None
    origin: Origin = "made"
    output: bool = False
    shared: tuple[int, ...] = ()
    rule: str | None = None
    extra: int = 0
    movable: bool = False

    @property
    def storage(self) -> int | None:
        """The number of its storage; the first one if it consists of several tensors; None without a storage."""
        return self.storages[0] if self.storages else None

    @property
    def counts(self) -> bool:
        """Whether its storage is held only for backward, unlike that of a parameter or a buffer."""
        return self.origin in ("input", "made", "recomputed")

    @property
    def rebuild(self) -> int:
        """The bytes that rebuilding it frees."""
        return max(self.held - self.extra, 0) if self.rule is not None and self.counts else 0

    @property
    def offload(self) -> int:
        """The bytes that moving it frees."""
        return self.held if self.movable else 0

    def compressed(self, bits: Literal[8, 16]) -> int:
        """Return the bytes that storing it in floats of so many bits frees."""
        if not (self.movable and self.dtype.is_floating_point) or self.dtype.itemsize * 8 <= bits:
            return 0
        numbers = self.held // self.dtype.itemsize
        scales = math.ceil(numbers / _BLOCK) * _SCALE if bits == 8 else 0
        return max(self.held - numbers * (bits // 8) - scales, 0)

    def entry(self) -> dict[str, Any]:
        """Return the description as a recording stores it."""
        return {
            "path": self.path, "call": self.call, "node": self.node, "field": self.field, "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."), "device": str(self.device), "bytes": self.bytes,
            "storage": self.storage, "held": self.held, "origin": self.origin, "alias": self.alias, "output": self.output,
            "shared": len(self.shared), "line": line_of(self), "rule": self.rule, "movable": self.movable,
        }  # fmt: skip


def line_of(tensor: SavedTensor) -> str | None:
    """Return the file and line of the program that saved a tensor; None if none was running."""
    return None if tensor.source is None else f"{tensor.source.file}:{tensor.source.line}"
