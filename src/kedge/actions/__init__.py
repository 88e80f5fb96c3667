"""Actions on values: tensors in, records or tensors out. Nothing here depends on a model."""
