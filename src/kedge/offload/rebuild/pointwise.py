"""Activations: from the input that their node saves, or from what their input is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import Apply, RebuildRule, RecipeBuilder, signed
from kedge.torch_internals.autograd_nodes import saved

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class FromInput(RebuildRule):
    """An elementwise operation whose node saves its input.

    Attributes:
        name: What the account calls it.
        nodes: The type name of its node.
        function: The operation, which takes the input and then the numbers.
        numbers: What the node calls the operation's numbers.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]
    numbers: tuple[str, ...] = ()

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Apply the operation to the input."""
        source = builder.saved(node, "self", 0)
        numbers = [signed(saved(node, name)) for name in self.numbers]
        return None if source is None else Apply(self.function, (source,), numbers)


@dataclass(frozen=True, slots=True)
class FromBehind(RebuildRule):
    """An elementwise operation whose node saves its own output: it is made again from what made the input.

    Attributes:
        name: What the account calls it.
        nodes: The type name of its node.
        function: The operation.
        inside: The same in place, for an input that is itself made again and needed for this alone.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]
    inside: Callable[..., Tensor]

    result = "result"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Apply the operation to what its input is made of."""
        source = builder.behind(node.next_functions[0])
        if source is None:
            return None
        return Apply(self.inside if isinstance(source, Apply) else self.function, (source,))


@dataclass(frozen=True, slots=True)
class OutputOnly(RebuildRule):
    """An operation whose node saves its own output, which cannot be made again, but others from it.

    Attributes:
        nodes: The type name of its node.
        result: Under which name it is saved.
    """

    nodes: tuple[str, ...]
    result: str | None = "result"

    name = "kept"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:  # noqa: ARG002 - what a rule is asked with
        """Return None: the output cannot be made again."""
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

_ATTENTION = ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
RESULTS = (
    *(OutputOnly((f"{name}Backward0",)) for name in ("Softmax", "LogSoftmax", "Exp", "Sqrt", "Rsqrt", "Reciprocal")),
    *(OutputOnly((f"ScaledDotProduct{name}Backward0",), "output") for name in _ATTENTION),
)
