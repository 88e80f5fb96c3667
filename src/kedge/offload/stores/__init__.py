"""Stores for moved bytes: host memory, or a file."""
