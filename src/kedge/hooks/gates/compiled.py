"""Hooks in compiled code: their operators in a graph that Dynamo has captured.

# Note [In the graph]
Dynamo traces the forward hooks that exist when it compiles, and puts their operations into the
graph. Work that must happen in Python at run time - counting, recording, measuring - enters the
graph as one opaque operator without a result. It is registered as having an effect, so that the
compiler neither removes nor reorders it. Dynamo traces edits, Kedge's and plain functions alike,
and they become part of the graph. For a gradient the graph has an identity whose backward calls the
operator.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kedge.errors import CannotCompile
from kedge.flow import Event
from kedge.hooks.firing.contract import check_edit
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.measuring import measure_passing
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Tap, numbered
from kedge.sites.site import Site
from kedge.torch_internals import dynamo, operators
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.own_work import own_work

_library = torch.library.Library("kedge", "DEF")
_SCHEMAS = (
    "value(Tensor x, int key, str leaf) -> ()",
    "gradient(Tensor x, int key, str leaf) -> ()",
    "passed(Tensor x, int key, str leaf) -> ()",
    "applied(Tensor x, int key) -> ()",
    "begin(Tensor any, int key, bool graded) -> ()",
    "end(Tensor any, int key) -> ()",
)
_NAMES = tuple(f"kedge::{schema.partition('(')[0]}" for schema in _SCHEMAS)
_ANY = torch.zeros(())
numbers = itertools.count(1)
followed: weakref.WeakValueDictionary[int, PassCounter] = weakref.WeakValueDictionary()
"""The pass counter of each hooked model, by the number that a graph holds in its place."""


def _count(tap: Tap, leaf: str, kind: str) -> tuple[int, bool]:
    """Count a call by tap and leaf, because a graph does not call the gate itself."""
    gate: Gate = tap.gate
    gate.owner.in_graph += 1
    return gate.passes.count((tap.graph.key, leaf, kind))


def _event(tap: Tap, leaf: str, call: int, recompute: bool) -> Event:
    gate: Gate = tap.gate
    return gate.passes.event(_site(tap, leaf), call, recompute)


def _site(tap: Tap, leaf: str) -> Site:
    """Return the site of one leaf, and note that it passed."""
    gate: Gate = tap.gate
    return tap.site if tap.site.kind == "param" else gate.site(tap.site.kind, leaf)


def _value(x: Tensor, key: int, leaf: str) -> None:
    tap = numbered.get(key)
    if (
        tap is None
        or tap.gate is None
        or (tap.site.kind == "param" and not tap.gate.is_first(tap.site))
    ):
        return
    call, recompute = _count(tap, leaf, "value")
    tap.gate.called += 1
    with own_work():
        _show(tap, x, _event, (tap, leaf, call, recompute))


def _show(tap: Tap, x: Tensor, make: Callable[..., Event], of: tuple[Tap, str, int, bool]) -> None:
    """Show a value to a tap, with an event only if it needs one.

    See Note [Values alone] in `firing.measuring`.
    """
    owner = tap.owner
    leaf = of[1]
    recompute = of[3]
    if tap.measure is not None and not recompute:
        start = perf_counter()
        _site(tap, leaf)
        measure_passing((tap,), x.detach(), owner, make, of, leaf)
        owner.measuring += perf_counter() - start
        return
    # The compiler may reuse the memory and the tensor object as soon as the operator has returned:
    # the next value would then pass for this one.
    keeps = getattr(tap.action, "keeps", False)
    shown = x.clone() if keeps else x.detach()
    fire((tap,), shown, make(*of))


def _passed(x: Tensor, key: int, leaf: str) -> None:
    tap = numbered.get(key)
    if tap is not None and tap.gate is not None:
        _count(tap, leaf, "passed")
        tap.gate.called += 1
        tap.gate.seen.listened += 1


def _gradient(x: Tensor, key: int, leaf: str) -> None:
    tap = numbered.get(key)
    if tap is None or tap.gate is None:
        return
    tap.owner.in_graph += 1
    here = tap.gate.passes.here
    # Backward runs in the reverse order of forward, so calls count down.
    arrived = here.calls.get((key, leaf, "arrived"), 0)
    here.calls[key, leaf, "arrived"] = arrived + 1
    calls = here.calls.get((key, leaf, "passed"), 1)
    with own_work():
        _show(tap, x, _backward_event, (tap, leaf, (calls - 1 - arrived) % calls, False))


def _backward_event(tap: Tap, leaf: str, call: int, recompute: bool) -> Event:
    event = _event(tap, leaf, call, recompute)
    event.backward = tap.owner.clock.backwards.now()
    return event


def _applied(x: Tensor, key: int) -> None:
    tap = numbered.get(key)
    if tap is not None and tap.gate is not None:
        tap.gate.called += 1
        tap.gate.seen.listened += tap.site.is_gradient
        tap.fired += 1


def _begin(x: Tensor, key: int, graded: bool) -> None:
    passes = followed.get(key)
    if passes is not None and not in_backward():
        passes.begin(graded=graded)


def _end(x: Tensor, key: int) -> None:
    passes = followed.get(key)
    if passes is not None and not in_backward():
        passes.end()


def _without_data(x: Tensor, *_: Any) -> None:
    """Called for each operator of a graph that is being compiled.

    See Note [Outside of graphs] in `torch_internals.operators`.
    """
    dynamo.see_limits()
    if not x.is_cpu:
        operators.divide_graphs_at(_NAMES)


with operators.all_or_none(_library):
    for _schema, _run in zip(
        _SCHEMAS, (_value, _gradient, _passed, _applied, _begin, _end), strict=True
    ):
        _name = _library.define(_schema)
        _library.impl(_name, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kedge::{_name}", _without_data, lib=_library)
        operators.has_effect(_library, f"kedge::{_name}")
_ops = torch.ops.kedge


class _Listen(torch.autograd.Function):
    """The identity, whose backward shows the gradient to an observer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, leaf: str) -> Tensor:
        """Return a copy: later operations may work in place, which a view of `x` would not allow."""
        ctx.key = key
        ctx.leaf = leaf
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Show the gradient to the observer and pass it on."""
        _ops.gradient(grad, ctx.key, ctx.leaf)
        return grad, None, None


def identity(act: Any, key: int) -> Any:
    """Return an identity whose backward applies an edit.

    Dynamo traces the edit into the graph.
    """

    class GraphEdit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            _ops.applied(grad, key)
            new = act(grad, None)
            return new if new is not None else grad

    return GraphEdit


def is_exported() -> bool:
    """Whether the graph is captured for export: an exported program must load without Kedge."""
    return torch.compiler.is_exporting()


def begin(key: int) -> None:
    """Put the beginning of a forward pass into the graph, with the grad mode: the graph itself runs with grad off."""
    if not is_exported():
        _ops.begin(_ANY, key, torch.is_grad_enabled())


def end(key: int) -> None:
    """Put the end of a forward pass into the graph."""
    if not is_exported():
        _ops.end(_ANY, key)


def through(taps: tuple[Tap, ...], gradients: tuple[Tap, ...], leaf: str, tensor: Tensor) -> Tensor:
    """Put the taps on one output, and on its gradient, into the graph.

    Returns the new output.
    """
    tensor = through_forward(taps, leaf, tensor)
    if not tensor.requires_grad:
        return tensor
    for tap in reversed(gradients):  # backward reaches the last identity first
        if tap.site.leaf is not None and tap.site.leaf != leaf:
            continue
        if tap.observes and is_exported():
            continue
        if tap.observes:
            _ops.passed(tensor.detach(), tap.graph.key, leaf)
            tensor = _Listen.apply(tensor, tap.graph.key, leaf)  # type: ignore[no-untyped-call]
        else:
            _needs_no_event(tap)
            tensor = tap.graph.edit.apply(tensor)
    return tensor


def show(tap: Tap, value: Tensor) -> None:
    """Put into the graph an operator that shows a tap a value from outside the graph, such as a parameter."""
    _ops.value(value, tap.graph.key, "")


def through_forward(taps: tuple[Tap, ...], leaf: str, tensor: Tensor) -> Tensor:
    """Put the taps on one value into the graph; returns the new value."""
    for tap in taps:
        if tap.site.leaf is not None and tap.site.leaf != leaf:
            continue
        # The operator checks the schedule at run time: reading it here would recompile.
        if tap.observes:
            if not is_exported():
                _ops.value(tensor.detach(), tap.graph.key, leaf)
            continue
        if not tap.on:
            continue
        _needs_no_event(tap)
        if not is_exported():
            _ops.applied(tensor.detach(), tap.graph.key)
        result = tap.action(tensor)
        if result is not None:
            check_edit(tensor, result, tap.action, tap.site)
            tensor = result
    return tensor


def _needs_no_event(tap: Tap) -> None:
    if tap.site.call is not None:
        raise CannotCompile(
            f"{tap.label} at {tap.site} edits one call, but compiled code has one "
            "graph for all passes and does not count calls; edit every call, or run "
            "the model uncompiled"
        )
    if tap.takes_event:
        raise CannotCompile(
            f"{tap.label} at {tap.site} takes (value, event), but compiled code has "
            "one graph for all passes and so no event; let it take (value) alone, "
            "or run the model uncompiled"
        )
