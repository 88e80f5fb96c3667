"""A tensor that is kept as it is, and whether the program has worked in place on it since.

# Note [Kept without a copy]
A kept tensor has its memory in common with the program's. PyTorch counts the changes in place of that memory, through
whichever view they are made: another count than when the tensor was kept means that its value is gone. Of tensors that
have no such count, as those of inference mode, a copy is kept.
"""

from __future__ import annotations

from torch import Tensor

from kedge.torch_internals.tensors import version_of


class KeptTensor:
    """One tensor, and the state of its memory when it was kept; see Note [Kept without a copy].

    Attributes:
        value: The tensor.
        version: How often its memory had been changed when it was kept.
    """

    __slots__ = ("__weakref__", "value", "version")

    def __init__(self, value: Tensor, *, copied: bool) -> None:
        self.value, self.version = value, version_of(value)
        if copied or self.version < 0:
            self._replace(value.clone())

    @property
    def overwritten(self) -> bool:
        """Whether its memory was changed after it was kept."""
        return version_of(self.value) != self.version

    def preserve(self) -> None:
        """Keep a copy from here on, if it still is what it was: its memory is about to be changed."""
        if not self.overwritten:
            self._replace(self.value.clone())

    def _replace(self, copy: Tensor) -> None:
        self.value, self.version = copy, version_of(copy)
