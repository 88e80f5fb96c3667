"""A folded graph in the DOT language of graphviz; arrows follow the data, gradients run against them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kedge.figures.graph.folding import Box, Call, Calls, FoldedGraph
from kedge.inspection.autograd_graph import GraphHook, GraphNode
from kedge.short_text import counted, sized
from kedge.shown_text import visible

_HOOKS_NAMED = 3
_LONGEST = 60
_NAMED = 3
_SHADES = ("#ffffff", "#fff3e6", "#ffe3c7", "#ffcf9e", "#ffb870")
"""The more a box saves, the darker it is."""
_FRAME = 'color="#8c959f"; style=rounded; fontsize=12'
_HOOKED = "#0072b2"
_BACKWARD = re.compile(r"Backward\d*$")
_HEAD = """digraph {
  graph [rankdir=TB, bgcolor=white, fontname="Helvetica", fontsize=13]
  graph [labelloc=t, labeljust=l, nodesep=0.25, ranksep=0.35]
  node [shape=box, style="filled,rounded", fillcolor=white, color="#57606a", fontname="Helvetica", fontsize=11]
  node [margin="0.12,0.06"]
  edge [color="#57606a", arrowsize=0.6]"""


@dataclass(frozen=True)
class GraphLabels:
    """The texts of a drawing.

    Attributes:
        types: Class names by path.
        head: The heading.
    """

    types: Mapping[str, str]
    head: str


def written(folded: FoldedGraph, words: GraphLabels) -> str:
    """Return a folded graph in the DOT language."""
    most = max((box.bytes for box in folded.boxes), default=0)
    numbers = {id(box): number for number, box in enumerate(folded.boxes)}
    again = _called_again(folded.boxes)

    def inside(calls: Calls, indent: str) -> Iterator[str]:
        for box in folded.boxes:
            if box.calls == calls:
                yield f"{indent}n{numbers[id(box)]} [{_attributes(box, words, again, most)}]"
        deeper = [box.calls[: len(calls) + 1] for box in folded.boxes]
        for inner in dict.fromkeys(deeper):
            if len(inner) == len(calls) or inner[:-1] != calls:
                continue
            name = _named(inner[-1], calls, words, again)
            yield f"{indent}subgraph {_quoted('cluster_' + repr(inner))} {{"
            yield f"{indent}  label={_quoted(name)}; {_FRAME}"
            yield from inside(inner, indent + "  ")
            yield f"{indent}}}"

    legend = "arrows go with the data; the darker, the more is saved; blue frames have hooks"
    title = _quoted(f"{words.head}\n{legend}\n")
    lines = [_HEAD, f"  label={title}", *inside((), "  ")]
    lines += [f"  n{before} -> n{after}" for before, after in folded.edges]
    lines.append("}")
    return "\n".join(lines) + "\n"


def _called_again(boxes: Sequence[Box]) -> set[str | None]:
    """Return the modules with several calls in the drawing."""
    calls: set[Call] = set()
    for box in boxes:
        calls.update(box.calls)
        if box.of:
            calls.add(box.of)
    count = Counter(path for path, _ in calls)
    return {path for path, times in count.items() if times > 1}


def _named(call: Call, around: Calls, words: GraphLabels, again: set[str | None]) -> str:
    """Return a call's path, without that of the module around it, and its type."""
    path, number = call
    type_ = words.types.get(path or "", "")
    name = _short_path(path or "", around)
    if path in again:
        name += f"#{number}"
    return f"{name}  {type_}".strip()


def _short_path(path: str, around: Calls) -> str:
    """Return a path without that of the module around it."""
    if not around:
        return path
    outer, _ = around[-1]
    if not outer:
        return path
    return path.removeprefix(f"{outer}.")


def _attributes(box: Box, words: GraphLabels, again: set[str | None], most: int) -> str:
    node = box.nodes[0]
    alone = box.of is None and len(box.nodes) == 1
    lines = _of_node(node, box.calls) if alone else _of_several(box, words, again)
    if box.bytes:
        lines.append(f"saves {sized(box.bytes)}")
    elif alone and node.saved:
        reasons = sorted({field.why for field in node.saved if field.why})
        lines.append(f"saves {', '.join(reasons)}")
    lines += _hooks(box.hooks)
    label = _quoted("\n".join(lines))

    style = [f"label={label}"]
    if alone and node.kind == "leaf":
        style.append('fillcolor="#eef1f4"; shape=ellipse; margin="0.04,0.03"')
    elif alone and node.kind == "parameter":
        style.append('fillcolor="#eef1f4"')
    elif most:
        shade = _SHADES[round(box.bytes / most * (len(_SHADES) - 1))]
        style.append(f'fillcolor="{shade}"')
    if box.hooks:
        style.append(f'color="{_HOOKED}"; penwidth=2')
    return "; ".join(style)


def _of_node(node: GraphNode, around: Calls) -> list[str]:
    name = _operation(node)
    if node.kind != "operation":
        name = _short_path(node.leaf, around) or "leaf"
    if node.shape is None:
        return [name, ""]
    return [name, f"[{', '.join(map(str, node.shape))}]"]


def _of_several(box: Box, words: GraphLabels, again: set[str | None]) -> list[str]:
    content = counted(len(box.operations), "operation")
    names = ", ".join(dict.fromkeys(map(_operation, box.operations)))
    name = _short(names)
    if box.of is not None:
        name = _named(box.of, box.calls, words, again)
        if len(box.operations) <= _NAMED:
            content = names

    parameters = sum(node.kind == "parameter" for node in box.nodes)
    if parameters:
        content += f", {counted(parameters, 'parameter')}"
    return [name, content]


def _hooks(hooks: Sequence[GraphHook]) -> Iterator[str]:
    """Yield the first few hooks, equal ones together, and the number of the others."""
    alike: Counter[str] = Counter()
    for hook in hooks:
        text = f"kedge {hook.name}" if hook.owner == "kedge" else str(hook)
        alike[_short(text)] += 1

    for text, times in list(alike.items())[:_HOOKS_NAMED]:
        if times > 1:
            yield f"{text} x{times}"
        else:
            yield text
    rest = sum(list(alike.values())[_HOOKS_NAMED:])
    if rest:
        yield f"and {counted(rest, 'more hook')}"


def _operation(node: GraphNode) -> str:
    return _BACKWARD.sub("", node.name)


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 1]}…"


def _quoted(text: str) -> str:
    escaped = visible(text, lines=True).replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("\n", "\\n")
    return f'"{escaped}"'
