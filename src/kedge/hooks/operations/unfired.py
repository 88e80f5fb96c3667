"""The causes of operations that did not fire."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from kedge.hooks.firing.cause import Cause, ExpectedSilence
from kedge.hooks.firing.tap import Tap
from kedge.short_text import listed
from kedge.sites.language import op_pattern
from kedge.sites.site import VARIABLE
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import module_at, modules_in
from kedge.torch_internals.torchscript import is_scripted

_SHOWN = 8


def explain_op(tap: Tap, model: nn.Module | None, *, compiled: bool) -> Cause | None:
    """Return why there was no such operation; None if there was, or if its module was not called.

    For a gradient of an operation there was, the cause may be a `torch.autograd.Function` around
    it.

    Args:
        tap: The tap.
        model: Its model; None if it no longer exists.
        compiled: Whether the model is called as compiled code.
    """
    gate: Any = tap.gate
    if gate.called:
        return _explain_ungraded(tap)
    operations = gate.operations
    in_compiled = operations.captured
    if not any(operations.made.values()):
        in_compiled |= _is_compiled(gate.path, model, compiled=compiled)
    if in_compiled:
        return Cause(
            "it is inside compiled code, which does not call operations one by one",
            "run the model uncompiled, or hook the module",
        )
    module = module_at(model, gate.path) if model is not None else None
    if is_scripted(module) or isinstance(module, torch.jit.ScriptFunction):
        return Cause(
            "its module is scripted, and runs without Python",
            "hook the module before it is scripted",
        )
    if not operations.called:
        return None
    if operations.fused == operations.called:
        return Cause(
            "attention took PyTorch's fused path, which runs as one operation; "
            "while operations are observed, this path is off",
            "call it with grad, or torch.backends.mha.set_fastpath_enabled(False)",
        )
    return explain_made(tap)


def _explain_ungraded(tap: Tap) -> Cause | None:
    if tap.site.is_gradient and tap.gate.ungraded == tap.gate.called:
        return Cause(
            "it is in the forward of a torch.autograd.Function, which runs without "
            "grad and has a hand-written backward",
            "hook the function's inputs or outputs",
        )
    return None


def _is_compiled(path: str, model: nn.Module | None, *, compiled: bool) -> bool:
    """Whether the module at a path, or one that contains it, is called as compiled code."""
    if model is None:
        return False
    if compiled:
        return True
    for name, module in modules_in(model).items():
        holds = not name or f"{path}.".startswith(f"{name}.")
        if holds and (dynamo.compiles(module) or dynamo.has_code(module.forward)):
            return True
    return False


def _explain_variable(
    gate: Any, kind: type[Cause], made: dict[str, int], same: dict[str, int]
) -> Cause:
    """Return the cause of a variable that got no result of an operation or a module."""
    name, nth = gate.pattern.op
    if same and nth is not None:
        most = ", ".join(f"{other}{count - 1}" for other, count in _numbered(same))
        return kind(
            f"{gate.operations.runs} assigned it less often: the last is {most}",
            "the numbers start at 0",
        )
    for other, line in gate.operations.kept.items():
        if op_pattern(name).fullmatch(other):
            return kind(
                f"{gate.operations.runs} assigned {other.removesuffix(VARIABLE)} what {line.function} "
                f"returned, which may not be the result of an operation: {line.file}:{line.line}",
                "hook the operation that makes the value, or those of that function",
            )
    assigned = f"; it assigned {listed(list(made), _SHOWN)}" if made else ""
    return kind(
        f"{gate.operations.runs} assigned no result of an operation or a module to "
        f"{name.removesuffix(VARIABLE)}{assigned}",
        "hook the operation that makes the value, such as the last one of a function that it calls",
    )


def _numbered(made: dict[str, int]) -> list[tuple[str, int]]:
    return [(f"{name}#", count) for name, count in made.items()]


def explain_made(tap: Tap) -> Cause:
    """Return the cause that lists the operations that the module's forward made."""
    gate: Any = tap.gate
    name, nth = gate.pattern.op
    made = {
        other: count
        for other, count in gate.operations.made.items()
        if count and other.endswith(VARIABLE) is gate.variable
    }
    kind = ExpectedSilence if gate.many else Cause
    listing = gate.operations.listing
    if gate.operations.interrupted:
        return Cause(
            "an interrupt ended a call inside it, and its forward went on; Kedge "
            "did not see the operations before its next call of a module",
            "catch the interrupt outside the model",
        )
    if any(op_pattern(name).fullmatch(raised) for raised in gate.operations.raised):
        return Cause(f"its {name} raised an error each time", "see the error")
    if any(op_pattern(name).fullmatch(other) for other in gate.operations.unready):
        return Cause(
            f"its {name} returned before it had a result, which nothing tells of that waits for it",
            "call it without async_op=True, or hook the operation that uses the result",
        )
    same = {other: made[other] for other in made if op_pattern(name).fullmatch(other)}
    if gate.variable:
        return _explain_variable(gate, kind, made, same)
    if same and nth is not None:
        most = ", ".join(f"{count} {other}" for other, count in same.items())
        return kind(f"it called {most}; the numbers start at 0", listing)
    if not made:
        return kind(
            f"{gate.operations.runs} calls no operation, only modules",
            "hook the operations of those modules",
        )
    called = listed(list(made), _SHOWN)
    why = f"{gate.operations.runs} called no {name}: it called {called}"
    near = difflib.get_close_matches(name, made, 1)
    if near:
        return kind(why, f'did you mean "{near[0]}"?')
    return kind(why, listing)
