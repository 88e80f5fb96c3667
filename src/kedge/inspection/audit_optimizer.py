"""The audit of an optimizer: its parameters, and the hooks on its steps, state dicts and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.inspection.effects import CopyTrial, FoundHook
from kedge.inspection.hook_entries import EVERY_OPTIMIZER, Audit, entry_of
from kedge.short_text import counted, listed, thousands
from kedge.torch_internals.hook_tables import (
    hooks_on_every_optimizer,
    hooks_on_optimizer,
    hooks_on_tensor,
)

_SHOWN = 8


@dataclass(frozen=True)
class HeldParameter:
    """A parameter that an optimizer holds.

    Attributes:
        name: Its name; its group and its place there where none is known.
        group: The number of its group.
        shape: Its shape.
        trains: Whether it requires grad; if not, steps leave it as it is.
        has_grad: Whether it has a gradient now; if not, the next step leaves it as it is.
        has_state: Whether the optimizer keeps values for it, such as a momentum.
        hooks: The number of hooks on it.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    trains: bool
    has_grad: bool
    has_state: bool
    hooks: int


@dataclass(frozen=True, repr=False)
class OptimizerAudit(Audit):
    """The hooks on an optimizer, on all optimizers and on its parameters; and these.

    Attributes:
        parameters: Its parameters, in the order of its groups.
    """

    parameters: tuple[HeldParameter, ...] = ()


def audit_optimizer(optimizer: Optimizer, named: Mapping[str, Tensor]) -> OptimizerAudit:
    """Return the audit of an optimizer.

    Args:
        optimizer: The optimizer.
        named: Tensors by their names; the names that the optimizer itself was given come first.
    """
    kind = type(optimizer).__name__
    everywhere = hooks_on_every_optimizer()
    hooks = [FoundHook(h.kind, h.hook, EVERY_OPTIMIZER, "", h.order) for h in everywhere]
    for h in hooks_on_optimizer(optimizer):
        on_it = FoundHook(h.kind, h.hook, "optimizer", kind, h.order, flags=h.flags)
        hooks.append(replace(on_it, of_optimizer=True))

    parameters = []
    for name, group, tensor in _held(optimizer, named):
        own = list(hooks_on_tensor(tensor))
        type_ = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
        hooks += [FoundHook(h.kind, h.hook, name, type_, h.order) for h in own]
        parameters.append(
            HeldParameter(
                name=name,
                group=group,
                shape=tuple(tensor.shape),
                trains=tensor.requires_grad,
                has_grad=tensor.grad is not None,
                has_state=bool(optimizer.state.get(tensor)),
                hooks=len(own),
            )
        )

    trial = CopyTrial(())
    return OptimizerAudit(
        model=kind,
        entries=tuple(entry_of(each, trial) for each in hooks),
        what="optimizer",
        facts=tuple(_facts(optimizer, parameters)),
        parameters=tuple(parameters),
    )


def _held(optimizer: Optimizer, named: Mapping[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, group and tensor of each parameter."""
    names = {id(tensor): name for name, tensor in named.items()}
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or ()
        for place, tensor in enumerate(group["params"]):
            name = names.get(id(tensor), f"group {number}[{place}]")
            if place < len(own):
                name = own[place]
            yield name, number, tensor


def _facts(optimizer: Optimizer, parameters: Sequence[HeldParameter]) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(optimizer.param_groups):
        here = [p for p in parameters if p.group == number]
        size = sum(tensor.numel() for tensor in group["params"])
        count = "no parameters"
        if here:
            count = f"{counted(len(here), 'parameter')} of {thousands(size)} elements"
        yield f"group {number}", f"{count}, {_settings(group)}"

    frozen = [p for p in parameters if not p.trains]
    yield from _lacking("frozen", frozen, "every step skips those, until they require grad")
    without_grad = [p for p in parameters if p.trains and not p.has_grad]
    yield from _lacking("no gradient", without_grad, "a step now skips those")
    bare = [p for p in parameters if not p.hooks]
    if len(bare) < len(parameters):
        yield from _lacking("no hook", bare, "the others have one")


def _settings(group: Mapping[str, Any]) -> str:
    shown = []
    for key, value in group.items():
        if isinstance(value, (int, float)) and value not in (False, 0):
            shown.append(f"{key} {value}")
    return ", ".join(shown) or "no settings"


def _lacking(label: str, those: Iterable[HeldParameter], why: str) -> Iterator[tuple[str, str]]:
    names = [each.name for each in those]
    if names:
        yield label, f"{listed(names, _SHOWN)}; {why}"
