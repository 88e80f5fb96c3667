"""The effects of a hook on torch.compile, pickle, deepcopy, in-place operations and gradients.

A test shows each effect that a sentence here describes.
"""

from __future__ import annotations

import functools
import pickle
import re
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from kedge.torch_internals import dynamo, hook_tables
from kedge.torch_internals.hook_tables import computed_by
from kedge.torch_internals.module_tables import own_children

FORWARD = ("forward-pre", "forward")
FULL = ("full-backward-pre", "full-backward")
BACKWARD = (*FULL, "legacy-backward")
TENSOR = ("tensor", "post-accumulate")
STATE = ("state-dict-pre", "state-dict", "load-state-dict-pre", "load-state-dict")

_READ = (
    "where compiled code calls its module, it is traced into the graph; "
    "code that Dynamo cannot trace, such as a print, breaks the graph. "
    "Code compiled earlier, for this model or another of its class, leaves it out"
)
_LEFT_OUT = (
    "if it was registered after the compile: "
    "code compiled earlier leaves it out, until torch.compiler.reset()"
)
_READ_AGAIN = (
    "is traced into the compiled code, "
    "which recompiles whenever it is added or removed; "
    "code that Dynamo cannot trace, such as a print, breaks the graph"
)
_AROUND = "runs around the compiled code, whenever it was registered"
_BREAKS = "breaks the graph where its module is called in compiled code; fullgraph=True raises"
_OUTSIDE = "runs outside compiled code, whenever it was registered"
_IDENTITY = (
    "puts an identity into the graph, which can change bits of gradients; "
    "never fires for outputs in a list, dict or dataclass"
)
_KEYWORDS = "; its grad_input leaves out keyword arguments"
_LAST = "sees the gradients of the last operation in its module, not of the module's inputs"
_RAISES = "an in-place operation on inputs or outputs of its module raises, if they require grad"
_RAISES_HERE = "raises, if the input requires grad: its module works in place"
_OVERWRITTEN = "receives an input that is already overwritten: its module works in place"
_REFUSED = "pickle and torch.save of the model raise ({}); saving its state_dict() works"
_PICKLED = "is pickled with the model, and needed to load it"
_WITHOUT = "a pickled or deep-copied model lacks it"
_WARNED = ", and pickle warns about that"

_WITHOUT_TENSOR = "a pickled or deep-copied tensor lacks it"
_WITHOUT_STEP = (
    "a pickled or deep-copied optimizer lacks it; saving its state_dict() leaves it out too"
)
_PARAMETRIZED = "its module is parametrized"
_NO_COPY = "deepcopy of the model raises ({})"
_SAME = "a deep copy of the model calls the same function, with all objects it refers to"
_OWN = "a deep copy of the model calls a copy of this {}"
_PREFIX = 'state_dict() puts "_orig_mod." in front of every name'


Standing: TypeAlias = Literal["", "root", "entry", "inside"]


class Effect(NamedTuple):
    """One effect of a hook.

    Attributes:
        on: Its object: compile, gradients, in-place, pickle, deepcopy or state_dict.
        what: The sentence.
        harms: Whether it can cause an error, a wrong result or silence.
    """

    on: str
    what: str
    harms: bool = False


@dataclass(frozen=True)
class FoundHook:
    """A hook and its place.

    Attributes:
        kind: Its kind.
        hook: The object that PyTorch calls.
        path: The name of its module or tensor; a description for hooks on all of them.
        type: Class name of the module or tensor; empty for hooks on all of them.
        order: Its place in the firing order, among its kind there.
        module: The module that holds it; None for tensors' and global hooks.
        flags: How it was registered.
        compiled: Whether the module is the root of compiled code, inside of it, or neither.
        ours: Whether it belongs to Kedge.
        of_optimizer: Whether it is on one optimizer.
    """

    kind: str
    hook: Any
    path: str
    type: str
    order: int = 0
    module: nn.Module | None = None
    flags: tuple[str, ...] = ()
    compiled: Standing = ""
    ours: bool = False
    of_optimizer: bool = False


