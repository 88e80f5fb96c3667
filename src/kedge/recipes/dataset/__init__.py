"""The features of a whole data set, in a folder: taken by `extract_dataset`, read by `open_features`."""

from kedge.recipes.dataset.cluster import Cluster
from kedge.recipes.dataset.engine import extract_dataset
from kedge.recipes.dataset.options import Options
from kedge.recipes.dataset.reading import FeatureSet, open_features

__all__ = ["Cluster", "FeatureSet", "Options", "extract_dataset", "open_features"]
