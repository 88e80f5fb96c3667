"""What is done with a value: tensors in, records or tensors out. Nothing here knows a model."""
