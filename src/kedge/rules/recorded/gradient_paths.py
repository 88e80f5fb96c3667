"""Where the path of gradients from the loss to a parameter ends, as far as a recording shows it.

# Note [Where a path ends]
A recording shows for each module whether it was called, whether its output had a graph, and whether
a gradient came to that output. Modules are in the order in which they returned. So the path from
the loss to a module that was called and got no gradient ends after the last module behind it that
had a graph and got none, and before the next one that did get one. It does not show what is between
two modules: `detach()`, `.data`, numbers taken out of the graph, a result that the loss does not
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kedge.rules.recorded.roots import within
from kedge.store.recording import Recording


class PathEnd(NamedTuple):
    """Where the path of gradients to a parameter ends.

    Attributes:
        last: The last module without a gradient, as a path; the module of the parameter itself
            where it got one.
        after: The next module that got a gradient; None if none did.
        without: The next module that returned a value without a graph, if that is why; None if not.
        inside: Whether the parameter's own module got a gradient.
    """

    last: str
    after: str | None
    without: str | None
    inside: bool


@dataclass(frozen=True)
class GradientPaths:
    """The modules of one root in the order in which they returned.

    Attributes:
        graphs: Whether the output of each module had a graph, by path.
        graded: The paths of modules whose output got a gradient.
    """

    graphs: Mapping[str, bool]
    graded: frozenset[str]

    @classmethod
    def of(cls, recording: Recording, root: int) -> GradientPaths:
        """Return the modules of a root that were called."""
        graphs: dict[str, bool] = {}
        for site in recording.of_kind("out"):
            if site.root == root and len(recording.rows(site)):
                graphs[site.path] = graphs.get(site.path, False) or site.node is not None
        if not any(graphs.values()):  # as in compiled code, whose values have no node
            graphs = dict.fromkeys(graphs, True)
        grads = (
            site
            for site in recording.of_kind("out.grad")
            if site.root == root and len(recording.rows(site))
        )
        return cls(graphs, frozenset(site.path for site in grads))

    def end(self, parameter: str, top: str) -> PathEnd | None:
        """Return where the path to a parameter ends; None if no module that holds it was called.

        Args:
            parameter: Its path.
            top: The path of its root.
        """
        owner = parameter.rpartition(".")[0]
        while owner not in self.graphs and within(owner, top) and owner != top:
            owner = owner.rpartition(".")[0]  # of a ParameterList, which is not called
        if owner not in self.graphs:
            return None
        if owner in self.graded:
            return PathEnd(owner, None, None, inside=True)
        if not self.graphs[owner]:
            return PathEnd(owner, None, owner, inside=False)
        last, order = owner, list(self.graphs)
        without: str | None = None
        for path in order[order.index(owner) + 1 :]:
            if path in self.graded:
                return PathEnd(last, path, without, inside=False)
            if within(owner, path) or within(last, path):
                continue  # a container of it
            if self.graphs[path]:
                last, without = path, None
            elif without is None:
                without = path
        return PathEnd(last, None, without, inside=False)

    def whole(self, end: PathEnd) -> str:
        """Return the outermost module without a gradient that holds the last one before the end, and not what is after it."""
        around = [
            path
            for path, graph in self.graphs.items()
            if path and graph and path not in self.graded and within(end.last, path)
        ]
        return min(
            (path for path in around if end.after is None or not within(end.after, path)),
            key=len,
            default=end.last,
        )

    def outermost(self, path: str) -> str:
        """Return the outermost module around one that returned a value without a graph, too."""
        around = [
            other
            for other, graph in self.graphs.items()
            if other and within(path, other) and not graph
        ]
        return min(around, key=len, default=path) or "the model itself"
