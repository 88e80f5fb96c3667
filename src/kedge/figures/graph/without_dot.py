"""A folded graph drawn without graphviz, in Kedge's own layout."""

from __future__ import annotations

from kedge.figures.graph.folding import FoldedGraph
from kedge.figures.graph.labels import (
    BoxLabel,
    GraphLabels,
    called_again,
    labels_of,
    name_of_call,
)
from kedge.report.drawing.layered import FrameKey
from kedge.report.drawing.svg import SvgBox, graph_svg


def drawn_here(folded: FoldedGraph, words: GraphLabels) -> str:
    """Return a folded graph as SVG."""
    labels = labels_of(folded.boxes, words)
    again = called_again(folded.boxes)
    boxes = []
    titles: dict[FrameKey, str] = {}
    for box, label in zip(folded.boxes, labels, strict=True):
        lines = tuple(line for line in label.lines if line)
        boxes.append(SvgBox(lines, _kinds(label), box.calls))
        for level in range(1, len(box.calls) + 1):
            inner = box.calls[:level]
            titles[inner] = name_of_call(inner[-1], inner[:-1], words, again)
    head = f"{words.head}\n{words.legend}"
    return graph_svg(boxes, folded.edges, titles, head, words.head)


def _kinds(label: BoxLabel) -> tuple[str, ...]:
    kinds = []
    if label.kind != "operation":
        kinds.append("leaf")
    elif label.shade:
        kinds.append(f"shade-{label.shade}")
    if label.hooked:
        kinds.append("hooked")
    return tuple(kinds)
