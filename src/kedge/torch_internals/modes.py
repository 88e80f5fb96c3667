"""Modes that see what a thread calls, and the transforms and traces that it may be in.

# Note [Keys put back]
PyTorch calls its modes where a thread's dispatch keys say that there are some. Some callers put the
keys back as they were before: a backward pass, whatever calls ``__torch_dispatch__``, and a function
that Dynamo compiles. Where the last mode is taken off inside of one, the keys say afterwards that
there is one, and the next operation fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from kedge.frames import frames_around
from kedge.torch_internals.corners import at_once, find, late
from kedge.torch_internals.graph_task import in_backward

push_function_mode: Callable[[Any], None] = late(
    "torch:_C._push_on_torch_function_stack", lambda _: None
)
pop_function_mode: Callable[[], Any] = late("torch:_C._pop_torch_function_stack", lambda: None)
function_modes: Callable[[], int] = late("torch:_C._len_torch_function_stack", lambda: 0)
"""The number of function modes on this thread's stack."""

dispatch_modes: Callable[[], int] = late("torch:_C._len_torch_dispatch_stack", lambda: 0)
"""The number of dispatch modes on this thread's stack."""

is_under_jit: Callable[[], bool] = at_once("torch:_C._is_tracing", lambda: False)
"""Whether `torch.jit.trace` is under way."""

without_modes: Callable[[], AbstractContextManager[Any]] = late(
    "torch.utils._python_dispatch:_disable_current_modes", nullcontext
)
"""Suspends every dispatch mode."""

without_function_modes: Callable[[], AbstractContextManager[Any]] = late(
    "torch:_C.DisableTorchFunction", nullcontext
)

without_subclasses: Callable[[], AbstractContextManager[Any]] = late(
    "torch:_C.DisableTorchFunctionSubclass", nullcontext
)
"""A block in which tensors of a class with ``__torch_function__`` are plain ones."""

_KEYS_GUARDS = frozenset({"_ForceDispatchKeyGuard", "_PreserveDispatchKeyGuard"})
"""Blocks of PyTorch's after which a thread's dispatch keys are as before."""

_record: Callable[[bool], None] = late("torch:_C._autograd._enable_record_function", lambda _: None)
_dispatch_mode_at: Callable[[int], Any] = late("torch:_C._get_dispatch_stack_at", lambda _: None)
_pop_dispatch_mode: Callable[[None], Any] = late(
    "torch:_C._pop_torch_dispatch_stack", lambda _: None
)
_push_dispatch_mode: Callable[[Any], None] = late(
    "torch:_C._push_on_torch_dispatch_stack", lambda _: None
)
_mode: Callable[[Any], Any] = late("torch:_C._get_dispatch_mode", lambda _: None)
_interpreter: Callable[[], Any] = late("torch:_C._functorch.peek_interpreter_stack", lambda: None)
_is_wrapped: Callable[[Any], bool] = late(
    "torch:_C._functorch.is_functorch_wrapped_tensor", lambda _: False
)
_inside: Callable[[Any], Any] = late("torch:_C._functorch.get_unwrapped", lambda value: value)
_is_batched: Callable[[Any], bool] = at_once(
    "torch:_C._functorch.is_legacy_batchedtensor", lambda _: False
)
_without_batch: Callable[[Any, int, int, int], Tensor] = late(
    "torch:_remove_batch_dim", lambda value, *_: value
)
_without_fake: Callable[[], AbstractContextManager[Any]] = late(
    "torch._subclasses.fake_tensor:unset_fake_temporarily", nullcontext
)

without_transforms: Callable[[], AbstractContextManager[Any]] = late(
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", nullcontext
)
"""Suspends the transforms of `torch.func`."""

without_wrapping: Callable[[], AbstractContextManager[Any]] = late(
    "torch:_C._DisableFuncTorch", nullcontext
)
"""A block in which results inside of a transform are not wrapped again."""


def seeing_operations(see: Callable[[str, Any, Any, Any], None]) -> AbstractContextManager[Any]:
    """Return a context in which a function is called after each operation of this thread.

    It is given the name, the arguments and the result.
    """
    mode: AbstractContextManager[Any] | None = operation_mode(see)
    if mode is None:
        return nullcontext()
    return mode


def operation_mode(see: Callable[[str, Any, Any, Any], None]) -> Any:
    """Return a dispatch mode that calls a function after each operation, as `seeing_operations` does.

    It passes on operators that call functions, and leaves Dynamo alone. None if PyTorch has none.
    """
    base = find("torch.utils._python_dispatch:TorchDispatchMode")
    if base is None:
        return None

    class Seeing(base):  # type: ignore[misc, valid-type]
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            # In inference mode operations come here before they are taken apart.
            if torch.is_inference_mode_enabled() and hasattr(operation, "decompose"):
                with self:
                    result = operation.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if is_profiled():
                # It has recorded the operation already.
                _record(False)
                try:
                    result = operation(*args, **kwargs)
                finally:
                    _record(True)
            else:
                result = operation(*args, **kwargs)
            packet = getattr(operation, "overloadpacket", operation)
            see(packet.__name__, args, kwargs, result)
            return result

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # to be skipped would import Dynamo, which takes a second

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    return Seeing()


