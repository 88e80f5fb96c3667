"""Compiled code that exists when a model is hooked: what of it stays in use, and for which modules.

# Note [Code without hooks]
Dynamo keeps compiled code by the code object of a function, which all instances of a class share,
with guards that decide whether a call may use it. Code that was compiled without Kedge's hooks gets
one guard more: none of the modules that it was compiled from has such hooks in the present call.
Which modules these are, Dynamo's guards on them tell, as expressions over the function's variables.
So the code of other models stays in use while one is hooked, the hooked model compiles once with
its hooks, and its former code is in use again afterwards. Nobody but Kedge's hooks makes the guard
fail.

Code with hooks is of no use after their end, but would count against Dynamo's limit of codes for
one function. So it is discarded when its model is hooked again, with whatever else was compiled
from the same function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from kedge.torch_internals import dynamo
from kedge.torch_internals.corners import find, lacks
from kedge.torch_internals.module_tables import buffers_in, modules_in, parameters_in

IsHooked = Callable[[nn.Module], bool]

_COMPILED_HOOKS = "__import_kedge_"
"""The beginning of the names by which guards refer to modules of Kedge's that were traced."""


_CONDITION = "_kedge_guard"
"""The attribute of a guard manager that has Kedge's guard."""


def set_aside(model: nn.Module, is_hooked: IsHooked) -> bool:
    """Have a model that is about to be hooked compile again at its next call.

    See Note [Code without hooks].

    Args:
        model: The model.
        is_hooked: Whether a module has hooks of Kedge's, asked at each call of compiled code while
            there are any.

    Returns:
        Whether there is code that was compiled from the model, or may have been.
    """
    if not dynamo.has_compiled():
        return False
    if not dynamo.may_compile_again() or lacks("dynamo", "compiled_entries"):
        return dynamo.refresh()
    types: set[type] = set()
    if _was_compiled(model):
        types.update(map(type, modules_in(model).values()))
    may_be_its = False
    reset: Any = find("torch:_C._dynamo.eval_frame.reset_code")
    for code, entries in _compiled():
        known = [(entry, _conditions(entry)) for entry in entries]
        of_model = [about for _, about in known if not types.isdisjoint(about.modules.values())]
        may_be_its = may_be_its or bool(of_model)
        if any(about.with_hooks for about in of_model):
            reset(code)
            continue
        for entry, about in known:
            if not about.with_hooks and not hasattr(entry.guard_manager, _CONDITION):
                _add_condition(entry, tuple(about.modules), is_hooked)
    return may_be_its


class NoneHooked:
    """The guard that no module of some compiled code is hooked; see Note [Code without hooks].

    Args:
        sources: The expressions of the modules.
        scope: The names in them, besides that of the variables.
        is_hooked: Whether a module is hooked.
    """

    def __init__(
        self, sources: tuple[str, ...], scope: dict[str, Any], is_hooked: IsHooked
    ) -> None:
        every = "".join(f"{source}, " for source in sources)
        self._modules = compile(f"({every})", "<guard>", "eval")
        self._scope = scope
        self._is_hooked = is_hooked

    def __call__(self, variables: dict[str, Any]) -> bool:
        """Whether the code may be used in a call with these variables."""
        if not dynamo.is_held():
            return True
        # The expressions are Dynamo's own, which it has evaluated just before: those of an earlier
        # guard.
        found = eval(self._modules, {**self._scope, "L": variables})  # noqa: S307
        return not any(isinstance(each, nn.Module) and self._is_hooked(each) for each in found)


def _compiled() -> Iterator[tuple[CodeType, list[Any]]]:
    """Yield each code object of which there is compiled code, with Dynamo's entries for it."""
    frames: Any = sys.modules["torch._dynamo.convert_frame"]
    entries_of: Any = find("torch:_C._dynamo.eval_frame._debug_get_cache_entry_list")
    known: dict[int, CodeType] = {}
    for seen in (*frames.input_codes.seen, *frames.output_codes.seen):
        code = seen()
        if code is not None:
            known[id(code)] = code
    for code in known.values():
        entries = entries_of(code)
        if entries:
            yield code, entries


class _Conditions(NamedTuple):
    """What the guards of an entry are about.

    Attributes:
        modules: The expression of each module, with its class.
        with_hooks: Whether code of Kedge's hooks was traced.
    """

    modules: dict[str, type]
    with_hooks: bool


def _conditions(entry: Any) -> _Conditions:
    """Return what the guards of an entry are about, a tree of expressions."""
    modules: dict[str, type] = {}
    with_hooks = False
    waiting: list[Any] = []
    root = getattr(entry.guard_manager, "root", None)
    if root is not None:  # an object exists no more without it, and the code is never used
        waiting.append(root)
    while waiting:
        condition = waiting.pop()
        source = condition.get_source()
        kind = condition.get_type_of_guarded_value()
        with_hooks = with_hooks or _COMPILED_HOOKS in source
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            modules[source] = kind
        waiting += condition.get_child_managers()
        # The values of the guard of a dict are no children of it.
        if hasattr(condition, "get_key_value_managers"):
            for _, value in condition.get_key_value_managers().values():
                if value is not None:
                    waiting.append(value)
    return _Conditions(modules, with_hooks)


def _add_condition(entry: Any, sources: tuple[str, ...], is_hooked: IsHooked) -> None:
    manager = entry.guard_manager
    if not hasattr(manager, "root"):
        return
    condition = NoneHooked(sources, manager.global_scope, is_hooked)
    manager.root.add_epilogue_lambda_guard(condition, ["no module has hooks of Kedge's"], None)
    setattr(manager, _CONDITION, condition)


def _was_compiled(model: nn.Module) -> bool:
    """Whether Dynamo has traced a model, or may have.

    It marks parameters and buffers, of which there may be none.
    """
    held: list[torch.Tensor] = [*parameters_in(model).values(), *buffers_in(model).values()]
    return not held or any(hasattr(tensor, "_dynamo_static_input_type") for tensor in held)