def function_in(hook: Any) -> Any:
    """Return the function or object inside partials, bound methods and wrappers."""
    while True:
        if isinstance(hook, functools.partial):
            hook = hook.func
        elif isinstance(hook, types.MethodType):
            hook = hook.__func__
        elif hook_tables.unwrapped(hook) is not None:
            hook = hook_tables.unwrapped(hook)
        elif isinstance(hook, types.FunctionType) and hasattr(hook, "__wrapped__"):
            hook = hook.__wrapped__
        else:
            return hook


def effects(found: FoundHook, trial: CopyTrial) -> tuple[Effect, ...]:
    """Return all effects of a hook."""
    return (
        *_on_compile(found),
        *_on_gradients(found),
        *_in_place(found),
        *_on_copies(found, trial),
    )


def _on_compile(found: FoundHook) -> Iterator[Effect]:
    if found.kind in TENSOR:
        yield Effect("compile", _OUTSIDE)
    if found.ours or found.kind not in FORWARD + BACKWARD:
        return
    if found.compiled == "root":
        yield Effect("compile", _AROUND)
        return
    if found.kind in BACKWARD:
        yield Effect("compile", _BREAKS, harms=True)
    elif found.compiled == "entry":
        yield Effect("compile", _READ_AGAIN)
        return
    if found.compiled == "inside":
        yield Effect("compile", _LEFT_OUT, harms=True)
    elif found.kind in FORWARD:
        yield Effect("compile", _READ)


def standings(modules: Iterable[nn.Module]) -> dict[int, Standing]:
    """Return for modules, by id, whether compiled code is around them or in them.

    Compiled code calls those that are "inside"; a "root" calls compiled code.

    # Note [Where compiled code begins]
    Dynamo compiles a module's ``forward``; the call with its hooks is around that, and only the
    calls of this ``forward`` are inside. It does not compile the ``forward`` of PyTorch's own
    modules by itself: `torch.compile` puts a function around such a module, which is then inside as
    a whole, and after ``module.compile()`` compiled code begins further down, at the first
    ``forward`` that is not PyTorch's. Since 2.14 ``module.compile()`` puts a function around such a
    module too, whose hooks Dynamo looks for at each call: that module is the "entry" to what is
    inside.
    """
    at: dict[int, Standing] = {}
    for module in modules:
        inner = dynamo.unwrap(module)
        if inner is not module:
            at.setdefault(id(module), "root")
            standing: Standing = "inside" if _is_torchs(inner) else "root"
            _mark(inner, standing, at)
        elif dynamo.is_compiled_in_place(module):
            is_inside = at.get(id(module)) == "inside"
            if _is_torchs(module) and dynamo.takes_calls_in() and not is_inside:
                _mark(module, "inside", at)
                at[id(module)] = "entry"
            else:
                _mark(module, "root", at)
    return at


def _mark(module: nn.Module, standing: Standing, at: dict[int, Standing]) -> None:
    if at.get(id(module)) == "inside":
        return
    at[id(module)] = standing

    below: Standing = "inside"
    if standing == "root" and _is_torchs(module):
        below = "root"
    for child in own_children(module).values():
        if child is not None:
            _mark(child, below, at)


def _is_torchs(module: nn.Module) -> bool:
    """Whether Dynamo skips a module's ``forward``."""
    return isinstance(module.forward, types.MethodType) and dynamo.passes_over(module.forward)


def _on_gradients(found: FoundHook) -> Iterator[Effect]:
    if found.kind == "full-backward":
        yield Effect("gradients", _IDENTITY + _KEYWORDS, harms=True)
    elif found.kind in FULL:
        yield Effect("gradients", _IDENTITY, harms=True)
    elif found.kind == "legacy-backward":
        yield Effect("gradients", _LAST, harms=True)


def _in_place(found: FoundHook) -> Iterator[Effect]:
    works_in_place = getattr(found.module, "inplace", False) is True
    if found.kind in FULL:
        raises = _RAISES_HERE if works_in_place else _RAISES
        yield Effect("in-place", raises, harms=True)
    elif found.kind == "forward" and works_in_place and not found.ours:
        yield Effect("in-place", _OVERWRITTEN)


