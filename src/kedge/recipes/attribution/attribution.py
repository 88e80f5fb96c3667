"""An attribution: a method and a model, called like the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from kedge.calls.arguments import called_as, described, not_a_model, noted_arguments
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.handle import Hooked
from kedge.hooks.session import Session, session
from kedge.recipes.attribution.scores import Target, Targets, score
from kedge.recipes.model_run import name_of, preserved_state, shortened, warn_of_training
from kedge.sites import leaves
from kedge.sites.select import selects
from kedge.torch_internals.autograd_nodes import by_need

INPUT = ":in"
REENTRANT = "CheckpointFunctionBackward"


def nodes_between(scores: Sequence[Tensor], values: Sequence[Tensor]) -> list[Node]:
    """Return the nodes that pass a gradient from the scores to the values, from the scores backwards."""
    ends = {get_gradient_edge(value).node for value in values}
    begins = [score.grad_fn for score in reversed(scores) if score.grad_fn is not None]
    order = list(by_need(begins))
    leading: set[Node] = set(ends)
    for node in order:  # the nodes behind a node are before it
        if any(behind in leading for behind, _ in node.next_functions):
            leading.add(node)
    return [node for node in reversed(order) if node in leading and node not in ends]


def operation_of(node: Node) -> str:
    """Return PyTorch's name of a node's operation, without namespaces."""
    return node.name().rpartition("::")[2]


class Method:
    """The steps of a method besides taking the gradient; this one has none, and returns the gradient."""

    noisy: str | None = None
    """The selector where `smoothgrad` adds noise; None for the place of the gradient."""

    def begin(self, s: Session, model: nn.Module) -> None:
        """Hook the model before its forward."""

    def cut(self, s: Session, scores: list[Tensor], values: list[Tensor]) -> bool:
        """Hook the graph between the values and the scores.

        False requests another forward, with `closer` hooks.
        """
        return True

    def closer(self) -> Method:
        """Return the method for another forward."""
        return self

    def check(self) -> None:
        """Called after each backward: raise if the method had no effect."""

    def read(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the attribution for a value and its gradient."""
        return gradient


class LeafCopy:
    """An action that replaces a value by a copy whose gradient can be taken.

    The graph before the value is cut off: no gradient is needed there, and frozen models get one
    here too. With several values, only values that do not depend on the others are cut off. The
    program may work on the copy in place.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.alone = alone
        self.values: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Return the copy of a value; a recompute of the forward gets the same one."""
        name = name_of(event)
        if not value.is_floating_point():
            self.others[name] = value
            if value.is_inference():  # which a backward could not use
                return value.clone()
            return None
        if name not in self.values:
            if value.requires_grad and not self.alone:
                self.values[name] = value.clone()
            else:
                self.values[name] = value.detach().clone().requires_grad_()
        return self.values[name].clone()

    def only(self, where: str, hooked: Hooked[Any]) -> Tensor:
        """Return the value, if there is exactly one.

        Raises:
            AttributionError: If not; the message names the values.
        """
        if len(self.values) == 1:
            return next(iter(self.values.values()))
        if self.values:
            names = ", ".join(f'"{name}"' for name in shortened(self.values))
            raise AttributionError(
                f'"{where}" matches {len(self.values)} values; name one of {names}'
            )
        if self.others:
            others = zip(shortened(self.others), self.others.values(), strict=True)
            found = ", ".join(f"{name} is {leaves.describe(t)}" for name, t in others)
            raise AttributionError(
                f'"{where}" holds no floating-point tensor, '
                f"and other tensors have no gradient: {found}; "
                "take the gradient at a later site, such as the output of an embedding"
            )
        raise AttributionError(f'there is nothing to explain at "{where}": {hooked.ledger()}')


