"""Which part of an input a model's answer depends on: methods that are hooks and nothing else."""
