"""Tests of the tables of the memory of a step."""
