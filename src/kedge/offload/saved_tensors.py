"""The saved tensors of one call: ``kedge.saved(model)(x)``, ``kedge.saved(lambda: x.exp())``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.calls.arguments import OF_THE_LOSS, called_as, described, noted_arguments, noting
from kedge.calls.not_a_block import NotABlock
from kedge.errors import NoSuchKind, WrongCall
from kedge.hooks.saved.keeper import keep
from kedge.offload.account.recorder import LEAST, SaveRecorder
from kedge.offload.account.tensors import SavedTensors
from kedge.offload.function_values import FunctionValues, takes_arguments, values_of
from kedge.offload.rebuild import find
from kedge.sites import leaves
from kedge.sites.select import ModelLayout, runs
from kedge.torch_internals import dynamo
from kedge.torch_internals.accelerators import same_random_numbers
from kedge.torch_internals.autograd_nodes import leaves_behind
from kedge.torch_internals.kernels import keeping_versions
from kedge.torch_internals.module_tables import (
    buffers_in,
    modules_in,
    own_buffers,
    parameters_in,
    put_back,
)

Loss = Callable[[Any], Any]
_INFERENCE = (
    "[kedge] kedge.saved makes its call with gradients on, "
    "and an argument was made in inference mode; "
    "make the arguments outside of torch.inference_mode()"
)


@overload
def saved(
    target: nn.Module,
    *,
    loss: Loss | None = None,
    backward: bool = False,
    min_bytes: int = LEAST,
) -> SavedByCall: ...


@overload
def saved(
    target: Callable[..., Any],
    *,
    loss: Loss | None = None,
    backward: bool = False,
    min_bytes: int = LEAST,
) -> Any: ...


@called_as("kedge.saved(model)(images), with the arguments of the model in a call of their own")
def saved(
    target: Callable[..., Any],
    *,
    loss: Loss | None = None,
    backward: bool = False,
    min_bytes: int = LEAST,
) -> Any:
    """List the tensors that autograd saves in one call of a model or a function, with their memory.

    Pass the arguments in a second call: ``print(kedge.saved(model)(x))``. A function that needs no
    arguments is called at once: ``kedge.saved(lambda: loss_of(x, y))`` is the report.

    The target is called once, with gradients on, and its hooks run; neither its output nor the
    graph is kept. The random state is restored, and so are the buffers of its modules, such as
    BatchNorm's running statistics. Gradients stay as they are, unless a function runs a backward
    itself. Anything else that the call changes stays changed.

    Args:
        target: The model; or a function, a bound method or another object that can be called. The
            rows of a function's report are the modules that it reaches by its variables; if it
            calls none, they are operations.
        loss: A function from the output to the loss; the report then includes the tensors that the
            loss saves.
        backward: Whether to run the backward pass too, from the loss or else from all outputs, for
            `SavedTensors.timeline`. The gradients are discarded. Only then does the report have the
            peak, and the modules that hold most there.
        min_bytes: The size in bytes from which a storage counts as movable.

    Returns:
        For a model, and for a function with parameters, a function that takes the arguments and
        returns the `SavedTensors`. Otherwise the `SavedTensors`: those held at the end of the call;
        if the function ran the backward itself, so that nothing is held then, those held at the
        peak.

    Raises:
        NoSuchKind: If the target is not a module and cannot be called.
        WrongCall: If `loss` is not a function, or `min_bytes` not a number.

    Examples:
        >>> report = kedge.saved(model)(images)
        >>> report.total.bytes > 0
        True
    """
    if not callable(target) or isinstance(target, type):
        raise NoSuchKind(
            f"kedge.saved takes a module or a function, not {described(target)}; "
            "to list what existing code saves, "
            "give a function that runs it: kedge.saved(lambda: x.exp())"
        )
    if not (loss is None or callable(loss)) or isinstance(loss, type):
        raise WrongCall(
            f"saved(loss={described(loss)}): "
            "loss is a function from the output to the loss, such as torch.sum"
        )
    if not isinstance(min_bytes, int):
        raise WrongCall(f"saved(min_bytes={described(min_bytes)}): min_bytes is a number of bytes")

    of_call = SavedByCall(target, loss, min_bytes, backward=backward)
    if isinstance(target, nn.Module) or takes_arguments(target):
        return of_call
    return of_call()


class SavedByCall(NotABlock):
    """Waits for the arguments of a model or a function, and returns the account of a call with them."""

    _instead = (
        "call it: print(kedge.saved(model)(images)). To keep less for backward, use "
        "with kedge.offload(model, to=kedge.Cpu()): loss(model(images)).backward()"
    )

    def __init__(
        self, target: Callable[..., Any], loss: Loss | None, least: int, *, backward: bool
    ) -> None:
        self._target = target
        self._loss = loss
        self._least = least
        self._backward = backward

    def __repr__(self) -> str:
        """What it waits for."""
        name = getattr(self._target, "__qualname__", type(self._target).__name__)
        return f"<kedge.saved of {name}: call this with its arguments for the account>"

    def __getattr__(self, name: str) -> Any:
        if name in dir(SavedTensors):
            raise AttributeError(
                f"the account needs a call of the model first: kedge.saved(model)(images).{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> SavedTensors:
        """Call the target once; returns the tensors that the call saves."""
        target = self._target
        owner = getattr(target, "__self__", None)
        given = [tensor for _, tensor in leaves.find((args, kwargs))]
        if isinstance(target, nn.Module):
            call = _RecordedCall(target, self._least, None)
        elif isinstance(owner, nn.Module):
            compiled = dynamo.compiles(owner)
            found = FunctionValues(dynamo.unwrap(owner), [""], given, compiled=compiled)
            call = _RecordedCall(found.modules, self._least, found)
        else:
            found = values_of(target)
            found.tensors += given
            call = _RecordedCall(found.modules, self._least, found)

        with ExitStack() as notes:
            notes.enter_context(noted_arguments(target, args, kwargs))
            if any(tensor.is_inference() for tensor in given):
                notes.enter_context(noting(RuntimeError, _INFERENCE))
            return call.run(lambda: target(*args, **kwargs), self._loss, backward=self._backward)


class _RecordedCall:
    """One call, and the recording of what it saves.

    Args:
        model: The model, or the modules of a function.
        least: The bytes of the smallest storage that counts as movable.
        function: The values that a function can reach; None for a model.
    """

    def __init__(self, model: Any, least: int, function: FunctionValues | None) -> None:
        self.model = model
        self.tensors: list[Tensor] = []
        self.roots: Sequence[str] = ("",)
        self.compiled = False
        self.function = function
        if function is not None:
            self.tensors = function.tensors
            self.roots = function.roots
            self.compiled = function.compiled
        self.recorder = SaveRecorder(find, least)

    def run(self, call: Callable[[], Any], loss: Loss | None, *, backward: bool) -> SavedTensors:
        """Make the call; returns what it saves."""
        recorder = self.recorder
        gradients_were_off = not torch.is_grad_enabled()
        self._own()
        recorder.give(self.tensors)
        with (
            ExitStack() as stack,
            _as_before(self.model),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            made = self._forward(call, loss, stack)
            given = {path: set(numbers) for path, numbers in recorder.calls.given.items()}
            recorder.walk(made)
            moment: int | None = len(recorder.timeline)
            if self.function is not None and not recorder.timeline.alive(moment):
                moment = None
            self._own()
            if backward:
                _back(made, self._wanted(made))
            del made
        saved = recorder.tensors(moment, self.roots, given)
        saved.gradients_were_off = gradients_were_off
        return saved

    def _own(self) -> None:
        """Record the buffers and the parameters, also those that a function reaches by itself."""
        parameters = list(parameters_in(self.model).values())
        parameters += [tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter)]
        self.recorder.own(parameters, buffers_in(self.model).values())

    def _forward(
        self, call: Callable[[], Any], loss: Loss | None, stack: ExitStack
    ) -> list[Tensor]:
        """Call the target; returns its results. The stack ends the recording."""
        model = dynamo.unwrap(self.model)
        layout = ModelLayout(model)
        paths = []
        for path, module in layout.modules.items():
            if layout.first[id(module)] == path and runs(module):
                paths.append(path)

        calls = self.recorder.calls
        stack.callback(calls.close)
        calls.add(model, paths, str)
        keep(stack, self.model, self.recorder, ambient=True, compiled=self.compiled)
        output = call()
        if loss is not None:
            with noting(TypeError, OF_THE_LOSS):
                output = loss(output)
        return [tensor for _, tensor in leaves.find(output)]

    def _wanted(self, made: list[Tensor]) -> list[Tensor]:
        """Return the tensors at which the backward ends.

        It leaves a graph alone that existed before the call.
        """
        if self.function is None:
            return [param for param in parameters_in(self.model).values() if param.requires_grad]
        own = [tensor for tensor in self.tensors if tensor.requires_grad]
        return [*own, *leaves_behind(made, [tensor.grad_fn for tensor in own])]


def _back(made: list[Tensor], wanted: list[Tensor]) -> None:
    """Run the backward pass, and drop the gradients."""
    roots = [tensor for tensor in made if tensor.requires_grad]
    if roots and wanted:
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, ones, allow_unused=True)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Context that restores random number generators and buffers at its end."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 - models draw from it, not Kedge
    buffers = [(module, dict(own_buffers(module))) for module in modules_in(model).values()]
    values: dict[int, tuple[Tensor, Tensor]] = {}
    for _, own in buffers:
        for buffer in own.values():
            if buffer is not None and not is_lazy(buffer):
                values[id(buffer)] = buffer, buffer.detach().clone()
    try:
        with same_random_numbers():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for module, own in buffers:
            put_back(module, own)
        for buffer, value in values.values():
            with torch.no_grad(), keeping_versions((buffer,)):
                buffer.copy_(value)
