"""How and when: what PyTorch's hooks and modes are set for, and what happens when they are called."""
