"""Puts this folder on the path, so that the tests in its folders find what they share."""
