"""Compares the bits that a program computes with and without watching."""
