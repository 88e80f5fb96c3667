"""What operations make of numbers: which can give a result that is not finite, and of what."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.short_text import counted, is_or_are
from kedge.sites.operation_names import plain_name
from kedge.torch_internals.autograd_nodes import number_in, shape_of_output

_SUMS_OF_PRODUCTS = (
    "abs", "add", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "cumsum", "dot", "linear", "mean",
    "mkldnn_convolution", "mm", "mul", "mv", "neg", "rsub", "sub", "sum",
)  # fmt: skip
LARGE = 1e4
"""The magnitude beyond which sums and products of a few factors are suspected, too."""
_MEANS = (
    "mean",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "kl_div",
)
_REDUCTION_MEAN = 1
"""PyTorch's number of ``reduction="mean"``."""
STEEP = (
    "sqrt",
    "pow",
    "acos",
    "asin",
    "atanh",
    "log",
    "div",
    "reciprocal",
    "rsqrt",
    "linalg_eigh",
    "linalg_svd",
)
"""Operations whose slope can be infinite where the loss is finite; that of a norm or a deviation is 0 at 0."""
MOVES = (
    "t",
    "transpose",
    "permute",
    "view",
    "unsafe_view",
    "reshape_alias",
    "expand",
    "squeeze",
    "unsqueeze",
    "to_copy",
)
FINITE_OF_FINITE = (
    *MOVES,
    "alias",
    "cat",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clone",
    "detach",
    "elu",
    "embedding",
    "gather",
    "gelu",
    "hardtanh",
    "index",
    "index_select",
    "leaky_relu",
    "maximum",
    "minimum",
    "relu",
    "select",
    "sigmoid",
    "silu",
    "slice",
    "softplus",
    "split",
    "stack",
    "tanh",
    "unbind",
    "where",
)
"""Operations whose result is finite for all finite inputs: they move, choose or bound numbers."""
CARRIES = (*MOVES, *_SUMS_OF_PRODUCTS, "alias", "clone", "native_layer_norm")
"""Operations that hide no value that is not finite, neither in the forward nor in the backward."""
SHOWS = (*CARRIES, "cat", "div", "stack")
"""Operations that hide none in the forward; an infinite divisor is hidden."""
_INFINITE_OF_FINITE = {
    "log": (-math.inf, "zero"),
    "log10": (-math.inf, "zero"),
    "log1p": (-math.inf, "-1"),
    "log2": (-math.inf, "zero"),
    "reciprocal": (math.inf, "zero and the numbers next to it"),
    "rsqrt": (math.inf, "zero"),
}
"""The infinity that an operation makes of finite numbers alone, and of which."""
LAYERS = {
    "addmm": (1, 2, 0),
    "convolution": (0, 1, 2),
    "linear": (0, 1, 2),
    "native_batch_norm": (0, 1, 2),
    "native_group_norm": (0, 1, 2),
    "native_layer_norm": (0, 1, 2),
}
"""The places of the input, the weight and the bias among the operands of an operation."""


def operand(node: Node, at: int) -> Node | None:
    """Return the node that made an operand; None for a constant, and if there are fewer."""
    if at >= len(node.next_functions):
        return None
    return node.next_functions[at][0]


def danger_in(node: Node, inputs: dict[str, Tensor]) -> str | None:
    """Describe the finite inputs of an operation that make its result non-finite.

    None if none do.
    """
    name = plain_name(node.name())
    if name in _MEANS and _takes_nothing(node):
        return "it took the mean of no elements"
    if name == "div":
        divisor = inputs.get("other")
        if divisor is None or bool(divisor.all()):
            return None
        return f"its divisor has {counted(int((divisor == 0).sum()), 'zero')}"

    own = inputs.get("self")
    if own is None:
        return None
    found = []
    if name == "log1p":
        equal = int((own == -1).sum())
        smaller = int((own < -1).sum())
        if equal:
            found.append(f"{counted(equal, 'element')} equal to -1")
        if smaller:
            found.append(counted(smaller, "smaller element"))
    elif name in ("log", "log2", "log10", "rsqrt", "reciprocal"):
        zeros = int((own == 0).sum())
        negative = int((own < 0).sum())
        if zeros:
            found.append(counted(zeros, "zero"))
        if negative and (zeros or name != "reciprocal"):
            found.append(counted(negative, "negative element"))
    elif name == "sqrt":
        negative = int((own < 0).sum())
        if negative:
            found.append(counted(negative, "negative element"))
    elif name in ("acos", "asin", "atanh"):
        outside = int((own.abs() > 1).sum())
        if outside:
            found.append(f"{counted(outside, 'element')} outside [-1, 1]")
    if found:
        return f"its input has {' and '.join(found)}"

    if name == "pow":
        exponent = number_in(node, "exponent")
        low = int((own <= 0).sum())
        is_root = isinstance(exponent, (int, float)) and exponent != int(exponent)
        is_inverse = isinstance(exponent, (int, float)) and exponent < 0
        if low and (is_root or is_inverse):
            return f"its base has {counted(low, 'element')} at or below zero"
    return None


def _takes_nothing(node: Node) -> bool:
    """Whether an operation takes a value without elements, and reduces it to their mean."""
    before = operand(node, 0)
    if before is None or number_in(node, "reduction") not in (None, _REDUCTION_MEAN):
        return False
    shape = shape_of_output(before)
    return shape is not None and math.prod(shape) == 0


def shown_by_infinities(node: Node, result: Tensor | None) -> str | None:
    """Describe a result whose infinities alone show that its operation took finite numbers.

    A logarithm is -inf of zero, and a reciprocal infinite of zero and of the numbers next to it. Of
    a NaN or an infinity they make other values, and the answer is None.
    """
    name = plain_name(node.name())
    if result is None or name not in _INFINITE_OF_FINITE:
        return None
    infinite, made_of = _INFINITE_OF_FINITE[name]
    count = int((result == infinite).sum())
    if count == 0 or count < int((~torch.isfinite(result)).sum()):
        return None
    are = is_or_are(count)
    return f"{count} of its results {are} {infinite}, which it makes of {made_of} alone"


def only_overflows(node: Node, inputs: Mapping[str, Tensor]) -> bool:
    """Whether an operation is a sum of products, which makes no NaN of numbers of usual size."""
    name = plain_name(node.name())
    if name == "pow":
        exponent = number_in(node, "exponent")
        is_number = isinstance(exponent, (int, float))
        return is_number and exponent >= 0 and exponent == int(exponent)
    if name == "div":
        divisor = inputs.get("other")
        if divisor is None:
            return _is_clamped(node)
        return bool((divisor.abs() > 1 / LARGE).all())
    return name in _SUMS_OF_PRODUCTS


def _is_clamped(division: Node) -> bool:
    """Whether the divisor of a division is clamped from below, by a number of usual size."""
    divisor = operand(division, 1)
    if divisor is None or not plain_name(divisor.name()).startswith("clamp"):
        return False
    least = number_in(divisor, "min")
    return isinstance(least, (int, float)) and least > 1 / LARGE


def is_gentle(node: Node, sound: Container[Node]) -> bool:
    """Whether an operation's slope is known to be finite.

    A square's is, and a division's by what its quotient or divisor shows.
    """
    if plain_name(node.name()) == "div" and operand(node, 1) is None:
        return node in sound
    return only_overflows(node, {})


def is_finite(value: Tensor) -> bool:
    """Whether all elements are finite."""
    return not value.numel() or bool(torch.isfinite(value).all())


def largest_magnitude(value: Tensor) -> float:
    """Return the largest finite magnitude; 0 without one."""
    if not value.numel():
        return 0.0
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max())
