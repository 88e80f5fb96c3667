"""The report of a program of tensors: its graphs with values, gradients and hooks."""
