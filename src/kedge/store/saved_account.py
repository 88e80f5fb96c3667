"""The memory that autograd held for backward: by module, by line, and over time; plain numbers.

# Note [What a remedy frees]
Of the storages that one module holds, each counted once, for the module that saved it first:

- *rebuild*: the bytes of tensors that can be computed again from others that are in memory in any
  case, less the bytes that this needs, such as one bit per element of a dropout mask.
- *offload*: the bytes of plain strided tensors, in storages from a least size on, other than
  parameters, buffers and inputs of the model.
- *bf16*, *int8*: of floating-point tensors, the bytes saved by 2 bytes a number, or by 1 byte a
  number and 4 bytes of scale for every 256 numbers.
- *checkpoint*: the bytes that only calls of the module and of its submodules hold, less the inputs
  of those calls: a checkpoint keeps the inputs, even if nothing else would. During its backward it
  needs the rest again.

A model's own inputs count as held, and no remedy frees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.json_input.classes import Count, left_out, required
from kedge.json_input.shape import Misshapen
from kedge.store.held_tensors import NO_TENSORS, HeldTensors


@dataclass(frozen=True)
class Sums:
    """Totals of some saved tensors; see Note [What a remedy frees].

    Attributes:
        path: The module; None for tensors saved outside of modules.
        tensors: The number of saves that are still held.
        packed: The bytes of all these tensors, each as often as it was saved.
        bytes: The bytes of their storages, each once, without parameters and buffers.
        rebuild: The bytes that rebuilding frees.
        offload: The bytes that offloading frees.
        bf16: The bytes that keeping floats in bfloat16 frees.
        int8: The bytes that keeping floats in 8 bits frees.
        checkpoint: The bytes that checkpointing the module frees; 0 if there is no module.
    """

    path: str | None = required(None)
    tensors: Count = required(0)
    packed: Count = left_out(0)
    bytes: Count = required(0)
    rebuild: Count = left_out(0)
    offload: Count = left_out(0)
    bf16: Count = left_out(0)
    int8: Count = left_out(0)
    checkpoint: Count = left_out(0)


@dataclass(frozen=True)
class TotalSums(Sums):
    """Totals of all saved tensors, as a recording stores them: each may be missing.

    Attributes:
        parameters: Bytes of saved parameters and buffers.
        inputs: Bytes of the model's inputs.
    """

    path: str | None = None
    tensors: Count = 0
    bytes: Count = 0
    parameters: Count = 0
    inputs: Count = 0


@dataclass(frozen=True)
class LineSums:
    """Totals of the tensors that one line of the program saved.

    Attributes:
        file: The file; None if no line of the program was running.
        line: The number of the line.
        function: The function with the line.
        text: The source of the line, if it can be read.
        tensors: The number of saves that are still held.
        packed: The bytes of all these tensors.
        bytes: The bytes of their storages, each once, without parameters and buffers.
        rebuild: The bytes that rebuilding frees.
    """

    file: str | None = None
    line: int = 0
    function: str = ""
    text: str | None = None
    tensors: Count = 0
    packed: Count = 0
    bytes: Count = 0
    rebuild: Count = 0

    @property
    def place(self) -> str:
        """File and line."""
        if self.file is None:
            return "(no line of the program)"
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class BytesOverStep:
    """Bytes held over a step.

    Attributes:
        bytes: The bytes held after each save and each release; a sample where there were very many.
        at: The number of the save or release of each, counted from 1.
        peak: The largest of all.
        peak_at: The number of the save or release after which it was reached.
        backward: The number of the first release, with which backward begins to free memory; None
            if there was none.
        holders: The modules that hold memory at the peak, with their bytes, the largest first.
        seconds: The time of each since the first save; with what the recording itself takes. Empty
            if not recorded.
        tensors: The tensors held at each; empty if not recorded.
    """

    bytes: tuple[Count, ...] = ()
    at: tuple[Count, ...] = ()
    peak: Count = 0
    peak_at: Count = 0
    backward: Count | None = None
    holders: tuple[tuple[str | None, Count], ...] = ()
    seconds: tuple[float, ...] = ()
    tensors: HeldTensors = NO_TENSORS

    @property
    def peak_moment(self) -> int:
        """The place of the peak in `bytes`."""
        return self.at.index(self.peak_at)

    def __post_init__(self) -> None:
        """Check that everything is of the same moments."""
        if len(self.bytes) != len(self.at) or (self.peak and not self.at):
            raise Misshapen(f"has {len(self.bytes)} heights at {len(self.at)} places")
        if len(self.seconds) not in (0, len(self.at)):
            raise Misshapen(f"has {len(self.seconds)} times at {len(self.at)} places")
        try:
            self.tensors.check(len(self.at))
        except Misshapen as error:
            raise error.within(".tensors") from None


@dataclass(frozen=True)
class SavedAccount:
    """The memory that autograd held at one moment, or at the peak of one step.

    Attributes:
        total: All together; its `checkpoint` is not used.
        parameters: Bytes of saved parameters and buffers, which are in memory in any case; not part
            of `total`.
        inputs: Bytes of the model's inputs, part of `total`.
        modules: The totals of each module by itself, in data-flow order.
        tree: The totals of each module with its submodules.
        lines: The totals of each line, the largest first.
        items: Descriptions of the largest saved tensors.
        course: The bytes over time.
    """

    total: Sums
    parameters: int
    inputs: int
    modules: tuple[Sums, ...]
    tree: tuple[Sums, ...]
    lines: tuple[LineSums, ...]
    items: tuple[Mapping[str, Any], ...]
    course: BytesOverStep

    @property
    def holders(self) -> list[Sums]:
        """The totals of each module with its submodules, if it saved anything."""
        return [sums for sums in self.tree if sums.bytes or sums.packed]
