"""Whether a program computes the same bits when it is watched."""
