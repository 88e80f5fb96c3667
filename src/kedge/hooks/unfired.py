"""The causes of sites that did not fire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import nn

from kedge.hooks.attach import Attachments
from kedge.hooks.firing.cause import Cause, ExpectedSilence
from kedge.hooks.firing.tap import Counts, Tap, skips
from kedge.hooks.forward_source import attributes_read, calls_forward
from kedge.hooks.operations.unfired import explain_op
from kedge.hooks.target import HookedModel
from kedge.hooks.unfired_gradients import explain_backward, explain_gradient, explain_parameter
from kedge.sites.nearest import remedy_at
from kedge.sites.site import escape
from kedge.torch_internals.module_tables import module_at, named_modules
from kedge.torch_internals.torchscript import called_by_torchscript


@runtime_checkable
class ReasonGiving(Protocol):
    """A gate whose kind of site has reasons of its own not to fire."""

    def why(self, tap: Tap) -> Cause | None:
        """Return the cause of a tap never firing; None if it is one that all gates have."""


def explain(tap: Tap, session: Attachments) -> Cause:
    """Return the cause of a session's tap never firing."""
    now = tap.until or tap.gate.counts()
    steps = range(tap.since.step, now.step + 1)
    if tap.when is not None and not any(map(tap.when, steps)):
        return Cause(
            f"its schedule did not select any of the steps {steps[0]} to {steps[-1]}",
            "start it earlier, or run longer",
        )
    if tap.failed == "raised":
        return Cause("its action raised an error each time", "see the error")
    if tap.failed == "off":
        return Cause(
            "its action was switched off",
            "see the warning issued when it failed",
        )
    if isinstance(tap.gate, ReasonGiving):
        own = tap.gate.why(tap)
        if own is not None:
            return own
    if hasattr(tap.gate, "called"):
        return _explain_gate(tap, session, now)
    param = getattr(tap.gate, "param", None)
    if param is not None:
        by_parameter = explain_parameter(tap, param, session)
        if by_parameter is not None:
            return by_parameter
    return explain_backward(tap, session, now)


def _explain_gate(tap: Tap, session: Attachments, now: Counts) -> Cause:
    uncalled = not tap.gate.called or now.calls == tap.since.calls
    if uncalled and now.passes == tap.since.passes:
        return _explain_unbegun(tap)
    by_skip = _explain_by_skip(tap, session)
    if by_skip is not None:
        return by_skip
    if tap.site.kind == "saved":
        return _explain_saved(tap, session, now)

    if tap.site.op is not None:
        by_operation = _explain_operation(tap, session)
        if by_operation is not None:
            return by_operation

    if now.calls == tap.since.calls:
        by_calls = _explain_uncalled(tap, session, now)
        if getattr(tap.gate, "many", False):
            return ExpectedSilence(*by_calls)
        return by_calls

    by_value = _explain_value(tap)
    if by_value is not None:
        return by_value
    if tap.site.is_gradient:
        return explain_gradient(tap, session, now)
    return _explain_skipped(tap)


def _explain_unbegun(tap: Tap) -> Cause:
    """Return the cause where no forward pass of the model began while a tap was attached."""
    if tap.until is not None:
        return Cause(
            "the hook was removed before the model was called",
            "keep it until the model has been called",
        )
    if tap.since.during == "forward":
        return Cause(
            "it was hooked inside a forward that did not call it after that",
            "hook before the model is called",
        )
    if tap.since.passes:
        return Cause(
            "the model was not called again after it was hooked",
            "hook before the model is called",
        )
    return Cause(
        "the model was not called",
        "call it inside the block, or before remove()",
    )


def _explain_by_skip(tap: Tap, session: Attachments) -> Cause | None:
    """Return the cause of a site inside a module that the session has skipped."""
    gate = tap.gate
    for other in session.taps:
        if not (skips(other.action) and other.fired and other.gate.passes is gate.passes):
            continue
        skipped = other.gate.path
        within = gate.path != skipped and (not skipped or f"{gate.path}.".startswith(f"{skipped}."))
        at_it = gate.path == skipped and (tap.site.op is not None or tap.site.kind == "saved")
        if within or at_it:
            return Cause(
                f"{other.label} at {other.site} keeps that module's forward from running",
                "hook what is outside of it",
            )
    return None


def _explain_operation(tap: Tap, session: Attachments) -> Cause | None:
    target = _target_of(tap, session)
    if target is None:
        return explain_op(tap, None, compiled=False)
    return explain_op(tap, target.model(), compiled=target.compiled)


def _target_of(tap: Tap, session: Attachments) -> HookedModel | None:
    for target in session.targets.values():
        if target.passes is tap.gate.passes:
            return target
    return None


