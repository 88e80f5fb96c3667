"""The causes of gradients that did not come."""

from __future__ import annotations

from torch import nn

from kedge.hooks.attach import Attachments
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.tap import Counts, Tap
from kedge.hooks.gates.modules import OutputGate
from kedge.sites.leaves import own_part
from kedge.sites.site import Site, escape
from kedge.torch_internals.module_tables import modules_in, parameters_in


def explain_parameter(tap: Tap, param: nn.Parameter, session: Attachments) -> Cause | None:
    """Return the cause that a parameter itself is of having no gradient; None if it is none."""
    if not param.requires_grad:
        return Cause(
            "it requires no grad, or did not when it was hooked",
            "call requires_grad_() before hooking",
        )
    if tap.gate.emptied:
        return Cause(
            "another hook had used its .grad and set it to None, as an optimizer "
            "that steps inside the backward does",
            f'hook "{Site(tap.site.path, "param.grad")}", or hook before that hook',
        )
    alive = (target.model() for target in session.targets.values())
    models = [model for model in alive if model is not None]
    held = (p for model in models for p in parameters_in(model).values())
    if models and not any(p is param for p in held):
        return Cause(
            "the model now holds another parameter in its place",
            "hook after the call that replaced it, such as fully_shard, to_empty "
            "or load_state_dict(assign=True)",
        )
    sharded = own_part(param) is not param and any(map(_is_sharded, models))
    if tap.site.kind == "param.grad" and sharded:
        return Cause(
            "it is sharded over processes, and FSDP differentiates the gathered parameter instead",
            f'hook "{Site(tap.site.path, "param.acc")}"',
        )
    return None


def _is_sharded(model: nn.Module) -> bool:
    """Whether a module of a model is FSDP's."""
    kinds = {kind for module in modules_in(model).values() for kind in type(module).__mro__}
    return any(kind.__name__ == "FSDPModule" for kind in kinds)


def explain_backward(tap: Tap, session: Attachments, now: Counts) -> Cause:
    """Return the cause of a gradient that could have come and did not."""
    if now.backwards - tap.since.backwards <= (now.during == "backward"):
        if now.during == "backward":
            return Cause(
                "a backward was still running, and had not reached it",
                "keep the hook until backward() has returned",
            )
        if tap.until is not None:
            return Cause(
                "the hook was removed before a backward reached a hook of this session",
                _KEEP,
            )
        return Cause(
            "no backward reached a hook of this session",
            f"call backward() inside the block, on a value that depends on it; {_CUTS}",
        )
    if (between := _explain_cut(tap, session)) is not None:
        return between
    independent = (
        "the value that was differentiated does not depend on it: its result is "
        f"not used for it, or {_CUTS}"
    )
    reasons = [independent, _UNASKED]
    if tap.site.kind == "param.acc":
        reasons.append("autograd.grad() was called, which accumulates nothing")
    if tap.site.kind.startswith("param"):
        reasons.append("another tensor stood in its place, as under functional_call()")
    if tap.site.call is not None:
        reasons.append(f"no forward called it {tap.site.call + 1} times")
    return Cause("the backward that ran did not reach it", "; or ".join(reasons))


_KEEP = "keep it until backward() has returned"
_CUTS = "detach(), .data and no_grad cut the path to it"
_UNASKED = "autograd.grad() or backward(inputs=) asked for other gradients only"


def _explain_cut(tap: Tap, session: Attachments) -> Cause | None:
    """Return the cause that names the calls between which gradients ended.

    None if no hooks show these.
    """
    passes = getattr(tap.gate, "passes", None)
    if passes is None or tap.gate.path == "":
        return None
    # The calls of the latest pass, in the order in which they returned.
    gates = (gate for gate in passes.here.calls if isinstance(gate, OutputGate))
    calls = [gate for gate in gates if gate.taps["out.grad"]]
    of_tap = [i for i, gate in enumerate(calls) if gate.path == tap.gate.path]
    if not of_tap:
        return None
    last = calls[of_tap[-1]]
    for gate in calls[of_tap[-1] + 1 :]:
        if any(each.fired for each in gate.taps["out.grad"]):
            earlier = escape(last.path)
            later = escape(gate.path) or ":out"
            own = ""
            if last.path != tap.gate.path:
                own = f', and none reached "{earlier}"'
            return Cause(
                f"the backward that ran did not reach it{own}; it reached "
                f'"{later}", which returned later',
                f'what "{earlier}" returned is not used for the value that was '
                f'differentiated, or {_CUTS}: look between "{earlier}" and '
                f'"{later}"; or {_UNASKED}',
            )
        if not gate.path or tap.gate.path.startswith(f"{gate.path}."):
            continue  # a container of it
        last = gate
    return None


