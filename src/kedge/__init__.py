"""Kedge sees, takes, changes and spares what flows through any PyTorch program.

Names are loaded when they are first used, so that reading a recording does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.actions.edit import add, clamp, replace, scale, zero
    from kedge.actions.error_if import error_if, nonfinite
    from kedge.actions.measure import measure
    from kedge.actions.packed import packed
    from kedge.actions.record import record
    from kedge.features.extract import extract
    from kedge.hooks.firing.schedule import at, every
    from kedge.hooks.opening import hook, session
    from kedge.inspect.audit import audit
    from kedge.inspect.operations import operations
    from kedge.offload.destination import Cpu, Disk, Rebuild
    from kedge.offload.malloc import tuned_malloc
    from kedge.offload.offload import offload
    from kedge.offload.saved_tensors import saved
    from kedge.sites.select import select
    from kedge.sites.table import sites
    from kedge.watch.run.block import watch

__all__ = [
    "Cpu",
    "Disk",
    "Rebuild",
    "add",
    "at",
    "audit",
    "clamp",
    "error_if",
    "every",
    "extract",
    "hook",
    "measure",
    "nonfinite",
    "offload",
    "operations",
    "packed",
    "record",
    "replace",
    "saved",
    "scale",
    "select",
    "session",
    "sites",
    "tuned_malloc",
    "watch",
    "zero",
]
__version__ = "0.1.0"

_HOME = {
    "actions.edit": ("add", "clamp", "replace", "scale", "zero"),
    "actions.error_if": ("error_if", "nonfinite"),
    "actions.measure": ("measure",),
    "actions.packed": ("packed",),
    "actions.record": ("record",),
    "inspect.audit": ("audit",),
    "hooks.opening": ("hook", "session"),
    "inspect.operations": ("operations",),
    "hooks.firing.schedule": ("at", "every"),
    "offload.destination": ("Cpu", "Disk", "Rebuild"),
    "offload.malloc": ("tuned_malloc",),
    "offload.offload": ("offload",),  # until the package of this name is there, which can be called as well
    "offload.saved_tensors": ("saved",),
    "features.extract": ("extract",),
    "sites.select": ("select",),
    "sites.table": ("sites",),  # as above
    "watch.run.block": ("watch",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"kedge.{home}"), name)
    raise AttributeError(f"module 'kedge' has no attribute {name!r}")
