"""Which operation made the first value that is not finite, seen while a program's lines run.

# Note [Where a value came from]
Every function of PyTorch that the program calls is seen, in modules and outside, with what it takes
and what it returns. One that takes finite numbers and returns others made them: it is the origin of
its result. One that takes such numbers passes them on, and its result has their origin. An infinity
that the program puts in place itself, as a mask does, has been made by nobody; if an operation makes
a NaN of it, that one is the origin. A NaN comes from what was NaN before it, and from an infinity
only if nothing was; in arithmetic by elements, only where the infinity was. What NumPy computed,
and what memory held before it was written to, enters without an operation. Of what takes numbers
that cannot be read, such as those of a sparse tensor, nothing is said.

A tensor that was there before and is changed in place once more, such as a batch that a forward
scales, has other values than in the program. Nothing is said of what is made of those.

In the backward pass, the first node that gets finite gradients and passes on others made them. It
belongs to the operation between whose arguments and result it stands. If that operation took or
returned numbers that were not finite in the forward, which the loss does not show, it is their
origin that counts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from kedge.frames import frames_around, is_between
from kedge.hooks.operations.names import clean, name_of, overwrites
from kedge.repro.step.changed_again import ChangedAgain
from kedge.short_text import is_or_are, spans
from kedge.sites import leaves
from kedge.torch_internals.autograd_nodes import behind, between, function_of, is_leaf
from kedge.torch_internals.modes import seeing_operations

PLACING = frozenset(
    {
        "fill",
        "fill_",
        "full",
        "full_like",
        "masked_fill",
        "masked_fill_",
        "new_full",
        "setitem",
        "where",
    }
)
"""Operations that put a given number in place: an infinity among their results is none that they made."""
ENTERING = frozenset(
    {
        "as_tensor",
        "asarray",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "from_numpy",
        "frombuffer",
        "new_empty",
        "new_empty_strided",
        "new_tensor",
        "tensor",
    }
)
"""Operations that return what no operation made: numbers from outside, or memory as it was."""
BY_ELEMENTS = frozenset(
    {"acos", "add", "asin", "div", "log", "mul", "pow", "sqrt", "sub", "truediv"}
)
"""Operations whose results are made of the elements at the same places alone."""


@dataclass(frozen=True)
class CalledAt:
    """An operation, and where the program calls it.

    Attributes:
        name: The operation's name.
        code: The code of the innermost frame that is neither PyTorch's nor Python's.
        line: The line there.
        module: The innermost module that runs; None outside of modules.
    """

    name: str
    code: CodeType | None
    line: int
    module: nn.Module | None


@dataclass(frozen=True)
class BadElements:
    """The elements of a tensor that are not finite.

    Attributes:
        nan: How many are NaN.
        infinite: How many are infinite.
        every: The number of all elements.
        dim: The first dimension along which some places have such elements and others have none.
        rows: Those places.
        length: The length of that dimension; 0 without one.
    """

    nan: int
    infinite: int
    every: int
    dim: int
    rows: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, tensor: Tensor, *, nan_alone: bool = False) -> Self:
        """Look at a tensor; without its infinities, if only NaN counts."""
        own = tensor.detach()
        if nan_alone:
            own = own.nan_to_num(torch.nan, 0.0, 0.0)
        is_bad_at = ~torch.isfinite(own)
        dim = length = 0
        places: list[int] = []
        for each in range(own.dim()):
            found = is_bad_at.nonzero()[:, each].unique().tolist()
            if 0 < len(found) < own.shape[each]:
                dim, length, places = each, own.shape[each], found
                break
        return cls(
            nan=int(torch.isnan(own).sum()),
            infinite=int(torch.isinf(own).sum()),
            every=own.numel(),
            dim=dim,
            rows=tuple(places),
            length=length,
        )

    @property
    def kind(self) -> str:
        """What they are."""
        if self.nan and self.infinite:
            return f"not finite ({self.nan} NaN, {self.infinite} infinite)"
        if self.nan:
            return "NaN"
        return "infinite"

    @property
    def are(self) -> str:
        """The verb for so many."""
        return is_or_are(self.nan + self.infinite)

    def counted(self, whose: str, what: str) -> str:
        """Return how many of how many elements they are, as words: ``2 of its 16 results``."""
        bad = self.nan + self.infinite
        if self.every == 1:
            return f"{whose} {what}"
        if self.every == bad:
            return f"all of {whose} {bad} {what}s"
        return f"{bad} of {whose} {self.every} {what}s"

    def in_rows(self) -> str:
        """Return the rows that hold them, or the places along another dimension, as words; empty if all do."""
        if not self.length:
            return ""
        along = ""
        if self.dim:
            along = f" along dimension {self.dim}"
        rows = "row"
        if len(self.rows) > 1:
            rows = "rows"
        return f", in {rows} {spans(self.rows)} of {self.length}{along}"


@dataclass(frozen=True)
class _Call:
    """What an operation is given, as it was before the call.

    Attributes:
        given: Its tensors.
        bad: Those that are not finite.
        nan: Those of them that have a NaN.
        has_nan: Whether one of them, or a number, is NaN.
        has_infinity: Whether a number is infinite.
        span: The smallest and the largest number of its tensors; None if there is none.
        is_empty: Whether a tensor has no elements.
        is_unread: Whether the numbers of a tensor cannot be read, as those of a sparse one.
        before: The nodes of its tensors.
    """

    given: tuple[Tensor, ...]
    bad: tuple[Tensor, ...]
    nan: tuple[Tensor, ...]
    has_nan: bool
    has_infinity: bool
    span: tuple[float, float] | None
    is_empty: bool
    is_unread: bool
    before: frozenset[Node | None]

    @classmethod
    def of(cls, name: str, arguments: Any) -> Self:
        """Look at the arguments of a call."""
        tensors = tuple(tensor for _, tensor in leaves.find(arguments))
        numbers = list(_numbers_in(arguments))
        bad = tuple(tensor for tensor in tensors if is_bad(tensor))
        nan = tuple(tensor for tensor in bad if has_nan(tensor))
        span = None
        if not bad and name not in PLACING:
            span = _span(tensors)
        return cls(
            tensors,
            bad,
            nan,
            has_nan=bool(nan) or any(map(math.isnan, numbers)),
            has_infinity=any(map(math.isinf, numbers)),
            span=span,
            is_empty=any(tensor.numel() == 0 for tensor in tensors),
            is_unread=any(_is_number(each) and not _is_readable(each) for each in tensors),
            before=frozenset(tensor.grad_fn for tensor in tensors),
        )


def _numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers among the arguments of a call."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _numbers_in(each)
    elif isinstance(value, dict):
        yield from _numbers_in(list(value.values()))


@dataclass(frozen=True)
class Origin:
    """An operation that made numbers which are not finite, and what was seen of it.

    Attributes:
        at: The operation.
        bad: The elements of its result that are not finite.
        call: What it was given.
        inner: The first operation inside of it that did, if it is a function of several.
    """

    at: CalledAt
    bad: BadElements
    call: _Call
    inner: str | None


class _Inside:
    """The operations inside of a function, of which the first may be the origin of its result.

    Attributes:
        first_bad: The name of the first one that made an infinity of finite numbers, or a NaN of
            numbers without one.
    """

    def __init__(self) -> None:
        self.first_bad: str | None = None

    def see(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Look at one operation."""
        if self.first_bad is not None:
            return
        name = _name_of_kernel(name)
        made = [each for _, each in leaves.find(result) if is_bad(each)]
        if not made:
            return
        call = _Call.of(name, (args, kwargs))
        if BadElements.of(made[0]).nan:
            if not call.has_nan:
                self.first_bad = name
        elif not call.bad and not call.has_infinity and name not in PLACING:
            self.first_bad = name


