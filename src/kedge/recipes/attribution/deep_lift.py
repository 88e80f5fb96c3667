"""DeepLIFT: what each part of an input adds to the difference of a score from that of a baseline.

# Note [The multipliers of DeepLIFT]
The samples and their baselines run in one batch: the samples are its first half. The backward pass
of that batch gives multipliers in the place of gradients, where each nonlinear operation has the
slope between its two values (the rescale rule) and not the one at a point. Operations are followed
by hooks, so functions count as modules do. Their nodes are looked for in the graph between the
score and the input, as in Note [Where the ReLUs are]: whatever stands there must be linear, or have
been followed. Anything else is an error, because its plain gradient would be taken silently.

# Note [What the graph does not show]
A mask that depends on the input, as in ``x * (x > 0)``, has no gradient and so no place in the
graph. But it differs between a sample and its baseline, and what is the same for all inputs does
not. So factors and masks are compared, and the attributions must add up to the difference of the
scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from kedge.calls.arguments import called_as, described
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.session import Session
from kedge.recipes.attribution.attribution import (
    INPUT,
    Attribution,
    Method,
    nodes_between,
    operation_of,
)
from kedge.recipes.attribution.baseline import Baseline
from kedge.recipes.attribution.copies import OverCopies
from kedge.recipes.attribution.rectifiers import OPAQUE, covers
from kedge.recipes.attribution.scores import Target, Targets, score
from kedge.recipes.model_run import name_of
from kedge.torch_internals.autograd_nodes import (
    between,
    dimension_of,
    number_in,
    saved,
    shape_of_output,
)

EPS = 1e-10
"""Values closer than this count as equal; there the slope is the gradient. The same as Captum's."""

RESCALED = frozenset({
    "Abs", "Celu", "Clamp", "ClampMax", "ClampMin", "Cos", "Elu", "Erf", "Exp", "Gelu", "Hardshrink", "Hardsigmoid",
    "Hardswish", "Hardtanh", "LeakyRelu", "Log", "Log1P", "LogSigmoid", "Mish", "Pow", "PreluKernel", "Reciprocal",
    "Relu", "Rsqrt", "Sigmoid", "Silu", "Sin", "Softplus", "Softshrink", "Sqrt", "Tanh", "Threshold",
})  # fmt: skip
"""Operations on each element alone."""
POOLED = {"MaxPool2DWithIndices": 2, "MaxPool3DWithIndices": 3, "AdaptiveMaxPool2D": 2, "AdaptiveMaxPool3D": 3}  # fmt: skip
"""Operations that pass on the largest of a window, and over how many dimensions."""
SOFTMAX = "Softmax"

LINEAR = frozenset({
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "Add", "Alias", "AsStrided", "AvgPool2D", "AvgPool3D", "Cat", "Clone",
    "Col2Im", "ConstantPadNd", "Copy", "Cumsum", "Diagonal", "Expand", "Flip", "Gather", "Im2Col", "Index", "IndexSelect",
    "Mean", "MkldnnAdaptiveAvgPool2D", "Narrow", "Neg", "Permute", "PixelShuffle", "PixelUnshuffle", "ReflectionPad1D",
    "ReflectionPad2D", "Repeat", "ReplicationPad1D", "ReplicationPad2D", "ReshapeAlias", "Roll", "Rsub", "Select", "Slice",
    "Split", "SplitWithSizes", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Tril", "Triu", "Unbind",
    "Unfold", "UnsafeView", "Unsqueeze", "UpsampleBicubic2D", "UpsampleBilinear2D", "UpsampleLinear1D", "UpsampleNearest1D",
    "UpsampleNearest2D", "View",
})  # fmt: skip
"""Operations that are linear in everything that has a gradient."""
FACTORS = frozenset({
    "Addbmm", "Addcmul", "Addmm", "Baddbmm", "Bmm", "Convolution", "Div", "Dot", "Linear", "Mm", "Mul", "Mv",
})  # fmt: skip
"""Operations that are linear in one of their arguments, if the others do not depend on the input."""
CHOICES = frozenset({"Where", "MaskedFill"})
"""Operations that are linear if their mask does not depend on the input."""
KEPT: dict[str, dict[str, int | None]] = {
    "Div": {"other": 1},
    "MaskedFill": {"mask": None},
    "Mul": {"self": 0, "other": 1},
    "Where": {"condition": None},
}
"""Where the nodes keep factors and masks, and the number of the argument that has a gradient."""

