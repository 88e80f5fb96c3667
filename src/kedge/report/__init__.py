"""Recordings and findings, drawn in a terminal and as pages."""
