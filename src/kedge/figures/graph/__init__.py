"""The graph that autograd has made, drawn: operations, what they saved for backward, and the hooks on them."""

from kedge.figures.graph.drawn import Graph, graph

__all__ = ["Graph", "graph"]