def _on_copies(found: FoundHook, trial: CopyTrial) -> Iterator[Effect]:
    if found.kind in TENSOR and found.type == "Tensor":
        lacks = _WITHOUT_TENSOR
        if found.kind == "tensor":
            lacks += _WARNED
        yield Effect("pickle", lacks)
    elif found.kind in TENSOR:
        lacks = _WITHOUT
        if found.type != "Parameter":
            lacks += _WARNED
        yield Effect("pickle", lacks)
    elif found.of_optimizer:
        yield Effect("pickle", _WITHOUT_STEP)
    elif found.kind == "parametrization":
        yield Effect("pickle", _REFUSED.format(_PARAMETRIZED), harms=True)
    elif found.kind == "compiled" and found.type == "OptimizedModule":
        yield Effect("state_dict", _PREFIX, harms=True)
    elif found.kind == "compiled" or (found.module is not None and found.ours):
        yield Effect("pickle", _WITHOUT)
    elif found.module is not None:
        refused = trial.pickle(found.hook)
        if refused:
            yield Effect("pickle", _REFUSED.format(refused), harms=True)
        else:
            yield Effect("pickle", _PICKLED)
        yield _deepcopied(found, trial)


def _deepcopied(found: FoundHook, trial: CopyTrial) -> Effect:
    refused = trial.deepcopy(found.hook)
    name = computed_by(found.hook)
    if name is not None and not _copies(getattr(found.module, name, None)):
        refused = f"{name} is computed from others, so it is not a leaf"
    if refused:
        return Effect("deepcopy", _NO_COPY.format(refused), harms=True)

    hook = hook_tables.unwrapped(found.hook) or found.hook
    held = getattr(hook, "__self__", hook)
    if isinstance(held, _ATOMIC):
        return Effect("deepcopy", _SAME)
    return Effect("deepcopy", _OWN.format(type(held).__name__))


def _copies(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.is_leaf


_ATOMIC = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    property,
    weakref.ref,
)


class CopyTrial:
    """A trial of pickling and copying hooks that writes nothing and copies no tensor.

    Args:
        known: The ids of the model's own modules, which are pickled and copied anyway.
    """

    def __init__(self, known: Container[int]) -> None:
        self.known = known
        self._pickled: dict[int, str | None] = {}
        self._copied: dict[int, str | None] = {}

    def pickle(self, hook: Any) -> str | None:
        """Return why a hook cannot be pickled; None if it can."""
        if id(hook) not in self._pickled:
            refused = self._try(hook, _Dry)
            if refused:
                refused = _named(function_in(hook)) or refused
            self._pickled[id(hook)] = refused
        return self._pickled[id(hook)]

    def deepcopy(self, hook: Any) -> str | None:
        """Return why a hook cannot be copied; None if it can."""
        if id(hook) not in self._copied:
            self._copied[id(hook)] = self._try(hook, _DryCopy)
        return self._copied[id(hook)]

    def _try(self, hook: Any, how: Callable[[Container[int]], _Dry]) -> str | None:
        try:
            how(self.known).dump(hook)
        except Exception as error:  # noqa: BLE001 - any error of the program's object is the result
            text = re.sub(r" at 0x[0-9a-f]+", "", str(error)).partition("\n")[0]
            return f"{type(error).__name__}: {text}"
        return None


def _named(function: Any) -> str | None:
    """Return why pickle cannot find a function by its name; None if it can."""
    name = getattr(function, "__qualname__", "")
    if name.endswith("<lambda>"):
        return "a lambda has no name to import it by"
    if "<locals>" in name:
        return f"{name.rpartition('.')[2]} is defined inside a function"
    return None


class _Nowhere:
    """A file that discards its content."""

    def write(self, data: Any) -> int:
        return len(data)


class _Dry(pickle.Pickler):
    """A pickler without output that skips tensors and the modules of the model."""

    def __init__(self, known: Container[int]) -> None:
        super().__init__(_Nowhere(), 5, buffer_callback=lambda buffer: None)
        self.known = known

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, Tensor) or id(obj) in self.known:
            return "known"
        return None


class _DryCopy(_Dry):
    """A pickler by the protocol of deepcopy, which keeps functions and classes."""

    def persistent_id(self, obj: Any) -> str | None:
        if not _copies(obj):
            raise RuntimeError(f"it holds a tensor of shape {list(obj.shape)} that is not a leaf")
        if isinstance(obj, _ATOMIC) or hasattr(type(obj), "__deepcopy__"):
            return "kept"
        return super().persistent_id(obj)
