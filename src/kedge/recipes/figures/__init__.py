"""Pictures of what hooks see: each takes tensors and returns a figure of matplotlib (the extra ``plot``).

Nothing is shown, saved or kept by them, and matplotlib's settings are left alone: what is done with a figure is up to
whoever gets it, such as ``figure.savefig("layers.png")``. A notebook shows it.
"""

from kedge.recipes.figures.depth import distributions
from kedge.recipes.figures.effects import effects
from kedge.recipes.figures.maps import feature_maps
from kedge.recipes.figures.memory import memory
from kedge.recipes.figures.overlay import attributions
from kedge.recipes.figures.plane import principal, scatter

__all__ = ["attributions", "distributions", "effects", "feature_maps", "memory", "principal", "scatter"]
