"""Recordings and findings, drawn in a terminal and as pages."""

import random

# On import, Rich draws a number from Python's generator, which the program may have seeded before
# it imports PyTorch. Every import of Rich in a program comes after this one.
_numbers = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_numbers)
