"""What a model does when its activations are other ones: patched between inputs, ablated, steered."""
