"""A method and a model: called as the model is called, it says what the model's answer depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.handle import Hooked
from kedge.hooks.session import Session, session
from kedge.recipes.attribution.graph import REENTRANT, nodes_between, operation_of
from kedge.recipes.attribution.named import name_of, shortened
from kedge.recipes.attribution.preserve_state import undisturbed
from kedge.recipes.attribution.scores import Target, Targets, score
from kedge.sites import leaves

INPUT = ":in"


class Method:
    """What a method does besides taking a gradient; this one does nothing, and gives the gradient."""

    noisy: str | None = None
    """Where `smoothgrad` adds noise; None for where the gradient is taken."""

    def begin(self, s: Session, model: nn.Module) -> None:
        """Hook the model before its forward."""

    def cut(self, s: Session, scores: list[Tensor], values: list[Tensor]) -> bool:
        """Hook the graph between the values and the scores; False asks for another forward, with `closer` hooks."""
        return True

    def closer(self) -> Method:
        """Make the method for another forward."""
        return self

    def check(self) -> None:
        """See after each backward that it did what it should."""

    def read(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Make the answer of a value and its gradient."""
        return gradient


class Leaf:
    """An action that hands a copy of a value on, so that the gradient of that value can be taken.

    What was before it is cut off: no gradient is needed there, and a frozen model has one here all the same. Where other
    values are asked for as well, only what depends on none of them is cut off. The copy may be worked on in place.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.alone = alone
        self.values: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Take a value in; a recompute of the forward meets the same again."""
        name = name_of(event)
        if not value.is_floating_point():
            self.others[name] = value
            return value.clone() if value.is_inference() else None  # which a backward could not use
        if name not in self.values:
            through = value.requires_grad and not self.alone
            self.values[name] = value.clone() if through else value.detach().clone().requires_grad_()
        return self.values[name].clone()

    def only(self, where: str, hooked: Hooked) -> Tensor:
        """Return the value, if there is exactly one.

        Raises:
            AttributionError: If not; the message says what there is.
        """
        if len(self.values) == 1:
            return next(iter(self.values.values()))
        if self.values:
            names = ", ".join(f'"{name}"' for name in shortened(self.values))
            raise AttributionError(f'"{where}" stands for {len(self.values)} values here; say which: one of {names}')
        if self.others:
            others = zip(shortened(self.others), self.others.values(), strict=True)
            found = ", ".join(f"{name} is {leaves.describe(t)}" for name, t in others)
            raise AttributionError(
                f'"{where}" holds no floating-point tensor, and there is no gradient of others: {found}; '
                "take the gradient further on, as at the output of an embedding"
            )
        raise AttributionError(f'there is nothing to explain at "{where}": {hooked.ledger()}')


class Attribution:
    """A method of attribution for one model; call it as the model is called.

    Args:
        model: The model, in the mode in which it is to be asked: usually `eval`.
        method: Makes, for each question, what is done with the gradient, and on its way.
        target: The class, one class a sample, or a function of the output; None for the class with the highest score of
            each sample. A list explains several in one forward, and the answer has a first dimension for them.
        wrt: Where the gradient is taken: a selector that stands for one value, or several such.
    """

    def __init__(
        self, model: nn.Module, method: Callable[[], Method], target: Targets = None, wrt: str | Sequence[str] = INPUT
    ) -> None:
        if not wrt:
            raise AttributionError(f"wrt={wrt!r} names no site; leave it out for the input, or give a selector")
        self.model, self.method, self.target, self.wrt = model, method, target, wrt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Explain what the model answers to these arguments.

        Returns:
            A tensor like the value at `wrt`; for several, a dict of them.

        Raises:
            AttributionError: If something of the question does not fit the model.
        """
        return self.answer(args, kwargs)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], *first: Any, target: Targets = None) -> Any:
        """Explain with actions of others in front.

        Args:
            args: The model's positional arguments.
            kwargs: Its keyword arguments.
            first: A selector and an action that come before all else; or nothing.
            target: What to explain; None for what the attribution was made with.
        """
        method = self.method()
        targets, several = _listed(self.target if target is None else target)
        forward = partial(self.model, *args, **kwargs)
        answers = self._asked(method, targets, forward, first) or self._asked(method.closer(), targets, forward, first)
        stacked = [torch.stack(column) if several else column[0] for column in zip(*answers, strict=True)]
        return stacked[0] if isinstance(self.wrt, str) else dict(zip(self.wrt, stacked, strict=True))

    def _asked(
        self, method: Method, targets: list[Target], forward: Callable[[], Any], first: tuple[Any, ...]
    ) -> list[list[Tensor]]:
        """Run the forward and a backward for each target; return no answer if the method asks for another forward."""
        where = [self.wrt] if isinstance(self.wrt, str) else list(self.wrt)
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model))
            s = stack.enter_context(session())
            stack.callback(s.end, quiet=True)  # what did not fire is said here, and by name
            if first:
                s.hook(self.model, *first)
            found = [(text, leaf := Leaf(alone=len(where) == 1), s.hook(self.model, text, leaf)) for text in where]
            method.begin(s, self.model)
            output = forward()
            values = [leaf.only(text, hooked) for text, leaf, hooked in found]
            scores = [score(output, one) for one in targets]
            if not method.cut(s, scores, values):
                return []
            return [_differentiated(method, one, where, values, last=one is scores[-1]) for one in scores]


def _differentiated(method: Method, one: Tensor, where: list[str], values: list[Tensor], *, last: bool) -> list[Tensor]:
    """Take the gradient of one score, and let the method make its answer of it."""
    try:
        grads = torch.autograd.grad(one, values, retain_graph=not last, allow_unused=True)
    except RuntimeError as error:
        if not any(operation_of(node) == REENTRANT for node in nodes_between([one], values)):
            raise
        raise AttributionError(
            "a reentrant checkpoint cannot be differentiated with respect to an input; use checkpoint(..., "
            "use_reentrant=False), or none"
        ) from error
    for text, grad in zip(where, grads, strict=True):
        if grad is None:
            raise AttributionError(f'the score does not depend on "{text}"')
    method.check()
    return [method.read(value.detach(), grad) for value, grad in zip(values, grads, strict=True)]


def _listed(targets: Targets) -> tuple[list[Target], bool]:
    """The targets as a list, and whether they were one."""
    if isinstance(targets, str):
        raise AttributionError(f"target {targets!r} is a text; a class is a number, from 0")
    if isinstance(targets, Sequence):
        if not targets:
            raise AttributionError("the list of targets is empty; name a class, or leave the target out")
        return list(targets), True
    return [targets], False


class _Magnitude(Method):
    def read(self, value: Tensor, gradient: Tensor) -> Tensor:
        return gradient.abs()


def gradient(model: nn.Module, target: Targets = None, *, wrt: str | Sequence[str] = INPUT) -> Attribution:
    """Make what gives the gradient of the score, signed; arguments as of `saliency`."""
    return Attribution(model, Method, target, wrt)


def saliency(model: nn.Module, target: Targets = None, *, wrt: str | Sequence[str] = INPUT) -> Attribution:
    """Make what gives the size of the gradient of the score: where a small change would change the score most.

    Simonyan, Vedaldi and Zisserman, "Deep inside convolutional networks", 2013; their maps are the largest over the
    channels: ``saliency(model)(images).amax(1)``.

    Args:
        model: The model, in the mode in which it is to be asked: usually `eval`.
        target: What to explain; see `Attribution`.
        wrt: Where; the input, if it holds one floating-point tensor. Others by name, such as ``":in[image]"``; text at
            the output of its embedding.
    """
    return Attribution(model, _Magnitude, target, wrt)
