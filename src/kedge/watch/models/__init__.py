"""The watched models of a program, their parameters, and the optimizers that hold these."""
