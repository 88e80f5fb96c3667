"""The drawing of an autograd graph: operations, the bytes that they save for backward, and the hooks on them."""

from kedge.figures.graph.drawn import Graph, graph

__all__ = ["Graph", "graph"]
