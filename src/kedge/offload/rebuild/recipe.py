"""Recipes: how a tensor that is not kept is rebuilt, bit for bit.

# Note [The same bits]
The same kernel on the same bytes gives the same bits only under the same circumstances. Autocast is
switched off: a node saves its tensors after autocast has cast them. The number of threads is
restored: threads divide a tensor among them, and at the end of each part the last elements of a
vectorised kernel take another path, whose exponential may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kedge.offload.held.handle import Handle

Term = Callable[[Sequence[Tensor]], Tensor]
"""An expression over the tensors of a recipe's inputs."""

Cost = Literal["copy", "elementwise", "norm"]

HandleOf = Callable[[Any], Handle | None]
"""Returns the handle behind a node's saved tensor; None if there is none."""


class Recipe(Protocol):
    """A recipe that rebuilds a saved tensor from tensors that are kept in any case.

    Attributes:
        rule: The name of its rule.
        inputs: The handles whose tensors `run` takes.
        extra: A tensor that is stored for this recipe only; code that moves it puts it back before
            `run`.
        nbytes: The bytes that are stored for it, those of `extra` included.
        cost: The cost of `run`: as much as a copy of the tensor, an elementwise operation or a
            normalisation.
    """

    rule: str
    inputs: tuple[Handle, ...]
    extra: Tensor | None
    nbytes: int
    cost: Cost

    def run(self, *inputs: Tensor) -> Tensor:
        """Return the tensor, of the same strides, in a storage of its own that is the same byte for byte."""


Find = Callable[[Tensor, HandleOf], Recipe | None]
"""Returns the recipe of a tensor; None if there is none."""


class WholeLayout:
    """Shape and strides of a tensor and of the one whose whole storage it shares."""

    __slots__ = (
        "_dtype",
        "_nbytes",
        "_offset",
        "_own",
        "_size",
        "_stride",
        "_whole_size",
        "_whole_stride",
        "device",
    )

    def __init__(self, value: Tensor, whole: Tensor) -> None:
        self._own = value is whole
        self._size = value.size()
        self._stride = value.stride()
        self._offset = value.storage_offset()
        self._whole_size = whole.size()
        self._whole_stride = whole.stride()
        self._dtype = whole.dtype
        self._nbytes = whole.untyped_storage().nbytes()
        self.device = whole.device

    def fit(self, made: Tensor) -> Tensor:
        """Return a rebuilt tensor with the saved strides, at its place in the storage."""
        size = self._whole_size
        stride = self._whole_stride
        if made.dtype != self._dtype or made.size() != size:
            raise RuntimeError(
                f"rebuilt {made.dtype} {tuple(made.size())}, saved {self._dtype} {tuple(size)}"
            )
        if made.stride() != stride or made.untyped_storage().nbytes() != self._nbytes:
            blank = torch.empty_strided(size, stride, dtype=self._dtype, device=self.device)
            made = blank.copy_(made)
        if self._own:
            return made
        return made.as_strided(self._size, self._stride, self._offset)


class Replay:
    """A recipe that runs a term."""

    __slots__ = ("_layout", "_term", "_threads", "cost", "extra", "inputs", "nbytes", "rule")

    def __init__(
        self,
        rule: str,
        cost: Cost,
        term: Term,
        layout: WholeLayout,
        inputs: tuple[Handle, ...],
        extra: Tensor | None,
        nbytes: int,
    ) -> None:
        self.rule = rule
        self.cost = cost
        self.inputs = inputs
        self.extra = extra
        self.nbytes = nbytes
        self._term = term
        self._layout = layout
        self._threads = torch.get_num_threads()

    def run(self, *inputs: Tensor) -> Tensor:
        """Return the tensor, of the same strides, in a storage of its own that is the same byte for byte."""
        given = inputs if self.extra is None else (*inputs, self.extra)
        with torch.no_grad(), _circumstances(self._layout.device.type, self._threads):
            return self._layout.fit(self._term(given))


@contextmanager
def _circumstances(kind: str, threads: int) -> Iterator[None]:
    """Context with the saved number of threads and without autocast; see Note [The same bits]."""
    now = torch.get_num_threads()
    if now == threads and not torch.is_autocast_enabled(kind):
        yield
        return
    torch.set_num_threads(threads)
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        torch.set_num_threads(now)
