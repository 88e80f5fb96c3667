"""The drawing of an autograd graph: operations, what they save for backward, and their hooks.

`kedge.figures.graph` is both this package and the function that draws, so the package itself can be
called.
"""

from kedge.calls.called_package import make_callable
from kedge.figures.graph.drawn import Graph, graph

__all__ = ["Graph", "graph"]

make_callable("kedge.figures.graph", "kedge.figures.graph.drawn")
