"""A tensor that is kept without a copy, and whether the program has changed it in place since.

# Note [Kept without a copy]
A kept tensor shares its memory with the program's. PyTorch counts in-place changes of that memory,
made through any view: a count other than at the time of keeping means that the value is lost.
Tensors without a count, such as those of inference mode, are copied.
"""

from __future__ import annotations

from torch import Tensor

from kedge.torch_internals.tensors import version_of


class KeptTensor:
    """One tensor, and the state of its memory when it was kept; see Note [Kept without a copy].

    Attributes:
        value: The tensor.
        version: The number of in-place changes of its memory when it was kept; negative if PyTorch
            does not count them.
    """

    __slots__ = ("__weakref__", "value", "version")

    def __init__(self, value: Tensor, *, copied: bool) -> None:
        self.value, self.version = value, version_of(value)
        if copied or self.version < 0:
            self._replace(value.clone())

    @property
    def overwritten(self) -> bool:
        """Whether the program changed its memory after it was kept."""
        return version_of(self.value) != self.version

    def preserve(self) -> None:
        """Replace the tensor by a copy, unless it was overwritten; called before a change of its memory."""
        if not self.overwritten:
            self._replace(self.value.clone())

    def _replace(self, copy: Tensor) -> None:
        self.value, self.version = copy, version_of(copy)
