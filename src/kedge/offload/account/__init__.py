"""The account of saved tensors: which there are, and what holds memory for backward when."""
