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
_HOOKED = "#0072b2"
_BACKWARD = re.compile(r"Backward\d*$")
_HEAD = """digraph {
  graph [rankdir=TB, bgcolor=white, fontname="Helvetica", fontsize=13, labelloc=t, labeljust=l, nodesep=0.25, ranksep=0.35]
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
        for call in dict.fromkeys(
            box.calls[len(calls)] for box in folded.boxes if _is_inside(box.calls, calls)
        ):
            deeper = (*calls, call)
            yield f"{indent}subgraph {_quoted('cluster_' + repr(deeper))} {{"
            yield f'{indent}  label={_quoted(_named(call, calls, words, again))}; color="#8c959f"; style=rounded; fontsize=12'
            yield from inside(deeper, indent + "  ")
            yield f"{indent}}}"

    legend = "arrows go with the data; the darker, the more is saved; blue frames have hooks"
    lines = [
        _HEAD,
        f"  label={_quoted(f'{words.head}{chr(10)}{legend}{chr(10)}')}",
        *inside((), "  "),
    ]
    lines += [f"  n{before} -> n{after}" for before, after in folded.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _is_inside(calls: Calls, outer: Calls) -> bool:
    return len(calls) > len(outer) and calls[: len(outer)] == outer


def _called_again(boxes: Sequence[Box]) -> set[str | None]:
    """Return the modules with several calls in the drawing."""
    calls = {call for box in boxes for call in (*box.calls, *([box.of] if box.of else []))}
    return {path for path, times in Counter(path for path, _ in calls).items() if times > 1}


def _named(call: Call, around: Calls, words: GraphLabels, again: set[str | None]) -> str:
    """Return a call's path, without that of the module around it, and its type."""
    path, number = call
    outer = around[-1][0] if around else None
    short = (path or "").removeprefix(f"{outer}.") if outer else path or ""
    times = f"#{number}" if path in again else ""
    return f"{short}{times}  {words.types.get(path or '', '')}".strip()


def _attributes(box: Box, words: GraphLabels, again: set[str | None], most: int) -> str:
    node = box.nodes[0]
    alone = box.of is None and len(box.nodes) == 1
    lines = list(_of_node(node, box.calls) if alone else _of_several(box, words, again))
    if box.bytes:
        lines.append(f"saves {sized(box.bytes)}")
    elif alone and node.saved:
        lines.append(f"saves {', '.join(sorted({field.why for field in node.saved if field.why}))}")
    lines += _hooks(box.hooks)
    style = [f"label={_quoted(chr(10).join(lines))}"]
    if alone and node.kind != "operation":
        style.append(
            'fillcolor="#eef1f4"; shape=ellipse; margin="0.04,0.03"'
            if node.kind == "leaf"
            else 'fillcolor="#eef1f4"'
        )
    elif most:
        style.append(f'fillcolor="{_SHADES[round(box.bytes / most * (len(_SHADES) - 1))]}"')
    if box.hooks:
        style.append(f'color="{_HOOKED}"; penwidth=2')
    return "; ".join(style)


def _of_node(node: GraphNode, around: Calls) -> Iterator[str]:
    shape = f"[{', '.join(map(str, node.shape))}]" if node.shape is not None else ""
    if node.kind == "operation":
        yield _operation(node)
        yield shape
    else:
        yield node.leaf.removeprefix(f"{around[-1][0]}." if around else "") or "leaf"
        yield shape


def _of_several(box: Box, words: GraphLabels, again: set[str | None]) -> Iterator[str]:
    names = list(dict.fromkeys(map(_operation, box.operations)))
    yield _short(", ".join(names)) if box.of is None else _named(box.of, box.calls, words, again)
    few = box.of is not None and len(box.operations) <= _NAMED
    parameters = sum(node.kind == "parameter" for node in box.nodes)
    counts = [", ".join(names) if few else counted(len(box.operations), "operation")]
    yield ", ".join([*counts, *([counted(parameters, "parameter")] if parameters else [])])


def _hooks(hooks: Sequence[GraphHook]) -> Iterator[str]:
    """Yield the first few hooks, equal ones together, and the number of the others."""
    alike = Counter(_short(_of_hook(hook)) for hook in hooks)
    for text, times in list(alike.items())[:_HOOKS_NAMED]:
        yield text + (f" x{times}" if times > 1 else "")
    rest = sum(list(alike.values())[_HOOKS_NAMED:])
    if rest:
        yield f"and {counted(rest, 'more hook')}"


def _of_hook(hook: GraphHook) -> str:
    return f"kedge {hook.name}" if hook.owner == "kedge" else str(hook)


def _operation(node: GraphNode) -> str:
    """Return an operation's name without autograd's suffix."""
    return _BACKWARD.sub("", node.name)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _quoted(text: str) -> str:
    """Return a text quoted for graphviz, with special characters escaped."""
    plain = visible(text, lines=True).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{plain}"'
