"""A program of tensors in a terminal: its graphs as lists, its leaves and its hooks."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from kedge.report.fitted_text import cut, print_paragraph
from kedge.report.tensors.content import (
    course,
    first_broken,
    graphs_of,
    in_order,
    is_broken,
    kept,
    name_of,
    shape_of,
    title_of,
    told_firing,
    told_graph,
    told_hook,
    told_program,
    told_saved,
    told_times,
)
from kedge.short_text import counted
from kedge.shown_text import visible
from kedge.store.events import TensorGraphEvent, TensorNode
from kedge.store.recording import Recording

_MOST = 40
_HEAD = ("tensor", "from", "type", "value", "gradient", ".grad", "line")


def render_tensors(recording: Recording, console: Console, *, whole: bool) -> None:
    """Print the graphs of a program of tensors.

    Args:
        recording: The recording.
        console: The console to print to.
        whole: Whether to list all tensors of large graphs.
    """
    told = told_program(recording)
    if told:
        print_paragraph(Text(told), console)
    broken = first_broken(recording)
    if broken:
        print_paragraph(Text(broken, "red"), console)
    console.print()
    for graph in graphs_of(recording):
        console.print(Text(cut(title_of(graph), console.width), "bold"))
        if told_graph(graph):
            print_paragraph(Text(told_graph(graph), "dim"), console)
        _render_nodes(graph, console, whole=whole)
        _render_hooks(graph, console)
        console.print()
    print_paragraph(Text("kedge report --html draws it.", "dim"), console)


def _render_nodes(graph: TensorGraphEvent, console: Console, *, whole: bool) -> None:
    first = 0
    if not whole:
        first = max(len(graph.nodes) - _MOST, 0)
    rows: list[tuple[str, ...]] = [_HEAD]
    broken = [False]
    for place, node in enumerate(graph.nodes):
        if place >= first or node.kind == "leaf":
            rows.append(_cells(graph, place, node))
            broken.append(is_broken(node))
    used = [i for i in range(len(_HEAD)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    for number, (row, bad) in enumerate(zip(rows, broken, strict=True)):
        line = "  ".join(row[i].ljust(widths[i]) for i in used).rstrip()
        style = "red" if bad else "dim" if not number else ""
        console.print(Text(f"  {cut(line, console.width - 2)}", style))
    if len(rows) - 1 < len(graph.nodes):
        left = counted(len(graph.nodes) - len(rows) + 1, "tensor")
        console.print(Text(f"  … {left} before these; --all shows them", "dim"))


def _cells(graph: TensorGraphEvent, place: int, node: TensorNode) -> tuple[str, ...]:
    made: str = node.kind
    if node.kind == "operation":
        taken = ", ".join(name_of(graph.nodes[each], each) for each in node.takes)
        made = f"{visible(node.name)}({taken})"
    line = ""
    if node.source is not None:
        line = visible(str(node.source))
    value = course(node.value, node.last) if node.value and node.value.text else ""
    gradient = course(node.gradient, node.last_gradient)
    return (name_of(node, place), made, shape_of(node.value), value, gradient, kept(node), line)


def _render_hooks(graph: TensorGraphEvent, console: Console) -> None:
    for line in [*_told_hooks(graph), *_told_kept(graph)]:
        print_paragraph(Text(line), console)


def _told_hooks(graph: TensorGraphEvent) -> Iterator[str]:
    for hook in in_order(graph.hooks):
        on = name_of(graph.nodes[hook.node], hook.node)
        told = told_times(hook)
        if hook.firings:
            told += f": {told_firing(hook.firings[0])}"
        if len(hook.firings) > 1:
            told += f"; last: {told_firing(hook.firings[-1])}"
        yield f"  hook on {on}: {hook.kind} {told_hook(hook)}, {told}"


def _told_kept(graph: TensorGraphEvent) -> Iterator[str]:
    for place, node in enumerate(graph.nodes):
        if node.saved:
            yield f"  {name_of(node, place)} keeps for backward: {told_saved(node)}"
