"""The check of skipped steps for gradients that are not finite.

# Note [Ends of gradients]
A NaN that is made in a backward pass flows on to all that the pass computes from it, so it shows
where the gradients end. In the graph of a loss that is behind the operations that lead to no other
operation: the first layer of the model, or of each of two towers. The smallest gradient behind each
of them is checked. Operations that only move numbers count as none, as they make no NaN: so an
embedding's large table is left out, and the first layer after it is an end. A ReLU may stop a NaN
on its way, so the gradient that arrives first is checked as well, if it is small.

All of them are read in one hook, on the parameter whose gradient arrives last; see Note [Cold
caches] in `kedge.watch.step`. It runs inside the pass, before the program unscales or clips.
A program may go on with such gradients for long, as its loss scale may skip them; so they are news
only if they were finite at the last check.

On a device nothing is read. Its backward passes run on several streams, which PyTorch joins at the
end of the pass: there the norms are computed, by one call, and looked at when they have arrived;
see Note [Late news] in `kedge.watch.records.curves`. A call takes some 40 microseconds of the host,
so where steps are shorter than two milliseconds not every one is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge import native
from kedge.hooks.placing.leaf_hooks import LeafHook
from kedge.sites.operation_names import plain_name
from kedge.torch_internals.autograd_nodes import behind, by_need, is_leaf, sequence_number
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import at_end_of_backward
from kedge.torch_internals.own_work import OwnWork, is_watched
from kedge.watch.models.backwards import BackwardPasses
from kedge.watch.models.parameters import ParameterSites
from kedge.watch.records.operation_numbers import MOVES

_MOST = 4
"""Most ends in the graph of one loss: those of the earliest operations."""
_LARGEST = 1 << 16
"""Most elements of a gradient that is checked."""
_SHARE = 0.02
"""Largest share of the time that checks on a device take."""
_MOST_NODES = 20_000
_MOVES = (*MOVES, "embedding")


class GradientChecks:
    """Checks a few small gradients of each skipped step; see Note [Ends of gradients].

    Args:
        passes: Are told of a gradient that is not finite.
    """

    def __init__(self, passes: BackwardPasses) -> None:
        self.passes = passes
        self._hooks: dict[int, tuple[ParameterSites, LeafHook]] = {}

    def learn(self, losses: Iterable[Tensor], task: int) -> None:
        """Choose the gradients to check.

        Called at the end of a backward pass from some losses, the pass of a number.
        """
        leaves = leaves_at_ends(losses)
        watched = self.passes.places
        for place in watched:
            if place.first and place.task == task:
                param = place.param()
                if param is not None and _can_check(param.grad):
                    leaves.append(param)
        places = [place for place in watched.among(leaves) if place.order is not None]
        if not places:
            return
        last = max(places, key=_order)
        param = last.param()
        if param is None:
            return
        there = {id(leaf): leaf for leaf in leaves if leaf.device == param.device}
        places = [place for place in watched.among(there.values()) if place.order is not None]

        old = self._hooks.pop(last.id, None)
        if old is not None:
            old[1].remove(param)
        self._hooks = {key: known for key, known in self._hooks.items() if known[1].is_in_table}
        check = self._check_of(last, places)
        if not param.is_cpu:
            check = self._check_on_device(places)
        hook = LeafHook(param, check, accumulated=True, find=last.param)
        self._hooks[last.id] = (last, hook)

    def _check_of(
        self, last: ParameterSites, places: Iterable[ParameterSites]
    ) -> Callable[[Tensor], None]:
        finders: dict[int, Callable[[], Any]] = {p.id: p.param for p in places if p is not last}
        others = list(finders.values())
        passes = self.passes
        skipped = passes.skipped
        nonfinite = native.known_nonfinite
        was_bad = 0

        def check(param: Tensor) -> None:
            nonlocal was_bad
            if not skipped.on:
                return
            if is_watched():
                with OwnWork():
                    check(param)
                return
            try:
                bad = nonfinite([param.grad, *[other().grad for other in others]])[1]
            except AttributeError:  # one of them no longer exists
                others[:] = [other for other in others if other() is not None]
                return
            if bad and not was_bad and not passes.counts:
                passes.interrupt(last)
            was_bad = bad

        return check

    def _check_on_device(self, places: Iterable[ParameterSites]) -> Callable[[Tensor], None]:
        passes = self.passes
        skipped = passes.skipped
        measure = partial(passes.handler.skipped_gradients, tuple(places))
        due = 0.0

        def at_the_end() -> None:
            nonlocal due
            start = perf_counter()
            measure()
            end = perf_counter()
            due = end + (end - start) / _SHARE

        def check(_: Tensor) -> None:
            if skipped.on and not passes.counts and perf_counter() >= due:
                at_end_of_backward(at_the_end)

        return check

    def close(self) -> None:
        """Remove every hook."""
        for place, hook in self._hooks.values():
            hook.remove(place.param())
        self._hooks.clear()


def leaves_at_ends(losses: Iterable[Tensor]) -> list[Tensor]:
    """Return a few leaves whose gradients show what a backward pass made.

    See Note [Ends of gradients].
    """
    roots = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    if len(list(islice(behind(roots), _MOST_NODES))) == _MOST_NODES:
        return []
    reached: dict[Node, list[Tensor]] = {}
    followed: set[Node] = set()
    ends: list[tuple[int, Tensor]] = []
    for node in by_need(roots):
        before = [each for each, _ in node.next_functions if each is not None]
        if not followed.isdisjoint(before):
            followed.add(node)
        elif is_leaf(node):
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            reached[node] = []
            if _can_check(leaf.grad):
                reached[node].append(leaf)
        else:
            leaves = [leaf for each in before for leaf in reached[each]]
            reached[node] = leaves
            if leaves and plain_name(node.name()) not in _MOVES:
                ends.append((sequence_number(node), min(leaves, key=Tensor.numel)))
                followed.add(node)
    ends.sort(key=lambda end: end[0])
    return list({id(leaf): leaf for _, leaf in ends}.values())[:_MOST]


def _can_check(grad: Tensor | None) -> bool:
    """Whether a gradient can be checked quickly."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return False
    return 0 < grad.numel() <= _LARGEST


def _order(place: ParameterSites) -> int:
    return place.order or 0


untraced(GradientChecks._check_of)
untraced(GradientChecks._check_on_device)
