"""Where the path of gradients from the loss to a parameter ends, as far as a recording shows it.

# Note [Where a path ends]
A recording shows for each module whether it was called, whether its inputs and its output had a
graph, and whether a gradient came to that output. Modules are in the order in which they returned.
So the path from the loss to a module that was called and got no gradient ends after the last module
behind it that had a graph and got none, and before the next one that did get one. If nothing that
this one was given had a graph, then the path ends between the two, unless it is another path. If
something had, or was an input of the model, then the path from the loss goes past the module
without a gradient: what it returned is cut off where it joins the path, or the loss does not use
it. It does not show what is between two modules: `detach()`, `.data`, numbers taken out of the
graph.

The graph of an input is that of its first value. It says nothing where the module's output, which
got a gradient later, had none at first either, as in an evaluation before the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from kedge.rules.recorded.roots import root_path, within
from kedge.rules.recorded.wiring import have_same_figures
from kedge.store.recording import Recording, SiteInfo

#: What a module was given: something with a graph, an input of the model, other numbers without a
#: graph, whole numbers alone.
Given: TypeAlias = Literal["graph", "input", "no graph", "whole numbers"]


class PathEnd(NamedTuple):
    """Where the path of gradients to a parameter ends.

    Attributes:
        last: The last module without a gradient, as a path; the module of the parameter itself
            where it got one.
        after: The next module that got a gradient; None if none did.
        without: The next module that returned a value without a graph, if that is why; None if not.
        inside: Whether the parameter's own module got a gradient.
        given: What the next module was given, be it `without` or `after`; None if that is not known.
    """

    last: str
    after: str | None
    without: str | None
    inside: bool
    given: Given | None = None


@dataclass(frozen=True)
class GradientPaths:
    """The modules of one root in the order in which they returned.

    Attributes:
        graphs: Whether the output of each module had a graph, by path.
        graded: The paths of modules whose output got a gradient.
        given: What each was given, by path.
        unasked: The values with a graph that each returned and that got no gradient, as sites, by
            the path of a module of which other values did get one.
        lines: The line that calls each, by path, as far as it is known.
    """

    graphs: Mapping[str, bool]
    graded: frozenset[str]
    given: Mapping[str, Given] = field(default_factory=dict)
    unasked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, recording: Recording, root: int) -> GradientPaths:
        """Return the modules of a root that were called."""
        outputs = [
            site
            for site in recording.of_kind("out")
            if site.root == root and len(recording.rows(site))
        ]
        graphs: dict[str, bool] = {}
        for site in outputs:
            graphs[site.path] = graphs.get(site.path, False) or site.node is not None
        given = _given(recording, root)
        if not any(graphs.values()):  # as in compiled code, whose values have no node
            graphs = dict.fromkeys(graphs, True)
            given = {}
        grads = [
            site
            for site in recording.of_kind("out.grad")
            if site.root == root and len(recording.rows(site))
        ]
        graded = frozenset(site.path for site in grads)
        answered = {site.site for site in grads}
        unasked: dict[str, list[str]] = {}
        for site in outputs:
            # As in "net:out[1]", the gradient of which is at "net:out.grad[1]".
            path, _, kind = site.site.rpartition(":")
            gradient = f"{path}:{kind.replace('out', 'out.grad', 1)}"
            if site.path in graded and site.node is not None and gradient not in answered:
                unasked.setdefault(site.path, []).append(site.site)
        lines = {site.path: str(site.source) for site in outputs if site.source}
        return cls(graphs, graded, given, unasked, lines)

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
                given = self._given_to(without or path, last)
                return PathEnd(last, path, without, inside=False, given=given)
            if within(owner, path) or within(last, path):
                continue  # a container of it
            if self.graphs[path]:
                last, without = path, None
            elif without is None:
                without = path
        given = self._given_to(without, last)
        return PathEnd(last, None, without, inside=False, given=given)

    def _given_to(self, path: str | None, last: str) -> Given | None:
        """Return what a module after another one was given; None if it holds that one."""
        if path is None or within(last, path):
            return None
        if path in self.graded and not self.graphs[path]:
            return None  # its first values are not of the training
        return self.given.get(path)

    def unasked_around(self, end: PathEnd) -> Sequence[str]:
        """Return what the module with a gradient behind an end returned and got none of, if it holds the last module."""
        if end.after is None or not within(end.last, end.after):
            return ()
        return self.unasked.get(end.after, ())

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


def _given(recording: Recording, root: int) -> dict[str, Given]:
    """Return what each module of a root was given, by path."""
    top = root_path(recording, root)
    inputs = [site for site in recording.of_kind("in") if site.root == root]
    outer = [site for site in inputs if site.path == top]
    found: dict[str, Given] = {}
    for site in inputs:
        given: Given = "no graph"
        if site.node is not None:
            given = "graph"
        elif not site.dtype.startswith(("float", "bfloat", "complex")):
            given = "whole numbers"
        elif any(_is_same(recording, site, other) for other in outer):
            given = "input"
        found[site.path] = min(found.get(site.path, given), given, key=_BY_WEIGHT.index)
    return found


def _is_same(recording: Recording, site: SiteInfo, other: SiteInfo) -> bool:
    """Whether the values of two sites had the same shape and figures."""
    if (site.shape, site.dtype) != (other.shape, other.dtype) or not len(recording.rows(site)):
        return False
    return have_same_figures(recording, site, other)


#: What was given, the most telling first.
_BY_WEIGHT: tuple[Given, ...] = ("graph", "input", "no graph", "whole numbers")
