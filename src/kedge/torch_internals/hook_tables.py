"""The tables of PyTorch's hooks: of a module, of a tensor, and for all modules and optimizers.

# Note [Tables without a name]
If PyTorch's name for a table is not known, Kedge finds it through the handle that registering a
hook returns: the handle refers to the table. So Kedge adds a hook, reads the table, and removes the
hook again.

# Note [Views written to]
A write through one view makes the ``grad_fn`` of the others outdated. Reading ``grad_fn`` updates
it; ``register_hook`` of PyTorch 2.12 to 2.14 does not, and crashes the process. So Kedge reads it
before it hooks a view.

# Note [Swapped tensors]
`torch.utils.swap_tensors` exchanges what two tensor objects are, as `model.double()` does with each
parameter after ``torch.__future__.set_swap_module_params_on_conversion(True)``. A table stays with
the object, but autograd's knowledge of it goes with the content: from then on autograd calls no
hook in the table, nor one that is added to it, and `is_called` finds that it has dropped its own
reference to the table. What the object is at present shows in `content_of`.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from kedge.torch_internals.corners import find, lacks

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_BACKWARD = "_backward_hooks"
_EVERYWHERE = "_global"
# In the order in which PyTorch runs them.
_OF_MODULE = {
    "_forward_pre_hooks": "forward-pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "full-backward-pre",
    _BACKWARD: "full-backward",
    "_state_dict_pre_hooks": "state-dict-pre",
    "_state_dict_hooks": "state-dict",
    "_load_state_dict_pre_hooks": "load-state-dict-pre",
    "_load_state_dict_post_hooks": "load-state-dict",
}
_SAID_WITH = {
    "_forward_pre_hooks_with_kwargs": "with_kwargs",
    "_forward_hooks_with_kwargs": "with_kwargs",
    "_forward_hooks_always_called": "always_call",
}
_OF_BUILDING = {
    "_global_module_registration_hooks": "modules",
    "_global_parameter_registration_hooks": "parameters",
    "_global_buffer_registration_hooks": "buffers",
}
_OF_OPTIMIZER = {
    "_global_optimizer_pre_hooks": "optimizer-step-pre",
    "_global_optimizer_post_hooks": "optimizer-step",
}
_OF_ONE_OPTIMIZER = {
    "_optimizer_step_pre_hooks": "optimizer-step-pre",
    "_optimizer_step_post_hooks": "optimizer-step",
    "_optimizer_state_dict_pre_hooks": "state-dict-pre",
    "_optimizer_state_dict_post_hooks": "state-dict",
    "_optimizer_load_state_dict_pre_hooks": "load-state-dict-pre",
    "_optimizer_load_state_dict_post_hooks": "load-state-dict",
}
_RESTORED = (*FORWARD, *FLAGS, _BACKWARD, "_backward_pre_hooks")

Table = Mapping[int, Any]


class RegisteredHook(NamedTuple):
    """A hook in a table.

    Attributes:
        kind: Its kind: "forward", "full-backward-pre", "tensor", "optimizer-step" and so on.
        order: Its place in the table.
        hook: The function.
        flags: How it was registered: "with_kwargs", "always_call"; for a registration hook the
            registered kind.
    """

    kind: str
    order: int
    hook: Any
    flags: tuple[str, ...] = ()


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Register a hook for the gradient of a tensor; see Note [Views written to]."""
    # A view whose history cannot be updated raises it, as one of several outputs does.
    with suppress(RuntimeError):
        tensor.grad_fn  # noqa: B018
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def move_first(handle: RemovableHandle) -> None:
    """Have a hook run before all others of its table."""
    table = handle.hooks_dict_ref()
    if isinstance(table, OrderedDict):
        table.move_to_end(handle.id, last=False)


def _after_accumulation(tensor: Tensor) -> Table | None:
    return tensor._post_accumulate_grad_hooks


def _unknown(_: Tensor) -> int:
    return 0


content_of: Callable[[Tensor], int] = _unknown if lacks("tensor_contents") else attrgetter("_cdata")
"""A number of what a tensor object is at present, which no other living one has.

See Note [Swapped tensors].
"""


def _references(table: Table) -> int:
    return sys.getrefcount(table)


@functools.cache
def _references_of_two() -> int:
    """Return how many references are counted to a table that a tensor and autograd hold."""
    tensor = torch.zeros(1, requires_grad=True)
    handle = tensor.register_hook(_nothing)
    found = _references(handle.hooks_dict_ref())
    handle.remove()
    return found


def is_called(table: Table | None) -> bool:
    """Whether autograd calls the hooks in a leaf's table, as far as is known; see Note [Swapped tensors]."""
    if table is None or _hidden or lacks("tensor_contents"):
        return True
    return _references(table) >= _references_of_two()


def put_table(tensor: Tensor, table: Table | None, *, accumulated: bool) -> None:
    """Give a leaf a table whose hooks autograd calls from now on.

    With None it has none until the next hook.
    """
    if _hidden:
        return
    leaf: Any = tensor
    if accumulated:
        leaf._post_accumulate_grad_hooks = table
    else:
        leaf._backward_hooks = table


def hide_table(leaf: Tensor) -> None:
    """Leave a leaf's table of hooks after accumulation to autograd alone; for the program it has none."""
    put_table(leaf, None, accumulated=True)


def _before_forward(module: nn.Module) -> Table:
    return module._forward_pre_hooks


def _after_forward(module: nn.Module) -> Table:
    return module._forward_hooks


def _nothing(*_: Any) -> None:
    return None


def table_behind(register: Callable[..., Any]) -> Any:
    """Return the table of a registering function; see Note [Tables without a name]."""
    handle = register(_nothing)
    table = handle.hooks_dict_ref()
    handle.remove()
    return table


