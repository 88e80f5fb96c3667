"""The causes of sites that did not fire."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from torch import nn

from kedge.hooks.attach import Attachments
from kedge.hooks.firing.cause import WITHOUT_GRAD, Cause, ExpectedSilence
from kedge.hooks.firing.tap import Tap
from kedge.hooks.gates.block_saves import BlockGate
from kedge.hooks.operations.unfired import explain_op
from kedge.hooks.target import HookedModel
from kedge.sites.leaves import own_part
from kedge.sites.site import Site, escape


def explain(tap: Tap, session: Attachments) -> Cause:
    """Return the cause of a session's tap never firing."""
    clock = session.clock
    if tap.when is not None and not any(tap.when(step) for step in range(clock.step + 1)):
        return Cause(
            f"its schedule did not select any of the steps 0 to {clock.step}", "start it earlier, or run longer"
        )
    if tap.failed == "raised":
        return Cause("its action raised an error each time", "see the error")
    if tap.failed == "off":
        return Cause("its action was switched off", "see the warning issued when it failed")
    if isinstance(tap.gate, BlockGate):
        return tap.gate.why(tap)
    if hasattr(tap.gate, "called"):
        return _explain_gate(tap, session)
    param = getattr(tap.gate, "param", None)
    return (None if param is None else _explain_parameter(tap, param, session)) or _explain_backward(session)


def _explain_parameter(tap: Tap, param: nn.Parameter, session: Attachments) -> Cause | None:
    if not param.requires_grad:
        return Cause("it requires no grad, or did not when it was hooked", "call requires_grad_() before hooking")
    if tap.gate.emptied:
        return Cause(
            "another hook had used its .grad and set it to None, as an optimizer that steps inside the backward does",
            f'hook "{Site(tap.site.path, "param.grad")}", or hook before that hook',
        )
    models = [model for target in session.targets.values() if (model := target.model()) is not None]
    if models and not any(p is param for model in models for p in model.parameters()):
        return Cause(
            "the model now holds another parameter in its place",
            "hook after the call that replaced it, such as fully_shard, to_empty or load_state_dict(assign=True)",
        )
    shards = any(kind.__name__ == "FSDPModule" for model in models for m in model.modules() for kind in type(m).__mro__)
    if tap.site.kind == "param.grad" and shards and own_part(param) is not param:
        return Cause(
            "it is sharded over processes, and FSDP differentiates the gathered parameter instead",
            f'hook "{Site(tap.site.path, "param.acc")}"',
        )
    return None


def _explain_backward(session: Attachments) -> Cause:
    if session.clock.backwards.count == 0:
        return Cause(
            "no backward reached a hook of this session",
            "call backward() inside the block, on a value that depends on it",
        )
    return Cause("the backward that ran did not reach it", "the value that was differentiated does not depend on it")


def _explain_gate(tap: Tap, session: Attachments) -> Cause:
    if tap.site.kind == "saved":
        return _explain_saved(tap, session)
    if tap.site.op is not None and (cause := _explain_operation(tap, session)) is not None:
        return cause
    if not tap.gate.called:
        cause = _explain_uncalled(tap, session)
        return ExpectedSilence(*cause) if getattr(tap.gate, "many", False) else cause
    return _explain_value(tap) or (_explain_gradient(tap, session) if tap.site.is_gradient else _explain_skipped(tap))


def _explain_operation(tap: Tap, session: Attachments) -> Cause | None:
    target = _target_of(tap, session)
    return (
        explain_op(tap, None, compiled=False)
        if target is None
        else explain_op(tap, target.model(), compiled=target.compiled)
    )


def _target_of(tap: Tap, session: Attachments) -> HookedModel | None:
    return next((target for target in session.targets.values() if target.passes is tap.gate.passes), None)


def _explain_saved(tap: Tap, session: Attachments) -> Cause:
    gate = tap.gate
    forward = gate.called - gate.seen.again
    if gate.compiled:
        return Cause(
            "it is compiled, and compiled code saves all tensors at once after its graph has run, not module by module",
            "run the model uncompiled",
        )
    if not gate.called:
        return _explain_uncalled(tap, session)
    if gate.forbidden == forward > 0:
        return Cause(
            "it ran only in a torch.func transform, which allows no saved-tensor hooks",
            "run it outside the transform",
        )
    if gate.checkpointed or gate.seen.again:
        return Cause(
            "it ran in a checkpoint, which saves nothing until its recompute",
            "record the recompute with record(recomputes=True), or hook the module around the checkpoint",
        )
    if gate.ungraded == forward:
        return Cause("it ran without grad, so nothing was saved", "call the model with grad enabled")
    return _explain_unsaved(tap)


