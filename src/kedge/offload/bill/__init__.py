"""The bill: the modules and lines that hold memory for backward, when, and the remedies that would free it."""