def explain_gradient(tap: Tap, session: Attachments, now: Counts, leaf: str | None = None) -> Cause:
    """Return the cause of a gradient of a module's value, or of one leaf, that did not come."""
    seen = tap.gate.seen
    kind = tap.site.kind
    if leaf is None:
        leaf = tap.site.leaf
    if any(of == kind and leaf in (None, unused) for of, unused in seen.unused):
        return Cause(
            "the differentiated value does not depend on this tensor, only on "
            "others of the same operation or checkpoint",
            "hook the module inside that makes it: a use within a checkpoint has "
            "its gradient there",
        )
    if seen.rebuilt and not seen.again and "cut checkpoint" not in seen.ungraded:
        return Cause(
            "it ran in a checkpoint, whose backward builds the graph, and no "
            "backward ran it again while it was hooked",
            "call backward() inside the block, on a value that depends on it",
        )
    if kind == "in.share" and seen.no_share:
        no_share: Cause = seen.no_share
        return no_share
    if kind in seen.pulses and seen.pulses[kind].changed():
        return Cause(
            "its value is a view of memory that was then changed in place, and "
            "autograd keeps no node of the earlier value",
            "hook the module that made the viewed tensor, or avoid the in-place operation",
        )
    if kind in ("out.grad", "in.grad") and not seen.listened:
        return _explain_ungraded(kind, seen.ungraded)
    return explain_backward(tap, session, now)


def _explain_ungraded(kind: str, noted: list[str]) -> Cause:
    """Return the cause of a value that requires no grad.

    Args:
        kind: The kind of its site.
        noted: What ruled out its gradient in the first calls.
    """
    if not noted or len(set(noted)) > 1:
        words = {
            "transform": "a transform of torch.func",
            "nothing trainable": "nothing trainable before it",
        }
        what = "its value requires no grad"
        if noted:
            seen = ", ".join(words.get(each, each) for each in dict.fromkeys(noted))
            what = f"{what}: {seen}"
        return Cause(what, "call the model with grad enabled, on trainable values")
    mode, inside = noted[0].partition(" ")[::2]
    if mode in ("no_grad", "inference_mode") and inside:
        return Cause(
            f"its value requires no grad: the forward had grad, but this call was under {mode}",
            f"look for torch.{mode} around it; it also cuts the gradient of everything before",
        )
    if mode in ("no_grad", "inference_mode"):
        return Cause(
            f"its value requires no grad: the forward ran under {mode}",
            "call the model with grad enabled",
        )
    if kind == "in.grad" and noted[0] == "nothing trainable":
        return _UNGRADED_INPUT
    in_checkpoint = Cause("its value requires no grad", "it ran in a checkpoint")
    return _UNGRADED.get(noted[0], in_checkpoint)


_UNGRADED_INPUT = Cause(
    "its value requires no grad: nothing before it is trainable, or it was detached",
    "make something before it trainable; an input of the model needs requires_grad_()",
)
_UNGRADED = {
    "transform": Cause(
        "it ran in a transform of torch.func, such as vmap, under which values show no gradient",
        "hook the parameters' :param.grad, or call the model without the transform",
    ),
    "whole numbers": Cause(
        "its value requires no grad: it has whole numbers or booleans, which have no gradient",
        "hook the module before it",
    ),
    "nothing trainable": Cause(
        "its value requires no grad, although grad was enabled: nothing that it is "
        "computed from is trainable, or it was detached inside",
        "call requires_grad_() on the parameters or the input, or look inside it "
        "for detach(), .data and no_grad",
    ),
    "cut checkpoint": Cause(
        "it ran in a reentrant checkpoint without a graph, and none of the "
        "checkpoint's inputs requires a gradient",
        "use checkpoint(..., use_reentrant=False), or call requires_grad_() on the "
        "input of the checkpoint",
    ),
}
