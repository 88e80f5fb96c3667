"""Pictures of what hooks see: each takes tensors and returns a figure of matplotlib (the extra ``plot``).

Nothing is shown, saved or kept by them, and matplotlib's settings are left alone: what is done with a figure is up to
whoever gets it, such as ``figure.savefig("layers.png")``. A notebook shows it.
"""

from kedge.figures.depth import distributions
from kedge.figures.held_memory import memory
from kedge.figures.intervention_effects import effects
from kedge.figures.maps import feature_maps
from kedge.figures.overlay import attributions
from kedge.figures.plane import principal, scatter

__all__ = ["attributions", "distributions", "effects", "feature_maps", "memory", "principal", "scatter"]
