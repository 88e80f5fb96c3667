"""The rules for activations: from the input that the node saves, or from the input's own recipe."""

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
        numbers = [signed(saved(node, name)) for name in self.numbers]
        return None if source is None else Apply(self.function, (source,), numbers)


@dataclass(frozen=True, slots=True)
class FromBehind(RebuildRule):
    """The rule of an elementwise operation whose node saves its own output, rebuilt from the origin of the input.

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
        return Apply(self.inside if isinstance(source, Apply) else self.function, (source,))


@dataclass(frozen=True, slots=True)
class OutputOnly(RebuildRule):
    """The rule of an operation whose node saves its own output, which cannot be rebuilt, but serves to rebuild others.

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

_ATTENTION = ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
RESULTS = (
    *(
        OutputOnly((f"{name}Backward0",))
        for name in ("Softmax", "LogSoftmax", "Exp", "Sqrt", "Rsqrt", "Reciprocal")
    ),
    *(OutputOnly((f"ScaledDotProduct{name}Backward0",), "output") for name in _ATTENTION),
)
