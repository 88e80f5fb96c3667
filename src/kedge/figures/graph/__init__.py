"""The drawing of an autograd graph: operations, what they save for backward, and their hooks."""

from kedge.figures.graph.drawn import Graph, graph

__all__ = ["Graph", "graph"]
