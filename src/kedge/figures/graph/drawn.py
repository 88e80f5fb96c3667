"""The autograd graph of a forward: `graph` reads it, `Graph` writes and draws it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from kedge import notebook
from kedge.errors import CannotDraw, NoSiteMatched
from kedge.figures.graph.dot import GraphLabels, written
from kedge.figures.graph.folding import fold
from kedge.figures.graph.placing import by_parameters, by_use
from kedge.inspection.autograd_graph import GraphNode, following, read_graph
from kedge.short_text import sized
from kedge.sites import leaves
from kedge.sites.select import Selector, runs, type_names
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import modules_in

MOST = 60
_COLUMNS = ("module", "operations", "saved", "hooks")


class Graph(notebook.Printed):
    """A drawing of an autograd graph: plain numbers and names, which keep nothing of the graph alive.

    ``print(graph)`` prints a table by module; `dot` and `svg` return the drawing, and a notebook
    shows it.

    Attributes:
        nodes: The nodes in the order of execution, leaves first.
        followed: Whether Kedge followed the calls of modules during the forward.
    """

    def __init__(
        self, nodes: Iterable[GraphNode], types: dict[str, tuple[str, ...]], *, followed: bool
    ) -> None:
        self.nodes = tuple(nodes)
        self.followed = followed
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
        if most < 1 or (depth is not None and depth < 0):
            raise CannotDraw(
                f"depth={depth} and most={most}: a drawing needs at least one box, "
                "and a depth of 0 or more"
            )
        opened: set[str] = set()
        if expand is not None:
            opened = self._paths(expand)
        folded = fold(self.nodes, depth, most, opened)
        types = {path: names[0] for path, names in self._types.items() if names}
        return written(folded, GraphLabels(types, self._head()))

    def svg(self, *, depth: int | None = None, expand: str | None = None, most: int = MOST) -> str:
        """Return the graph as SVG; the arguments are those of `dot`.

        Raises:
            CannotDraw: If graphviz is not installed or fails; other errors as in `dot`.
        """
        program = shutil.which("dot")
        if program is None:
            raise CannotDraw(
                "an SVG of a graph needs graphviz's program dot, "
                "which this machine does not have: "
                "install graphviz (apt-get install graphviz), "
                "or draw the text, Graph.dot(), on another machine"
            )
        text = self.dot(depth=depth, expand=expand, most=most)
        ended = subprocess.run(  # noqa: S603
            [program, "-Tsvg"], input=text, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise CannotDraw(f"graphviz's dot could not draw the graph: {ended.stderr.strip()}")
        return ended.stdout[ended.stdout.index("<svg") :]

    def __str__(self) -> str:
        """Return a table of operations, bytes and hooks for each outermost module and the rest."""
        table = [_COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [self._head(), ""]
        for row in table:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[0] = row[0].ljust(widths[0])
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_svg_(self) -> str | None:
        if not shutil.which("dot"):
            return None
        return self.svg()

    def _repr_html_(self) -> str | None:
        if shutil.which("dot"):
            return None
        return notebook.table(_COLUMNS, self._rows(), title=self._head(), align="mrrr")

    def _head(self) -> str:
        operations = sum(node.kind == "operation" for node in self.nodes)
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
    """Return the autograd graph of a result: ``graph(lambda: loss_of(model(x), y), model)``.

    Call it before backward, which frees the saved tensors. Reading neither runs nor unpacks nor
    changes the graph.

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
        CannotDraw: If no tensor among the results requires grad, or `results` is a model.
    """
    if isinstance(results, nn.Module):
        raise CannotDraw(
            f"graph({type(results).__name__}): "
            "a model has no graph until it is called; "
            "use graph(lambda: model(x), model)"
        )
    followed = callable(results) and not isinstance(results, Tensor)
    if not followed:
        _check(results)
        nodes = read_graph(results, model)
    elif model is None:
        made = results()
        _check(made)
        nodes = read_graph(made)
    else:
        with following(model) as calls:
            made = results()
        _check(made)
        nodes = read_graph(made, model, calls)

    types: dict[str, tuple[str, ...]] = {}
    if model is not None:
        for path, module in modules_in(dynamo.unwrap(model)).items():
            if runs(module):
                types[path] = type_names(module)
    if not followed:
        nodes = by_parameters(nodes, types)
    return Graph(by_use(nodes), types, followed=followed)


def _check(results: Any) -> None:
    found = [tensor for _, tensor in leaves.find(results)]
    if not any(tensor.requires_grad for tensor in found):
        raise CannotDraw(
            f"graph(...) got {leaves.describe(results)}, "
            "and nothing in it requires grad, "
            "so autograd has no graph of it; "
            "run the forward with gradients on, not under torch.no_grad()"
        )