def _explain_unsaved(tap: Tap) -> Cause:
    gate, site = tap.gate, tap.site
    if not gate.seen.leaves:
        inside = f"{escape(gate.path)}.**:saved" if gate.path else "**:saved"
        return ExpectedSilence(
            "nothing was saved while it was the innermost module",
            f'the tensors saved by the modules inside it are at "{inside}"',
        )
    if site.leaf is not None and site.leaf not in gate.seen.leaves:
        return Cause(
            f"it never saved a tensor [{site.leaf}]",
            f"the last of its saves in one call is [{list(gate.seen.leaves)[-1]}]",
        )
    return _explain_skipped(tap)


def _explain_value(tap: Tap) -> Cause | None:
    """Return a cause found in the module's inputs or outputs; None without one."""
    gate, site = tap.gate, tap.site
    if gate.seen.again == gate.called:
        return Cause(
            "it ran only in a checkpoint's recompute", "observers skip recomputes; use record(recomputes=True)"
        )
    if gate.seen.empty is not None and not gate.seen.leaves:
        remedy = "hook the module inside that makes the tensor" if site.op is None else "hook its result, at :out"
        return Cause(f"its value contains no tensor: {gate.seen.empty}", remedy)
    if site.leaf is not None and site.leaf not in gate.seen.leaves:
        has = ", ".join(f"[{leaf}]" if leaf else "a bare tensor" for leaf in gate.seen.leaves)
        return Cause(f"its value has no tensor [{site.leaf}]", f"it has {has}")
    return None


def explain_leaves(tap: Tap, session: Attachments) -> dict[str, Cause]:
    """Return, for a gradient of several leaves that fired, why each leaf would not have."""
    seen = getattr(tap.gate, "seen", None)
    if seen is None or not tap.site.is_gradient or tap.site.leaf is not None or len(seen.leaves) < 2:
        return {}
    return {leaf: _explain_gradient(tap, session, leaf) for leaf in seen.leaves}


def _explain_gradient(tap: Tap, session: Attachments, leaf: str | None = None) -> Cause:
    seen, kind = tap.gate.seen, tap.site.kind
    leaf = tap.site.leaf if leaf is None else leaf
    if (kind, leaf) in seen.unused or (leaf is None and seen.unused):
        return Cause(
            "the differentiated value does not depend on this tensor, only on others of the same operation or checkpoint",
            "hook the module inside that makes it: a use within a checkpoint has its gradient there",
        )
    if seen.rebuilt and not seen.again:
        return Cause(
            "it ran in a checkpoint, whose backward builds the graph, and no backward ran it again while it was hooked",
            "call backward() inside the block, on a value that depends on it",
        )
    if kind == "in.share" and seen.no_share:
        no_share: Cause = seen.no_share
        return no_share
    if kind in seen.pulses and seen.pulses[kind].changed():
        return Cause(
            "its value is a view of memory that was then changed in place, and autograd keeps no node of the earlier value",
            "hook the module that made the viewed tensor, or avoid the in-place operation",
        )
    if kind in ("out.grad", "in.grad") and not seen.listened:
        given = "; an input of the model needs requires_grad_()" if kind == "in.grad" else ""
        remedy = f"{WITHOUT_GRAD}{given}"
        return Cause("its value requires no grad", remedy)
    return _explain_backward(session)


def _explain_skipped(tap: Tap) -> Cause:
    if tap.site.call is not None:
        return Cause(f"no forward called it {tap.site.call + 1} times", "calls are counted from 0")
    if tap.when is not None:
        return Cause("never called in the steps of its schedule", "choose other steps, or run longer")
    if tap.on:
        return Cause("its action raised an error each time", "see the error")
    return Cause("the hook was removed before a value arrived", "keep it until the model has been called")


