"""Keepers, which decide over the tensors that autograd saves, and the tensors that checkpoints hold without saving."""
