"""Who is watched: the models that a program calls, their parameters, and the optimizers that hold these."""
