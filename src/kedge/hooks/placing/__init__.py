"""Into PyTorch's tables and out again, and what is known of the calls on which hooks stand."""
