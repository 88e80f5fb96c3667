"""The modules that cannot be run again, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from kedge.errors import OffloadError
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import (
    SHARDING,
    buffers_in,
    modules_in,
    named_modules,
    parameters_in,
)
from kedge.torch_internals.tensors import is_sharded
from kedge.torch_internals.torchscript import class_name, takes_hooks

_SHARDED = (
    "its parameters are sharded, and are other tensors when backward runs it again; "
    "use PyTorch's checkpoint for modules under fully_shard: "
    "torch.distributed._composable.checkpoint, before fully_shard"
)
_WRAPPED = (
    "it distributes the calls of the module inside, and must not do so again in backward; "
    'name modules inside of it: "module.blocks.*"'
)
_COMPILED = (
    "it is compiled, and the compiler decides itself what to save and what to recompute; "
    "compile after the offload, or use torch.utils.checkpoint in the model"
)


def check_can_run_again(root: nn.Module, modules: Mapping[str, nn.Module], text: str) -> None:
    """Raise OffloadError if one of the modules named by a selector cannot be run again.

    Args:
        root: The model.
        modules: The named modules, by their paths.
        text: The selector.
    """
    inside = named_modules(dynamo.unwrap(root))
    compiled = [path for path, each in inside.items() if dynamo.compiles(each)]
    if dynamo.compiles(root):
        compiled.append("")
    for path, module in modules.items():
        why = _why_not(path, module, compiled)
        if why is not None:
            name = f'"{path}"' if path else "the model itself"
            raise OffloadError(
                f"recompute={text!r}: {name} ({class_name(module)}) cannot be run again: {why}"
            )


def _why_not(path: str, module: nn.Module, compiled: list[str]) -> str | None:
    if not takes_hooks(module):
        return (
            "it is TorchScript, which runs without hooks; "
            "use the module that it was made from, or name a module around it"
        )
    for other in compiled:
        if not other or path == other or path.startswith(f"{other}."):
            return _COMPILED
    tensors = [*parameters_in(module).values(), *buffers_in(module).values()]
    if any(map(is_lazy, tensors)):
        return "its parameters have no values yet; call the model once before kedge.offload"
    inside = modules_in(module).values()
    if any(isinstance(each, (DataParallel, DistributedDataParallel)) for each in inside):
        return _WRAPPED
    if any(map(is_sharded, tensors)) or any(map(_is_sharded, inside)):
        return _SHARDED
    return None


def _is_sharded(module: nn.Module) -> bool:
    return any(name.startswith(SHARDING) for name in vars(module))
