"""Tests of the tree of held tensors, and of its picture as text."""
