"""Samples with their places and keys, from a loader to the batches of a model."""
