"""The names of roots, and of tensors that belong to no module.

See Note [Roots] in `kedge.watch.models.models`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kedge.frames import frames_around, is_between
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
        # Where `torch.func` has replaced them, an optimizer may hold the original ones.
        are_replaced = not all(params.values())
        if are_replaced or not _others_train(params):
            return ""
        gc.collect()  # the optimizers of a training that is over may be garbage
        if not _others_train(params):
            return ""
    return free_prefix(type(module).__name__, roots)


def _others_train(params: Container[int]) -> bool:
    """Whether there are optimizers, and none of them holds one of these parameters."""
    if not any_optimizer():
        return False
    held = [id(p) in params for optimizer in living() for p in params_of(optimizer)]
    return bool(held) and not any(held)


def names_in_frames(tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of the program's variables that hold some tensors.

    Such as ``w`` or ``weights.0``; without one it is ``param0``.
    """
    names: dict[int, str] = {}
    wanted = {id(t) for t in tensors}
    for frame in frames_around(sys._getframe(1)):
        if is_between(frame.f_code.co_filename):
            continue
        for variables in (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if name.startswith("_"):
                    continue
                for key, each in _parts(value):
                    if id(each) in wanted:
                        full = name if key is None else f"{name}.{key}"
                        names.setdefault(id(each), full)
    return [names.get(id(t), f"param{i}") for i, t in enumerate(tensors)]


def _parts(value: Any) -> Iterator[tuple[object, Any]]:
    """Yield a variable's value, and the items of a list, tuple or dict with index or key.

    There may be millions.
    """
    yield None, value
    if type(value) in (list, tuple):
        yield from enumerate(value)
    elif type(value) is dict:
        yield from ((key, each) for key, each in list(value.items()) if isinstance(key, str))
