"""Pictures of values from hooks: each function takes tensors and returns a matplotlib figure (the extra ``plot``).

The functions do not show, save or keep figures, and do not change matplotlib's settings. The caller
decides what to do with a figure, for example ``figure.savefig("layers.png")``; a notebook shows it.

Names load on first use, so that the graph drawing in this folder works without matplotlib.
"""

from typing import TYPE_CHECKING

from kedge.calls.late_names import late_names

if TYPE_CHECKING:
    from kedge.figures.depth import distributions
    from kedge.figures.held_memory import memory
    from kedge.figures.intervention_effects import effects
    from kedge.figures.maps import feature_maps
    from kedge.figures.overlay import attributions
    from kedge.figures.plane import principal, scatter

_HOME = {
    "figures.depth": ("distributions",),
    "figures.held_memory": ("memory",),
    "figures.intervention_effects": ("effects",),
    "figures.maps": ("feature_maps",),
    "figures.overlay": ("attributions",),
    "figures.plane": ("principal", "scatter"),
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

__getattr__, __dir__ = late_names("kedge.figures", _HOME, ["graph"])