def _explain_uncalled(tap: Tap, session: Attachments) -> Cause:
    parent_path, _, name = tap.gate.path.rpartition(".")
    target = _target_of(tap, session)
    model = None if target is None else target.model()
    if target is None or model is None:  # a script's `main` has returned
        known = {} if target is None else target.kinds
        kinds = (known.get(path) for path in (parent_path, tap.gate.path))
        kind, child = (None if ref is None else ref() for ref in kinds)
        if kind is None:
            return Cause("never called while the hook was attached", "the model is gone, so the cause is unknown")
    else:
        try:
            parent = model.get_submodule(parent_path)
        except AttributeError:
            return Cause("it is no longer part of the model", "hook again after the model has changed")
        kind, child = type(parent), getattr(parent, name, None)
        if name and child is None:
            return Cause("it is no longer part of the model", "hook again after the model has changed")
        if name and _is_replaced(tap, target, child):
            return Cause(
                "another module is at its path now: the program has replaced the hooked one",
                "hook after the replacement; for a module that a forward replaces, hook the one around it",
            )
    taps = (t for t in session.taps if getattr(t.gate, "called", 0))
    called = {t.gate.path for t in taps if t.gate.passes is tap.gate.passes}
    if not called and not session.clock.passes:
        return Cause("the model was not called", "call it inside the block, or before remove()")
    by_parent = _explain_by_parent(kind, child, tap.gate.path, called) if name else None
    return by_parent or _explain_by_calls(tap, called)


def _is_replaced(tap: Tap, target: HookedModel, child: Any) -> bool:
    """Whether the program has put another module in the place of a hooked one."""
    stood = target.stood.get(tap.gate.path)
    return stood is not None and stood() is not child


def _explain_by_parent(kind: type[nn.Module], child: Any, place: str, called: set[str]) -> Cause | None:
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
        return Cause("bypassed by a fused path: attention uses its weights without calling it", remedy)
    if _calls_forward(kind, name):
        return Cause("its .forward() was called directly, which fires no hook", "call the module itself: layer(x)")
    if any(other.startswith(f"{place}.") for other in called):
        return None  # the forward skips it and calls its children
    used = " and ".join(_reads(kind, child, name)) if path in called or not path else ""
    return Cause(f"bypassed: {kind.__name__} uses its {used} without calling it", remedy) if used else None


def _explain_by_calls(tap: Tap, called: set[str]) -> Cause:
    path = tap.gate.path
    inside = path + "." if path else ""
    if any(other != path and other.startswith(inside) for other in called):
        return Cause(
            "never called itself, but the modules inside it were: one by one, or by a direct call of its .forward()",
            "hook the modules inside it, or call the module itself: layer(x)",
        )
    if tap.when is not None:
        return Cause("never called in the steps of its schedule", "choose other steps, or run longer")
    return Cause(
        "never called while the hook was attached", "this forward takes another path, or calls its .forward() directly"
    )


def _reads(kind: type[nn.Module], child: Any, name: str) -> list[str]:
    """Return the attributes of a child that a module's methods read, as attention reads a dropout's ``p`` for a fused kernel."""
    found: dict[str, None] = {}
    for node in ast.walk(_source(kind)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("__init__", "_init", "init_", "reset_")):
            node.body.clear()  # `walk` goes level by level and has not entered the body yet
        elif (
            isinstance(node, ast.Attribute)
            and _is_own(node.value, name)
            and not callable(getattr(child, node.attr, None))
        ):
            found[node.attr] = None
    return list(found)


def _is_own(node: Any, name: str) -> bool:
    """Whether an expression is ``self.<name>``."""
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
    return isinstance(owner, ast.Name) and owner.id == "self"


def _source(of: Any) -> Any:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(of)))
    except (OSError, TypeError, SyntaxError):  # no source to read: built in, or typed at a prompt
        return ast.parse("")


def _calls_forward(kind: type[nn.Module], name: str) -> bool:
    """Whether the source of a module's forward calls ``self.<name>.forward(...)``."""
    calls = (node.func for node in ast.walk(_source(kind.forward)) if isinstance(node, ast.Call))
    found = (f.value for f in calls if isinstance(f, ast.Attribute) and f.attr == "forward")
    return any(isinstance(v, ast.Attribute) and v.attr == name for v in found)