class Attribution:
    """An attribution method for one model; call it like the model.

    `gradient`, `saliency`, `guided_backprop`, `deconvnet` and `grad_cam` return one.

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        method: A function that returns a new `Method` for each call.
        target: The class to explain, one class for each sample, or a function of the output that
            returns scores; None for the class with the highest score of each sample. A list
            explains several in one forward; the result then has an additional first dimension for
            them.
        wrt: A selector of the place where the gradient is taken, or several such selectors.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Callable[[], Method],
        target: Targets = None,
        wrt: str | Sequence[str] = INPUT,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AttributionError(
                f"an attribution takes a model first, not {not_a_model(model)}; "
                "what the model is called with comes in a second call, "
                "as in saliency(model, target=3)(images)"
            )
        if not selects(wrt):
            raise AttributionError(
                f"{described(wrt)} is not the name of a place in the model: "
                'give a selector, such as "layer4", and the class to explain as target=...'
            )
        if not wrt:
            raise AttributionError(
                f"wrt={wrt!r} names no site; leave it out for the input, or give a selector"
            )
        if isinstance(target, Tensor) and target.is_floating_point():
            raise AttributionError(
                f"target={leaves.describe(target)} is no class: "
                "what the model is called with comes in a second call, "
                "as in saliency(model, target=3)(images)"
            )
        self.model = model
        self.method = method
        self.target = target
        self.wrt = wrt
        self._told = False

    def __repr__(self) -> str:
        """The model, the target and the place of the gradient, and what to do with it."""
        target = repr(self.target)
        if isinstance(self.target, Tensor):
            target = leaves.describe(self.target)
        return (
            f"<attribution of {type(self.model).__name__}, target={target}, "
            f"with respect to {self.wrt!r}: call it like the model>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the attribution of the model's output for these arguments.

        Returns:
            A tensor like the value at `wrt`; for several, a dict of them.

        Raises:
            AttributionError: If the target or `wrt` do not fit the model.
        """
        return self.answer(args, kwargs)

    def answer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *first: Any,
        target: Targets = None,
    ) -> Any:
        """Return the attribution with another action before the method's own.

        Args:
            args: The model's positional arguments.
            kwargs: Its keyword arguments.
            first: A selector and an action that come before all others; or nothing.
            target: The target; None for that of the attribution.
        """
        if not self._told:
            self._told = True
            warn_of_training(self.model)
        method = self.method()
        if target is None:
            target = self.target
        targets, several = _listed(target)
        answers = self._asked(method, targets, args, kwargs, first)
        if not answers:
            answers = self._asked(method.closer(), targets, args, kwargs, first)

        stacked = answers[0]
        if several:
            stacked = [torch.stack(column) for column in zip(*answers, strict=True)]
        if isinstance(self.wrt, str):
            return stacked[0]
        return dict(zip(self.wrt, stacked, strict=True))

    def _asked(
        self,
        method: Method,
        targets: list[Target],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        first: tuple[Any, ...],
    ) -> list[list[Tensor]]:
        """Return an answer for each target; none if the method requests another forward."""
        where = [self.wrt] if isinstance(self.wrt, str) else list(self.wrt)
        with ExitStack() as stack:
            stack.enter_context(preserved_state(self.model))
            s = stack.enter_context(session())
            stack.callback(s.end, quiet=True)  # errors here name the values that did not fire
            if first:
                s.hook(self.model, *first)
            found = []
            for text in where:
                leaf = LeafCopy(alone=len(where) == 1)
                found.append((text, leaf, s.hook(self.model, text, leaf)))
            method.begin(s, self.model)
            with noted_arguments(self.model, args, kwargs):
                output = self.model(*args, **kwargs)

            values = [leaf.only(text, hooked) for text, leaf, hooked in found]
            scores = [score(output, one) for one in targets]
            if not method.cut(s, scores, values):
                return []
            answers = []
            for one in scores:
                last = one is scores[-1]
                answers.append(_differentiated(method, one, where, values, last=last))
            return answers


def _differentiated(
    method: Method, one: Tensor, where: list[str], values: list[Tensor], *, last: bool
) -> list[Tensor]:
    """Return the method's answers for the gradient of one score."""
    try:
        grads = torch.autograd.grad(one, values, retain_graph=not last, allow_unused=True)
    except RuntimeError as error:
        operations = map(operation_of, nodes_between([one], values))
        if REENTRANT not in operations:
            raise
        raise AttributionError(
            "a reentrant checkpoint cannot be differentiated with respect to an input; "
            "use checkpoint(..., use_reentrant=False), or none"
        ) from error
    for text, grad in zip(where, grads, strict=True):
        if grad is None:
            raise AttributionError(f'the score does not depend on "{text}"')
    method.check()
    pairs = zip(values, grads, strict=True)
    return [method.read(value.detach(), grad) for value, grad in pairs]


def _listed(targets: Targets) -> tuple[list[Target], bool]:
    if isinstance(targets, str):
        raise AttributionError(f"target {targets!r} is a text; a class is a number, from 0")
    if isinstance(targets, Sequence):
        if not targets:
            raise AttributionError(
                "the list of targets is empty; name a class, or leave the target out"
            )
        return list(targets), True
    return [targets], False


class _Magnitude(Method):
    def read(self, value: Tensor, gradient: Tensor) -> Tensor:
        return gradient.abs()


@called_as("recipes.gradient(model, target=3)(images)")
def gradient(
    model: nn.Module, target: Targets = None, *, wrt: str | Sequence[str] = INPUT
) -> Attribution:
    """Explain a score by its signed gradient with respect to the input.

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        target: The class to explain, one class for each sample, a function of the output, or a list
            of these; None for the class with the highest score of each sample. See `Attribution`.
        wrt: A selector of the place where the gradient is taken; see `saliency`.

    Returns:
        The attribution. Call it like the model; it returns a tensor in the shape of the input.

    Examples:
        >>> recipes.gradient(model, target=2)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    return Attribution(model, Method, target, wrt)


@called_as("recipes.saliency(model, target=3)(images)")
def saliency(
    model: nn.Module, target: Targets = None, *, wrt: str | Sequence[str] = INPUT
) -> Attribution:
    """Explain a score by the magnitude of its gradient.

    It shows where a small change has the largest effect.

    Simonyan, Vedaldi and Zisserman, "Deep inside convolutional networks", 2013. Their maps are the
    maximum over the channels: ``saliency(model)(images).amax(1)``.

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        target: The class to explain, one class for each sample, a function of the output, or a list
            of these; None for the class with the highest score of each sample. See `Attribution`.
        wrt: A selector of the place where the gradient is taken. The default is the input, if that
            is one floating-point tensor. For several inputs, name one, such as ``":in[image]"``;
            for text, the output of its embedding.

    Returns:
        The attribution. Call it like the model; it returns a tensor in the shape of the input.

    Examples:
        >>> recipes.saliency(model)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    return Attribution(model, _Magnitude, target, wrt)
