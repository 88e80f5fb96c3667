"""Remedies for a birth, by the kind of operation that made it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kedge.store.formats import FORMATS

_PRODUCTS = re.compile(
    r"(Lazy)?(Linear|Bilinear|Conv(Transpose)?\dd|LSTM|GRU|RNN|LSTMCell|GRUCell|RNNCell|MultiheadAttention|EmbeddingBag|Conv1D)$"
)
_NORMS = re.compile(
    r"(Lazy)?((Sync)?BatchNorm\w*|InstanceNorm\w*|LayerNorm|GroupNorm|\w*RMSNorm|LocalResponseNorm)$"
)
_SOFTMAX = re.compile(r"(Log)?Soft(max|min)(2d)?$")
_PRODUCT_NODES = re.compile(
    r"(Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|Linear|Bilinear|Convolution|Mkldnn\w+|Cudnn\w+|\w*DotProduct\w*|Einsum)Backward"
)

DOMAIN = (
    "look at the range of the inputs in the evidence: log, division, sqrt, pow, exp and acos return non-finite values "
    "at 0, at 1 or for large inputs; clamp the input, add an epsilon, or use the stable form "
    "(log_softmax, logsumexp, softplus, *_with_logits)"
)

_OVERFLOW = (
    "In {name}, products and sums of finite numbers overflowed {dtype}{figures}: look at the size of the input "
    "and of the weights. Normalise or scale the input, and keep the weights small ({small}){wider}."
)
_OVERFLOW_BACK = (
    "In the backward of {name}, products of finite gradients with weights and inputs overflowed {dtype}: the "
    "gradients that arrive there are too large. Scale the loss down or take its mean, clip gradients{lower}{wider}."
)
_NORMALISED = (
    "In {name}, the variance was zero and eps too small to help, or squares overflowed {dtype}{figures}: look at "
    "the spread of the input, raise eps, or normalise in float32."
)
_STATISTICS = " In eval mode, look at running_mean and running_var: a NaN there, or a variance below zero, does the same."
_MASKED = (
    "In {name}, the softmax of a row that is -inf everywhere is NaN. Leave one position unmasked in every row, or mask "
    "with torch.finfo(dtype).min; if nothing is masked, look for an infinity in the input."
)
_MASKED_ATTENTION = (
    "In {name}, products cannot have overflowed: the input reached {largest:.3g}. The softmax of a row whose keys are all "
    "masked is NaN: leave one key unmasked in every row, or leave such rows out."
)
_STATE = "Look at what else the call uses, such as a mask, a state that is passed in, or weights that are not recorded"
_LOSSES = {
    "CrossEntropyLoss": "the mean over no elements (every target is ignore_index) is NaN, and logits of -inf give an infinite "
    "loss",
    "NLLLoss": "the mean over no elements (every target is ignore_index) is NaN, and a log-probability of -inf an infinite loss",
    "BCELoss": "use BCEWithLogitsLoss on the logits, because a probability of exactly 0 or 1 has no finite logarithm",
    "KLDivLoss": "make its input with log_softmax, not with log",
    "CTCLoss": "a target longer than its input has an infinite loss: use zero_infinity=True, or longer inputs",
    "GaussianNLLLoss": "a variance of zero needs a larger eps",
    "PoissonNLLLoss": "exp of a large input overflows: clamp it",
    "MSELoss": "squares of large numbers overflow: normalise the targets, or use SmoothL1Loss; the mean of no elements is NaN",
}

#: Remedies for operations outside their domain.
_REMEDIES = {
    "log": "Keep the input of log above zero: clamp it (x.clamp_min(eps)), or use log_softmax, logsumexp or log1p, which "
    "do not need this.",
    "div": "Keep the divisor away from zero: add an epsilon or clamp it, and skip empty masks.",
    "sqrt": "Keep the input of sqrt above zero, by more than rounding: below zero its value is NaN, at zero its slope is "
    "infinite.",
    "pow": "A power of a negative number, or a power below one of zero, has no finite value or slope, and a power of a large "
    "number overflows: clamp the base.",
    "exp": "exp of more than 88 is infinite in float32: clamp the input, subtract the largest, or use softmax or logsumexp.",
    "acos": "Clamp the input to a little less than 1 and more than -1.",
}
_REMEDIES |= {
    "log2": _REMEDIES["log"],
    "log10": _REMEDIES["log"],
    "asin": _REMEDIES["acos"],
    "reciprocal": _REMEDIES["div"],
}
_EMPTY = "The mean of no elements is NaN: skip an empty selection, or divide the sum by count.clamp(min=1)."
_SQUARES = "Sums and squares of large numbers overflow: normalise the targets and the outputs, or look why they grew."
_MEANS = ("mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
_REMEDIES |= {
    "kl_div": "The logarithm of a target below zero is NaN, and one of an input of zero is infinite: make the target with "
    "softmax and the input with log_softmax.",
    "softmax": "The softmax of a row that is -inf everywhere is NaN: leave one position unmasked in every row, or mask with "
    "torch.finfo(dtype).min.",
    "weight_norm_interface": "weight_norm divides the weight by its norm, which is zero for a row of zeros: initialise the "
    "weight with other numbers.",
}
_REMEDIES |= {"log_softmax": _REMEDIES["softmax"].replace("softmax", "log_softmax")}
_REMEDIES |= {"rsqrt": _REMEDIES["div"], "true_divide": _REMEDIES["div"]}
_NOT_ITS_OUTPUT = (
    " Change its input, not its output: torch.where after an operation whose derivative is infinite multiplies that by zero, "
    "which is NaN."
)


@dataclass(frozen=True)
class OperationAdvice:
    """The operation that made a non-finite value, as far as it is known.

    Attributes:
        name: Its name in a sentence.
        type: The class of the module.
        node: The autograd node of its result, or None.
        dtype: The dtype of its result.
        largest: The largest magnitude of its inputs; 0 if it is not known.
        first: Whether it happened before any training, so that no learning rate can be the reason.
        weights: A bound on the magnitude of its parameters; 0 if it is not known.
    """

    name: str
    type: str
    node: str | None
    dtype: str
    largest: float
    first: bool = False
    weights: float = 0.0

    @property
    def multiplies(self) -> bool:
        """Whether it is a sum of products, which is defined for all inputs and can only overflow."""
        return bool(_PRODUCTS.match(self.type) or (self.node and _PRODUCT_NODES.match(self.node)))

    @property
    def keeps_statistics(self) -> bool:
        """Whether it may hold a running mean and variance, which are not recorded."""
        return "BatchNorm" in self.type or "InstanceNorm" in self.type

    def advice(self) -> str:
        """Return what to do."""
        if self.multiplies and self._cannot_overflow():
            if self.type == "MultiheadAttention":
                return _MASKED_ATTENTION.format(name=self.name, largest=self.largest)
            return f"In {self.name}, products cannot have overflowed: the input reached {self.largest:.3g}. {_STATE}."
        if self.multiplies:
            wider = ", or compute it in bfloat16 or float32" if self.dtype in _NARROW else ""
            small = (
                "by their initialisation" if self.first else "a lower learning rate, weight decay"
            )
            return _OVERFLOW.format(
                name=self.name, dtype=self.dtype, figures=self.headroom(), wider=wider, small=small
            )
        if _NORMS.match(self.type):
            normalised = _NORMALISED.format(
                name=self.name, dtype=self.dtype, figures=self.headroom()
            )
            return normalised + (_STATISTICS if self.keeps_statistics else "")
        if _SOFTMAX.match(self.type):
            return _MASKED.format(name=self.name)
        if self.type in _LOSSES:
            return f"In {self.name}: {_LOSSES[self.type]}."
        return f"In {self.name}, {DOMAIN}{self._narrow()}."

    def backward_advice(self) -> str:
        """Return what to do if the backward of sums of products made it; empty for other operations."""
        wider = ", or use bfloat16 instead of float16" if self.dtype in _NARROW else ""
        lower = "" if self.first else ", lower the learning rate"
        advice = _OVERFLOW_BACK.format(name=self.name, dtype=self.dtype, wider=wider, lower=lower)
        return advice if self.multiplies else ""

    def headroom(self) -> str:
        """Return the largest number of the dtype, and how near to it the inputs were."""
        known = FORMATS.get(self.dtype)
        if known is None or not 0 < self.largest < math.inf:
            return ""
        left = known.headroom(self.largest)
        near = (
            ", beyond it" if left <= 0 else f", {left:.1f} doublings below" if left < _NEAR else ""
        )
        return f" (it ends at {known.largest:.3g}; the input reached {self.largest:.3g}{near})"

    def _cannot_overflow(self) -> bool:
        """Whether even a product of its products, as attention forms, stays within the dtype."""
        known = FORMATS.get(self.dtype)
        product = self.largest * self.weights * _ROOT_OF_A_ROW
        return known is not None and product > 0 and product**2 * _ROOT_OF_A_ROW < known.largest

    def _narrow(self) -> str:
        return (
            f". {self.dtype} is narrow{self.headroom()}"
            if self.dtype in _NARROW and self.headroom()
            else ""
        )


#: Formats in which ordinary values overflow.
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")

#: The number of doublings below which the words give it.
_NEAR = 16

#: The root of more numbers than one inner product has, which bounds it by the norms of its factors.
_ROOT_OF_A_ROW = 1e3


def domain_remedy(name: str, *, backward: bool, empty: bool = True) -> str:
    """Return the remedy for an operation outside its domain; empty for other operations.

    Args:
        name: The name of the operation.
        backward: Whether it shows in gradients, while the loss is finite.
        empty: Of a mean, whether it was one of no elements.
    """
    remedy = _REMEDIES.get(name, "")
    if name in _MEANS and (empty or not remedy):
        remedy = _EMPTY if empty else _SQUARES
    return remedy + _NOT_ITS_OUTPUT if remedy and backward else remedy


def operation(node: str | None) -> str:
    """Return the name of the operation that an autograd node belongs to: ``LogBackward0`` is ``log``'s."""
    if node is None or "Backward" not in node:
        return ""
    name = node.rpartition("::")[2].partition("Backward")[0]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def operations(nodes: Iterable[object]) -> list[str]:
    """Return the names of the operations that autograd nodes belong to; nodes of custom functions keep their own."""
    return [operation(str(node)) or str(node) for node in nodes]
