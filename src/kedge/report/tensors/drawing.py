"""The drawing of one graph of a program of tensors."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.report.drawing.svg import SvgBox, graph_svg
from kedge.report.fitted_text import cut
from kedge.report.tensors.content import (
    course,
    is_broken,
    kept,
    shape_of,
    shown,
    title_of,
    told_saved,
)
from kedge.short_text import counted
from kedge.shown_text import visible
from kedge.store.events import TensorGraphEvent, TensorHook, TensorNode, TensorValue

MOST_BOXES = 120
"""So many tensors of a graph are drawn; what comes before them is left out."""
_LONGEST = 34
_HOOKS = 3


def drawn_graph(graph: TensorGraphEvent) -> str:
    """Return a graph as SVG without a style of its own."""
    first = max(len(graph.nodes) - MOST_BOXES, 0)
    drawn = [place for place in range(len(graph.nodes)) if place >= first or _is_leaf(graph, place)]
    places = {place: number for number, place in enumerate(drawn)}
    boxes = []
    edges = []
    for place in drawn:
        node = graph.nodes[place]
        hooks = [hook for hook in graph.hooks if hook.node == place]
        boxes.append(_box(node, hooks, is_root=place in graph.roots))
        edges += [(places[taken], places[place]) for taken in node.takes if taken in places]
    label = f"{title_of(graph)}: {counted(len(drawn), 'tensor')}"
    return graph_svg(boxes, edges, label=label, style="")


def left_undrawn(graph: TensorGraphEvent) -> int:
    """Return how many tensors the drawing leaves out."""
    first = max(len(graph.nodes) - MOST_BOXES, 0)
    return sum(not _is_leaf(graph, place) for place in range(first))


def _is_leaf(graph: TensorGraphEvent, place: int) -> bool:
    return graph.nodes[place].kind == "leaf"


def _box(node: TensorNode, hooks: list[TensorHook], *, is_root: bool) -> SvgBox:
    kinds = []
    if node.kind == "leaf":
        kinds.append("leaf")
    elif node.kind == "constant":
        kinds.append("input")
    if is_root:
        kinds.append("root")
    if hooks:
        kinds.append("hooked")
    if is_broken(node):
        kinds.append("broken")
    lines = tuple(cut(line, _LONGEST) for line in _lines(node, hooks))
    return SvgBox(lines, tuple(kinds), tip="\n".join(_tip(node)))


def _lines(node: TensorNode, hooks: list[TensorHook]) -> Iterator[str]:
    name = visible(node.name)
    if node.variable and node.kind == "operation":
        yield f"{visible(node.variable)} = {name}"
    else:
        yield visible(node.variable) or name
    yield shape_of(node.value) or ("result not seen" if node.kind == "operation" else node.kind)
    if node.value is not None and node.value.text:
        yield from _course("", node.value, node.last)
    if node.gradient is not None:
        yield from _course("grad ", node.gradient, node.last_gradient)
    if kept(node):
        yield f".grad {kept(node)}"
    if node.saved:
        yield f"saves {told_saved(node)}"
    for hook in hooks[:_HOOKS]:
        yield _told(hook)
    if len(hooks) > _HOOKS:
        yield f"and {counted(len(hooks) - _HOOKS, 'more hook')}"


def _course(what: str, first: TensorValue, last: TensorValue | None) -> Iterator[str]:
    """Yield a value that changed from pass to pass in one line, or in two if it is too long."""
    whole = f"{what}{course(first, last)}"
    if len(whole) <= _LONGEST or last is None:
        yield whole
        return
    yield f"{what}{_short(first)}"
    yield f"→ {_short(last)}"


def _short(value: TensorValue) -> str:
    """Return a value without the mean of its numbers."""
    return shown(value).partition(", mean")[0]


def _told(hook: TensorHook) -> str:
    """Return what a hook did, in few words."""
    name = visible(hook.name)
    if hook.kind == "retain-grad":
        return "retain_grad()"
    if not hook.firings:
        return f"hook {name}: not called"
    last = hook.firings[-1]
    if last.result is None:
        did = {"raised": "raised"}.get(last.did, "called")
        return f"hook {name}: {did}"
    return f"hook {name} → {shown(last.result)}"


def _tip(node: TensorNode) -> Iterator[str]:
    yield f"{node.name} {shape_of(node.value)}".strip()
    if node.source is not None:
        yield f"{node.source}: {node.source.text or ''}"
    if node.value is not None:
        yield f"value {course(node.value, node.last)}"
    if node.gradient is not None:
        yield f"gradient {course(node.gradient, node.last_gradient)}"
    if node.kept is not None:
        yield f".grad {shown(node.kept)}"
