"""Gradients cut at every ReLU: guided backpropagation and the deconvolutional network.

# Note [Where the ReLUs are]
A ReLU may be a module, one module used many times, ``F.relu``, ``torch.relu``, ``x.relu()`` or
``relu_``, in a module of the model, in one that it keeps in a list, or in none. Autograd has one
name for all of them, so Kedge searches the graph between the score and the input, and not the code
of the model: it cannot miss one. Parts that are opaque to autograd - compiled or scripted code, a
reentrant checkpoint - are an error, because ReLUs in them would be skipped silently.

# Note [A ReLU in place on a view]
The output of `nn.Linear` for tokens is a view, and so is that of ``flatten``. An operation that
works in place on a view has no node of its own: autograd puts it into the node `CopySlices` of the
whole tensor, which does not show its content. So if there is one, the forward runs once more, with
a hook on every operation that may be a ReLU. If the view covers the tensor, the gradient can be cut
at that node, as each element of it is the ReLU's own; if it covers a part, it is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from kedge.calls.arguments import called_as
from kedge.errors import NothingCut
from kedge.flow import Event
from kedge.hooks.session import Session
from kedge.recipes.attribution.attribution import (
    INPUT,
    REENTRANT,
    Attribution,
    Method,
    nodes_between,
    operation_of,
)
from kedge.recipes.attribution.scores import Targets
from kedge.recipes.model_run import without_call
from kedge.torch_internals.autograd_nodes import number_in

_NAMES = 8
FLOORS = {
    "HardtanhBackward0": "min_val",
    "ClampBackward1": "min",
    "ClampMinBackward0": "min",
    "ThresholdBackward0": "threshold",
}
"""Operations that are a ReLU or a ReLU6 if their lower bound is 0, and where they have that."""
NODES = ("ReluBackward0", *FLOORS)
OPERATIONS = (
    "**/relu:out, **/relu_:out, **/relu6:out, **/hardtanh:out, **/hardtanh_:out, "
    "**/clamp_:out, **/clamp_min_:out, **/clip_:out, "
    "**/threshold_:out, **/threshold:out"
)
LOOKED_FOR = (
    "ReluBackward0 (nn.ReLU, F.relu, x.relu(), relu_) and, from 0, "
    "HardtanhBackward0 (nn.ReLU6, F.relu6), "
    "ClampBackward1 and ClampMinBackward0 (x.clamp(min=0)), ThresholdBackward0"
)
OPAQUE = {
    REENTRANT: "a reentrant checkpoint; use checkpoint(..., use_reentrant=False), or none",
    "CompiledFunctionBackward": "a compiled part of the model; take what it was compiled from",
    "DifferentiableGraphBackward": "a scripted part of the model; take what it was scripted from",
}


def rectifies(node: Node) -> bool:
    """Whether a node belongs to a ReLU or a ReLU6, under any of their names."""
    name = operation_of(node)
    if name in FLOORS:
        return bool(number_in(node, FLOORS[name]) == 0)
    return name == "ReluBackward0"


class InPlaceRelus:
    """The ReLUs of a forward that worked in place on views; see Note [A ReLU in place on a view].

    Attributes:
        whole: The nodes of ReLUs whose view covers a tensor.
        parts: The sites of the other ReLUs.
    """

    def __init__(self) -> None:
        self.whole: set[Node] = set()
        self.parts: dict[str, None] = {}

    def check_operation(self, model: nn.Module, value: Tensor, event: Event) -> None:
        """Action on an operation that may be a ReLU."""
        made = value.grad_fn
        if made is None or operation_of(made) in NODES:
            return
        if bool((value < 0).any()):
            return  # the output of a ReLU is never negative
        site = event.site
        _, _, operation = str(site).rpartition("/")
        ceiling = isinstance(model.get_submodule(site.path), nn.ReLU6)
        known = ceiling or operation.startswith("relu")
        joined = made.next_functions[0][0]
        if known and joined is not None and covers(joined, value):
            self.whole.add(joined)
        else:
            self.parts[without_call(str(site)).removesuffix(":out")] = None


def covers(node: Node, value: Tensor) -> bool:
    """Whether a node works in place on a view, and the view has all of its tensor."""
    if operation_of(node) != "CopySlices":
        return False
    return value.untyped_storage().nbytes() == value.nbytes


class _Cut(Method):
    name = ""

    def __init__(self, slices: InPlaceRelus | None = None) -> None:
        self.sites = 0
        self.cuts = 0
        self.before = 0
        self.others: Counter[str] = Counter()
        self.slices = slices

    def closer(self) -> Method:
        """Return the method with the ReLUs that worked in place on views.

        See Note [A ReLU in place on a view].
        """
        return type(self)(InPlaceRelus())

    def begin(self, s: Session, model: nn.Module) -> None:
        """Hook the operations, if they are needed."""
        if self.slices is not None:
            s.hook(model, OPERATIONS, partial(self.slices.check_operation, model))

    def cut(self, s: Session, scores: list[Tensor], values: list[Tensor]) -> bool:
        """Hook every node of a rectifier; see Note [Where the ReLUs are]."""
        for node in nodes_between(scores, values):
            name = operation_of(node)
            if name in OPAQUE:
                raise NothingCut(
                    f"{self.name} cannot tell whether there are ReLUs inside {OPAQUE[name]}"
                )
            in_place = self.slices is not None and node in self.slices.whole
            if in_place or rectifies(node):
                self.sites += 1
                self.at(s, node)
            else:
                self.others[name] += 1
        if self.others["CopySlices"] and self.slices is None:
            return False
        if self.slices is not None and self.slices.parts:
            raise NothingCut(
                f"{self.name} cannot cut at {', '.join(self.slices.parts)}: "
                "it works in place on a part of a tensor (a view), "
                "which autograd merges with the operation that made the tensor; "
                "use inplace=False there, or clone first"
            )
        if self.sites:
            return True

        found = [f"{count} {name}" for name, count in self.others.most_common(_NAMES)]
        text = ", ".join(found) or "no operation"
        if len(self.others) > _NAMES:
            text += f" and {len(self.others) - _NAMES} other kinds"
        raise NothingCut(
            f"{self.name} cut nothing, so it would be the plain gradient: "
            "between the score and the input there is no ReLU. "
            f"Looked for {LOOKED_FOR}; found {text}. "
            "For a model without ReLUs use kedge.recipes.saliency"
        )

    def at(self, s: Session, node: Node) -> None:
        """Hook one node."""
        raise NotImplementedError

    def positive(self, grad: Tensor) -> Tensor:
        """Action that cuts a gradient, and counts it."""
        self.cuts += 1
        return grad.clamp(min=0)

    def check(self) -> None:
        """Raise if the last backward passed no ReLU."""
        if self.cuts == self.before:
            raise NothingCut(
                f"{self.name} cut nothing: the gradient of this score "
                f"passes through none of the {self.sites} ReLUs"
            )
        self.before = self.cuts


class _Guided(_Cut):
    name = "guided backpropagation"

    def at(self, s: Session, node: Node) -> None:
        s.hook(node, ":pre", self.positive)


class _Deconvolution(_Cut):
    name = "the deconvolutional network"

    def at(self, s: Session, node: Node) -> None:
        arrived: list[Tensor] = []

        def arrive(grad: Tensor) -> None:
            arrived[:] = [self.positive(grad)]

        def leave(grad: Tensor) -> Tensor:
            return arrived.pop()

        s.hook(node, ":pre", arrive)
        s.hook(node, ":post", leave)


@called_as("recipes.guided_backprop(model, target=3)(images)")
def guided_backprop(
    model: nn.Module, target: Targets = None, *, wrt: str | Sequence[str] = INPUT
) -> Attribution:
    """Explain a score by guided backpropagation.

    It is the gradient, with negative parts set to zero at every ReLU. At each ReLU the gradient
    passes where both the ReLU's input and the gradient are positive (Springenberg, Dosovitskiy,
    Brox and Riedmiller, "Striving for simplicity: the all convolutional net", 2015).

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        target: The class to explain, one class for each sample, a function of the output, or a list
            of these; None for the class with the highest score of each sample. See `Attribution`.
        wrt: A selector of the place where the gradient is taken; see `saliency`.

    Returns:
        The attribution. Call it like the model; it returns a tensor in the shape of the input.

    Raises:
        NothingCut: When it is called, if there is no ReLU between the score and the input, or a
            part that cannot be searched.

    Examples:
        >>> recipes.guided_backprop(model, target=2)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    return Attribution(model, _Guided, target, wrt)


@called_as("recipes.deconvnet(model, target=3)(images)")
def deconvnet(
    model: nn.Module, target: Targets = None, *, wrt: str | Sequence[str] = INPUT
) -> Attribution:
    """Explain a score by the deconvolutional network: its projection back to the input.

    At each ReLU the gradient passes where it is positive, whatever the ReLU's input (Zeiler and
    Fergus, "Visualizing and understanding convolutional networks", 2014). Max-pooling passes it to
    the place of the maximum.

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        target: The class to explain, one class for each sample, a function of the output, or a list
            of these; None for the class with the highest score of each sample. See `Attribution`.
        wrt: A selector of the place where the gradient is taken; see `saliency`.

    Returns:
        The attribution. Call it like the model; it returns a tensor in the shape of the input.

    Raises:
        NothingCut: When it is called, if there is no ReLU between the score and the input, or a
            part that cannot be searched.

    Examples:
        >>> recipes.deconvnet(model, target=2)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    return Attribution(model, _Deconvolution, target, wrt)
