"""The owner of a hook: its name, its code and its library; what a hook of Kedge's own serves."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

from torch import nn

from kedge.calls.closure import enclosed
from kedge.frames import is_installed
from kedge.hooks.everywhere import RootFinder
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.tap import Tap
from kedge.hooks.gates.edited_parameters import EditsBegin
from kedge.hooks.gates.gradients import GradientListener, InputShare
from kedge.hooks.gates.modules import InputGate
from kedge.hooks.gates.passes import PassBegins, PassEnds
from kedge.hooks.gates.tensors import TensorGate
from kedge.hooks.operations.outside import ModuleBegins, ModuleEnds
from kedge.hooks.operations.variables import OutputAssigned, OutputLast
from kedge.inspection.effects import function_in
from kedge.torch_internals.hook_tables import computed_by
from kedge.torch_internals.source_lines import place_of

_OWNERS = {
    "kedge.": "kedge",
    "torch.nn.utils.weight_norm": "torch weight_norm",
    "torch.nn.utils.spectral_norm": "torch spectral_norm",
    "torch.nn.utils.prune": "torch pruning",
    "torch.nn.utils.parametriz": "torch parametrization",
    "torch.distributed.fsdp": "torch FSDP",
    "torch.distributed._composable": "torch FSDP",
    "torch.nn.parallel": "torch DDP",
    "torch.ao.": "torch quantization",
    "torch.": "torch",
}


def name_of(hook: Any) -> str:
    """The name of a hook's function in the code."""
    if isinstance(hook, functools.partial):
        return f"partial({name_of(hook.func)})"
    function = function_in(hook)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    name = name.rpartition("<locals>.")[2].strip("<>")
    computed = computed_by(function)
    if computed:
        return f"{name} of {computed}"
    return name


def source_of(function: Any) -> str:
    """File and line of a hook's code; empty if it has none."""
    if isinstance(function, nn.Module):
        function = type(function).forward
    elif not hasattr(function, "__code__") and callable(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{place_of(code.co_filename)}:{code.co_firstlineno}"


def library_of(function: Any) -> str:
    """The library of a function; empty for the program's own."""
    module = str(getattr(function, "__module__", ""))
    for prefix, name in _OWNERS.items():
        if f"{module}.".startswith(prefix):
            return name
    if not is_installed(source_of(function)):
        return ""
    package, _, _ = module.partition(".")
    return package


def serves(hook: Any, place: str) -> tuple[str, ...]:
    """The sites and actions that a Kedge hook on a module or a tensor serves.

    Args:
        hook: The hook.
        place: The name of the module or tensor; a site has its path where a tensor was hooked under
            another name.
    """
    if isinstance(hook, (PassBegins, PassEnds)):
        return ("counts forward passes",)
    if isinstance(hook, RootFinder):
        return ("finds the models of kedge.everywhere",)
    if isinstance(hook, (ModuleBegins, ModuleEnds)):
        return ("finds what is outside of modules",)
    if isinstance(hook, (OutputAssigned, OutputLast)):
        return ("shows what a forward assigns to a variable",)
    if isinstance(hook, EditsBegin):
        edits = itertools.chain(*(each.taps["param"] for each in hook.edits))
        return tuple(f"{tap.site} {tap.label}" for tap in edits)
    holders = _holders(hook)
    tensor_gates = [h for h in holders if isinstance(h, TensorGate)]
    taps: list[Tap] = []
    for holder in holders:
        if isinstance(holder, Gate):
            taps += itertools.chain(*holder.taps.values())
    for gate in tensor_gates:
        taps += gate.taps

    named = {gate.site.path for gate in tensor_gates if gate.param is None} - {place}
    served = []
    for tap in taps:
        site = tap.site
        if site.path not in named:
            site = replace(site, path="")
        served.append(f"{site} {tap.label}")
    if isinstance(hook, InputGate) and hook.preserving:
        served.append("copies records before they are overwritten")
    return tuple(served)


def taps_behind(hook: Any) -> tuple[Tap, ...]:
    """The actions with their sites that a Kedge hook on a tensor or a node runs."""
    holders = _holders(hook)
    taps: list[Tap] = []
    for holder in holders:
        if isinstance(holder, TensorGate):
            taps += holder.taps
    for holder in holders:
        if isinstance(holder, (GradientListener, InputShare)):
            site = holder.origin.site
            taps += holder.gate.taps.get(site.kind, ())
    return tuple(taps)


def _holders(hook: Any) -> list[Any]:
    """Return a hook, its object if it is a bound method, and the values that it encloses."""
    return [hook, getattr(hook, "__self__", None), *enclosed(hook).values()]
