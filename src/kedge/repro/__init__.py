"""Keeps the call that made the first non-finite value, so that it can be run again alone."""
