"""The most common uses of hooks.

Recipes work on a model by `kedge.session`, `kedge.hook` and actions, as a program could: they do
not touch PyTorch's hooks or modes. Besides, they, and the features and figures below them, use a
few internal parts of Kedge, so that there is one way to call an action, read a graph, recognise
compiled code, warn, name a site and write a file. A contract in `pyproject.toml` lists these parts.

Names are loaded when they are first used, so that one recipe does not wait for the imports of
another.
"""

from typing import TYPE_CHECKING

from kedge.calls.late_names import late_names

if TYPE_CHECKING:
    from kedge.features.extract import Features, extract
    from kedge.features.reduce import (
        Covariance,
        Histogram,
        Mean,
        Quantiles,
        Reducer,
        TopK,
        frechet_distance,
    )
    from kedge.features.tables import FeatureTable, feature_table, stored_table
    from kedge.figures.graph.drawn import Graph
    from kedge.recipes.attribution.attribution import Attribution, gradient, saliency
    from kedge.recipes.attribution.deep_lift import deep_lift
    from kedge.recipes.attribution.gradcam import Tokens, grad_cam
    from kedge.recipes.attribution.integrated import integrated_gradients
    from kedge.recipes.attribution.rectifiers import deconvnet, guided_backprop
    from kedge.recipes.attribution.smoothing import smoothgrad
    from kedge.recipes.by_sample import sample_gradients
    from kedge.recipes.interventions.ablation import Ablation, Means, ablate, means, resample
    from kedge.recipes.interventions.interventions import Interventions
    from kedge.recipes.interventions.patching import Patching, patch
    from kedge.recipes.interventions.routing import Route, route
    from kedge.recipes.interventions.steering import Steering, contrast, steer
    from kedge.recipes.lens import logit_lens
    from kedge.recipes.transformer_parts import Blocks, blocks

_HOME = {
    "recipes.attribution.attribution": ("Attribution", "gradient", "saliency"),
    "recipes.attribution.deep_lift": ("deep_lift",),
    "recipes.attribution.gradcam": ("Tokens", "grad_cam"),
    "recipes.attribution.integrated": ("integrated_gradients",),
    "recipes.attribution.rectifiers": ("deconvnet", "guided_backprop"),
    "recipes.attribution.smoothing": ("smoothgrad",),
    "recipes.by_sample": ("sample_gradients",),
    "recipes.transformer_parts": ("Blocks", "blocks"),
    "recipes.lens": ("logit_lens",),
    "features.extract": ("Features", "extract"),
    "figures.graph.drawn": ("Graph",),
    "recipes.interventions.ablation": ("Ablation", "Means", "ablate", "means", "resample"),
    "recipes.interventions.interventions": ("Interventions",),
    "recipes.interventions.patching": ("Patching", "patch"),
    "recipes.interventions.routing": ("Route", "route"),
    "recipes.interventions.steering": ("Steering", "contrast", "steer"),
    "features.reduce": (
        "Covariance",
        "Histogram",
        "Mean",
        "Quantiles",
        "Reducer",
        "TopK",
        "frechet_distance",
    ),
    "features.tables": ("FeatureTable", "feature_table", "stored_table"),
}
__all__ = [
    "Ablation",
    "Attribution",
    "Blocks",
    "Covariance",
    "FeatureTable",
    "Features",
    "Graph",
    "Histogram",
    "Interventions",
    "Mean",
    "Means",
    "Patching",
    "Quantiles",
    "Reducer",
    "Route",
    "Steering",
    "Tokens",
    "TopK",
    "ablate",
    "blocks",
    "contrast",
    "deconvnet",
    "deep_lift",
    "extract",
    "feature_table",
    "frechet_distance",
    "grad_cam",
    "gradient",
    "guided_backprop",
    "integrated_gradients",
    "logit_lens",
    "means",
    "patch",
    "resample",
    "route",
    "saliency",
    "sample_gradients",
    "smoothgrad",
    "steer",
    "stored_table",
]

__getattr__, __dir__ = late_names("kedge.recipes", _HOME)
