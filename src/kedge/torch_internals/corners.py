"""PyTorch's private names that Kedge uses, corner by corner, and the cost of a missing one.

A name is looked up when it is first needed, by `late`; or by `at_once`, if it is called so often
that one call more counts. Either has a substitute, so importing Kedge needs none of them, and a
PyTorch without one loses the feature that its corner names.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Corner:
    """One corner of PyTorch.

    Attributes:
        name: Its subject, or the file of this folder that uses it.
        privates: The private names, each as module and attributes, such as
            ``torch.autograd:_get_sequence_nr``; one that belongs to an instance, such as
            ``torch.nn:Module()._parameters``; one that a release has renamed by both of its
            names, ``torch:_new or torch:_old``.
        costs: The loss without one of them, in a sentence.
    """

    name: str
    privates: tuple[str, ...]
    costs: str

    def missing(self) -> tuple[str, ...]:
        """Return the names that this PyTorch does not have."""
        return tuple(path for path in self.privates if find(path) is None)


COMPILER = "torch._dynamo.eval_frame"
"""The module that PyTorch imports before it compiles anything."""

_C = "torch:_C."
_FUNCTIONS = "torch:_C._functions."
_MODULE = "torch.nn:Module()."
CORNERS = (
    Corner(
        "graph_task",
        (f"{_C}_current_graph_task_id", f"{_C}_current_autograd_node"),
        "recomputes of checkpoints count as passes of their own, values of older passes stay "
        "among those of the newest, and errors name no operation.",
    ),
    Corner(
        "backward_calls",
        (
            "torch.autograd.graph:_engine_run_backward.__code__",
            "torch.autograd.function:BackwardCFunction.apply.__code__",
        ),
        "the backward that a reentrant checkpoint runs inside another one counts as one of "
        "its own.",
    ),
    Corner(
        "engine",
        ("torch.autograd:Variable._execution_engine.queue_callback",),
        "without an optimizer, a step is a forward pass instead of a backward pass.",
    ),
    Corner(
        "autograd_nodes",
        (
            f"{_C}_autograd._get_sequence_nr",
            f"{_FUNCTIONS}AccumulateGrad._sequence_nr",
            f"{_C}_autograd.SavedTensor",
            f"{_C}_autograd._make_saved_tensor",
        ),
        "what modules save is not told apart, gradients of views are not followed past a "
        "change in place, dumps do not look at the share that each call has in a gradient, and "
        "arguments that a checkpoint holds in containers stay in memory.",
    ),
    Corner(
        "saved_fields",
        (
            f"{_FUNCTIONS}MulBackward0._raw_saved_self",
            f"{_FUNCTIONS}AddBackward0._saved_alpha",
            f"{_FUNCTIONS}AccumulateGrad._input_metadata",
        ),
        "kedge.offload rebuilds nothing, and graphs are without shapes and saved tensors.",
    ),
    Corner(
        "loss_scale",
        ("torch.amp:GradScaler._get_scale_async",),
        "the loss is recorded as a GradScaler has scaled it.",
    ),
    Corner(
        "loaders",
        ("torch.utils.data.dataloader:_BaseDataLoaderIter",),
        "rows of a batch are named by their places in it alone, not by those in the data set.",
    ),
    Corner(
        "saved_hooks",
        (
            f"{_C}_autograd._top_saved_tensors_default_hooks",
            f"{_C}_autograd._push_saved_tensors_default_hooks",
            f"{_C}_autograd._pop_saved_tensors_default_hooks",
            f"{_C}_autograd._saved_tensors_hooks_get_disabled_error_message",
            f"{_C}_autograd._saved_tensors_hooks_enable",
            f"{_C}_autograd._saved_tensors_hooks_disable",
        ),
        "kedge.offload and kedge.saved leave every tensor where it is.",
    ),
    Corner(
        "checkpoint",
        (
            "torch.utils.checkpoint:_CheckpointFrame",
            "torch.utils.checkpoint:_StopRecomputationError",
        ),
        "calls inside a checkpoint's recompute are counted from 0.",
    ),
    Corner(
        "begun_checkpoints",
        (
            "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
            "torch.utils.checkpoint:_StopRecomputationError",
        ),
        "kedge.offload(model, recompute=...) is an error.",
    ),
    Corner(
        "function_modes",
        (
            f"{_C}_push_on_torch_function_stack",
            f"{_C}_pop_torch_function_stack",
            f"{_C}_len_torch_function_stack",
        ),
        "operations inside a forward (layer/relu) never fire.",
    ),
    Corner(
        "device_modes",
        ("torch:_GLOBAL_DEVICE_CONTEXT",),
        "torch.set_default_device is an error while operations outside of modules are hooked, if "
        "it was called before.",
    ),
    Corner(
        "dispatch_modes",
        (
            f"{_C}_len_torch_dispatch_stack",
            f"{_C}_get_dispatch_mode",
            f"{_C}_TorchDispatchModeKey.PROXY",
            f"{_C}_TorchDispatchModeKey.FAKE",
            f"{_C}DisableTorchFunction",
            f"{_C}_is_tracing",
            "torch.utils._python_dispatch:_disable_current_modes",
            "torch._subclasses.fake_tensor:FakeTensor",
            "torch._subclasses.fake_tensor:unset_fake_temporarily",
        ),
        "a model that is traced or exported while it is watched holds what was measured in "
        "its graph.",
    ),
    Corner(
        "tensor_subclasses",
        (f"{_C}DisableTorchFunctionSubclass",),
        "a class of tensors with __torch_function__ sees how kedge run looks at programs of "
        "tensors.",
    ),
    Corner(
        "own_work",
        (
            f"{_C}_has_torch_function_unary",
            f"{_C}_len_torch_dispatch_stack",
            f"{_C}_get_function_stack_at",
            f"{_C}_get_dispatch_stack_at",
            f"{_C}_pop_torch_dispatch_stack",
            f"{_C}_push_on_torch_dispatch_stack",
            f"{_C}_autograd._enable_record_function",
            "torch.autograd.profiler:_is_profiler_enabled",
        ),
        "the modes and the profiler of the program see Kedge's own operations.",
    ),
    Corner(
        "operations_of_a_forward",
        ("torch.utils._python_dispatch:TorchDispatchMode",),
        "kedge.extract does not know which dimensions of a value are positions, unless that "
        "of the channels is named.",
    ),
    Corner(
        "transforms",
        (
            f"{_C}_functorch.peek_interpreter_stack",
            f"{_C}_functorch.is_functorch_wrapped_tensor",
            f"{_C}_functorch.get_unwrapped",
            f"{_C}_functorch.is_legacy_batchedtensor",
            "torch:_remove_batch_dim",
            f"{_C}_DisableFuncTorch",
            "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        ),
        "values inside torch.func transforms cannot be measured or recorded.",
    ),
    Corner(
        "dynamo",
        (
            f"{_C}_dynamo.eval_frame",
            f"{_C}_dynamo.eval_frame.set_code_exec_strategy",
            f"{_C}_dynamo.eval_frame._FrameExecStrategy",
            f"{_C}_dynamo.eval_frame._FrameAction",
            f"{_C}_dynamo.eval_frame._debug_get_cache_entry_list",
        ),
        "Dynamo may compile Kedge's own hooks between its graphs, and compiled functions are "
        "not recognised.",
    ),
    Corner(
        "compiled_entries",
        (
            f"{_C}_dynamo.eval_frame.reset_code",
            f"{_C}_dynamo.guards.GuardManager.get_child_managers",
            f"{_C}_dynamo.guards.GuardManager.get_source",
            f"{_C}_dynamo.guards.GuardManager.get_type_of_guarded_value",
            f"{_C}_dynamo.guards.RootGuardManager.add_epilogue_lambda_guard",
        ),
        "hooks on a model discard the compiled code of all models.",
    ),
    Corner(
        "effectful_operators",
        (
            "torch._library.effects:EffectType.ORDERED",
            "torch.library:Library._register_effectful_op",
        ),
        "hooks inside compiled code do not fire.",
    ),
    Corner(
        "kernels",
        ("torch:_foreach_norm", "torch:_assert_async", "torch:_neg_view"),
        "norms of many tensors take one call each, and offload waits for a GPU where it "
        "checks what it has rebuilt.",
    ),
    Corner(
        "versions",
        ("torch:Tensor._version",),
        "kedge.offload and kedge.saved leave every tensor where it is, records are copies, "
        "gradients of views are left out, and changes in place go unnoticed: those that actions "
        "make, of gradients that were not zeroed, of what a dump holds.",
    ),
    Corner(
        "kept_versions",
        ("torch.autograd:_unsafe_preserve_version_counter",),
        "kedge.saved counts as a change of the buffers that it puts back.",
    ),
    Corner(
        "aliases",
        ("torch:Tensor._base", "torch:Tensor._is_view"),
        "gradients of values that are changed in place later are left out, and nothing is "
        "rebuilt from a part of a tensor.",
    ),
    Corner(
        "zeros",
        ("torch:Tensor._is_zerotensor",),
        "kedge.offload asks each tensor for its address to know the zeros that are nowhere "
        "in memory.",
    ),
    Corner(
        "storages",
        ("torch:UntypedStorage._cdata",),
        "kedge.offload and kedge.saved leave every tensor where it is, and what has no "
        "address counts as shared with nothing.",
    ),
    Corner(
        "wrappers",
        ("torch.utils._python_dispatch:is_traceable_wrapper_subclass",),
        "the memory of tensors that are made of others, such as a DTensor, is not counted as "
        "theirs.",
    ),
    Corner(
        "containers",
        ("torch.utils._pytree:SUPPORTED_NODES",),
        "tensors in containers that a library has registered with PyTorch are not found.",
    ),
    Corner(
        "shared_storages",
        ("torch:UntypedStorage._new_with_weak_ptr", f"{_C}_storage_Use_Count"),
        "bytes that kedge.offload has brought back are not shared.",
    ),
    Corner(
        "hook_tables",
        (
            "torch:Tensor._backward_hooks",
            "torch:Tensor._post_accumulate_grad_hooks",
            f"{_MODULE}_forward_hooks",
            f"{_MODULE}_forward_pre_hooks",
        ),
        "looking which hooks there are takes longer, as Kedge hooks the place for a moment.",
    ),
    Corner(
        "tensor_contents",
        ("torch:Tensor._cdata",),
        "gradients of a parameter are not recorded after the program has swapped it for "
        "another by torch.utils.swap_tensors.",
    ),
    Corner(
        "wrapped_hooks",
        ("torch.nn.modules.module:_WrappedHook",),
        "kedge.audit does not say where the code of a hook is that PyTorch gives its module.",
    ),
    Corner(
        "module_tables",
        (f"{_MODULE}_parameters", f"{_MODULE}_buffers", f"{_MODULE}_modules"),
        "watching takes longer, and dumps do not tell which parameters, buffers and modules "
        "of a module are None, so that their script may fail.",
    ),
    Corner(
        "module_calls",
        ("torch.nn:Module._call_impl", "torch.nn:Module._slow_forward"),
        "operations inside a forward do not fire while torch.jit.trace is under way. If a call "
        "does not show its forward, kedge.skip and edits of parameters are errors.",
    ),
)


@functools.cache
def _resolve(path: str) -> Any:
    first, _, others = path.partition(" or ")
    module, _, names = first.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        found = None
    for name in names.split("."):
        found = getattr(found, name.removesuffix("()"), None)
        if name.endswith("()") and found is not None:
            found = found()
    if found is None and others:
        return _resolve(others)
    return found


def find(path: str) -> Any:
    """Return the object of a private name; None if this PyTorch does not have it."""
    return _resolve(path)


@functools.cache
def lacks(*names: str) -> bool:
    """Whether this PyTorch lacks any name of some corners, so that their other names are useless too."""
    return any(corner.missing() for corner in CORNERS if corner.name in names)


def late(path: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a private one, looked up at its first call.

    Args:
        path: As in `Corner.privates`.
        instead: The function to call if this PyTorch does not have it.
    """
    known: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal known
        if known is None:
            known = at_once(path, instead)
        return known(*args)

    return call


def at_once(path: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a private function itself, or the one to call if this PyTorch does not have it.

    For functions that every event calls: one of `late` takes longer than the call itself.
    """
    found: Callable[..., Any] | None = find(path)
    if found is None:
        return instead
    return found


def described() -> Iterator[str]:
    """Yield a line for each corner: whether this PyTorch has it, and what a missing one costs."""
    for corner in CORNERS:
        missing = corner.missing()
        if missing:
            names = ", ".join(path.replace(":", ".") for path in missing)
            yield f"{corner.name}: missing ({names}): {corner.costs}"
        else:
            yield f"{corner.name}: present"
