"""One tensor that autograd saved, described; no reference to it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kedge.torch_internals.source_lines import SourceLine

Origin = Literal["parameter", "buffer", "input", "made"]

_BLOCK, _SCALE = 256, 4
"""How many numbers share a scale in 8 bits, and the scale's bytes."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that was saved, once for each time that it was.

    Attributes:
        number: Which save it was, counted from 0.
        path: The innermost module that was running; None outside of all.
        call: Which call of that module in this forward, counted from 0.
        node: The autograd node that needs it; None where that could not be seen.
        field: What that node calls it, such as ``"self"`` or ``"result"``.
        shape: Its shape.
        dtype: Its number format.
        device: Where it is.
        bytes: Its own bytes, as if it were contiguous.
        storages: The numbers of its storages in this bill: one, unless it consists of several tensors.
        held: The bytes of these storages, of which it may be a part.
        version: How often it had been changed in place when it was saved.
        origin: Whether it is a parameter's storage, a buffer's, an input's of the model, or was made in the forward.
        alias: Whether it is a view of another tensor, or of a part of its storage.
        output: Whether the node that needs it is the one that made it.
        shared: The numbers of the other items with its storage.
        source: The line of the program that saved it.
        rule: By which rule it can be rebuilt; None if by none.
        extra: The bytes that have to be kept to rebuild it.
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
        """The number of its storage; the first where it consists of several tensors."""
        return self.storages[0] if self.storages else None

    @property
    def counts(self) -> bool:
        """Whether its storage is there for backward, and not in any case, as a parameter's or a buffer's is."""
        return self.origin in ("input", "made")

    @property
    def rebuild(self) -> int:
        """The bytes that rebuilding it frees."""
        return max(self.held - self.extra, 0) if self.rule is not None and self.counts else 0

    @property
    def offload(self) -> int:
        """The bytes that moving it frees."""
        return self.held if self.movable else 0

    def compressed(self, bits: Literal[8, 16]) -> int:
        """The bytes that keeping its storage in floats of so many bits frees."""
        if not (self.movable and self.dtype.is_floating_point) or self.dtype.itemsize * 8 <= bits:
            return 0
        numbers = self.held // self.dtype.itemsize
        scales = math.ceil(numbers / _BLOCK) * _SCALE if bits == 8 else 0
        return max(self.held - numbers * (bits // 8) - scales, 0)

    def entry(self) -> dict[str, Any]:
        """Describe it as a recording does."""
        where = None if self.source is None else f"{self.source.file}:{self.source.line}"
        return {
            "path": self.path, "call": self.call, "node": self.node, "field": self.field, "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."), "device": str(self.device), "bytes": self.bytes,
            "storage": self.storage, "held": self.held, "origin": self.origin, "alias": self.alias, "output": self.output,
            "shared": len(self.shared), "line": where, "rule": self.rule, "movable": self.movable,
        }  # fmt: skip