def _behind_tensor(tensor: Tensor) -> Table | None:
    if not tensor.requires_grad:
        return None
    return table_behind(partial(hook_gradient, tensor))  # type: ignore[no-any-return]


def _behind_leaf(tensor: Tensor) -> Table | None:
    if not tensor.requires_grad or not tensor.is_leaf:
        return None
    return table_behind(tensor.register_post_accumulate_grad_hook)  # type: ignore[no-any-return]


def _behind_pre(module: nn.Module) -> Table:
    return table_behind(module.register_forward_pre_hook)  # type: ignore[no-any-return]


def _behind_forward(module: nn.Module) -> Table:
    return table_behind(module.register_forward_hook)  # type: ignore[no-any-return]


_hidden = lacks("hook_tables")
on_tensor: Callable[[Tensor], Table | None] = (
    _behind_tensor if _hidden else attrgetter("_backward_hooks")
)
"""The hooks on a tensor; None where there are none yet."""

after_accumulation: Callable[[Tensor], Table | None] = (
    _behind_leaf if _hidden else _after_accumulation
)
"""The hooks that are called when a leaf has its gradient; None where there are none yet."""

before_forward: Callable[[nn.Module], Table] = _behind_pre if _hidden else _before_forward
after_forward: Callable[[nn.Module], Table] = _behind_forward if _hidden else _after_forward


def last_hook(table: Table) -> Any:
    """Return the hook of a table that PyTorch calls last; None if there is none.

    Another thread may change the table.
    """
    return next((hook for _, hook in reversed(list(table.items()))), None)


def hooks_on_module(module: nn.Module) -> Iterator[RegisteredHook]:
    """Yield the hooks on a module itself, in the order in which PyTorch runs the kinds."""
    full = getattr(module, "_is_full_backward_hook", None) is not False
    yield from _read(vars(module), "", full=full)


def hooks_on_tensor(tensor: Tensor) -> Iterator[RegisteredHook]:
    """Yield the hooks on a tensor."""
    for i, hook in enumerate((on_tensor(tensor) or {}).values()):
        yield RegisteredHook("tensor", i, hook)
    for i, hook in enumerate((after_accumulation(tensor) or {}).values()):
        yield RegisteredHook("post-accumulate", i, hook)


def hooks_on_every_module() -> Iterator[RegisteredHook]:
    """Yield the hooks on all modules, and those on registrations in modules."""
    everywhere = vars(modules)
    full = everywhere.get("_global_is_full_backward_hook") is not False
    yield from _read(everywhere, _EVERYWHERE, full=full)
    for table, what in _OF_BUILDING.items():
        for i, hook in _numbered(everywhere, table):
            yield RegisteredHook("registration", i, hook, (what,))


def hooks_on_every_optimizer() -> Iterator[RegisteredHook]:
    """Yield the hooks on the steps of all optimizers."""
    for table, kind in _OF_OPTIMIZER.items():
        for i, hook in _numbered(vars(optimizers), table):
            yield RegisteredHook(kind, i, hook)


def hooks_on_optimizer(optimizer: Optimizer) -> Iterator[RegisteredHook]:
    """Yield the hooks on one optimizer, and a ``step`` that was put in the place of its own."""
    own = vars(optimizer)
    if "step" in own:
        flags: tuple[str, ...] = ()
        if getattr(own["step"], "_wrapped_by_lr_sched", False):
            flags = ("by a learning-rate scheduler",)
        yield RegisteredHook("replaced-step", 0, own["step"], flags)
    for table, kind in _OF_ONE_OPTIMIZER.items():
        for i, hook in _numbered(own, table):
            yield RegisteredHook(kind, i, hook)


def _read(tables: Mapping[str, Any], prefix: str, *, full: bool) -> Iterator[RegisteredHook]:
    for table, said in _OF_MODULE.items():
        is_legacy = table == _BACKWARD and not full
        kind = "legacy-backward" if is_legacy else said
        for i, (key, hook) in enumerate(tables.get(prefix + table, {}).items()):
            flags = []
            for name, flag in _SAID_WITH.items():
                if name.startswith(table) and key in tables.get(prefix + name, ()):
                    flags.append(flag)
            yield RegisteredHook(kind, i, hook, tuple(flags))


def _numbered(tables: Mapping[str, Any], name: str) -> Iterator[tuple[int, Any]]:
    return enumerate(tables.get(name, {}).values())


def unwrapped(hook: Any) -> Any:
    """Return the function inside PyTorch's wrapper that adds the module to its arguments, if any."""
    wrapper = find("torch.nn.modules.module:_WrappedHook")
    if wrapper is None or not isinstance(hook, wrapper):
        return None
    return hook.hook


def computed_by(hook: Any) -> str | None:
    """Return the name of the tensor that a hook computes before each forward.

    It is None for one that is not of `torch.nn.utils`.
    """
    if not str(type(hook).__module__).startswith("torch.nn.utils."):
        return None
    name = getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)
    if not isinstance(name, str):
        return None
    return name


def for_modules() -> dict[str, Table]:
    """Return the tables of hooks on all modules, by name."""
    return _tables_in(vars(modules))


def for_everything() -> dict[str, Table]:
    """Return the tables of hooks on all modules and on all optimizers, by name."""
    return _tables_in(vars(modules)) | _tables_in(vars(optimizers))


def _tables_in(names: Mapping[str, Any]) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for name, table in names.items():
        is_of_hooks = name.startswith(_EVERYWHERE) and "hooks" in name
        if is_of_hooks and isinstance(table, dict):
            found[name] = table
    return found


def tables_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return copies of the tables of a module's hooks in a pass, and of their flags."""
    own = vars(module)
    return {name: dict(own[name]) for name in _RESTORED if own.get(name) is not None}
