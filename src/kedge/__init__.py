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
    from kedge.hooks.audit import audit
    from kedge.hooks.opening import hook, session
    from kedge.hooks.operations import operations
    from kedge.hooks.schedule import at, every
    from kedge.offload.destination import Cpu, Disk, Rebuild
    from kedge.offload.malloc import tuned_malloc
    from kedge.offload.opening import offload
    from kedge.offload.saved import saved
    from kedge.recipes.features import extract
    from kedge.sites.select import select
    from kedge.sites.table import sites
    from kedge.watch.block import watch

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
    "hooks.audit": ("audit",),
    "hooks.opening": ("hook", "session"),
    "hooks.operations": ("operations",),
    "hooks.schedule": ("at", "every"),
    "offload.destination": ("Cpu", "Disk", "Rebuild"),
    "offload.malloc": ("tuned_malloc",),
    "offload.opening": ("offload",),  # until the package of this name is there, which can be called as well
    "offload.saved": ("saved",),
    "recipes.features": ("extract",),
    "sites.select": ("select",),
    "sites.table": ("sites",),  # as above
    "watch.block": ("watch",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"kedge.{home}"), name)
    raise AttributeError(f"module 'kedge' has no attribute {name!r}")
