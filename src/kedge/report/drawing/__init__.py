"""Drawings of graphs as SVG, laid out by Kedge itself; they need no other program."""
