"""Calls that do not fit a function's arguments: the decorator that explains them, and words for what was given."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from kedge.errors import WrongCall

_C = TypeVar("_C", bound=Callable[..., Any])
_MODULE = "torch.nn.modules.module.Module"
_LOADERS = {"DataLoader", "TensorDataset", "Subset", "ImageFolder"}
_MOST = 40

OF_THE_LOSS = (
    "[kedge] loss is called with the output alone; "
    "give the rest with it: loss=lambda output: loss_fn(output, labels)"
)
"""The note of an error in a loss that was called with the model's output."""


def called_as(example: str) -> Callable[[_C], _C]:
    """Return a decorator that answers a call which does not fit the arguments with what was given and the right call.

    Python's own error knows neither. A call that fits costs nothing more, and errors inside the
    function pass unchanged.

    Args:
        example: The right call, as in ``kedge.saved(model)(images)``.
    """

    def decorate(function: _C) -> _C:
        if isinstance(function, type):
            begin = vars(function)["__init__"]
            type.__setattr__(function, "__init__", _explained(begin, function.__name__, example))
            return function
        explained: _C = _explained(
            function, function.__qualname__.removesuffix(".__init__"), example
        )
        return explained

    return decorate


def _explained(function: Any, name: str, example: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if _has_begun(error):
                raise
        raise WrongCall(_refusal(function, name, example, args, kwargs))

    return call


def _has_begun(error: TypeError) -> bool:
    """Whether a function that was called had begun; the caller keeps no traceback, which would keep all its frames alive."""
    own = error.__traceback__
    return own is None or own.tb_next is not None


def _refusal(
    function: Any, name: str, example: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    signature = inspect.signature(function)
    known = [each for each in signature.parameters if each != "self"]
    if len(known) < len(signature.parameters):
        args = args[1:]
    try:
        signature.bind(*([None] * (len(known) < len(signature.parameters))), *args, **kwargs)
    except TypeError as error:
        problem = str(error)
    unknown = next((each for each in kwargs if each not in known), None)
    if unknown is not None:
        problem = f"there is no argument {unknown!r}"
    near = difflib.get_close_matches(unknown or "", known, 1)
    has = ", ".join(known)
    advice = (
        f" (did you mean {near[0]}?)"
        if near
        else f"; it takes {has or 'no arguments'}"
        if unknown or args
        else ""
    )
    given = ", ".join(
        [*map(described, args), *(f"{each}={described(value)}" for each, value in kwargs.items())]
    )
    return f"{name}({given}): {problem}{advice}; use it as in: {example}"


def described(value: Any) -> str:
    """Return a short description of an argument for messages, such as ``the module Net``, ``a list`` or ``'layer4'``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        shown = repr(value)
        return shown if len(shown) <= _MOST else f"{shown[: _MOST - 4]}...{shown[-1]}"
    name = type(value).__name__
    if is_module(value):
        return f"the module {name}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', name)}"
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


@contextmanager
def noting(kind: type[Exception], note: str) -> Iterator[None]:
    """Context in which an error of one kind gets a note."""
    try:
        yield
    except kind as error:
        error.add_note(note)
        raise


@contextmanager
def noted_arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context for the call of a model: an error in it gets a note about arguments that a model cannot take."""
    try:
        yield
    except Exception as error:
        for note in _notes(model, [*args, *kwargs.values()]):
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _notes(model: Any, given: Sequence[Any]) -> Iterator[str]:
    """Yield what is odd about the arguments of a model: a loader instead of a batch, or another device."""
    for one in given:
        if type(one).__name__ in _LOADERS:
            yield f"[kedge] {described(one)} was given where the model takes a batch; use next(iter(loader)), or a loop over it"
    parameters: list[Any] = []
    if is_module(model):
        with suppress(
            Exception
        ):  # a class may have its own list; the user's error is not lost to it
            parameters = list(model.parameters())
    devices = {str(each.device) for each in parameters}
    others = [
        str(one.device)
        for one in given
        if "torch.Tensor" in _bases(one) and str(one.device) not in devices
    ]
    if devices and others:
        (there, *more), here = sorted(devices), others[0]
        if not more:
            yield f'[kedge] the model is on {there}, and an argument is on {here}; move it with .to("{there}")'


def _bases(value: Any) -> set[str]:
    return {f"{base.__module__}.{base.__name__}" for base in type(value).__mro__}


def is_module(value: Any) -> bool:
    """Whether an argument is a PyTorch module; known without importing PyTorch."""
    return _MODULE in _bases(value)


def not_a_model(value: Any) -> str:
    """Return what to do about an argument that is not a model: its description, and how to make a model of it."""
    if isinstance(value, type):
        return f"{described(value)}; create the model first, as in model = {value.__name__}(...)"
    if is_module(value):
        return described(value)
    if isinstance(value, (list, tuple, set)) and any(map(is_module, value)):
        return f"{described(value)}; for several models, give torch.nn.ModuleList([...]) or use one after the other"
    return described(value)