def is_profiled() -> bool:
    """Whether PyTorch's profiler records the operations."""
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def put_on_operations(mode: Any) -> None:
    """Put a dispatch mode onto this thread's stack; nobody else is told that there is one."""
    _push_dispatch_mode(mode)


def is_on_operations(mode: Any) -> bool:
    """Whether a dispatch mode is on this thread's stack; it is not while it passes an operation on."""
    return any(_dispatch_mode_at(place) is mode for place in range(dispatch_modes()))


def keys_are_put_back() -> bool:
    """Whether a caller will put this thread's dispatch keys back, so that no mode may go; see Note [Keys put back]."""
    if in_backward():
        return True
    for frame in frames_around(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == "__torch_dispatch__" or not _KEYS_GUARDS.isdisjoint(code.co_names):
            return True
    return False


def take_off_operations(mode: Any) -> bool:
    """Remove a dispatch mode from this thread's stack, and keep those above it.

    Returns:
        Whether it was there. It is not while it passes an operation on.
    """
    above: list[Any] = []
    found = False
    for place in reversed(range(dispatch_modes())):
        top = _dispatch_mode_at(place)
        if getattr(top, "_mode_key", None) is not None:  # PyTorch's own lie below all others
            break
        _pop_dispatch_mode(None)
        if top is mode:
            found = True
            break
        above.append(top)
    for other in reversed(above):
        _push_dispatch_mode(other)
    return found


def take_off(mode: Any, past: type | None = None) -> bool:
    """Remove a function mode from this thread's stack, and keep those above it.

    Args:
        mode: The mode.
        past: Only modes of this class may lie above it; any, if None.

    Returns:
        Whether it was found.
    """
    above: list[Any] = []
    found = False
    while function_modes() and not found:
        top = pop_function_mode()
        found = top is mode
        if not found:
            above.append(top)
            if past is not None and not isinstance(top, past):
                break
    for other in reversed(above):
        push_function_mode(other)
    return found


def put_low(mode: Any) -> None:
    """Put a function mode onto this thread's stack, below those of the program.

    Older ones of its class are below it, and that of `torch.set_default_device`, which expects to
    be the lowest.
    """
    above: list[Any] = []
    while function_modes():
        above.append(pop_function_mode())
    default = getattr(find("torch:_GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    while above and (above[-1] is default or isinstance(above[-1], type(mode))):
        push_function_mode(above.pop())
    for other in (mode, *reversed(above)):
        push_function_mode(other)


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is under way on this thread."""
    return _interpreter() is not None


def is_batched(value: Tensor) -> bool:
    """Whether a tensor stands for a batch of gradients, in a backward with ``is_grads_batched=True``.

    Such a wrapper does not belong to `torch.func`, and cannot be detached.
    """
    return _is_batched(value)


def is_wrapped(value: Tensor) -> bool:
    """Whether a tensor is the wrapper of a transform, or of a batch of gradients."""
    return _is_wrapped(value) or _is_batched(value)


def unwrapped(value: Tensor) -> Tensor:
    """Return the tensor inside a wrapper."""
    if _is_batched(value):
        return _without_batch(value, 1, 1, 0)
    inner: Tensor = _inside(value)
    return inner


def is_captured() -> bool:
    """Whether the operations of this thread become a graph, for example by ``make_fx``."""
    key = find("torch:_C._TorchDispatchModeKey.PROXY")
    return key is not None and dispatch_modes() > 0 and _mode(key) is not None


def is_faking() -> bool:
    """Whether the operations of this thread make fake tensors."""
    key = find("torch:_C._TorchDispatchModeKey.FAKE")
    return key is not None and dispatch_modes() > 0 and _mode(key) is not None


def is_fake(value: Any) -> bool:
    """Whether a tensor is fake: it has no data."""
    kind = find("torch._subclasses.fake_tensor:FakeTensor")
    return kind is not None and isinstance(value, kind)


def has_data(value: Tensor) -> bool:
    """Whether a tensor has numbers that can be read.

    One on the device ``meta``, or a fake one, has only a shape.
    """
    return not (value.is_meta or is_fake(value))


def is_dispatched(value: Tensor) -> bool:
    """Whether operations on a tensor run code of its class, as those on a DTensor do."""
    return type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__


def plainly() -> AbstractContextManager[Any]:
    """Suspend the modes in which tensors have no data or become part of a graph."""
    if is_captured():
        return without_modes()
    return _without_fake()
