"""A folded graph in the DOT language of graphviz; arrows follow the data, gradients run against them."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.figures.graph.folding import Calls, FoldedGraph
from kedge.figures.graph.labels import (
    BoxLabel,
    GraphLabels,
    called_again,
    labels_of,
    name_of_call,
)
from kedge.shown_text import visible

_SHADES = ("#ffffff", "#fff3e6", "#ffe3c7", "#ffcf9e", "#ffb870")
_FRAME = 'color="#8c959f"; style=rounded; fontsize=12'
_HOOKED = "#0072b2"
_HEAD = """digraph {
  graph [rankdir=TB, bgcolor=white, fontname="Helvetica", fontsize=13]
  graph [labelloc=t, labeljust=l, nodesep=0.25, ranksep=0.35]
  node [shape=box, style="filled,rounded", fillcolor=white, color="#57606a", fontname="Helvetica", fontsize=11]
  node [margin="0.12,0.06"]
  edge [color="#57606a", arrowsize=0.6]"""


def written(folded: FoldedGraph, words: GraphLabels) -> str:
    """Return a folded graph in the DOT language."""
    numbers = {id(box): number for number, box in enumerate(folded.boxes)}
    labels = labels_of(folded.boxes, words)
    again = called_again(folded.boxes)

    def inside(calls: Calls, indent: str) -> Iterator[str]:
        for box in folded.boxes:
            if box.calls == calls:
                number = numbers[id(box)]
                yield f"{indent}n{number} [{_attributes(labels[number])}]"
        deeper = [box.calls[: len(calls) + 1] for box in folded.boxes]
        for inner in dict.fromkeys(deeper):
            if len(inner) == len(calls) or inner[:-1] != calls:
                continue
            name = name_of_call(inner[-1], calls, words, again)
            yield f"{indent}subgraph {_quoted('cluster_' + repr(inner))} {{"
            yield f"{indent}  label={_quoted(name)}; {_FRAME}"
            yield from inside(inner, indent + "  ")
            yield f"{indent}}}"

    title = _quoted(f"{words.head}\n{words.legend}\n")
    lines = [_HEAD, f"  label={title}", *inside((), "  ")]
    lines += [f"  n{before} -> n{after}" for before, after in folded.edges]
    lines.append("}")
    return "\n".join(lines) + "\n"


def _attributes(label: BoxLabel) -> str:
    text = _quoted("\n".join(label.lines))
    style = [f"label={text}"]
    if label.kind == "leaf":
        style.append('fillcolor="#eef1f4"; shape=ellipse; margin="0.04,0.03"')
    elif label.kind == "parameter":
        style.append('fillcolor="#eef1f4"')
    elif label.shade is not None:
        style.append(f'fillcolor="{_SHADES[label.shade]}"')
    if label.hooked:
        style.append(f'color="{_HOOKED}"; penwidth=2')
    return "; ".join(style)


def _quoted(text: str) -> str:
    escaped = visible(text, lines=True).replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("\n", "\\n")
    return f'"{escaped}"'
