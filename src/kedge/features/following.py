"""One forward in which each dimension is followed from operation to operation; see Note [What a dimension is]."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from torch import Tensor, nn

from kedge.features.dimensions import (
    PARAMETER,
    Arguments,
    Axes,
    Axis,
    channels,
    of_parameter,
    reshaped,
    together,
)
from kedge.flow import Event
from kedge.hooks.session import Session
from kedge.sites.site import escape
from kedge.torch_internals.modes import seeing_operations
from kedge.torch_internals.module_tables import modules_in

_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_SEQUENCE = 3
_SEQUENCES = ("input", "query", "key", "value", "src", "tgt", "memory")


@contextmanager
def followed(model: nn.Module, given: Arguments) -> Iterator[Axes]:
    """Context of a forward; the dimensions of tensors are known while they exist."""
    axes = Axes()
    axes.put_parameters(model)
    for name, value in given.tensors.items():
        mine = [Axis(sources=frozenset({(name, dim)})) for dim in range(value.dim())]
        samples = given.sample_dim(value)
        if samples is not None:
            mine[samples].kind = "samples"
        axes.put(value, mine)
    session = Session()
    try:
        for path, module in modules_in(model).items():
            _declare(session, model, axes, path, module, counted=given.counted)
        with seeing_operations(lambda *call: follow(axes, *call)):
            yield axes
    finally:
        session.end(quiet=True)


def _declare(
    session: Session, model: nn.Module, axes: Axes, path: str, module: nn.Module, *, counted: bool
) -> None:
    """Let a module of PyTorch say what its operations do not: which dimension of its input is the sequence.

    Encoders with ``batch_first=True`` get no hook at their inputs, because it would keep PyTorch
    from their fast path.
    """
    first = getattr(module, "batch_first", None)
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        first = module.self_attn.batch_first

    def at_input(value: Tensor, event: Event) -> None:
        if event.site.leaf in _SEQUENCES and value.dim() == _SEQUENCE:
            sequence, samples, *_ = axes.of(value)
            if not counted or value.shape[0] == value.shape[1] or sequence.kind != "samples":
                sequence.kind, samples.kind = "positions", "samples"

    def at_output(value: Tensor, event: Event) -> None:
        given = event.kwargs.get("src", event.kwargs.get("input"))
        if event.args:
            given = event.args[0]
        if event.site.leaf not in (None, "0") or not isinstance(given, Tensor):
            return
        if given.shape[:2] == value.shape[:2]:
            lead = axes.of(given)[:2]
            rest = [channels() for _ in range(value.dim() - len(lead))]
            axes.of(value)[:] = [*lead, *rest]

    here = escape(path)
    if first is False:
        session.hook(model, f"{here}:in", at_input)
    if isinstance(module, (*_RECURRENT, nn.TransformerEncoder)):
        session.hook(model, f"{here}:out", at_output)


@dataclass(frozen=True)
class FollowedOperation:
    """A call of an operation of PyTorch.

    Attributes:
        axes: The dimensions known so far.
        name: Its name, such as "addmm"; "add" for "add_".
        args: Its arguments by position.
        kwargs: Its arguments by name.
        results: The tensors that it returned.
    """

    axes: Axes
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[Tensor]

    @property
    def value(self) -> Tensor:
        """The first operand."""
        value: Tensor = self.args[0]
        return value

    @property
    def mine(self) -> list[Axis]:
        """The dimensions of the first operand."""
        return self.axes.of(self.value)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by position or by name."""
        if len(self.args) > place:
            return self.args[place]
        return self.kwargs.get(name, default)

    def dim(self, place: int, count: int) -> int:
        """Return the dimension in an argument, counted from the front."""
        dim: int = self.argument(place, "dim", 0) % count
        return dim

    def dims(self, given: Any) -> set[int]:
        """Return the dimensions of the first operand that were given; all if there are none."""
        count = self.value.dim()
        if given is None or given == []:
            return set(range(count))
        if isinstance(given, int):
            given = [given]
        return {dim % max(1, count) for dim in given}

    def remade(self, dims: set[int]) -> list[Axis]:
        """Return the dimensions of the first operand, some of them with other elements."""
        axes = list(self.mine)
        for dim in dims:
            axes[dim] = axes[dim].remade()
        return axes


Rule: TypeAlias = Callable[[FollowedOperation, Tensor], list[Axis] | None]
"""Returns the dimensions of one of an operation's results; None if they are not known."""


def follow(
    axes: Axes, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any
) -> None:
    """Note the dimensions of the results of an operation of PyTorch.

    Args:
        axes: The dimensions known so far.
        name: The operation's name, such as "addmm" or "add_".
        args: Its arguments by position.
        kwargs: Its arguments by name.
        returned: What it returned.
    """
    operation = FollowedOperation(axes, name.rstrip("_"), args, kwargs, _tensors(returned))
    rule = _rule(operation.name)
    for result in operation.results:
        try:
            found = rule(operation, result)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):
            # A form of the operation that the rule does not know, or nested tensors, which have no
            # shape: nothing is known then.
            found = None
        if found is None:
            axes.forget(result)
        else:
            axes.put(result, found)


