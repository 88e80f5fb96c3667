"""Rules about the gradients of parameters."""
