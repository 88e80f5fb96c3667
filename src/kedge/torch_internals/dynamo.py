"""Living with Dynamo, without importing it: it takes a second, and most programs never need it.

# Note [Whose code]
Dynamo does not look for hooks that came after it had compiled, and lends the code of an unhooked
instance to a hooked one of the same class. So code that exists when hooks are attached is thrown
away, and while they are there Dynamo is told to look for hooks.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from kedge.torch_internals.corners import find

_before: list[bool] = []
_holders = 0


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside what `torch.compile` made of it."""
    dynamo = sys.modules.get("torch._dynamo")  # absent as long as nothing was compiled: importing it takes a second
    return model._orig_mod if dynamo is not None and isinstance(model, dynamo.OptimizedModule) else model


def compiles(module: nn.Module) -> bool:
    """Tell whether a call of this very module is compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, so that the module itself calls what was compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_loaded() -> bool:
    """Whether anything can have been compiled yet."""
    return "torch._dynamo" in sys.modules


def takes_calls_in() -> bool:
    """Tell whether ``compile()`` of one of PyTorch's own modules takes its call into the graph, hooks and all, as since 2.14."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return hasattr(getattr(dynamo, "OptimizedModule", None), "_should_wrap_module_call_impl")


def passes_over(function: Any) -> bool:
    """Tell whether Dynamo does not compile a function by itself."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")  # there, if anything is compiled
    return rules is not None and bool(rules.check(function))


def break_graph() -> None:
    """Have Dynamo, if it reads this, end its graph here."""
    torch._dynamo.graph_break()


def has_code(function: Any) -> bool:
    """Tell whether there is compiled code of a function or method, or a compiled one in its place."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    entries = find("torch:_C._dynamo.eval_frame._debug_get_cache_entry_list")
    compiled = code is not None and entries is not None and has_compiled() and bool(entries(code))
    return compiled or hasattr(function, "_torchdynamo_orig_callable")


def has_compiled() -> bool:
    """Tell whether there is compiled code in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(getattr(frames, "FRAME_COUNTER", True))


def frames() -> int:
    """Count what was compiled in this process since the last reset, again for each time it was compiled again."""
    converted: Any = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if converted is None else sum(getattr(converted, "FRAME_COMPILE_COUNTER", {0: 1}).values())


def hold() -> None:
    """Begin to need that Dynamo looks for hooks; see Note [Whose code]."""
    global _holders  # noqa: PLW0603 - Dynamo has one setting for the process
    _holders += 1
    look_for_hooks()


def look_for_hooks() -> None:
    """Tell Dynamo to look for hooks, if something has imported it by now."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if hasattr(config, "skip_nnmodule_hook_guards") and not _before:
        _before.append(config.skip_nnmodule_hook_guards)
        config.skip_nnmodule_hook_guards = False


def release() -> None:
    """Need it no longer; the last one gives Dynamo its setting back."""
    global _holders  # noqa: PLW0603
    _holders -= 1
    if not _holders and _before:
        config: Any = sys.modules["torch._dynamo.config"]
        config.skip_nnmodule_hook_guards = _before.pop()


class Hold:
    """Has Dynamo look for hooks as long as it stands."""

    def __init__(self) -> None:
        self._on = False
        self.back()

    def back(self) -> None:
        """Begin to need it."""
        if not self._on:
            hold()
            self._on = True

    def out(self) -> None:
        """Need it no longer, for now."""
        if self._on:
            self._on = False
            release()

    def remove(self) -> None:
        """Need it no longer."""
        self.out()


def refresh() -> bool:
    """Throw compiled code away, so that the next call is compiled with the hooks in it; tells whether there was any.

    Dynamo does not look for hooks that came later, and lends the code of an unhooked instance to a
    hooked one of the same class.
    """
    if has_compiled():
        torch.compiler.reset()
        return True
    return False


def untraced(*functions: Any) -> None:
    """Have these functions, the functions defined in them, and all they call run as plain Python.

    Dynamo may take up any function that is called between the graphs it has captured. What a hook
    does in Python is not for it. A hook that it reads while it captures the module is not affected.
    """
    frames: Any = find("torch:_C._dynamo.eval_frame")
    if find("torch:_C._dynamo.eval_frame.set_code_exec_strategy") is None:
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        if isinstance(function, FunctionType):
            inner = [c for c in function.__code__.co_consts if isinstance(c, CodeType)]
            for code in (function.__code__, *inner):
                frames.set_code_exec_strategy(code, skip)
