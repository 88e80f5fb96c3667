"""The features of a whole data set in a folder: written by `extract_dataset`, read by `open_features`."""

import kedge.report  # noqa: F401 - first: it imports Rich without drawing random numbers
from kedge.features.dataset.engine import extract_dataset
from kedge.features.dataset.folder.reading import FeatureSet, open_features
from kedge.features.dataset.options import Cluster, Options

__all__ = ["Cluster", "FeatureSet", "Options", "extract_dataset", "open_features"]
