"""The command line: one file for each command, which is why there are so many, and the parts that several share."""

from time import perf_counter

BEGAN = perf_counter()
"""When this process began to import the command line, before the program that it runs."""
