"""Pictures of values from hooks: each function takes tensors and returns a matplotlib figure (the extra ``plot``).

The functions do not show, save or keep figures, and do not change matplotlib's settings. The caller
decides what to do with a figure, for example ``figure.savefig("layers.png")``; a notebook shows it.

Names load on first use, so that the graph drawing in this folder works without matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.figures.depth import distributions
    from kedge.figures.held_memory import memory
    from kedge.figures.intervention_effects import effects
    from kedge.figures.maps import feature_maps
    from kedge.figures.overlay import attributions
    from kedge.figures.plane import principal, scatter

_HOME = {
    "depth": ("distributions",),
    "held_memory": ("memory",),
    "intervention_effects": ("effects",),
    "maps": ("feature_maps",),
    "overlay": ("attributions",),
    "plane": ("principal", "scatter"),
}
__all__ = [
    "attributions",
    "distributions",
    "effects",
    "feature_maps",
    "memory",
    "principal",
    "scatter",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"kedge.figures.{home}"), name)
    raise AttributeError(f"module 'kedge.figures' has no attribute {name!r}")
