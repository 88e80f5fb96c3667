"""Routing: the value of one site goes into a later one of the same forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kedge.calls.arguments import called_as, described
from kedge.errors import InterventionError
from kedge.flow import Event
from kedge.hooks.handle import Hooked
from kedge.recipes.interventions.joint_hook import hook_all
from kedge.recipes.model_run import name_of, without_call
from kedge.sites import leaves
from kedge.sites.select import Selectors

By: TypeAlias = Callable[[Tensor, Tensor], Tensor] | None
"""A function of the value at a site and of the routed value; None for the routed value alone."""

_PASSES = 8
"""The number of forwards whose values are kept for recomputes in their backwards."""


@dataclass
class RoutedValue:
    """The newest value of the source in one forward.

    Attributes:
        name: Its name.
        value: A copy, with its graph.
        with_graph: Whether it was taken where gradients were on.
    """

    name: str
    value: Tensor
    with_graph: bool


@dataclass
class RoutedForward:
    """What was taken and put in one forward.

    Attributes:
        newest: What the source gave last.
        again: What it gave last in a checkpoint's recompute.
        names: The names of the values taken so far.
        put: What each call of a target got.
    """

    newest: RoutedValue | None = None
    again: RoutedValue | None = None
    names: set[str] = field(default_factory=set)
    put: dict[str, RoutedValue] = field(default_factory=dict)


class RouteSource:
    """The action of a route's source; made by `Route`."""

    recomputes = True

    def __init__(self, note: Callable[[Tensor, Event], None]) -> None:
        self._note = note

    def __repr__(self) -> str:
        """A short form for messages."""
        return "Route.take"

    def __call__(self, value: Tensor, event: Event) -> None:
        """Keep a value for the targets."""
        self._note(value, event)


class Route:
    """Two actions that route a value: `take` for the source, and `put` for the targets.

    A target gets what the source gave last, so a source that is called several times leads each of
    its values to the calls of the target up to its next one.

    Args:
        by: What to do with the value of the target and the routed one; None to replace it.
        gradient: Whether gradients flow back through the routed value.

    Attributes:
        take: The action of the source.
    """

    def __init__(self, by: By = None, *, gradient: bool = True) -> None:
        if by is not None and not callable(by):
            raise InterventionError(
                f"route(by={described(by)}): by is a function of two values, that of the target and "
                "the routed one, such as torch.add"
            )
        self.by = by
        self.gradient = gradient
        self.take = RouteSource(self._note)
        self._forwards: dict[tuple[int, str], RoutedForward] = {}

    def __repr__(self) -> str:
        """A short form for messages."""
        return "Route()"

    def _note(self, value: Tensor, event: Event) -> None:
        """Keep a value of the source.

        Raises:
            InterventionError: If it matches several values.
        """
        here = self._forward(event)
        name = name_of(event)
        if event.recompute:
            here.again = self._taken(name, value)
            return
        if name in here.names:
            here = self._begin(event)
        plain = {without_call(one) for one in (*here.names, name)}
        if len(plain) > 1:
            listed = ", ".join(f'"{one}"' for one in sorted(plain))
            raise InterventionError(
                f"the source of a route matches several values: {listed}; name one"
            )
        here.names.add(name)
        here.newest = self._taken(name, value)

    def _taken(self, name: str, value: Tensor) -> RoutedValue:
        kept = value
        if not self.gradient:
            kept = value.detach()
        return RoutedValue(name, kept.clone(), torch.is_grad_enabled())

    def put(self, value: Tensor, event: Event) -> Tensor:
        """Action of a target.

        Raises:
            InterventionError: If the source has not run before in this forward, or its value does
                not fit.
        """
        here = self._forward(event)
        name = name_of(event)
        if event.recompute:
            taken = here.again or here.put.get(name)
        else:
            if name in here.put:
                here = self._begin(event)
            taken = here.newest
        if taken is None:
            raise InterventionError(
                f"{name} was reached before the source of its route had a value in this forward; "
                "a route leads from a site to one that comes later"
            )
        here.put[name] = taken
        if self.gradient and torch.is_grad_enabled() and not taken.with_graph:
            raise InterventionError(
                f"{taken.name} ran without gradients, as under no_grad or in a reentrant checkpoint, "
                f"so none can flow back from {name}; use checkpoint(..., use_reentrant=False), or "
                "route with gradient=False"
            )
        return self._combined(value, taken, name)

    def _combined(self, value: Tensor, taken: RoutedValue, name: str) -> Tensor:
        if self.by is not None:
            return self.by(value, taken.value.clone())
        if taken.value.shape != value.shape or taken.value.dtype != value.dtype:
            raise InterventionError(
                f"{taken.name} gives {leaves.describe(taken.value)}, which does not fit {name}, "
                f"{leaves.describe(value)}; route with by=, a function of both that returns a "
                "value that fits"
            )
        return taken.value.clone()  # which the program may work on in place

    def _forward(self, event: Event) -> RoutedForward:
        """Return what is known of the forward of an event."""
        known = self._forwards.get((event.pass_, event.replica))
        if known is None:
            return self._begin(event)
        return known

    def _begin(self, event: Event) -> RoutedForward:
        """Forget the forward of an event, which another block had counted with the same number."""
        now = event.pass_, event.replica
        self._forwards.pop(now, None)
        self._forwards[now] = RoutedForward()
        while len(self._forwards) > _PASSES:
            del self._forwards[next(iter(self._forwards))]
        return self._forwards[now]


@called_as('recipes.route(model, "h.2.mlp", into="h.5.mlp")')
def route(
    model: nn.Module,
    source: Selectors,
    *,
    into: Selectors,
    by: By = None,
    gradient: bool = True,
) -> Hooked[Any]:
    """Put the value of one site in the place of a later one, in the same forward.

    Args:
        model: The model.
        source: A selector of one value, such as ``"h.2.mlp"``; if its module is called several
            times, each target gets the newest.
        into: A selector of the values that it replaces.
        by: A function of the value at the target and of the routed one that returns the new value,
            such as `torch.add`; None to replace it.
        gradient: Whether gradients flow back through the routed value; else it counts as a constant.

    Returns:
        The handle, used as a ``with`` block, or ended by ``remove()``.

    Raises:
        InterventionError: In the forward, if the source had no value before the target, or one that
            does not fit.

    Examples:
        >>> with recipes.route(model, "conv", into="relu", by=torch.sub):
        ...     output = model(images)
    """
    routed = Route(by, gradient=gradient)
    return hook_all(model, [(source, routed.take), (into, routed.put)])
