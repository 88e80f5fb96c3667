"""Installing hooks in PyTorch's tables and removing them, and the module calls that they follow."""