def _is_of_several(func: Any) -> bool:
    """Whether a function is written in Python, and so of several operations; operators are one for the program."""
    return isinstance(func, FunctionType) and not func.__name__.startswith("__")


def _name_of_kernel(name: str) -> str:
    """Return the name of an operation for what PyTorch calls for it: ``nll_loss_forward``."""
    plain = clean(name.removeprefix("_").removeprefix("native_"))
    return plain.removesuffix("_forward").removesuffix("_")


class FirstOperations(TorchFunctionMode):
    """Sees each operation, and follows where values came from; see Note [Where a value came from].

    Args:
        placed: Tensors that hold infinities by design, such as the buffers of masks.

    Attributes:
        nodes: The operation that made each node of the autograd graph.
    """

    def __init__(self, placed: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.nodes: dict[Node, CalledAt] = {}
        self._origins: dict[int, Origin | None] = {}
        self._of_memory: dict[int, Origin | None] = {}
        self._hidden: dict[Node, Origin] = {}
        self._again = ChangedAgain()
        self._placed = {id(tensor) for tensor in placed}
        self._kept = list(placed)  # what is kept gives its identity to nothing else

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, and look at what it was given and what it returned."""
        named = dict(kwargs or {})
        name = name_of(func)
        if not name:
            return func(*args, **named)
        taken = {key: value for key, value in named.items() if key != "out"}
        call = _Call.of(name, (tuple(args), taken))
        changed = [tensor for _, tensor in overwrites(name, tuple(args), named)]
        before = self._again.before(changed)

        inside = _Inside()
        if _is_of_several(func):
            with seeing_operations(inside.see):
                result = func(*args, **named)
        else:
            result = func(*args, **named)

        made = [tensor for _, tensor in leaves.find(result)]
        made += [tensor for tensor in changed if all(tensor is not each for each in made)]
        is_as_before = self._again.follow(call.given, made, before)
        at: CalledAt | None = None
        for tensor in made:
            nodes = list(between(tensor.grad_fn, call.before))
            is_spoiled = is_bad(tensor)
            if not nodes and not is_spoiled:
                continue
            at = at or called_at(name)
            for node in nodes:
                if is_as_before:
                    self.nodes.setdefault(node, at)
            carriers = call.bad
            if call.nan and has_nan(tensor):
                carriers = call.nan
            origin = self._known_origin(carriers)
            if is_as_before and _made_elsewhere(name, tensor, call):
                elements = BadElements.of(tensor, nan_alone=True)
                of_numbers = replace(call, bad=(), has_infinity=False)
                origin = Origin(at, elements, of_numbers, inside.first_bad)
            elif is_spoiled and origin is None and is_as_before:
                origin = self._new_origin(at, tensor, call, inside.first_bad)
            if is_spoiled:
                self._remember(tensor, origin, call)
            if origin is not None:
                for node in nodes:
                    self._hidden.setdefault(node, origin)
        return result

    def _remember(self, tensor: Tensor, origin: Origin | None, call: _Call) -> None:
        """Note the origin of a result; views that the program has of its memory have the same."""
        self._origins[id(tensor)] = origin
        memory = leaves.storage_of(tensor)
        was_finite = all(tensor is not each for each in call.bad)
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if memory not in self._of_memory or (was_finite and is_whole):
            self._of_memory[memory] = origin
        self._kept.append(tensor)

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of a value that is not finite; None if nothing that was seen made it."""
        known = self._origins.get(id(tensor))
        if known is not None:
            return known
        return self._of_memory.get(leaves.storage_of(tensor))

    def hidden_behind(self, node: Node) -> Origin | None:
        """Return the origin of values that are not finite at the operation of a node."""
        return self._hidden.get(node)

    def _known_origin(self, bad: Iterable[Tensor]) -> Origin | None:
        for tensor in bad:
            known = self.origin_of(tensor)
            if known is not None:
                return known
        return None

    def _new_origin(
        self, at: CalledAt, made: Tensor, call: _Call, inner: str | None
    ) -> Origin | None:
        """Return the origin of a result that is not finite, while no argument has one."""
        if call.is_unread or (at.name in ENTERING and not call.has_infinity):
            return None
        is_of_infinities = has_nan(made) and bool(call.bad)
        elements = BadElements.of(made, nan_alone=is_of_infinities)
        places = call.has_infinity or (at.name in PLACING and not elements.nan)
        if all(id(tensor) in self._placed for tensor in call.bad) and not call.has_nan:
            if not call.bad and not places:
                return Origin(at, elements, call, inner)
            if elements.nan:
                return Origin(at, elements, call, inner)
            self._placed.add(id(made))
        return None  # it came from before what was seen


def _made_elsewhere(name: str, made: Tensor, call: _Call) -> bool:
    """Whether an operation by elements made a NaN where its arguments, some infinite, were finite."""
    if name.removesuffix("_") not in BY_ELEMENTS or call.has_nan or not call.bad or call.is_unread:
        return False
    new = torch.isnan(made.detach())
    for each in call.bad:
        if each is made or each.dim() > new.dim():
            return False
        new = new & torch.isfinite(each.detach())
    return new.shape == made.shape and bool(new.any())


class FirstBadNode(Exception):
    """The backward pass has come to a node that made gradients which are not finite."""

    def __init__(self, node: Node, gradient: Tensor) -> None:
        super().__init__()
        self.node = node
        self.gradient = gradient


def first_bad_node(
    losses: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
) -> FirstBadNode | None:
    """Run a backward pass until a node makes gradients that are not finite; None if all of them are."""
    roots = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    for node in behind(roots):
        if not is_leaf(node):
            node.register_hook(_check_of(node))
    try:
        torch.autograd.backward(losses, gradients)
    except FirstBadNode as found:
        return found
    return None


def _check_of(node: Node) -> Any:
    def check(passed_on: Any, arrived: Any) -> None:
        bad = [each for each in passed_on if each is not None and is_bad(each)]
        if bad and not any(each is not None and is_bad(each) for each in arrived):
            raise FirstBadNode(node, bad[0])

    return check


def backward_of(node: Node) -> CalledAt | None:
    """Return the backward that the program has written for a `torch.autograd.Function`; None for any other node."""
    function = function_of(node)
    backward = getattr(getattr(function, "backward", None), "__code__", None)
    if function is None or backward is None:
        return None
    return CalledAt(function.__name__, backward, backward.co_firstlineno, None)


def called_at(name: str) -> CalledAt:
    """Return the operation that is being called, with the program's line and the module that runs.

    Of an operation in place it has the plain name.
    """
    here = sys._getframe(2)
    module = next((each for each in map(_module_of, frames_around(here)) if each is not None), None)
    name = name.removeprefix("_").removesuffix("_")
    for frame in frames_around(here):
        if not is_between(frame.f_code.co_filename):
            return CalledAt(name, frame.f_code, frame.f_lineno, module)
    return CalledAt(name, None, 0, module)


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose method a frame runs."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    own = frame.f_locals.get(code.co_varnames[0])
    if isinstance(own, nn.Module):
        return own
    return None


def is_bad(tensor: Tensor) -> bool:
    """Whether a tensor has elements that are not finite."""
    if not _is_readable(tensor):
        return False
    return not bool(torch.isfinite(tensor.detach()).all())


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor has elements that are NaN."""
    return _is_readable(tensor) and bool(torch.isnan(tensor.detach()).any())


def _is_readable(tensor: Tensor) -> bool:
    return _is_number(tensor) and tensor.layout is torch.strided and leaves.has_memory(tensor)


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _span(given: Iterable[Tensor]) -> tuple[float, float] | None:
    """Return the smallest and the largest of some finite numbers."""
    low, high = float("inf"), float("-inf")
    for tensor in given:
        if tensor.is_floating_point() and _is_readable(tensor) and tensor.numel():
            least, most = tensor.detach().aminmax()
            low, high = min(low, float(least)), max(high, float(most))
    if low > high:
        return None
    return low, high
