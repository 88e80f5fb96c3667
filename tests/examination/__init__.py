"""Tests of the examination of a training before it runs."""