def _explain_saved(tap: Tap, session: Attachments, now: Counts) -> Cause:
    gate = tap.gate
    forward = gate.called - gate.seen.again
    if gate.compiled:
        return Cause(
            "it is compiled, and compiled code saves all tensors at once after its "
            "graph has run, not module by module",
            "run the model uncompiled",
        )
    if now.calls == tap.since.calls:
        return _explain_uncalled(tap, session, now)
    if gate.forbidden == forward > 0:
        return Cause(
            "it ran only in a torch.func transform, which allows no saved-tensor hooks",
            "run it outside the transform",
        )
    if gate.checkpointed == forward or gate.seen.again:
        return Cause(
            "it ran in a checkpoint, which saves nothing until its recompute",
            "record the recompute with record(recomputes=True), or hook the module "
            "around the checkpoint",
        )
    if gate.ungraded == forward:
        return Cause(
            "it ran without grad, so nothing was saved",
            "call the model with grad enabled",
        )
    if not gate.seen.leaves:
        prefix = f"{escape(gate.path)}." if gate.path else ""
        inside = f"{prefix}**:saved"
        return ExpectedSilence(
            "nothing was saved while it was the innermost module",
            f'the tensors saved by the modules inside it are at "{inside}"',
        )
    leaf = tap.site.leaf
    if leaf is not None and leaf not in gate.seen.leaves:
        return Cause(
            f"it never saved a tensor [{leaf}]",
            f"the last of its saves in one call is [{list(gate.seen.leaves)[-1]}]",
        )
    return _explain_skipped(tap)


def _explain_value(tap: Tap) -> Cause | None:
    """Return a cause found in the module's inputs or outputs; None without one."""
    gate = tap.gate
    site = tap.site
    if gate.seen.again == gate.called:
        return Cause(
            "it ran only in a checkpoint's recompute",
            "observers skip recomputes; use record(recomputes=True)",
        )
    if gate.seen.raised == gate.called:
        return Cause("each of its calls raised an error", "see the error")
    if gate.seen.empty is not None and not gate.seen.leaves:
        remedy = "hook its result, at :out"
        if site.op is None:
            remedy = "hook the module inside that makes the tensor"
        return Cause(f"its value contains no tensor: {gate.seen.empty}", remedy)

    if site.leaf is not None and site.leaf not in gate.seen.leaves:
        known = {leaf: f"[{leaf}]" for leaf in gate.seen.leaves}
        if "" in known:
            known[""] = "a bare tensor"
        has = ", ".join(known.values())
        return Cause(f"its value has no tensor [{site.leaf}]", f"it has {has}")
    return None


def explain_leaves(tap: Tap, session: Attachments) -> dict[str, Cause]:
    """Return, for a gradient of several leaves that fired, why each leaf would not have."""
    seen = getattr(tap.gate, "seen", None)
    if (
        seen is None
        or not tap.site.is_gradient
        or tap.site.leaf is not None
        or len(seen.leaves) < 2
    ):
        return {}
    now = tap.until or tap.gate.counts()
    return {leaf: explain_gradient(tap, session, now, leaf) for leaf in seen.leaves}


def _explain_skipped(tap: Tap) -> Cause:
    """Return the cause of an action that did not run though its module was called."""
    if tap.site.call is not None:
        times = tap.site.call + 1
        return Cause(f"no forward called it {times} times", "calls are counted from 0")
    if tap.when is not None:
        return _OFF_SCHEDULE
    if tap.until is not None:
        return Cause(
            "the hook was removed before a value arrived",
            "keep it until the model has been called",
        )

    taps = tap.gate.taps[tap.site.kind]
    if tap in taps:
        for before in taps[: taps.index(tap)]:
            if before.failed:
                return Cause(
                    f"an action before it, {before.label}, raised an error each time",
                    "see the error",
                )
    return Cause(
        "each call ended before its action had returned, as by an interrupt",
        "see the error",
    )


_OFF_SCHEDULE = Cause(
    "never called in the steps of its schedule",
    "choose other steps, or run longer",
)
_NOT_IN_MODEL = Cause(
    "it is no longer part of the model",
    "hook again after the model has changed",
)


