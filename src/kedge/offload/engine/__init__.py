"""The engine: the decision for each saved tensor, and its grounds."""
