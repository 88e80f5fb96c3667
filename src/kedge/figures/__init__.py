"""Pictures of what hooks see: each takes tensors and returns a figure of matplotlib (the extra ``plot``).

Nothing is shown, saved or kept by them, and matplotlib's settings are left alone: what is done with a figure is up to
whoever gets it, such as ``figure.savefig("layers.png")``. A notebook shows it.

Names are loaded when they are first used, so that the drawn graph, which is in this folder too, needs no matplotlib.
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
__all__ = ["attributions", "distributions", "effects", "feature_maps", "memory", "principal", "scatter"]


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"kedge.figures.{home}"), name)
    raise AttributeError(f"module 'kedge.figures' has no attribute {name!r}")