def _explain_uncalled(tap: Tap, session: Attachments, now: Counts) -> Cause:
    path = tap.gate.path
    parent_path, _, name = path.rpartition(".")
    target = _target_of(tap, session)
    model = target.model() if target is not None else None
    kind: Any
    child: Any
    if target is None or model is None:  # a script's `main` has returned
        kind = child = None
        if target is not None:
            kind = _class_at(target, parent_path)
            child = _class_at(target, path)
        if kind is None:
            return Cause(
                f"never called {session.while_hooked}",
                "the model is gone, so the cause is unknown",
            )
    else:
        parent = module_at(model, parent_path)
        if parent is None:
            return _NOT_IN_MODEL
        kind = type(parent)
        child = getattr(parent, name, None) if name else model
        if child is None:
            return _NOT_IN_MODEL
        if name and _is_replaced(tap, target, child):
            return Cause(
                "another module is at its path now: the program has replaced the hooked one",
                "hook after the replacement; for a module that a forward replaces, "
                "hook the one around it",
            )
        if id(child) in called_by_torchscript(named_modules(model)):
            return Cause("TorchScript runs its module without Python", remedy_at(path, model))

    called = _called_with(tap, session)
    if now.during == "forward" and now.passes == tap.since.passes + 1:
        return Cause(
            "a forward was still running, and had not called it",
            "keep the hook until the forward has returned",
        )
    if name:
        by_parent = _explain_by_parent(kind, child, path, called)
        if by_parent is not None:
            return by_parent
    return _explain_by_calls(tap, called, session, now)


def _class_at(target: HookedModel, path: str) -> type[nn.Module] | None:
    """Return the class of a module of a model that no longer exists."""
    known = target.kinds.get(path)
    return known() if known is not None else None


def _is_replaced(tap: Tap, target: HookedModel, child: Any) -> bool:
    """Whether the program has put another module in the place of a hooked one."""
    stood = target.stood.get(tap.gate.path)
    return stood is not None and stood() is not child


def _explain_by_parent(
    kind: type[nn.Module], child: Any, place: str, called: CalledPaths
) -> Cause | None:
    """Return a cause found in the parent's source; None without one.

    Args:
        kind: The parent's class.
        child: The module; its class if the model no longer exists.
        place: The module's path.
        called: The paths of the modules called.
    """
    path, _, name = place.rpartition(".")
    remedy = f'hook "{path or ":out"}" instead'
    if name == "out_proj" and issubclass(kind, nn.MultiheadAttention):
        return Cause(
            "bypassed by a fused path: attention uses its weights without calling it",
            remedy,
        )
    if calls_forward(kind, name):
        return Cause(
            f"{kind.__name__}.forward calls its .forward() directly, which fires no hook",
            "call the module itself: layer(x)",
        )
    if place in called.holders:
        return None  # the forward skips it and calls its children
    if path and path not in called:
        return None

    used = " and ".join(attributes_read(kind, child, name))
    if not used:
        return None
    if issubclass(kind, nn.TransformerEncoderLayer):
        return Cause(
            "bypassed by a fused path: the layer uses its weights without calling it",
            remedy,
        )
    return Cause(
        f"bypassed: {kind.__name__}.forward reads its {used} without calling it",
        remedy,
    )


def _explain_by_calls(tap: Tap, called: CalledPaths, session: Attachments, now: Counts) -> Cause:
    if tap.gate.path in called.holders:
        return Cause(
            "never called itself, but the modules inside it were: one by one, or "
            "by a direct call of its .forward()",
            "hook the modules inside it, or call the module itself: layer(x)",
        )
    if tap.when is not None:
        return _OFF_SCHEDULE
    if 0 < now.passes - tap.since.passes == now.raised - tap.since.raised:
        return Cause(
            f"never called {session.while_hooked}: each forward raised an error before that",
            "see the error",
        )
    if not tap.gate.passes.begun.whole:
        return Cause(
            "the model itself was not called, only parts of it were",
            "call the model, or hook these parts",
        )
    return Cause(
        f"never called {session.while_hooked}",
        "this forward takes another path, or calls its .forward() directly",
    )


class CalledPaths(frozenset[str]):
    """The paths of the modules of a model that were called."""

    @cached_property
    def holders(self) -> frozenset[str]:
        """The paths of the modules that hold them."""
        holders = set()
        for path in self:
            inside = path
            while inside:
                inside = inside.rpartition(".")[0]
                holders.add(inside)
        return frozenset(holders)


def _called_with(tap: Tap, session: Attachments) -> CalledPaths:
    """Return the paths called of the model that a tap belongs to."""
    known = session.explaining
    passes = tap.gate.passes
    if known is not None and id(passes) in known:
        of_model: CalledPaths = known[id(passes)]
        return of_model

    gates = (t.gate for t in session.taps if getattr(t.gate, "called", 0))
    called = CalledPaths(gate.path for gate in gates if gate.passes is passes)
    if known is not None:
        known[id(passes)] = called
    return called


@contextmanager
def explaining_many(session: Attachments) -> Iterator[None]:
    """Within the block, what the causes of several sites have in common is found once."""
    outer = session.explaining
    if outer is None:
        session.explaining = {}
    try:
        yield
    finally:
        session.explaining = outer
