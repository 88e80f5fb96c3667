"""The inputs of a call as they were given, for actions that ask for them when the call has worked on them.

# Note [Inputs as they were]
An action reads its call's inputs from the call's frame, when the module may have overwritten them
already. So the gate of a module's inputs notes their versions for actions that may ask, and copies
what the module is about to overwrite: that of a module with `inplace=True`, of one that was seen to
do it, and tensors whose changes PyTorch does not count.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from kedge.sites import leaves
from kedge.torch_internals.tensors import version_of


def may_ask(action: Any) -> bool:
    """Whether an action of (value, event) may read the inputs of its call, as far as its code shows."""
    if not isinstance(action, FunctionType):
        return bool(getattr(action, "reads_inputs", True))
    code = action.__code__
    event = code.co_varnames[1]
    if event in code.co_cellvars:
        return True
    steps = [each for each in dis.get_instructions(action) if each.opname != "CACHE"]
    for step, after in itertools.zip_longest(steps, steps[1:]):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if not step.opname.startswith("LOAD_FAST") or event not in loaded:
            continue
        reads = after is not None and after.opname == "LOAD_ATTR" and loaded[-1] == event
        if not reads or after.argval in ("args", "kwargs"):
            return True
    return False


class NotedInput(NamedTuple):
    """One input of a call.

    Attributes:
        version: The number of changes of its memory before the call; negative if PyTorch does not
            count them.
        copy: What it was; None if it is not expected to change.
    """

    version: int
    copy: Tensor | None


class GivenInputs:
    """The tensors that one call was given, by identity; the call itself keeps them alive.

    Args:
        tensors: The tensors.
        copied: Whether to copy them.
    """

    def __init__(self, tensors: Iterable[Tensor], *, copied: bool) -> None:
        self._noted: dict[int, NotedInput] = {}
        for tensor in tensors:
            version = version_of(tensor)
            copy = tensor.clone() if copied or version < 0 else None
            self._noted[id(tensor)] = NotedInput(version, copy)

    def as_given(self, inputs: Any) -> Any:
        """Return the inputs with those that were overwritten as they were.

        Raises:
            InputOverwritten: If one of these was not copied.
        """
        new: dict[str, Tensor] = {}
        for leaf, tensor in leaves.find(inputs):
            noted = self._noted.get(id(tensor))
            if noted is None or version_of(tensor) == noted.version >= 0:
                continue
            if noted.copy is None:
                raise InputOverwritten(leaf)
            new[leaf] = noted.copy
        if not new:
            return inputs
        return leaves.put(inputs, new)


class InputOverwritten(Exception):
    """The module has overwritten an input that was not copied."""
