"""Forward hooks of PyTorch's kind as actions: `from_hook`.

# Note [Once a call]
PyTorch gives a forward hook the whole output, and Kedge fires once for each tensor in it. The hook
runs at the first of them; what it returns is taken apart, and each tensor is handed out at its own
event. `ModuleGate.through_whole` keeps such an action apart from the others, so that they all have
had every tensor before. What is left ends with the call, also if the hook was removed in it,
failed, or called the module again.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from kedge.calls.arguments import called_as, described
from kedge.errors import ActionArity, EditError, InPlaceEdit, NoSuchKind
from kedge.flow import Act, Event
from kedge.sites.leaves import describe, find
from kedge.sites.site import Site
from kedge.torch_internals.tensors import version_of

_TAKES = (
    "a forward hook takes (module, args, output) or (module, args, kwargs, output), "
    "a forward-pre hook (module, args)"
)


class _Answer:
    """What the hook has answered in one call.

    Attributes:
        events: The events of the call's leaves.
        left: One entry for each leaf still to come: its replacement, or None; None before the hook
            has run.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.left: list[Tensor | None] | None = None


class _Thread(threading.local):
    """The calls under way on each thread, the innermost last."""

    def __init__(self) -> None:
        self.answers: list[_Answer] = []


class HookAction:
    """The action that `from_hook` returns: runs a hook of PyTorch's kind once a call.

    See Note [Once a call].

    Attributes:
        reads_inputs: Whether the hook may read the inputs of the call.
    """

    reshape = True

    def __init__(self, hook: Callable[..., Any], takes: int) -> None:
        self.hook = hook
        self.takes = takes
        self.reads_inputs = _reads_inputs(hook, takes)
        self._here = _Thread()

    def __repr__(self) -> str:
        """The call that makes this action."""
        return f"from_hook({getattr(self.hook, '__qualname__', repr(self.hook))})"

    def check(self, site: Site) -> None:
        """Refuse a site that a hook of this kind cannot serve.

        Raises:
            NoSuchKind: If it is another kind of site, or a single tensor of a call.
        """
        kind = "in" if self.takes == 2 else "out"
        if site.kind != kind or site.op is not None:
            problem = (
                f'{self!r} is for ":{kind}" of modules, and "{site}" is another kind of site: '
                f"{_TAKES}"
            )
            if site.is_gradient:
                problem += "; a function (grad) is an action for a gradient as it is"
            raise NoSuchKind(problem)
        if site.leaf is not None:
            raise NoSuchKind(
                f'{self!r} takes all tensors of a call, and "{site}" is one of them; '
                f"leave out [{site.leaf}]"
            )

    def bind(self, site: Site) -> Act:
        """Return the action itself.

        Raises:
            NoSuchKind: If a hook of this kind cannot serve the site.
        """
        self.check(site)
        return self

    @contextmanager
    def one_call(self, events: Sequence[Event]) -> Iterator[None]:
        """The block in which the leaves of one call pass; see Note [Once a call]."""
        answers = self._here.answers
        answers.append(_Answer(events))
        try:
            yield
        finally:
            answers.pop()

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Return the replacement of one leaf; the first of a call runs the hook.

        Raises:
            EditError: If another action calls this one in a call of several tensors.
        """
        answer = None
        answers = self._here.answers
        if answers and any(own is event for own in answers[-1].events):
            answer = answers[-1]
        if answer is None:
            left = self._run(event)
            if len(left) > 1:
                raise EditError(
                    f"{self!r} was called by another action, at one of {len(left)} tensors; "
                    "pass it to hook directly"
                )
        else:
            if answer.left is None:
                answer.left = self._run(event)
            left = answer.left
        if not left:
            return None
        new = left.pop(0)
        if new is value:
            return None
        return new

    def _run(self, event: Event) -> list[Tensor | None]:
        if self.takes == 2:
            args = event.args
            new = self._once(args, event.module, args)
            if not isinstance(new, tuple) and new is not None:
                new = (new,)
            return self._apart(args, new) + [None] * len(find(event.kwargs))
        output = event.output
        if self.takes == 3:
            new = self._once(output, event.module, event.args, output)
        else:
            new = self._once(output, event.module, event.args, event.kwargs, output)
        return self._apart(output, new)

    def _once(self, value: Any, *given: Any) -> Any:
        """Run the hook; returns what it returns.

        Raises:
            InPlaceEdit: If it changed a tensor of the value in place.
        """
        before = [version_of(tensor) for _, tensor in find(value)]
        new = self.hook(*given)
        if before != [version_of(tensor) for _, tensor in find(value)]:
            raise InPlaceEdit(
                "the hook changed a tensor in place, but other parts of the program may share "
                "its memory; return a new one instead (output * 2, not output.mul_(2))"
            )
        return new

    def _apart(self, old: Any, new: Any) -> list[Tensor | None]:
        """Return what replaces each tensor of a value.

        Raises:
            EditError: If the new value differs in more than its tensors.
        """
        if new is None or new is old:
            return [None] * len(find(old))
        found = _difference(old, new)
        if found is not None:
            raise EditError(
                f"the hook returned {describe(new)} in place of {describe(old)}; "
                f"the first difference is {found}: a site keeps the structure of its value "
                "and everything in it but tensors; return the same structure with other tensors"
            )
        return [tensor for _, tensor in find(new)]


def _reads_inputs(hook: Callable[..., Any], takes: int) -> bool:
    """Whether a forward hook uses its ``args`` or ``kwargs``, as far as its code shows."""
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, FunctionType):
        return True
    first = 1
    if function is not hook:  # a method, whose first argument is its object
        first = 2
    given = function.__code__.co_varnames[first : first + takes - 2]
    for instruction in dis.get_instructions(function):
        names = instruction.argval
        if not isinstance(names, tuple):  # Python 3.13 loads two variables at once
            names = (names,)
        if any(name in given for name in names):
            return True
    return False


def _difference(old: Any, new: Any, at: str = "") -> str | None:
    """Return the first difference of two values that is not between tensors; None without one."""
    if old is new or (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return None
    where = ""
    if at:
        where = f"at [{at}], "
    if type(old) is not type(new) or isinstance(old, Tensor):
        return f"{where}a {type(new).__name__} in place of a {type(old).__name__}"
    parts: Iterable[tuple[Any, Any, Any]]
    if isinstance(old, Mapping):
        if list(old) != list(new):
            return f"{where}the keys {list(new)} in place of {list(old)}"
        parts = ((key, old[key], new[key]) for key in old)
    elif isinstance(old, (tuple, list)):
        if len(old) != len(new):
            return f"{where}{len(new)} parts in place of {len(old)}"
        parts = zip(range(len(old)), old, new, strict=True)
    elif dataclasses.is_dataclass(old):
        names = [f.name for f in dataclasses.fields(old)]
        parts = ((name, getattr(old, name, None), getattr(new, name, None)) for name in names)
    elif _is_same(old, new):
        return None
    else:
        return f"{where}{reprlib.repr(new)} in place of {reprlib.repr(old)}"
    for key, before, now in parts:
        inner = f"{at}.{key}" if at else str(key)
        found = _difference(before, now, inner)
        if found is not None:
            return found
    return None


def _is_same(old: Any, new: Any) -> bool:
    """Whether two values that are not tensors are equal.

    NaN equals NaN, and arrays are compared by element.
    """
    if getattr(old, "shape", None) != getattr(new, "shape", None):
        return False
    same = old == new
    if isinstance(same, bool):
        return same or bool(old != old and new != new)  # noqa: PLR0124 - NaN is not itself
    same = same | ((old != old) & (new != new))  # noqa: PLR0124
    if hasattr(same, "all"):
        same = same.all()
    return bool(same)


@called_as('kedge.hook(model, "layer4", kedge.from_hook(my_forward_hook))')
def from_hook(hook: Callable[..., Any]) -> HookAction:
    """Run an existing PyTorch forward hook or forward-pre hook: an action for `kedge.hook`.

    The hook behaves as with `register_forward_hook` and `register_forward_pre_hook`: it receives
    the whole output, or all positional arguments, once per call, and may return others. They must
    have the same structure; shapes may differ.

    Args:
        hook: A function that takes ``(module, args, output)`` or ``(module, args, kwargs,
            output)``, for ``:out``, or ``(module, args)``, for ``:in``. It returns None, or the
            value to continue with.

    Returns:
        The action.

    Raises:
        ActionArity: If the function takes other arguments.

    Examples:
        >>> def halve(module, args, output):
        ...     return output / 2
        >>> with kedge.hook(model, "relu", kedge.from_hook(halve)):
        ...     output = model(images)
    """
    if isinstance(hook, (str, nn.Module)):
        raise ActionArity(f"from_hook takes a function, not {described(hook)}: {_TAKES}")
    if hasattr(hook, "bind") or hook.__class__.__module__.startswith("kedge.actions."):
        raise ActionArity(
            f"{hook!r} is an action already: pass it to kedge.hook as it is, without from_hook"
        )
    try:
        params = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError) as error:
        raise ActionArity(
            f"the arguments of {hook!r} are unknown; wrap it in a function: {_TAKES}"
        ) from error
    needed = [param for param in params if param.default is param.empty]
    by_name = any(param.kind is param.KEYWORD_ONLY for param in needed)
    names = [
        param.name
        for param in needed
        if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)
    ]
    called = getattr(hook, "__qualname__", hook)
    if by_name or len(names) not in (2, 3, 4):
        raise ActionArity(f"{called}{inspect.signature(hook)} is not a forward hook: {_TAKES}")
    if any(name.startswith("grad") for name in names):
        raise ActionArity(
            f"{called}({', '.join(names)}) is a backward hook, which takes the gradients of "
            "inputs and outputs at once; here each is an event of its own: "
            'hook ":out.grad" and ":in.share" with functions (grad)'
        )
    return HookAction(hook, len(names))
