"""The records of a step: losses, gradients, updates, saved tensors and facts."""
