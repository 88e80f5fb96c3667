"""Pairs of the same site in two recordings, by their names or by their place in the data's flow."""
