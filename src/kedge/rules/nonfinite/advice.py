"""What to do about a birth: it depends on what kind of operation made it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kedge.store.formats import FORMATS

_PRODUCTS = re.compile(
    r"(Lazy)?(Linear|Bilinear|Conv(Transpose)?\dd|LSTM|GRU|RNN|LSTMCell|GRUCell|RNNCell|MultiheadAttention|EmbeddingBag|Conv1D)$"
)
_NORMS = re.compile(r"(Lazy)?((Sync)?BatchNorm\w*|InstanceNorm\w*|LayerNorm|GroupNorm|\w*RMSNorm|LocalResponseNorm)$")
_SOFTMAX = re.compile(r"(Log)?Soft(max|min)(2d)?$")
_PRODUCT_NODES = re.compile(
    r"(Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|Linear|Bilinear|Convolution|Mkldnn\w+|Cudnn\w+|\w*DotProduct\w*|Einsum)Backward"
)

DOMAIN = (
    "look at the range of the inputs in the evidence: log, division, sqrt, pow, exp and acos leave the finite numbers "
    "at 0, at 1 or for large values; clamp what goes in, add an epsilon, or use the stable form "
    "(log_softmax, logsumexp, softplus, *_with_logits)"
)

_OVERFLOW = (
    "In {name}, products and sums of finite numbers left the range of {dtype}{figures}: look at the size of what came in "
    "and of the weights. Normalise or scale what comes in, and keep the weights small ({small}){wider}."
)
_OVERFLOW_BACK = (
    "In the backward of {name}, products of finite gradients with weights and inputs left the range of {dtype}: the "
    "gradients that arrive there are too large. Scale the loss down or take its mean, clip gradients{lower}{wider}."
)
_NORMALISED = (
    "In {name}, the variance was zero and eps too small to help, or squares left the range of {dtype}{figures}: look at "
    "the spread of what came in, raise eps, or normalise in float32."
)
_STATISTICS = (
    " In eval mode, look at running_mean and running_var: a NaN there, or a variance below zero, does the same."
)
_MASKED = (
    "In {name}, a row that is -inf all over has no softmax: it is NaN. Leave one position unmasked in every row, or mask "
    "with torch.finfo(dtype).min; if nothing is masked, look for an infinity in what came in."
)
_LOSSES = {
    "CrossEntropyLoss": "a mean over no element (every target is ignore_index) is NaN, and logits of -inf give an infinite loss",
    "NLLLoss": "a mean over no element (every target is ignore_index) is NaN, and a log-probability of -inf an infinite loss",
    "BCELoss": "take BCEWithLogitsLoss on the logits, as a probability of exactly 0 or 1 has no finite logarithm",
    "KLDivLoss": "give log-probabilities made by log_softmax, not by log",
    "CTCLoss": "a target longer than its input has an infinite loss: zero_infinity=True, or longer inputs",
    "GaussianNLLLoss": "a variance of zero needs a larger eps",
    "PoissonNLLLoss": "exp of a large input overflows: clamp it",
    "MSELoss": "squares left the range: normalise the targets, or take SmoothL1Loss",
}


@dataclass(frozen=True)
class Maker:
    """What is known of the operation that made something that is not finite.

    Attributes:
        name: What it is called in a sentence.
        type: The class of the module.
        node: The autograd node of what it made, or None.
        dtype: The dtype of what it made.
        largest: The largest magnitude that went in; 0 if that is not known.
    """

    name: str
    type: str
    node: str | None
    dtype: str
    largest: float
    first: bool = False
    "Whether it was so before any training, so that no learning rate is to blame."

    @property
    def multiplies(self) -> bool:
        """Whether it is a sum of products, which has no forbidden inputs and can only overflow."""
        return bool(_PRODUCTS.match(self.type) or (self.node and _PRODUCT_NODES.match(self.node)))

    @property
    def keeps_statistics(self) -> bool:
        """Whether it may hold a running mean and variance, which are not watched."""
        return "BatchNorm" in self.type or "InstanceNorm" in self.type

    def advice(self) -> str:
        """Say what to do."""
        if self.multiplies:
            wider = ", or compute it in bfloat16 or float32" if self.dtype in _NARROW else ""
            small = "by their initialisation" if self.first else "a lower learning rate, weight decay"
            return _OVERFLOW.format(name=self.name, dtype=self.dtype, figures=self.headroom(), wider=wider, small=small)
        if _NORMS.match(self.type):
            said = _NORMALISED.format(name=self.name, dtype=self.dtype, figures=self.headroom())
            return said + (_STATISTICS if self.keeps_statistics else "")
        if _SOFTMAX.match(self.type):
            return _MASKED.format(name=self.name)
        if self.type in _LOSSES:
            return f"In {self.name}: {_LOSSES[self.type]}."
        return f"In {self.name}, {DOMAIN}{self._narrow()}."

    def backward_advice(self) -> str:
        """Say what to do where the backward of sums of products made it; empty for other operations."""
        wider = ", or take bfloat16 instead of float16" if self.dtype in _NARROW else ""
        lower = "" if self.first else ", lower the learning rate"
        told = _OVERFLOW_BACK.format(name=self.name, dtype=self.dtype, wider=wider, lower=lower)
        return told if self.multiplies else ""

    def headroom(self) -> str:
        """Say where the dtype ends, and how near to that the inputs were."""
        known = FORMATS.get(self.dtype)
        if known is None or not 0 < self.largest < math.inf:
            return ""
        left = known.headroom(self.largest)
        near = ", beyond it" if left <= 0 else f", {left:.1f} doublings below" if left < _NEAR else ""
        return f" (it ends at {known.largest:.3g}; what came in reached {self.largest:.3g}{near})"

    def _narrow(self) -> str:
        return f". {self.dtype} is narrow{self.headroom()}" if self.dtype in _NARROW and self.headroom() else ""


#: Formats in which ordinary values overflow.
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")

#: Doublings below which it is said how many are left.
_NEAR = 16


def operation(node: str | None) -> str:
    """Give the name of the operation that an autograd node belongs to: ``LogBackward0`` is ``log``'s."""
    if node is None or "Backward" not in node:
        return ""
    name = node.rpartition("::")[2].partition("Backward")[0]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def operations(nodes: Iterable[object]) -> list[str]:
    """Give the names of the operations that autograd nodes belong to; a node of another's making keeps its own."""
    return [operation(str(node)) or str(node) for node in nodes]
