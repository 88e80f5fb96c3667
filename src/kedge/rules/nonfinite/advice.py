"""Remedies for a birth, by the kind of operation that made it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kedge.store.formats import FORMATS

_PRODUCTS = re.compile(
    r"(Lazy)?(Linear|Bilinear|Conv(Transpose)?\dd|LSTM|GRU|RNN|LSTMCell|GRUCell|RNNCell|"
    r"MultiheadAttention|EmbeddingBag|Conv1D)$"
)
_NORMS = re.compile(
    r"(Lazy)?((Sync)?BatchNorm\w*|InstanceNorm\w*|LayerNorm|GroupNorm|\w*RMSNorm|LocalResponseNorm)$"
)
_SOFTMAX = re.compile(r"(Log)?Soft(max|min)(2d)?$")
_PRODUCT_NODES = re.compile(
    r"(Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|Linear|Bilinear|Convolution|Mkldnn\w+|Cudnn\w+|"
    r"\w*DotProduct\w*|Einsum)Backward"
)

#: Formats in which ordinary values overflow.
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")

#: The number of doublings below which the words give it.
_NEAR = 16

#: The root of more numbers than one inner product has, which bounds it by the norms of its factors.
_ROOT_OF_A_ROW = 1e3

#: The advice if nothing is known of the operation.
_ANY_OPERATION = (
    "log, division, sqrt, pow, exp and acos return non-finite values at 0, at 1 or "
    "for large inputs; clamp the input, add an epsilon, or use the stable form "
    "(log_softmax, logsumexp, softplus, *_with_logits)"
)
_OVERFLOW = (
    "In {name}, products and sums of finite numbers overflowed {dtype}{figures}: "
    "look at the size of the input and of the weights. Normalise or scale the input, "
    "and keep the weights small ({small}){wider}."
)
_INPUT_BEYOND = (
    "In {name}, the input reached {largest:.3g}, which {dtype} cannot hold: it ends "
    "at {end:.3g}. Normalise or scale the input{wider}."
)
_OVERFLOW_BACK = (
    "In the backward of {name}, products of finite gradients with weights and inputs "
    "overflowed {dtype}: the gradients that arrive there are too large. Scale the "
    "loss down or take its mean, clip gradients{lower}{wider}."
)
_NO_OVERFLOW = (
    "In {name}, products cannot have overflowed: the input reached {largest:.3g}. "
    "Look at what else the call uses, such as a mask, a state that is passed in, or "
    "weights that are not recorded."
)
_MASKED_ATTENTION = (
    "In {name}, products cannot have overflowed: the input reached {largest:.3g}. "
    "The softmax of a row whose keys are all masked is NaN: leave one key unmasked "
    "in every row, or leave such rows out."
)
_NORMALISED = (
    "In {name}, the variance was zero and eps too small to help, or squares "
    "overflowed {dtype}{figures}: look at the spread of the input, raise eps, or "
    "normalise in float32."
)
_STATISTICS = (
    " In eval mode, look at running_mean and running_var: a NaN there, or a variance "
    "below zero, does the same."
)
_MASKED = (
    "the softmax of a row that is -inf everywhere is NaN. Leave one position "
    "unmasked in every row, or mask with torch.finfo(dtype).min; if nothing is "
    "masked, look for an infinity in the input."
)
_LOSSES = {
    "CrossEntropyLoss": "the mean over no elements (every target is ignore_index) is "
    "NaN, and logits of -inf give an infinite loss",
    "NLLLoss": "the mean over no elements (every target is ignore_index) is NaN, and a "
    "log-probability of -inf an infinite loss",
    "BCELoss": "use BCEWithLogitsLoss on the logits, because a probability of "
    "exactly 0 or 1 has no finite logarithm",
    "KLDivLoss": "make its input with log_softmax, not with log",
    "CTCLoss": "a target longer than its input has an infinite loss: use "
    "zero_infinity=True, or longer inputs",
    "GaussianNLLLoss": "a variance of zero needs a larger eps",
    "PoissonNLLLoss": "exp of a large input overflows: clamp it",
    "MSELoss": "squares of large numbers overflow: normalise the targets, or use "
    "SmoothL1Loss; the mean of no elements is NaN",
}

_LOSS_FUNCTIONS = {
    "binary_cross_entropy": "BCELoss",
    "cross_entropy": "CrossEntropyLoss",
    "ctc_loss": "CTCLoss",
    "gaussian_nll_loss": "GaussianNLLLoss",
    "nll_loss": "NLLLoss",
    "poisson_nll_loss": "PoissonNLLLoss",
}
"""Losses that are functions, and the modules of the same name."""

_LOG = (
    "keep the input of log above zero: clamp it (x.clamp_min(eps)), or use "
    "log_softmax, logsumexp or log1p, which do not need this."
)
_DIVISOR = "keep the divisor away from zero: add an epsilon or clamp it, and skip empty masks."
_ARC = "clamp the input to a little less than 1 and more than -1."
_EMPTY = (
    "the mean of no elements is NaN: skip an empty selection, or divide the sum by "
    "count.clamp(min=1)."
)
_SQUARES = (
    "sums and squares of large numbers overflow: normalise the targets and the "
    "outputs, or look why they grew."
)
_DIVERGENCE = (
    "the logarithm of a target below zero is NaN, and one of an input of zero is "
    "infinite: make the target with softmax and the input with log_softmax."
)
_NORM_OF_A_ROW = (
    "weight_norm divides the weight by its norm, which is zero for a row of zeros: "
    "initialise the weight with other numbers."
)
_SQRT = (
    "keep the input of sqrt above zero, by more than rounding: below zero its value "
    "is NaN, at zero its slope is infinite."
)
_POWER = (
    "a power of a negative number, or a power below one of zero, has no finite value "
    "or slope, and a power of a large number overflows: clamp the base."
)
_EXP = (
    "exp of more than 88 is infinite in float32: clamp the input, subtract the "
    "largest, or use softmax or logsumexp."
)
#: For operations outside their domain: the condition, and the remedy where it holds.
_OUTSIDE = {
    "log": ("the input of {name} came to zero or below", _LOG),
    "div": ("the divisor of {name} came near zero", _DIVISOR),
    "sqrt": (
        "the input of {name} came to zero or below",
        _SQRT,
    ),
    "pow": (
        "the base of {name} came to zero or below, or was large",
        _POWER,
    ),
    "exp": (
        "the input of {name} came above 88",
        _EXP,
    ),
    "acos": ("the input of {name} came to 1 or -1, or beyond", _ARC),
    "mean": ("{name} took no elements", _EMPTY),
    "mean of some": ("", _SQUARES),
    "kl_div": ("", _DIVERGENCE),
    "softmax": ("", _MASKED),
    "weight_norm": ("", _NORM_OF_A_ROW),
}
_SAME = {
    "log2": "log",
    "log10": "log",
    "asin": "acos",
    "log_softmax": "softmax",
    "reciprocal": "div",
    "rsqrt": "div",
    "true_divide": "div",
    "mse_loss": "mean",
    "l1_loss": "mean",
    "smooth_l1_loss": "mean",
    "huber_loss": "mean",
    "weight_norm_interface": "weight_norm",
}
_NOT_ITS_OUTPUT = (
    " Change its input, not its output: torch.where after an operation whose "
    "derivative is infinite multiplies that by zero, which is NaN."
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
        if _PRODUCTS.match(self.type):
            return True
        return bool(self.node and _PRODUCT_NODES.match(self.node))

    def advice(self) -> str:
        """Return what to do."""
        if self.multiplies:
            return self._advice_for_products()
        if _NORMS.match(self.type):
            form = _NORMALISED
            if "BatchNorm" in self.type or "InstanceNorm" in self.type:
                form += _STATISTICS
            return form.format(name=self.name, dtype=self.dtype, figures=self._headroom())
        if _SOFTMAX.match(self.type):
            return f"In {self.name}, {_MASKED}"
        if self.type in _LOSSES:
            return f"In {self.name}: {_LOSSES[self.type]}."

        advice = range_advice(self.name, are_shown=self.largest > 0)
        if self.dtype in _NARROW and self._headroom():
            advice = f"{advice[:-1]}. {self.dtype} is narrow{self._headroom()}."
        return f"In {advice}"

    def _advice_for_products(self) -> str:
        known = FORMATS.get(self.dtype)
        wider = ""
        if self.dtype in _NARROW:
            wider = ", or compute it in bfloat16 or float32"
        if known is not None and known.largest < self.largest < math.inf:
            return _INPUT_BEYOND.format(
                name=self.name,
                dtype=self.dtype,
                largest=self.largest,
                end=known.largest,
                wider=wider,
            )

        # Even a product of its products, as attention forms, stays within the dtype.
        product = self.largest * self.weights * _ROOT_OF_A_ROW
        if known is not None and product > 0 and product**2 * _ROOT_OF_A_ROW < known.largest:
            form = _MASKED_ATTENTION if self.type == "MultiheadAttention" else _NO_OVERFLOW
            return form.format(name=self.name, largest=self.largest)

        small = "a lower learning rate, weight decay"
        if self.first:
            small = "by their initialisation"
        return _OVERFLOW.format(
            name=self.name, dtype=self.dtype, figures=self._headroom(), wider=wider, small=small
        )

    def backward_advice(self) -> str:
        """Return what to do if the backward of sums of products made it; empty for other operations."""
        if not self.multiplies:
            return ""
        wider = ""
        if self.dtype in _NARROW:
            wider = ", or use bfloat16 instead of float16"
        lower = ", lower the learning rate"
        if self.first:
            lower = ""
        return _OVERFLOW_BACK.format(name=self.name, dtype=self.dtype, wider=wider, lower=lower)

    def _headroom(self) -> str:
        """Return the largest number of the dtype, and how near to it the inputs were."""
        known = FORMATS.get(self.dtype)
        if known is None or not 0 < self.largest < math.inf:
            return ""
        left = known.headroom(self.largest)
        near = ""
        if left <= 0:
            near = ", beyond it"
        elif left < _NEAR:
            near = f", {left:.1f} doublings below"
        return f" (it ends at {known.largest:.3g}; the input reached {self.largest:.3g}{near})"


def range_advice(name: str, *, are_shown: bool) -> str:
    """Return the advice for any operation, without its first word; whether its inputs are in the evidence."""
    inputs = "its inputs"
    if are_shown:
        inputs = "the inputs in the evidence"
    return f"{name}, look at the range of {inputs}: {_ANY_OPERATION}."


def is_for_any(advice: str) -> bool:
    """Whether some advice is that for any operation."""
    return _ANY_OPERATION in advice


def domain_remedy(
    name: str, *, in_gradients: bool, is_empty: bool = True, is_certain: bool = True
) -> str:
    """Return the remedy for an operation outside its domain, or at the edge of it; empty for other operations.

    Args:
        name: The name of the operation.
        in_gradients: Whether it shows in gradients, while the loss is finite.
        is_empty: Of a mean, whether it was one of no elements.
        is_certain: Whether it is certain that the operation was outside its domain; else the remedy
            begins with the condition for it.
    """
    kind = _SAME.get(name, name)
    if kind == "mean" and not is_empty:
        kind = "mean of some"
    condition, remedy = _OUTSIDE.get(kind, ("", ""))
    if name in _LOSS_FUNCTIONS:
        remedy = f"{_LOSSES[_LOSS_FUNCTIONS[name]]}."
        return remedy[0].upper() + remedy[1:]
    if not remedy:
        return ""
    if in_gradients and kind != "softmax":
        remedy += _NOT_ITS_OUTPUT
    if condition and not is_certain:
        return f"If {condition.format(name=name)}, {remedy}"
    is_name = remedy.startswith("exp")
    if is_name:
        return remedy
    return remedy[0].upper() + remedy[1:]
