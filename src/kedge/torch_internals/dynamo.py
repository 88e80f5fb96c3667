"""Dynamo's state and settings, without importing it: that takes a second, and most programs never need it.

# Note [Whose code]
Dynamo does not check for hooks that came after compilation, and reuses the code of an unhooked
instance for a hooked one of the same class. So Kedge keeps existing code from the models that it
hooks, or discards it where all models are hooked, and has Dynamo check for hooks as long as they
are there.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from kedge.torch_internals.corners import find, lacks
from kedge.torch_internals.operators import leave_graphs_whole
from kedge.torch_internals.stance import stance

_SETTINGS = {
    "skip_nnmodule_hook_guards": 0,
    "recompile_limit": 2,
    "accumulated_recompile_limit": 2,
}
"""Dynamo's settings, with the number that each is multiplied by.

It checks for hooks then, and has room for all code with and without them.
"""
_PHASES = ("entire_frame_compile", "entire_backward_compile")
"""Dynamo's names for the nanoseconds of compiling: with a forward, and of a backward when it is first run."""
_before: dict[str, Any] = {}
_own_limits: set[str] = set()
_holders = 0


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside a result of `torch.compile`; any other model itself."""
    # It is absent as long as nothing was compiled: importing it takes a second.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not isinstance(model, dynamo.OptimizedModule):
        return model
    inside: nn.Module = getattr(model, "_orig_mod", model)
    return inside


def compiles(module: nn.Module) -> bool:
    """Whether calls of this module itself are compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, so that the module itself calls compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_loaded() -> bool:
    """Whether anything can have been compiled yet."""
    return "torch._dynamo" in sys.modules


def takes_calls_in() -> bool:
    """Whether ``compile()`` of a PyTorch module compiles its call with its hooks, as since 2.14."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return hasattr(getattr(dynamo, "OptimizedModule", None), "_should_wrap_module_call_impl")


def passes_over(function: Any) -> bool:
    """Whether Dynamo does not compile a function by itself."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")  # there, if anything is compiled
    return rules is not None and bool(rules.check(function))


def is_export_wrapper(module: nn.Module) -> bool:
    """Whether a module is the one in which `torch.export` puts the model that it traces with Dynamo."""
    kind = type(module)
    return kind.__name__ == "ModuleToTrace" and kind.__module__.startswith("torch._dynamo.")


def break_graph() -> None:
    """End Dynamo's graph here, if Dynamo traces this."""
    torch._dynamo.graph_break()


def has_code(function: Any) -> bool:
    """Whether there is compiled code of a function or method, or a compiled one in its place."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    entries = find("torch:_C._dynamo.eval_frame._debug_get_cache_entry_list")
    compiled = code is not None and entries is not None and has_compiled() and bool(entries(code))
    return compiled or hasattr(function, "_torchdynamo_orig_callable")


def has_compiled() -> bool:
    """Whether there is compiled code in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(getattr(frames, "FRAME_COUNTER", True))


def frames() -> int:
    """Return the number of compilations in this process since the last reset."""
    converted: Any = sys.modules.get("torch._dynamo.convert_frame")
    if converted is None:
        return 0
    return sum(getattr(converted, "FRAME_COMPILE_COUNTER", {0: 1}).values())


def compile_seconds() -> float:
    """Return the seconds that compiling has taken since the last reset of Dynamo's clocks."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    phases: dict[str, float] = getattr(utils, "cumulative_time_spent_ns", {})
    return sum(phases.get(name, 0) for name in _PHASES) / 1e9


def may_compile_again() -> bool:
    """Whether compiling code again would neither fail, nor have to happen in every process at once."""
    config: Any = sys.modules.get("torch._dynamo.config")
    refused = ("error_on_recompile", "enable_compiler_collectives", "fail_on_recompile_limit_hit")
    see_limits()
    if stance() != "default" or _own_limits:
        return False
    return not any(getattr(config, name, False) for name in refused)


def see_limits() -> None:
    """Note limits that the program has set itself meanwhile.

    They may have no room for all code with and without hooks. While code is compiled, they are
    those of `torch.compile(..., recompile_limit=...)`.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    for name, before in _before.items():
        if getattr(config, name) != _changed(name, before):
            _own_limits.add(name)


def hold() -> None:
    """Switch on Dynamo's check for hooks until `release`; see Note [Whose code]."""
    global _holders  # noqa: PLW0603 - Dynamo has one setting for the process
    _holders += 1
    look_for_hooks()


def is_held() -> bool:
    """Whether Dynamo is asked to check for hooks now."""
    return _holders > 0


def look_for_hooks() -> None:
    """Switch on Dynamo's check for hooks, if it is held and Dynamo is imported by now."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if _holders and not _before:
        for name in _SETTINGS:
            if hasattr(config, name):
                _before[name] = getattr(config, name)
                setattr(config, name, _changed(name, _before[name]))


def _changed(name: str, before: Any) -> Any:
    return type(before)(_SETTINGS[name] * before)


def release() -> None:
    """End one `hold`; the last one restores Dynamo's setting."""
    global _holders  # noqa: PLW0603
    _holders -= 1
    if not _holders:
        leave_graphs_whole()
    if not _holders and _before:
        config: Any = sys.modules["torch._dynamo.config"]
        for name, before in _before.items():
            # Another value is one that the program has set itself meanwhile.
            if getattr(config, name) == _changed(name, before):
                setattr(config, name, before)
        _before.clear()
        _own_limits.clear()


class DynamoHold:
    """Keeps Dynamo checking for hooks until it is removed."""

    def __init__(self) -> None:
        self._on = False
        self.back()

    def back(self) -> None:
        """Switch on Dynamo's check for hooks."""
        if not self._on:
            hold()
            self._on = True

    def out(self) -> None:
        """Pause it."""
        if self._on:
            self._on = False
            release()

    def remove(self) -> None:
        """End it."""
        self.out()


def refresh() -> bool:
    """Discard compiled code, so that the next call is compiled with the hooks.

    See Note [Whose code].

    Returns:
        Whether there was any.
    """
    if has_compiled():
        torch.compiler.reset()
        return True
    return False


def untraced(*functions: Any) -> None:
    """Exclude these functions, the functions defined in them, and all that they call from compilation.

    Dynamo may compile any function that is called between its graphs, also the Python code of a
    hook. Hooks that it traces as part of a module are not affected.
    """
    if lacks("dynamo"):
        return
    frames: Any = find("torch:_C._dynamo.eval_frame")
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        if isinstance(function, FunctionType):
            inner = [c for c in function.__code__.co_consts if isinstance(c, CodeType)]
            for code in (function.__code__, *inner):
                frames.set_code_exec_strategy(code, skip)
