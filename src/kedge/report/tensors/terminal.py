"""A program of tensors in a terminal: its graphs as lists, its leaves and its hooks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

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
    newest,
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
from kedge.store.events import TensorGraphEvent, TensorNode, TensorValue
from kedge.store.recording import Recording

_MOST = 40
_HEAD = ("tensor", "from", "type", "value", "gradient", ".grad", "line")


class _Form(NamedTuple):
    """How the list is written: in how many words, for a terminal that is wide enough.

    Attributes:
        told: Returns the text of a value, given the one of the first pass and of the last.
        values: Of which passes the values are.
        left_out: The columns that are left out.
    """

    told: Callable[[TensorValue | None, TensorValue | None], str]
    values: str
    left_out: tuple[str, ...] = ()


_FORMS = (
    _Form(course, "values of the first → the last"),
    _Form(newest, "values of the last"),
    _Form(newest, "values of the last", ("type",)),
    _Form(newest, "values of the last", ("type", ".grad")),
)
"""The forms, the widest first."""


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
        _render_nodes(graph, console, whole=whole)
        _render_hooks(graph, console)
        console.print()
    print_paragraph(Text("kedge report --html draws it.", "dim"), console)


def _render_nodes(graph: TensorGraphEvent, console: Console, *, whole: bool) -> None:
    first = 0
    if not whole:
        first = max(len(graph.nodes) - _MOST, 0)
    shown_nodes = [
        (place, node)
        for place, node in enumerate(graph.nodes)
        if place >= first or node.kind == "leaf"
    ]
    room = console.width - 2
    lines: list[str] = []
    form = _FORMS[0]
    for form in _FORMS:
        cells = [_cells(graph, place, node, form) for place, node in shown_nodes]
        lines = _aligned([_HEAD, *cells], left_out=form.left_out)
        if max(map(len, lines)) <= room:
            break
    told = told_graph(graph, form.values)
    if told:
        print_paragraph(Text(told, "dim"), console)
    for number, line in enumerate(lines):
        style = ""
        if not number:
            style = "dim"
        elif is_broken(shown_nodes[number - 1][1]):
            style = "red"
        console.print(Text(f"  {cut(line, room)}", style))
    if len(shown_nodes) < len(graph.nodes):
        left = counted(len(graph.nodes) - len(shown_nodes), "tensor")
        console.print(Text(f"  … {left} before these; --all shows them", "dim"))


def _aligned(rows: Sequence[Sequence[str]], left_out: Container[str]) -> list[str]:
    """Return rows of cells as lines, without the columns that are empty or left out."""
    used = [
        i
        for i, title in enumerate(rows[0])
        if title not in left_out and any(row[i] for row in rows[1:])
    ]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    return ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows]


def _cells(graph: TensorGraphEvent, place: int, node: TensorNode, form: _Form) -> tuple[str, ...]:
    made: str = node.kind
    if node.kind == "operation":
        taken = ", ".join(name_of(graph.nodes[each], each) for each in node.takes)
        made = f"{visible(node.name)}({taken})"
    line = ""
    if node.source is not None:
        line = visible(str(node.source))
    value = ""
    if node.value and node.value.text:
        value = form.told(node.value, node.last)
    gradient = form.told(node.gradient, node.last_gradient)
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
