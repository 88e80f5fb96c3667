"""Kedge sees, takes, changes and spares what flows through any PyTorch program.

Names are loaded when they are first used, so that reading a recording does not import torch.

PYTEST_DONT_REWRITE: under ``kedge run -m pytest`` Kedge is imported first, of which pytest would
warn.
"""

from kedge.calls.late_names import late_names

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
    "actions.skip": ("skip",),
    "examination.examine": ("examine",),
    "examination.model_sites": ("sites",),
    "features.extract": ("extract",),
    "hooks.everywhere": ("everywhere",),
    "hooks.firing.schedule": ("at", "every"),
    "hooks.session": ("Session", "hook", "session"),
    "inspection.audit": ("audit",),
    "inspection.operations": ("operations",),
    "logged": ("log",),
    "offload.destination": ("Cpu", "Disk", "Rebuild"),
    "offload.offload": (
        "offload",
    ),  # until the package of this name is there, which can be called as well
    "offload.saved_tensors": ("saved",),
    "report.displayed": ("Recording",),
    "rules.rule": ("Finding",),
    "sites.select": ("select",),
    "watch.run.block": ("watch",),
}

#: The public modules, which are loaded as late.
_MODULES = ("compare", "errors", "figures", "recipes", "rules", "testing")

__all__ = [name for names in _HOME.values() for name in names]
__getattr__, __dir__ = late_names("kedge", _HOME, _MODULES)
