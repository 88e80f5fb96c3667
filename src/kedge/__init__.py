"""Kedge sees, takes, changes and spares what flows through any PyTorch program.

Names are loaded when they are first used, so that reading a recording does not import torch.

PYTEST_DONT_REWRITE: under ``kedge run -m pytest`` Kedge is imported first, of which pytest would
warn.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: The public names, by the module that each is loaded from. Type checkers read `__init__.pyi`; a
#: test compares the two.
_HOME = {
    "actions.edit": ("add", "clamp", "replace", "scale", "zero"),
    "actions.error_if": ("error_if", "nonfinite"),
    "actions.from_hook": ("from_hook",),
    "actions.measure.meter": ("measure",),
    "actions.packed": ("packed",),
    "actions.record": ("record",),
    "examination.examine": ("examine",),
    "features.extract": ("extract",),
    "hooks.everywhere": ("everywhere",),
    "hooks.firing.schedule": ("at", "every"),
    "hooks.session": ("Session", "hook", "session"),
    "inspection.audit": ("audit",),
    "inspection.operations": ("operations",),
    "offload.destination": ("Cpu", "Disk", "Rebuild"),
    "offload.offload": (
        "offload",
    ),  # until the package of this name is there, which can be called as well
    "offload.saved_tensors": ("saved",),
    "rules.rule": ("Finding",),
    "sites.select": ("select",),
    "sites.table": ("sites",),  # as above
    "store.recording": ("Recording",),
    "watch.run.block": ("watch",),
}

__all__ = [name for names in _HOME.values() for name in names]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "errors"})


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"kedge.{home}"), name)
    if name == "errors":  # so that `except kedge.errors.EditError` needs no further import
        return import_module("kedge.errors")
    if name.startswith("_"):
        raise AttributeError(f"module 'kedge' has no attribute {name!r}")
    others = {"kedge.recipes": import_module("kedge.recipes").__all__}
    raise AttributeError(
        import_module("kedge.calls.arguments").unknown_name("kedge", name, __all__, others)
    )
