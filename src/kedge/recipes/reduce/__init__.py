"""Summaries of any number of samples in constant memory, which merge exactly."""

from kedge.recipes.reduce.frechet import frechet_distance
from kedge.recipes.reduce.histogram import Histogram
from kedge.recipes.reduce.moments import Covariance, Mean
from kedge.recipes.reduce.quantiles import Quantiles
from kedge.recipes.reduce.reducer import Reducer
from kedge.recipes.reduce.restoring import restore
from kedge.recipes.reduce.topk import TopK

__all__ = ["Covariance", "Histogram", "Mean", "Quantiles", "Reducer", "TopK", "frechet_distance", "restore"]
