"""Handles, which replace saved tensors, and the entries of bytes that several handles share."""
