"""What autograd held over one step: as a tree of modules, operations and tensors, and as text."""
