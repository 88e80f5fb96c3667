"""Programs of tensors alone: what they compute, differentiate and hook before they call a module."""
