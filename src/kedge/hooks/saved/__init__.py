"""Who decides over the tensors that autograd saves, and what a checkpoint holds without saving it."""
