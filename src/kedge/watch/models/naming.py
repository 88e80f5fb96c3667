"""The names of roots, see Note [Roots] in `kedge.watch.models.models`, and of tensors that belong to no module."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from kedge.frames import is_between
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.optimizers import any_optimizer, living, params_of
from kedge.watch.models.roots import RootModule, free_prefix


def prefix_of(
    module: nn.Module, roots: Sequence[RootModule], names: Mapping[nn.Module, str]
) -> str:
    """Return the prefix of a new root.

    Args:
        module: The root.
        roots: The existing roots.
        names: Names given before.
    """
    if module in names:
        return names[module]
    params = {id(p): isinstance(p, nn.Parameter) for p in parameters_in(module).values()}
    if params and all(root.prefix for root in roots):
        replaced = not all(
            params.values()
        )  # by `torch.func`: an optimizer may hold its original ones
        if replaced or not _others_train(params):
            return ""
        gc.collect()  # the optimizers of a training that is over may be garbage
        if not _others_train(params):
            return ""
    return free_prefix(type(module).__name__, roots)


def _others_train(params: Container[int]) -> bool:
    """Whether there are optimizers, and none of them holds one of these parameters."""
    held = [
        id(p) in params
        for optimizer in (living() if any_optimizer() else ())
        for p in params_of(optimizer)
    ]
    return bool(held) and not any(held)


def names_in_frames(tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of the program's variables that hold some tensors: ``w``, ``weights.0``; else ``param0``."""
    names: dict[int, str] = {}
    wanted = {id(t) for t in tensors}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_between(frame.f_code.co_filename):
            for variables in (frame.f_locals, frame.f_globals):
                for name, value in list(variables.items()):
                    if not name.startswith("_"):
                        for key, each in _parts(value):
                            if id(each) in wanted:
                                names.setdefault(id(each), name if key is None else f"{name}.{key}")
        frame = frame.f_back
    return [names.get(id(t), f"param{i}") for i, t in enumerate(tensors)]


def _parts(value: Any) -> Iterator[tuple[object, Any]]:
    """Yield a variable's value, and the items of a list, tuple or dict with index or key; there may be millions."""
    yield None, value
    if type(value) in (list, tuple):
        yield from enumerate(value)
    elif type(value) is dict:
        yield from ((key, each) for key, each in list(value.items()) if isinstance(key, str))
