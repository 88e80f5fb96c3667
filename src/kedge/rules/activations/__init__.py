"""Rules about the values in a model: their scale, their range, and channels that never fire."""
