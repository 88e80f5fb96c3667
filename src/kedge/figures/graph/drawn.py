"""The graph of a forward: `graph` reads it, `Graph` writes and draws it.

It is the one that autograd builds, or, where nothing requires grad, that of the operations.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from kedge import notebook
from kedge.errors import CannotDraw, NoSiteMatched
from kedge.figures.graph.dot import written
from kedge.figures.graph.folding import FoldedGraph, fold
from kedge.figures.graph.labels import GraphLabels
from kedge.figures.graph.placing import by_parameters, by_use
from kedge.figures.graph.without_dot import drawn_here
from kedge.inspection.autograd_graph import GraphNode, read_graph
from kedge.inspection.forward_graph import forward_graph
from kedge.short_text import counted, sized
from kedge.sites import leaves
from kedge.sites.select import Selector, runs, type_names
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import modules_in

MOST = 60
_COLUMNS = ("module", "operations", "saved", "hooks")


class Graph(notebook.Printed):
    """A drawing of a forward's graph: plain numbers and names, which keep nothing of the graph alive.

    ``print(graph)`` prints a table by module; `dot` and `svg` return the drawing, and a notebook
    shows it.

    Attributes:
        nodes: The nodes in the order of execution, leaves first.
        followed: Whether Kedge followed the calls of modules during the forward.
        of_autograd: Whether it is autograd's graph; otherwise nothing required grad, and it is that
            of the forward's operations.
    """

    def __init__(
        self,
        nodes: Iterable[GraphNode],
        types: dict[str, tuple[str, ...]],
        *,
        followed: bool,
        of_autograd: bool = True,
    ) -> None:
        self.nodes = tuple(nodes)
        self.followed = followed
        self.of_autograd = of_autograd
        self._types = types

    def __len__(self) -> int:
        """Return the number of nodes, leaves included."""
        return len(self.nodes)

    @property
    def bytes(self) -> int:
        """The bytes that autograd holds for backward.

        Each storage counts once, parameters and buffers do not.
        """
        return sum(node.bytes for node in self.nodes)

    def dot(self, *, depth: int | None = None, expand: str | None = None, most: int = MOST) -> str:
        """Return the graph in the DOT language of graphviz.

        Args:
            depth: The number of levels of modules to open; None for as many as keep the drawing
                within `most` boxes.
            expand: A selector of further modules to open, such as ``"layer1.0, **{Attention}"``.
            most: The largest number of boxes if `depth` is None.

        Raises:
            NoSiteMatched: If the selector matches no module of the graph.
            CannotDraw: If `most` is below 1 or `depth` below 0.
        """
        return written(self._folded(depth, expand, most), self._labels())

    def _folded(self, depth: int | None, expand: str | None, most: int) -> FoldedGraph:
        if most < 1 or (depth is not None and depth < 0):
            raise CannotDraw(
                f"depth={depth} and most={most}: a drawing needs at least one box, "
                "and a depth of 0 or more"
            )
        opened: set[str] = set()
        if expand is not None:
            opened = self._paths(expand)
        return fold(self.nodes, depth, most, opened)

    def _labels(self) -> GraphLabels:
        types = {path: names[0] for path, names in self._types.items() if names}
        legend = "arrows go with the data"
        if self.of_autograd:
            legend += "; the darker, the more is saved; blue frames have hooks"
        return GraphLabels(types, self._head(), legend)

    def svg(self, *, depth: int | None = None, expand: str | None = None, most: int = MOST) -> str:
        """Return the graph as SVG; the arguments are those of `dot`.

        Graphviz draws it if it is installed, otherwise Kedge itself, with a simpler layout.

        Raises:
            CannotDraw: If graphviz fails; other errors as in `dot`.
        """
        program = shutil.which("dot")
        if program is None:
            return drawn_here(self._folded(depth, expand, most), self._labels())
        text = self.dot(depth=depth, expand=expand, most=most)
        ended = subprocess.run(  # noqa: S603
            [program, "-Tsvg"], input=text, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise CannotDraw(f"graphviz's dot could not draw the graph: {ended.stderr.strip()}")
        return ended.stdout[ended.stdout.index("<svg") :]

    def __str__(self) -> str:
        """Return a table for each outermost module and the rest.

        It has their operations, and the bytes and hooks of autograd's graph.
        """
        table = [_COLUMNS, *self._rows()]
        if not self.of_autograd:
            table = [row[:2] for row in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [self._head(), ""]
        for row in table:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[0] = row[0].ljust(widths[0])
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        return self.svg()

    def _head(self) -> str:
        operations = sum(node.kind == "operation" for node in self.nodes)
        if not self.of_autograd:
            return f"{counted(operations, 'operation')}; nothing requires grad"
        hooks = sum(len(node.hooks) for node in self.nodes)
        return (
            f"{operations:,} operations, {sized(self.bytes)} saved for backward, "
            f"{hooks:,} {'hook' if hooks == 1 else 'hooks'}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for box in fold(self.nodes, 1, MOST).boxes:
            if box.of is not None:
                path, _ = box.of
                operations = f"{len(box.operations):,}"
                hooks = f"{len(box.hooks):,}"
                rows.append((str(path), operations, sized(box.bytes), hooks))

        rest = [node for node in self.nodes if len(node.calls) < 2 and node.kind == "operation"]
        saved = sum(node.bytes for node in rest)
        hooks = f"{sum(len(node.hooks) for node in rest):,}"
        rows.append(("outside of these", f"{len(rest):,}", sized(saved), hooks))
        return rows

    def _paths(self, text: str) -> set[str]:
        there: set[str] = set()
        for node in self.nodes:
            there.update(path for path, _ in node.calls if path is not None)

        found: set[str] = set()
        for term in Selector(text).terms:
            types = self._types
            matched = {path for path in there if term.matches(path, types.get(path, ()))}
            if term.excluded:
                found -= matched
            else:
                found |= matched
        if not found:
            first = ", ".join(sorted(there)[1:6]) or "none: no module was followed"
            raise NoSiteMatched(
                f'expand="{text}" matches no module that made a node of this graph; '
                f"the first that did: {first}"
            )
        return found


def graph(results: Any | Callable[[], Any], model: nn.Module | None = None) -> Graph:
    """Return the graph of a forward: ``graph(lambda: loss_of(model(x), y), model)``.

    It is autograd's graph, with what is saved for backward; or that of the forward's operations, if
    nothing requires grad, as under ``torch.no_grad()``. Call it before backward, which frees the
    saved tensors. Reading neither runs nor unpacks nor changes the graph.

    Args:
        results: A function that runs the forward and returns its result: then Kedge follows the
            calls of the model's modules and knows the module of each operation. Or the result of a
            finished forward, a tensor or any structure of tensors: then operations are assigned to
            modules by the parameters that they take.
        model: The model, to group operations by its modules; its parameters get names, and their
            bytes do not count.

    Returns:
        The graph.

    Raises:
        CannotDraw: If no tensor among finished results requires grad, if a function returns none
            and makes no visible operation either, or if `results` is a model.
    """
    if isinstance(results, nn.Module):
        raise CannotDraw(
            f"graph({type(results).__name__}): "
            "a model has no graph until it is called; "
            "use graph(lambda: model(x), model)"
        )
    types: dict[str, tuple[str, ...]] = {}
    if model is not None:
        for path, module in modules_in(dynamo.unwrap(model)).items():
            if runs(module):
                types[path] = type_names(module)

    if not callable(results) or isinstance(results, Tensor):
        if not _requires_grad(results):
            raise _no_graph(results, "; or give graph a function that runs it: lambda: model(x)")
        nodes = by_parameters(read_graph(results, model), types)
        return Graph(by_use(nodes), types, followed=False)

    with forward_graph(model) as (forward, calls):
        made = results()
    if _requires_grad(made):
        nodes = read_graph(made, model, calls)
        return Graph(by_use(nodes), types, followed=True)
    nodes = forward.nodes()
    if not any(node.kind == "operation" for node in nodes):
        raise _no_graph(made, "; its forward makes no visible operation either")
    return Graph(by_use(nodes), types, followed=True, of_autograd=False)


def _requires_grad(results: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in leaves.find(results))


def _no_graph(results: Any, more: str) -> CannotDraw:
    return CannotDraw(
        f"graph(...) got {leaves.describe(results)}, "
        "and nothing in it requires grad, "
        "so autograd has no graph of it; "
        f"run the forward with gradients on, not under torch.no_grad(){more}"
    )
