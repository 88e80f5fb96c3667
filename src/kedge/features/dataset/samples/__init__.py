"""From a loader to the batches of a model: samples with their places and keys."""
