"""Kedge sees, takes, changes and spares what flows through any PyTorch program."""

from kedge.actions.edit import add, clamp, replace, scale, zero
from kedge.actions.error_if import error_if, nonfinite
from kedge.actions.measure import measure
from kedge.actions.record import record
from kedge.hooks.schedule import at, every
from kedge.hooks.session import hook, session
from kedge.sites.select import Selector as select
from kedge.sites.table import sites

__all__ = [
    "add",
    "at",
    "clamp",
    "error_if",
    "every",
    "hook",
    "measure",
    "nonfinite",
    "record",
    "replace",
    "scale",
    "select",
    "session",
    "sites",
    "zero",
]
__version__ = "0.1.0"
