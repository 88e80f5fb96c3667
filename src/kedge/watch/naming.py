"""What the paths of a new root begin with; see Note [Roots] in `kedge.watch.watcher`."""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping, Sequence

from torch import nn

from kedge.watch.optimizers import any_optimizer, living, params_of
from kedge.watch.roots import Root, free_prefix


def prefix_of(module: nn.Module, roots: Sequence[Root], names: Mapping[nn.Module, str]) -> str:
    """Choose the prefix of a new root.

    Args:
        module: The root.
        roots: Those that there are.
        names: Names that were given before.
    """
    if module in names:
        return names[module]
    params = {id(p): isinstance(p, nn.Parameter) for p in module.parameters()}
    if params and all(root.prefix for root in roots):
        replaced = not all(params.values())  # by `torch.func`: its own may be what an optimizer holds
        if replaced or not _others_train(params):
            return ""
        gc.collect()  # the optimizers of a training that is over may be garbage
        if not _others_train(params):
            return ""
    return free_prefix(type(module).__name__, roots)


def _others_train(params: Container[int]) -> bool:
    """Whether there are optimizers, and none of them holds one of these parameters."""
    held = [id(p) in params for optimizer in (living() if any_optimizer() else ()) for p in params_of(optimizer)]
    return bool(held) and not any(held)
