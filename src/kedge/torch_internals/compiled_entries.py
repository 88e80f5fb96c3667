"""Compiled code that exists when a model is hooked: what of it stays in use, and for which modules.

# Note [Code without hooks]
Dynamo keeps compiled code by the code object of a function, which all instances of a class share, with guards that decide whether
a call may use it. Code that was compiled without Kedge's hooks gets one guard more: none of the modules that it
was compiled from has such hooks in the present call. Which modules these are, its guards on their types tell, as expressions over
the function's variables. So the code of other models stays in use while one is hooked, the hooked model compiles
once with its hooks, and its former code is in use again afterwards. Nobody but Kedge's hooks makes the guard fail.

Code with hooks is of no use after their end, but would count against Dynamo's limit of codes for one function. So it is
discarded when its model is hooked again, with whatever else was compiled from the same function.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from kedge.torch_internals import dynamo
from kedge.torch_internals.corners import find

IsHooked = Callable[[nn.Module], bool]

_TYPE = re.compile(r"___check_type_id\((.+), (\d+)\)")
_OBJECT = re.compile(r"___check_obj_id\((.+), \d+\), type=<class '(.+?)'>")
_WITH_HOOKS = "__import_kedge_"
"""The beginning of the names by which guards refer to modules of Kedge's that were traced."""


def set_aside(model: nn.Module, is_hooked: IsHooked) -> bool:
    """Have a model that is about to be hooked compile again at its next call; see Note [Code without hooks].

    Args:
        model: The model.
        is_hooked: Whether a module has hooks of Kedge's, asked at each call of compiled code while there are any.

    Returns:
        Whether there is code that was compiled from the model, or may have been.
    """
    if not dynamo.has_compiled():
        return False
    if not dynamo.may_compile_again() or not _has_guards():
        return dynamo.refresh()
    types = _ids_of_module_types()
    own = {id(type(module)) for module in model.modules()}
    may_be_its = False
    was_traced = _was_traced(model)
    for code, entries in _compiled():
        of_model = [entry for entry in entries if was_traced and not own.isdisjoint(_sources(entry, types).values())]
        may_be_its = may_be_its or bool(of_model)
        if any(map(_has_hooks, of_model)):
            _reset(code)
            continue
        for entry in entries:
            if not _has_hooks(entry) and not hasattr(entry.guard_manager, _GUARD):
                _add_guard(entry, tuple(_sources(entry, types)), is_hooked)
    return may_be_its


_GUARD = "_kedge_guard"


class NoneHooked:
    """The guard that no module of some compiled code is hooked; see Note [Code without hooks].

    Args:
        sources: The expressions of the modules.
        scope: The global variables in them.
        is_hooked: Whether a module is hooked.
    """

    def __init__(self, sources: tuple[str, ...], scope: dict[str, Any], is_hooked: IsHooked) -> None:
        self._modules = compile(f"({''.join(f'{source}, ' for source in sources)})", "<guard>", "eval")
        self._scope, self._is_hooked = scope, is_hooked

    def __call__(self, variables: dict[str, Any]) -> bool:
        """Whether the code may be used in a call with these variables."""
        if not dynamo.is_held():
            return True
        # The expressions are Dynamo's own, which it has evaluated just before: those of an earlier guard.
        found = eval(self._modules, {"L": variables, "G": self._scope})  # noqa: S307
        return not any(isinstance(each, nn.Module) and self._is_hooked(each) for each in found)


def _has_guards() -> bool:
    """Whether this PyTorch has what a guard needs."""
    return all(
        find(f"torch:_C._dynamo.{name}") is not None
        for name in (
            "eval_frame._debug_get_cache_entry_list",
            "eval_frame.reset_code",
            "guards.RootGuardManager.add_epilogue_lambda_guard",
        )
    )


def _compiled() -> Iterator[tuple[CodeType, list[Any]]]:
    """Yield each code object of which there is compiled code, with Dynamo's entries for it."""
    frames: Any = sys.modules["torch._dynamo.convert_frame"]
    entries_of: Any = find("torch:_C._dynamo.eval_frame._debug_get_cache_entry_list")
    known = {id(code): code for seen in (*frames.input_codes.seen, *frames.output_codes.seen) if (code := seen())}
    for code in known.values():
        if entries := entries_of(code):
            yield code, entries


def _reset(code: CodeType) -> None:
    reset: Any = find("torch:_C._dynamo.eval_frame.reset_code")
    reset(code)


def _parts(entry: Any) -> list[str]:
    return getattr(entry.guard_manager, "code_parts", None) or []


def _has_hooks(entry: Any) -> bool:
    return any(_WITH_HOOKS in part for part in _parts(entry))


def _sources(entry: Any, types: dict[int, str]) -> dict[str, int]:
    """Return the expressions of all modules in the guards of an entry, each with the id of the module's class."""
    found: dict[str, int] = {}
    by_name = {name: number for number, name in types.items()}
    for part in _parts(entry):
        if (of_type := _TYPE.match(part)) and int(of_type[2]) in types:
            found[of_type[1]] = int(of_type[2])
        elif (of_object := _OBJECT.match(part)) and of_object[2] in by_name:
            found[of_object[1]] = by_name[of_object[2]]
    return found


def _add_guard(entry: Any, sources: tuple[str, ...], is_hooked: IsHooked) -> None:
    manager = entry.guard_manager
    if not hasattr(manager, "root"):  # its code was invalidated, because an object in it no longer exists
        return
    guard = NoneHooked(sources, manager.global_scope, is_hooked)
    manager.root.add_epilogue_lambda_guard(guard, ["no module has hooks of Kedge's"], None)
    setattr(manager, _GUARD, guard)


def _ids_of_module_types() -> dict[int, str]:
    """Return the names of all classes of modules, by their ids."""
    found: dict[int, str] = {}
    waiting: list[type] = [nn.Module]
    while waiting:
        kind = waiting.pop()
        if id(kind) not in found:
            found[id(kind)] = f"{kind.__module__}.{kind.__qualname__}"
            waiting += type.__subclasses__(kind)
    return found


def _was_traced(model: nn.Module) -> bool:
    """Whether Dynamo has traced a model, or may have: it marks parameters and buffers, of which there may be none."""
    held: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return not held or any(hasattr(tensor, "_dynamo_static_input_type") for tensor in held)
