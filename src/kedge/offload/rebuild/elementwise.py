"""The rules for elementwise operations: activations, products, quotients and sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import (
    Apply,
    RebuildRule,
    RecipeBuilder,
    constant,
    signed,
)
from kedge.torch_internals.autograd_nodes import raw, saved

_aten: Any = torch.ops.aten
_OF_NUMBERS = frozenset({torch.float64, torch.int64, torch.bool})


@dataclass(frozen=True, slots=True)
class FromInput(RebuildRule):
    """The rule of an elementwise operation whose node saves its input.

    Attributes:
        name: Its name in the account.
        nodes: The type name of its node.
        function: The operation, which takes the input and then the numbers.
        numbers: The node's names of the operation's numbers.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]
    numbers: tuple[str, ...] = ()

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that applies the operation to the input."""
        source = builder.saved(node, "self", 0)
        if source is None:
            return None
        numbers = [signed(saved(node, name)) for name in self.numbers]
        return Apply(self.function, (source,), numbers)


@dataclass(frozen=True, slots=True)
class FromBehind(RebuildRule):
    """The rule of an elementwise operation whose node saves its own output.

    That is rebuilt from the origin of the input.

    Attributes:
        name: Its name in the account.
        nodes: The type name of its node.
        function: The operation.
        inside: The same in place, for an input that is itself rebuilt and needed for this alone.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]
    inside: Callable[..., Tensor]

    result = "result"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that applies the operation to its rebuilt input."""
        source = builder.behind(node.next_functions[0])
        if source is None:
            return None
        function = self.inside if isinstance(source, Apply) else self.function
        return Apply(function, (source,))


@dataclass(frozen=True, slots=True)
class OutputOnly(RebuildRule):
    """The rule of an operation whose node saves its own output, which cannot be rebuilt.

    The output serves to rebuild others.

    Attributes:
        nodes: The type name of its node.
        result: The name under which the output is saved.
    """

    nodes: tuple[str, ...]
    result: str | None = "result"

    name = "kept"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:  # noqa: ARG002 - the arguments of every rule
        """Return None: the output cannot be rebuilt."""
        return None


def _gelu(source: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(source, approximate=approximate)


ACTIVATIONS = (
    FromInput("gelu", ("GeluBackward0",), _gelu, ("approximate",)),
    FromInput("silu", ("SiluBackward0",), _aten.silu),
    FromInput("leaky_relu", ("LeakyReluBackward0",), _aten.leaky_relu, ("negative_slope",)),
    FromInput("elu", ("EluBackward0",), _aten.elu, ("alpha", "scale", "input_scale")),
    FromInput("celu", ("CeluBackward0",), _aten.celu, ("alpha",)),
    FromInput("softplus", ("SoftplusBackward0",), _aten.softplus, ("beta", "threshold")),
    FromInput("hardswish", ("HardswishBackward0",), _aten.hardswish),
    FromInput("hardsigmoid", ("HardsigmoidBackward0",), _aten.hardsigmoid),
    FromInput("hardtanh", ("HardtanhBackward0",), _aten.hardtanh, ("min_val", "max_val")),
    FromInput("mish", ("MishBackward0",), _aten.mish),
    FromInput("logsigmoid", ("LogSigmoidBackward0",), _aten.log_sigmoid),
    FromInput("softshrink", ("SoftshrinkBackward0",), _aten.softshrink, ("lambd",)),
    FromInput("glu", ("GluBackward0",), _aten.glu, ("dim",)),
    FromInput("pow", ("PowBackward0",), _aten.pow, ("exponent",)),
    FromInput("sin", ("SinBackward0",), torch.sin),
    FromInput("cos", ("CosBackward0",), torch.cos),
    FromInput("abs", ("AbsBackward0",), torch.abs),
    FromInput("log", ("LogBackward0",), torch.log),
    FromBehind("relu", ("ReluBackward0",), torch.relu, torch.relu_),
    FromBehind("sigmoid", ("SigmoidBackward0",), torch.sigmoid, torch.sigmoid_),
    FromBehind("tanh", ("TanhBackward0",), torch.tanh, torch.tanh_),
)

RESULTS = (
    OutputOnly(("SoftmaxBackward0",)),
    OutputOnly(("LogSoftmaxBackward0",)),
    OutputOnly(("ExpBackward0",)),
    OutputOnly(("SqrtBackward0",)),
    OutputOnly(("RsqrtBackward0",)),
    OutputOnly(("ReciprocalBackward0",)),
    OutputOnly(("ScaledDotProductFlashAttentionForCpuBackward0",), "output"),
    OutputOnly(("ScaledDotProductFlashAttentionBackward0",), "output"),
    OutputOnly(("ScaledDotProductEfficientAttentionBackward0",), "output"),
    OutputOnly(("ScaledDotProductCudnnAttentionBackward0",), "output"),
)


@dataclass(frozen=True, slots=True)
class OfTwo(RebuildRule):
    """The rule of a product or a quotient; its node saves a side if the other one needs a gradient.

    Attributes:
        name: Its name in the account.
        nodes: The type name of its node.
        function: The operation.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that combines both sides."""
        left = _side(node, builder, "self", 0)
        if left is None:
            return None
        right = _side(node, builder, "other", 1)
        if right is None:
            return None
        return Apply(self.function, (left, right))


class SumOfTwo(RebuildRule):
    """The rule of a sum, as at the end of a residual branch.

    Its node saves nothing: both sides are taken from their origins.
    """

    name = "sum"
    nodes = ("AddBackward0",)

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that adds both sides."""
        left = builder.behind(node.next_functions[0])
        if left is None:
            return None
        right = builder.behind(node.next_functions[1])
        if right is None:
            return None
        add = _add_inside if isinstance(left, Apply) else _add
        return Apply(add, (left, right), (saved(node, "alpha"),))


ARITHMETIC = (
    OfTwo("product", ("MulBackward0",), torch.mul),
    OfTwo("quotient", ("DivBackward0",), torch.div),
    SumOfTwo(),
)


def _side(node: Any, builder: RecipeBuilder, field: str, edge: int) -> Term | None:
    """Return the term of one side: saved, a number, or rebuilt."""
    held = raw(node, field).data
    if held is None:
        return builder.behind(node.next_functions[edge])
    if not isinstance(held, Tensor):
        return builder.saved(node, field, edge)

    # PyTorch wraps a Python number into a CPU tensor that no hook sees.
    if held.dim() or held.device.type != "cpu" or held.dtype not in _OF_NUMBERS:
        return None
    return partial(constant, held.item())


def _add(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    return torch.add(left, right, alpha=alpha)


def _add_inside(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    """Return the sum, in place in the left side if it fits: that was computed for this sum alone."""
    fits = left.shape == right.shape and torch.result_type(left, right) == left.dtype
    if fits:
        return left.add_(right, alpha=alpha)
    return torch.add(left, right, alpha=alpha)
