"""The dimensions of an operation's results, from those of its operands; see Note [What a dimension is]."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

from torch import Tensor

from kedge.features.axes.axis import PARAMETER, Axes, Axis, channels, reshaped, together

Rule: TypeAlias = Callable[[Axes, str, Sequence[Any], dict[str, Any], Sequence[Tensor]], None]


def follow(axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Note the dimensions of the results of an operation of PyTorch.

    Args:
        axes: The dimensions known so far.
        name: The operation's name, such as "addmm" or "add_".
        args: Its arguments by position.
        kwargs: Its arguments by name.
        result: What it returned.
    """
    results = _tensors(result)
    word = name.rstrip("_")
    try:
        _rule(word)(axes, word, args, kwargs, results)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        # A form of the operation that the rule does not know, or nested tensors, which have no
        # shape: nothing is known then.
        _unknown(axes, word, args, kwargs, results)


@cache
def _rule(name: str) -> Rule:
    for pattern, rule in _RULES:
        if pattern.fullmatch(name):
            return rule
    return _elementwise


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [each for each in value if isinstance(each, Tensor)]
        if isinstance(value, (tuple, list))
        else []
    )


def _argument(
    args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any = None
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _resized(axis: Axis, before: int, after: int) -> Axis:
    """Return a dimension along which an operation moved a window."""
    return axis if before == after else axis.remade()


def _elementwise(
    axes: Axes, _name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Whatever keeps the places of elements, with broadcasting; of an unknown operation only results like its operands."""
    operands = [each for arg in (*args, *kwargs.values()) for each in _tensors(arg)]
    for result in results:
        found = []
        for back in range(result.dim(), 0, -1):
            size = result.shape[-back]
            there = [each for each in operands if each.dim() >= back and each.shape[-back] == size]
            found.append(together([axes.of(each)[-back] for each in there]) if there else None)
        if all(axis is not None for axis in found) and any(
            each.dim() == result.dim() for each in operands
        ):
            axes.put(result, [axis for axis in found if axis is not None])
        else:
            axes.forget(result)


def _windows(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Convolutions, and pooling, padding and resizing of images: channels in dimension 1, positions behind them."""
    value, convolves = args[0], "conv" in name
    spatial = value.dim() - 2
    if digits := re.search(r"([123])d", name):
        spatial = int(digits[1])
    mine = axes.of(value)
    lead = value.dim() - spatial - 1
    mine[lead].must_be("channels")
    for axis in mine[lead + 1 :]:
        axis.must_be("positions")
    made = channels() if convolves or name == "im2col" else mine[lead]
    for result in results:
        if name == "im2col":
            axes.put(
                result, [mine[0], made, Axis("positions", within=mine[2].origin | mine[3].origin)]
            )
            continue
        places = zip(
            mine[lead + 1 :], value.shape[lead + 1 :], result.shape[lead + 1 :], strict=True
        )
        axes.put(result, [*mine[:lead], made, *(_resized(*place) for place in places)])


def _padded(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Padding, slices and selections: other elements along some dimensions."""
    value, result = args[0], results[0]
    if value.dim() == result.dim():
        places = zip(axes.of(value), value.shape, result.shape, strict=True)
        axes.put(result, [_resized(*place) for place in places])
    else:
        axes.forget(result)


def _linear(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Products with a matrix of weights: channels last."""
    left, right = args[1:3] if "add" in name else args[:2]
    mine = axes.of(left)
    mine[-1].must_be("channels")
    made = channels()
    if "linear" not in name and right.dim() > 1 and axes.of(right)[-1].kind is not None:
        made = axes.of(right)[-1]
    lead = list(mine[:-1])
    if right.dim() > 1:
        lead.append(made)
    axes.put(results[0], lead)


def _product(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Products of two batches of matrices, as in attention."""
    left, right = args[1:3] if name == "baddbmm" else args[:2]
    ours, theirs = axes.of(left), axes.of(right)
    last = theirs[2]
    if last.kind is None:
        last = channels()
    axes.put(results[0], [together([ours[0], theirs[0]]), ours[1], last])


def _attention(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    query, _, value = args[:3]
    mine = axes.of(query)
    mine[-2].must_be("positions")
    lead = [together(pair) for pair in zip(mine[:-2], axes.of(value)[:-2], strict=True)]
    axes.put(results[0], [*lead, mine[-2], axes.of(value)[-1]])
    for other in results[1:]:
        axes.forget(other)


def _embedding(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """A row of channels for each index."""
    mine = axes.of(args[1])
    for axis in mine[1:] or mine:
        axis.must_be("positions")
    axes.put(results[0], [*mine, channels()])


def _last_normalized(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Normalization over the last dimensions: if it is one, that is the channels'."""
    shape = args[1]
    if isinstance(shape, (list, tuple)) and len(shape) == 1:
        axes.of(args[0])[-1].must_be("channels")
    _as_first(axes, name, args, kwargs, results)


def _first_normalized(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Normalization of channels in dimension 1."""
    mine = axes.of(args[0])
    if len(mine) > 1:
        mine[1].must_be("channels")
    for axis in mine[2:]:
        axis.must_be("positions")
    _as_first(axes, name, args, kwargs, results)


def _as_first(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Results like the first operand."""
    value = args[0]
    for result in results:
        if result.shape == value.shape:
            axes.put(result, axes.of(value))
        else:
            axes.forget(result)


def _reshape(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    axes.put(results[0], reshaped(axes.of(args[0]), args[0].shape, results[0].shape))


def _permute(
    axes: Axes, name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    mine = axes.of(args[0])
    if name == "permute":
        order = list(args[1])
    else:
        order = list(range(len(mine)))
        one, other = args[1:3] if name != "t" else (0, len(mine) - 1)
        if order:
            order[one], order[other] = order[other], order[one]
    axes.put(results[0], [mine[at] for at in order])


def _expand(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    value, result = args[0], results[0]
    mine = axes.of(value)
    new = result.dim() - len(mine)
    made = [Axis() for _ in range(new)]
    for axis, before, after in zip(mine, value.shape, result.shape[new:], strict=True):
        made.append(axis if before == after else Axis(sources=axis.sources & {PARAMETER}))
    axes.put(result, made)


def _unsqueeze(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    made = list(axes.of(args[0]))
    made.insert(args[1] % results[0].dim(), Axis())
    axes.put(results[0], made)


def _squeeze(
    axes: Axes, _name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    value = args[0]
    dims = _dims(_argument(args, kwargs, 1, "dim"), value.dim())
    kept = [
        axis for at, axis in enumerate(axes.of(value)) if not (at in dims and value.shape[at] == 1)
    ]
    axes.put(results[0], kept)


def _select(
    axes: Axes, _name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """One element of a dimension, or each."""
    value = args[0]
    dim = _argument(args, kwargs, 1, "dim", 0) % value.dim()
    for result in results:
        axes.put(result, [axis for at, axis in enumerate(axes.of(value)) if at != dim])


def _split(
    axes: Axes, _name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    value = args[0]
    dim = _argument(args, kwargs, 2, "dim", 0) % value.dim()
    for result in results:
        mine = list(axes.of(value))
        mine[dim] = _resized(mine[dim], value.shape[dim], result.shape[dim])
        axes.put(result, mine)


def _cat(
    axes: Axes, _name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    result = results[0]
    dim = _argument(args, kwargs, 1, "dim", 0) % result.dim()
    parts = [each for each in args[0] if each.dim() == result.dim()]  # PyTorch skips an empty [0]
    each = [axes.of(part) for part in parts]
    made = [together([of[at] for of in each]) for at in range(result.dim())]
    if len(parts) > 1:
        along = together([of[dim] for of in each])
        sizes = tuple(part.shape[dim] for part in parts)
        origin = frozenset().union(*(of[dim].origin for of in each))
        made[dim] = Axis(along.kind, within=origin, joined=sizes)
    axes.put(result, made)


def _stack(
    axes: Axes, _name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    result = results[0]
    each = [axes.of(part) for part in args[0]]
    made = [together([of[at] for of in each]) for at in range(result.dim() - 1)]
    made.insert(_argument(args, kwargs, 1, "dim", 0) % result.dim(), Axis())
    axes.put(result, made)


def _reduced(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Sums and their like over some dimensions."""
    value = args[0]
    place = 2 if name in ("linalg_vector_norm", "norm", "kthvalue") else 1
    given = _argument(args, kwargs, place, "dim")
    if isinstance(given, Tensor):  # max and min of two tensors
        _elementwise(axes, name, args, kwargs, results)
        return
    dims = _dims(None if isinstance(given, (bool, float)) else given, value.dim())
    mine = axes.of(value)
    for result in results:
        if result.dim() == value.dim():
            axes.put(
                result, [axis.remade() if at in dims else axis for at, axis in enumerate(mine)]
            )
        else:
            axes.put(result, [axis for at, axis in enumerate(mine) if at not in dims])


def _moved(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Elements in another order along some dimensions."""
    value = args[0]
    dims = _dims(args[-1], value.dim())
    axes.put(
        results[0],
        [axis.remade() if at in dims else axis for at, axis in enumerate(axes.of(value))],
    )


def _indexed(
    axes: Axes, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Elements chosen by indices: dimensions without an index stay, those with one are made of other elements."""
    value, result = args[0], results[0]
    mine = axes.of(value)
    if name in ("index_select", "gather"):
        dim = args[1] % max(1, value.dim())
        axes.put(result, [axis.remade() if at == dim else axis for at, axis in enumerate(mine)])
        return
    indices = list(args[1])
    used = [at for at, index in enumerate(indices) if index is not None]
    if len(used) == 1 and indices[used[0]].dim() == 1:
        axes.put(result, [axis.remade() if at == used[0] else axis for at, axis in enumerate(mine)])
    else:
        axes.forget(result)


def _made(
    axes: Axes, _name: str, _args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """Tensors that come from no argument."""
    for result in results:
        axes.put(result, [Axis(sources=frozenset({PARAMETER})) for _ in range(result.dim())])


def _unknown(
    axes: Axes, _name: str, _args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    for result in results:
        axes.forget(result)


def _restrided(
    axes: Axes, _name: str, args: Sequence[Any], _kwargs: dict[str, Any], results: Sequence[Tensor]
) -> None:
    """A view of any kind; in place PyTorch itself changes only the strides of dimensions of size 1."""
    if results[0] is not args[0]:
        axes.forget(results[0])


def _dims(given: Any, count: int) -> set[int]:
    """Return the dimensions that an operation was given; all if it was given none."""
    if given is None or given == []:
        return set(range(count))
    return {dim % max(1, count) for dim in ([given] if isinstance(given, int) else given)}


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
