"""The page of a program of tensors: one HTML file with its graphs, drawn by Kedge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from kedge.report.page.document import Document
from kedge.report.page.render import assembled, asset, bundled
from kedge.report.shown_run import ShownRun
from kedge.report.tensors.content import (
    course,
    findable_leaves,
    first_broken,
    graphs_of,
    in_order,
    kept,
    name_of,
    shape_of,
    title_of,
    told_firing,
    told_graph,
    told_hook,
    told_program,
    told_times,
)
from kedge.report.tensors.drawing import drawn_graph, left_undrawn
from kedge.report.verdict import tone, verdict
from kedge.report.what_ran import UNNAMED
from kedge.short_text import compact, counted
from kedge.shown_text import visible
from kedge.store.events import TensorGraphEvent

_KEY = (
    "arrows go with the data, gradients against them",
    "blue: leaves, whose gradients are kept",
    "dashed: constants",
    "yellow frame: hooks of the program",
    "red frame: not finite",
)
_CURVE_WIDTH = 40


def render_tensors_page(shown_run: ShownRun) -> str:
    """Return the recording of a program of tensors as an HTML page."""
    recording = shown_run.recording
    content = "\n".join([*_head(shown_run), *map(_section, graphs_of(recording))])
    name = recording.path.name
    body = asset("tensors.html", __package__)
    body = body.replace("{{name}}", _text(name)).replace("{{content}}", content)
    code = bundled(("elements.js", "theme.js"), asset("tensors.js", __package__))
    style = asset("tensors.css", __package__)
    return assembled(body, code, Document({"run": {"name": name}}, {}), more_style=style)


def _head(shown_run: ShownRun) -> Iterator[str]:
    judgement = shown_run.judgement
    yield "<section>"
    yield f'<h2 class="line">{_text(shown_run.command or UNNAMED)}</h2>'
    end = shown_run.recording.end
    if end is not None and end.error:
        yield f'<p class="trouble">ended with {_text(end.error)}</p>'
    told = told_program(shown_run.recording)
    if told:
        yield f'<p class="told">{_text(told)}</p>'
    broken = first_broken(shown_run.recording)
    if broken:
        yield f'<p class="trouble">{_text(broken)}</p>'
    if judgement.findings or judgement.measured:
        yield f'<p id="verdict" class="{tone(judgement)}">{_text(verdict(judgement))}</p>'
    for finding in judgement.findings:
        yield (
            f'<p class="severity {finding.severity}"><b>{_text(finding.code)}</b> '
            f"{_text(finding.site)}: {_text(finding.message)}</p>"
        )
    for curve in shown_run.drawn_curves:
        ends = f"{compact(curve.values[0])} → {compact(curve.values[-1])}"
        line = f"{curve.title}  {ends}  {curve.drawn(_CURVE_WIDTH).plain}"
        yield f'<p class="curve">{_text(line)}</p>'
    yield "</section>"


def _section(graph: TensorGraphEvent) -> str:
    parts = ["<section>", f'<h2 class="line">{_text(title_of(graph))}</h2>']
    told = told_graph(graph)
    undrawn = left_undrawn(graph)
    if undrawn:
        told += f" · the drawing begins after {counted(undrawn, 'tensor')}"
    if told:
        parts.append(f'<p class="told">{_text(told)}</p>')
    parts.append(f'<figure tabindex="0">{_safe(drawn_graph(graph))}</figure>')
    keys = "".join(f"<span>{_text(each)}</span>" for each in _KEY)
    parts.append(f'<p class="key">{keys}</p>')
    parts += _leaves(graph)
    parts += _hooks(graph)
    parts.append("</section>")
    return "\n".join(parts)


def _leaves(graph: TensorGraphEvent) -> Iterator[str]:
    rows = []
    for place, node in findable_leaves(graph):
        gradient = course(node.gradient, node.last_gradient) or "none arrived"
        accumulated = kept(node) or ("the same" if node.kept else "None")
        value = course(node.value, node.last)
        rows.append([name_of(node, place), shape_of(node.value), value, gradient, accumulated])
    if rows:
        yield "<h3>Leaves</h3>"
        yield _table(("leaf", "type", "value", "gradient", ".grad after it"), rows)


def _hooks(graph: TensorGraphEvent) -> Iterator[str]:
    if not graph.hooks:
        return
    yield "<h3>Hooks, in the order of their first calls</h3>"
    head = ("on", "kind", "hook", "called", "with, and what it did")
    rows = []
    for hook in in_order(graph.hooks):
        calls = [f"<li>{_text(told_firing(firing))}</li>" for firing in hook.firings]
        name = name_of(graph.nodes[hook.node], hook.node)
        did = f"<ol>{''.join(calls)}</ol>" if calls else ""
        texts = [_text(each) for each in (name, hook.kind, told_hook(hook), told_times(hook))]
        rows.append([*texts, did])
    yield _table_of(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _table_of(head, [[_text(cell) for cell in row] for row in rows])


def _table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are markup."""
    titles = "".join(f"<th>{_text(each)}</th>" for each in head)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f'<tr><td class="name">{first}</td>{cells}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _text(text: str) -> str:
    return _safe(escape(visible(text)))


def _safe(markup: str) -> str:
    """Return markup in which no text looks like a name of a part of the page."""
    return markup.replace("{", "&#123;")