FOLLOWED = frozenset({
    "abs", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "celu", "clamp", "clamp_max", "clamp_min",
    "clip", "cos", "elu", "erf", "exp", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log",
    "log1p", "log_sigmoid", "max_pool1d", "max_pool2d", "max_pool3d", "mish", "pow", "prelu", "reciprocal", "relu", "relu6",
    "rsqrt", "selu", "sigmoid", "silu", "sin", "softmax", "softplus", "softshrink", "sqrt", "square", "tanh", "threshold",
})  # fmt: skip
"""The names of the operations that have these nodes; in place, they end in an underscore."""
OPERATIONS = "**/*:in, **/*:out"
MARGIN = {torch.float64: 1e-6, torch.float32: 1e-2}
"""How closely attributions add up, as a share of their magnitudes."""


def kind_of(node: Node) -> str:
    """Return the kind of a node: ``Relu`` for ``ReluBackward0``."""
    return operation_of(node).rstrip("0123456789").removesuffix("Backward")


def halves(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples and the baselines of a batch."""
    samples, baselines = batch.chunk(2)
    return samples, baselines


def twice(half: Tensor) -> Tensor:
    """Return a batch whose halves are the same."""
    return torch.cat([half, half])


class Rescaled:
    """The slope of an operation on each element, between a sample and its baseline."""

    def __init__(self, values: Tensor, results: Tensor, node: Node) -> None:
        sample, baseline = halves(values)
        result, result_of_baseline = halves(results)
        self.rise_in = twice(sample - baseline)
        self.rise_out = twice(result - result_of_baseline)

    def multiplier(self, outer: Tensor, inner: Tensor) -> Tensor:
        """Return what arrives at the input.

        Args:
            outer: The multipliers of the output.
            inner: What the gradient would be at the input.
        """
        rise_in = self.rise_in.view_as(inner)
        slope = outer * self.rise_out.view_as(outer) / rise_in
        return torch.where(rise_in.abs() < EPS, inner, slope)


class Normalized(Rescaled):
    """The same for a softmax, less the mean over its classes, as a softmax ignores what all share."""

    def __init__(self, values: Tensor, results: Tensor, node: Node) -> None:
        super().__init__(values, results, node)
        self.dim = dimension_of(node)

    def multiplier(self, outer: Tensor, inner: Tensor) -> Tensor:
        """See `Rescaled.multiplier`."""
        slope = super().multiplier(outer, inner)
        return slope - slope.mean(self.dim, keepdim=True)


class Pooled:
    """Max pooling: the rise of a window belongs to the largest element of each of its two values."""

    def __init__(self, values: Tensor, results: Tensor, node: Node) -> None:
        sample, baseline = halves(values)
        result, result_of_baseline = halves(results)
        self.rise_in = twice(sample - baseline)
        largest = torch.max(result, result_of_baseline)
        self.rise_out = torch.cat([largest - result_of_baseline, result - largest])
        self.dims = POOLED[kind_of(node)]
        self.places = saved(node, "result1")

    def multiplier(self, outer: Tensor, inner: Tensor) -> Tensor:
        """See `Rescaled.multiplier`; windows that overlap add up."""
        rise_in = self.rise_in.view_as(inner)
        rises = (outer * self.rise_out.view_as(outer)).flatten(-self.dims)
        found = torch.zeros_like(inner).flatten(-self.dims)
        found = found.scatter_add(-1, self.places.flatten(-self.dims), rises).view_as(inner)
        of_sample, of_baseline = halves(found)
        return torch.where(rise_in.abs() < EPS, inner, twice(of_sample + of_baseline) / rise_in)


def rule_of(node: Node) -> type[Rescaled | Pooled] | None:
    """Return the rule of a nonlinear node; None if there is none."""
    kind = kind_of(node)
    if kind in RESCALED:
        return Rescaled
    if kind in POOLED:
        return Pooled
    if kind == SOFTMAX:
        return Normalized
    return None


class Lift(Method):
    """The steps of DeepLIFT for one forward of samples and baselines.

    Attributes:
        rules: The rule of each node that was followed.
        complete: Whether attributions add up; a softmax keeps them from it.
    """

    def __init__(self) -> None:
        self.rules: dict[Node, Rescaled | Pooled] = {}
        self.complete = True
        self._given: dict[tuple[Any, ...], tuple[Tensor, Node | None]] = {}
        self._arrived: dict[Node, Tensor] = {}

    def begin(self, s: Session, model: nn.Module) -> None:
        """Follow the operations that may be nonlinear."""
        s.hook(model, OPERATIONS, self._follow)

    def _follow(self, value: Tensor, event: Event) -> None:
        """Action on the inputs and outputs of an operation that may be nonlinear."""
        site = event.site
        if site.op is None or site.op[0].rstrip("_") not in FOLLOWED:
            return
        operation = (site.path, site.op, event.call, event.replica)
        if site.kind == "in":
            if site.leaf in ("0", "input") and value.requires_grad:
                self._given[operation] = (value.detach().clone(), value.grad_fn)
            return
        given, before = self._given.pop(operation, (None, None))
        if given is None or event.recompute:
            return
        made = list(between(value.grad_fn, [before]))
        nonlinear = [node for node in made if rule_of(node) is not None]
        if not nonlinear and len(made) > 1 and covers(made[1], value):
            self._note(Rescaled, made[1], given, value)
        if len(nonlinear) == 1:
            self._note(rule_of(nonlinear[0]), nonlinear[0], given, value)

    def _note(
        self, rule: type[Rescaled | Pooled] | None, node: Node, given: Tensor, result: Tensor
    ) -> None:
        """Note the rule of a node, unless its values are not those of samples and baselines."""
        if rule is not None and given.dim() and len(given) % 2 == 0:
            self.rules[node] = rule(given, result.detach().clone(), node)

    def cut(self, s: Session, scores: list[Tensor], values: list[Tensor]) -> bool:
        """Hook each nonlinear node; see Note [The multipliers of DeepLIFT]."""
        nodes = nodes_between(scores, values)
        leading = {*nodes, *(get_gradient_edge(value).node for value in values)}
        for node in nodes:
            rule = self.rules.get(node)
            if rule is None:
                _check_linear(node, leading)
                continue
            _check_one(node, leading)
            if isinstance(rule, Normalized):
                self.complete = False
            s.hook(node, ":pre", partial(self._arrive, node))
            s.hook(node, ":post", partial(self._leave, node))
        return True

    def _arrive(self, node: Node, grad: Tensor) -> None:
        self._arrived[node] = grad

    def _leave(self, node: Node, grad: Tensor, event: Event) -> Tensor | None:
        if event.site.leaf not in (None, "", "0"):
            return None  # of a weight
        return self.rules[node].multiplier(self._arrived.pop(node), grad)


def _check_linear(node: Node, leading: set[Node]) -> None:
    """Refuse a node that is not linear in what depends on the input; see Note [What the graph does not show].

    Raises:
        AttributionError: It is not, or nobody can tell.
    """
    name = operation_of(node)
    kind = kind_of(node)
    if name in OPAQUE:
        raise AttributionError(f"deep_lift cannot see what is inside {OPAQUE[name]}")
    if rule_of(node) is not None:
        raise AttributionError(
            f"deep_lift cannot follow an operation ({name}): it runs in a module that the model does "
            "not know, such as one in a plain list, inside a traced model or another function of PyTorch, "
            "or in place on a part of a tensor, or the batch is not the first dimension of its value; register the "
            "module, or call the operation itself, without inplace=True"
        )
    if kind in ("NativeBatchNorm", "CudnnBatchNorm"):
        if number_in(node, "training"):
            raise AttributionError(
                "deep_lift found a batch normalization that uses the statistics of the batch, in which "
                "samples and baselines mix; call model.eval() first"
            )
        return
    if kind in LINEAR:
        return
    if kind == "Div" and node.next_functions[1][0] in leading:
        raise AttributionError(
            "deep_lift has no rule for a division by a value that depends on the input; multiply by "
            "its reciprocal(), or use integrated_gradients"
        )
    if kind in FACTORS:
        _check_one(node, leading)
    if kind in FACTORS or kind in CHOICES:
        _check_same(node, kind, leading)
        return
    raise AttributionError(
        f"deep_lift has no rule for {name}, which stands between the input and the score; "
        "integrated_gradients explains every model"
    )


def _check_one(node: Node, leading: set[Node]) -> None:
    """Refuse an operation of which two arguments depend on the input.

    Raises:
        AttributionError: They do.
    """
    depending = [before for before, _ in node.next_functions if before in leading]
    if len(depending) > 1:
        raise AttributionError(
            f"deep_lift has no rule for {operation_of(node)} where two of its arguments depend on the "
            "input, as in a product of two such values; integrated_gradients explains every model"
        )


def _check_same(node: Node, kind: str, leading: set[Node]) -> None:
    """Refuse a factor or mask that differs between samples and baselines.

    Raises:
        AttributionError: It does.
    """
    for name, argument in KEPT.get(kind, {}).items():
        kept = number_in(node, name)
        if argument is not None and node.next_functions[argument][0] in leading:
            continue  # this is the one that depends on the input
        if not isinstance(kept, Tensor) or not _is_of_batch(node, kept):
            continue
        sample, baseline = halves(kept)
        if not torch.equal(sample, baseline):
            raise AttributionError(
                f"deep_lift found a factor or a mask that depends on the input without a gradient "
                f"({operation_of(node)}), as in x * (x > 0); use a function that PyTorch has, such as "
                "relu, or integrated_gradients"
            )


def _is_of_batch(node: Node, kept: Tensor) -> bool:
    """Whether a kept tensor has the dimensions of the node's output, and all of the first."""
    shape = shape_of_output(node)
    if not shape or len(shape) != kept.dim():
        return False
    return shape[0] == len(kept)


class BesideBaseline(Baseline):
    """An action that puts baselines beside the samples: the second of two copies becomes them."""

    verb = "compare with"

    def start(self, first: int, copies: int) -> None:
        """Begin the forward; there is one."""

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Return the samples and their baselines."""
        difference = self.differences.get(name_of(event))
        if difference is None:
            return None
        sample, _ = value.chunk(2)
        return torch.cat([sample, self.of(sample)])

    def summed(self, parts: Tensor, first: int) -> Tensor:
        """Return the multipliers of the samples."""
        return parts[:, 0]


class Lifted(OverCopies):
    """DeepLIFT for one model; called like the model.

    Args:
        model: The model.
        target: The target; see `Attribution`.
        wrt: The place that is explained, or several.
        baseline: What it is compared with.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Targets,
        wrt: str | Sequence[str],
        baseline: float | Tensor,
    ) -> None:
        attribution = Attribution(model, self._begin, target, wrt)
        super().__init__(attribution, BesideBaseline(baseline), copies=2, at_once=2)
        self._lift = Lift()
        self._scores: list[list[Tensor]] = []

    def __repr__(self) -> str:
        """The attribution, and what to do with it."""
        attribution = repr(self.attribution).lstrip("<")
        return f"<DeepLIFT, {attribution}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the attribution for these arguments; see `Attribution`.

        Raises:
            AttributionError: The model has an operation without a rule, or the attributions do not
                add up.
        """
        found = super().__call__(*args, **kwargs)
        if self._lift.complete:
            parts = list(found.values()) if isinstance(found, dict) else [found]
            self._check_sums(parts)
        return found

    def _begin(self) -> Lift:
        self._lift = Lift()
        return self._lift

    def _settled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Target], int, dict[str, str]]:
        """Return what `OverCopies` does, with targets that note the scores of samples and baselines."""
        targets, n, names = super()._settled(args, kwargs)
        self._scores = [[] for _ in targets]
        noted: list[Target] = []
        for target, scores in zip(targets, self._scores, strict=True):
            noted.append(partial(_noted, target, scores))
        return noted, n, names

    def _check_sums(self, parts: list[Tensor]) -> None:
        """Refuse attributions that do not add up; see Note [What the graph does not show]."""
        several = isinstance(self.attribution.target, Sequence)
        for i, (score_of_samples, score_of_baselines) in enumerate(self._scores):
            explained = [part[i] if several else part for part in parts]
            margin = MARGIN.get(explained[0].dtype)
            if margin is None:
                return  # halves are too coarse
            total = sum(float(part.double().sum()) for part in explained)
            magnitude = sum(float(part.double().abs().sum()) for part in explained)
            rise = float(score_of_samples - score_of_baselines)
            if abs(total - rise) > margin * max(magnitude, abs(rise), 1e-3):
                raise AttributionError(
                    f"the attributions of deep_lift add up to {total:.4g}, but the score rises by "
                    f"{rise:.4g}: something between the input and the score is not linear and has no "
                    "gradient, or mixes samples; integrated_gradients explains every model"
                )


def _noted(target: Target, scores: list[Tensor], part: Any) -> Tensor:
    """Return the score of the samples, and then of the baselines, and note it."""
    found = score(part, target)
    scores.append(found.detach())
    return found


@called_as("recipes.deep_lift(model, target=3)(images)")
def deep_lift(
    model: nn.Module,
    target: Targets = None,
    *,
    baseline: float | Tensor = 0.0,
    wrt: str | Sequence[str] = INPUT,
) -> Lifted:
    """Explain the difference of a score from that of a baseline by DeepLIFT, with its rescale rule.

    The attributions of a sample add up to that difference, in one forward and one backward. Functions
    such as `F.relu` count as modules do, and modules may be called several times. A softmax shares
    its result among its classes, after which attributions no longer add up, as in the paper.

    Shrikumar, Greenside and Kundaje, "Learning important features through propagating activation
    differences", 2017.

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        target: The class to explain; see `Attribution`. Without one, the class that has the highest
            score for the input itself.
        baseline: The value to compare with: a number, one sample, or one for each sample.
        wrt: A selector of the place that is explained; see `saliency`. With several, all of them
            are compared together.

    Returns:
        The attribution. Call it like the model; it returns a tensor in the shape of the input.

    Raises:
        AttributionError: When it is called, if the model has an operation for which DeepLIFT has no
            rule, such as a product of two values that depend on the input.

    Examples:
        >>> recipes.deep_lift(model, target=2)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    if not isinstance(baseline, (int, float, Tensor)):
        raise AttributionError(
            f"deep_lift(baseline={described(baseline)}): the baseline is a number or a tensor"
        )
    return Lifted(model, target, wrt, baseline)
