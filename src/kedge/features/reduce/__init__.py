"""Summaries of any number of samples in constant memory, which merge."""

from kedge.features.reduce.frechet import frechet_distance
from kedge.features.reduce.histogram import Histogram
from kedge.features.reduce.load_state import restore
from kedge.features.reduce.moments import Covariance, Mean
from kedge.features.reduce.quantiles import Quantiles
from kedge.features.reduce.reducer import Reducer
from kedge.features.reduce.topk import TopK

__all__ = [
    "Covariance",
    "Histogram",
    "Mean",
    "Quantiles",
    "Reducer",
    "TopK",
    "frechet_distance",
    "restore",
]