@cache
def _rule(name: str) -> Rule:
    for pattern, rule in _RULES:
        if pattern.fullmatch(name):
            return rule
    return _elementwise


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [each for each in value if isinstance(each, Tensor)]
    return []


def _resized(axis: Axis, before: int, after: int) -> Axis:
    """Return a dimension along which an operation moved a window."""
    return axis if before == after else axis.remade()


def _elementwise(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Whatever keeps the places of elements, with broadcasting; of an unknown operation only results like its operands."""
    operands: list[Tensor] = []
    for argument in (*operation.args, *operation.kwargs.values()):
        operands += _tensors(argument)
    if all(each.dim() != result.dim() for each in operands):
        return None
    found = []
    for back in range(result.dim(), 0, -1):
        size = result.shape[-back]
        there = [each for each in operands if each.dim() >= back and each.shape[-back] == size]
        if not there:
            return None
        found.append(together([operation.axes.of(each)[-back] for each in there]))
    return found


def _windows(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """Convolutions, and pooling, padding and resizing of images: channels in dimension 1, positions behind them."""
    name = operation.name
    value = operation.value
    mine = operation.mine
    digits = re.search(r"([123])d", name)
    spatial = int(digits[1]) if digits else value.dim() - 2
    lead = value.dim() - spatial - 1
    mine[lead].must_be("channels")
    for axis in mine[lead + 1 :]:
        axis.must_be("positions")
    if name == "im2col":
        positions = Axis("positions", within=mine[2].origin | mine[3].origin)
        return [mine[0], channels(), positions]
    made = channels() if "conv" in name else mine[lead]
    behind = slice(lead + 1, None)
    places = zip(mine[behind], value.shape[behind], result.shape[behind], strict=True)
    return [*mine[:lead], made, *(_resized(*place) for place in places)]


def _padded(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Padding, slices and selections: other elements along some dimensions."""
    value = operation.value
    if value.dim() != result.dim():
        return None
    places = zip(operation.mine, value.shape, result.shape, strict=True)
    return [_resized(*place) for place in places]


def _linear(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """Products with a matrix of weights: channels last."""
    left, right = operation.args[1:3] if "add" in operation.name else operation.args[:2]
    mine = operation.axes.of(left)
    mine[-1].must_be("channels")
    lead = list(mine[:-1])
    if right.dim() <= 1:
        return lead
    columns = operation.axes.of(right)[-1]
    if "linear" in operation.name or columns.kind is None:
        columns = channels()
    return [*lead, columns]


def _product(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """Products of two batches of matrices, as in attention."""
    left, right = operation.args[:2]
    if operation.name == "baddbmm":
        left, right = operation.args[1:3]
    ours, theirs = operation.axes.of(left), operation.axes.of(right)
    last = theirs[2]
    if last.kind is None:
        last = channels()
    return [together([ours[0], theirs[0]]), ours[1], last]


def _attention(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    if result is not operation.results[0]:
        return None
    mine, values = operation.mine, operation.axes.of(operation.args[2])
    mine[-2].must_be("positions")
    lead = [together(pair) for pair in zip(mine[:-2], values[:-2], strict=True)]
    return [*lead, mine[-2], values[-1]]


def _embedding(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """A row of channels for each index."""
    indices = operation.axes.of(operation.args[1])
    for axis in indices[1:] or indices:
        axis.must_be("positions")
    return [*indices, channels()]


def _last_normalized(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Normalization over the last dimensions: if it is one, that is the channels'."""
    shape = operation.args[1]
    if isinstance(shape, (list, tuple)) and len(shape) == 1:
        operation.mine[-1].must_be("channels")
    return _as_first(operation, result)


def _first_normalized(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Normalization of channels in dimension 1."""
    mine = operation.mine
    if len(mine) > 1:
        mine[1].must_be("channels")
    for axis in mine[2:]:
        axis.must_be("positions")
    return _as_first(operation, result)


def _as_first(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Results like the first operand."""
    return operation.mine if result.shape == operation.value.shape else None


def _reshape(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    return reshaped(operation.mine, operation.value.shape, result.shape)


def _permute(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    mine = operation.mine
    if operation.name == "permute":
        return [mine[at] for at in operation.args[1]]
    made = list(mine)
    if made:
        one, other = (0, -1) if operation.name == "t" else operation.args[1:3]
        made[one], made[other] = made[other], made[one]
    return made


def _expand(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    value, mine = operation.value, operation.mine
    new = result.dim() - len(mine)
    made = [Axis() for _ in range(new)]
    for axis, before, after in zip(mine, value.shape, result.shape[new:], strict=True):
        if before == after:
            made.append(axis)
        else:
            made.append(Axis(sources=axis.sources & {PARAMETER}))
    return made


def _unsqueeze(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    made = list(operation.mine)
    made.insert(operation.args[1] % result.dim(), Axis())
    return made


def _squeeze(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    shape = operation.value.shape
    dims = operation.dims(operation.argument(1, "dim"))
    gone = {dim for dim in dims if shape[dim] == 1}
    return [axis for at, axis in enumerate(operation.mine) if at not in gone]


def _select(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """One element of a dimension, or each."""
    dim = operation.dim(1, operation.value.dim())
    return [axis for at, axis in enumerate(operation.mine) if at != dim]


def _split(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    value = operation.value
    dim = operation.dim(2, value.dim())
    made = list(operation.mine)
    made[dim] = _resized(made[dim], value.shape[dim], result.shape[dim])
    return made


def _cat(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    dim = operation.dim(1, result.dim())
    # PyTorch skips an empty [0].
    parts = [part for part in operation.args[0] if part.dim() == result.dim()]
    of_parts = [operation.axes.of(part) for part in parts]
    made = [together(axes) for axes in zip(*of_parts, strict=True)]
    if len(parts) > 1:
        origin = frozenset().union(*(axes[dim].origin for axes in of_parts))
        sizes = tuple(part.shape[dim] for part in parts)
        made[dim] = Axis(made[dim].kind, within=origin, joined=sizes)
    return made


def _stack(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    of_parts = [operation.axes.of(part) for part in operation.args[0]]
    made = [together(axes) for axes in zip(*of_parts, strict=True)]
    made.insert(operation.dim(1, result.dim()), Axis())
    return made


def _reduced(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Sums and their like over some dimensions."""
    place = 2 if operation.name in ("linalg_vector_norm", "norm", "kthvalue") else 1
    given = operation.argument(place, "dim")
    if isinstance(given, Tensor):  # max and min of two tensors
        return _elementwise(operation, result)
    if isinstance(given, (bool, float)):
        given = None
    dims = operation.dims(given)
    if result.dim() == operation.value.dim():
        return operation.remade(dims)
    return [axis for at, axis in enumerate(operation.mine) if at not in dims]


def _moved(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """Elements in another order along some dimensions."""
    return operation.remade(operation.dims(operation.args[-1]))


def _indexed(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """Elements chosen by indices: dimensions without an index stay, those with one are made of other elements."""
    if operation.name in ("index_select", "gather"):
        return operation.remade({operation.args[1] % max(1, operation.value.dim())})
    indices = list(operation.args[1])
    used = [at for at, index in enumerate(indices) if index is not None]
    if len(used) == 1 and indices[used[0]].dim() == 1:
        return operation.remade(set(used))
    return None


def _made(operation: FollowedOperation, result: Tensor) -> list[Axis]:
    """Tensors that come from no argument."""
    return of_parameter(result)


def _unknown(operation: FollowedOperation, result: Tensor) -> None:
    return None


def _restrided(operation: FollowedOperation, result: Tensor) -> list[Axis] | None:
    """A view of any kind; in place PyTorch itself changes only the strides of dimensions of size 1."""
    return operation.mine if result is operation.value else None


_RULES: tuple[tuple[re.Pattern[str], Rule], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r".*conv(olution|_|\d).*", _windows),
        (r".*(max|avg)_pool\dd.*|_?upsample_.*\dd.*|im2col|pixel_(un)?shuffle|grid_sampler_\dd", _windows),
        (r"constant_pad_nd|(reflection|replication)_pad\dd|pad|slice|narrow", _padded),
        (r"(mkldnn_|_mkl_)?linear|mm|_?addmm(_activation)?|matmul|(add)?mv", _linear),
        (r"bmm|baddbmm", _product),
        (r"_?scaled_dot_product_.*", _attention),
        (r"embedding", _embedding),
        (r"(native_)?layer_norm|_?(fused_)?rms_norm", _last_normalized),
        (r".*(batch|group|instance)_norm.*", _first_normalized),
        (r"(_unsafe_|_reshape_)?view(_copy)?|reshape|_reshape_alias|_reshape_copy|flatten|unflatten", _reshape),
        (r"permute|transpose|t|swapaxes", _permute),
        (r"expand|broadcast_to|repeat", _expand),
        (r"unsqueeze", _unsqueeze),
        (r"squeeze", _squeeze),
        (r"select|unbind", _select),
        (r"(unsafe_)?(split|chunk)(_with_sizes)?", _split),
        (r"cat|concat", _cat),
        (r"stack", _stack),
        (r"mean|(nan)?sum|a?(max|min)|(var|std)(_mean)?|logsumexp|prod|arg(max|min)|any|all", _reduced),
        (r"(linalg_vector_)?norm", _reduced),
        (r"roll|flip", _moved),
        (r"index|index_select|gather", _indexed),
        (r"arange|zeros|ones|full|empty.*|rand.*|eye|linspace|scalar_tensor|new_.*|normal|bernoulli", _made),
        (r"_transformer_.*|_native_multi_head.*|mkldnn_rnn.*|.*cudnn_rnn.*|index_.*|scatter.*|masked_scatter", _as_first),
        (r"as_strided", _restrided),
        (r"tile|repeat_interleave|unfold|diagonal.*|nonzero|masked_select|unique.*|sort|topk|.*nested.*", _unknown),
    )
)  # fmt: skip
