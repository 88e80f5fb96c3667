"""How and when: the only folder that touches PyTorch's hooks and modes."""
