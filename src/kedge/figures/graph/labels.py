"""The texts of a folded graph: of each box, and of the frame of each opened module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kedge.figures.graph.folding import Box, Call, Calls
from kedge.inspection.autograd_graph import GraphHook, GraphNode
from kedge.short_text import counted, sized

SHADES = 5
"""How many shades there are: the more a box saves, the darker it is."""
_HOOKS_NAMED = 3
_LONGEST = 60
_NAMED = 3
_BACKWARD = re.compile(r"Backward\d*$")


@dataclass(frozen=True)
class GraphLabels:
    """The texts of a drawing.

    Attributes:
        types: Class names by path.
        head: The heading.
        legend: What the drawing's marks mean.
    """

    types: Mapping[str, str]
    head: str
    legend: str


@dataclass(frozen=True)
class BoxLabel:
    """What one box says.

    Attributes:
        lines: Its text.
        kind: ``leaf`` or ``parameter``, or ``operation`` for all others.
        shade: How dark it is, from 0 up to below `SHADES`; None if nothing is saved anywhere.
        hooked: Whether there are hooks on its nodes.
    """

    lines: tuple[str, ...]
    kind: str
    shade: int | None
    hooked: bool


def labels_of(boxes: Sequence[Box], words: GraphLabels) -> list[BoxLabel]:
    """Return what each box says."""
    most = max((box.bytes for box in boxes), default=0)
    again = called_again(boxes)
    return [_label(box, words, again, most) for box in boxes]


def _label(box: Box, words: GraphLabels, again: set[str | None], most: int) -> BoxLabel:
    node = box.nodes[0]
    alone = box.of is None and len(box.nodes) == 1
    lines = _of_node(node, box.calls) if alone else _of_several(box, words, again)
    if box.bytes:
        lines.append(f"saves {sized(box.bytes)}")
    elif alone and node.saved:
        reasons = sorted({field.why for field in node.saved if field.why})
        lines.append(f"saves {', '.join(reasons)}")
    lines += _hooks(box.hooks)

    kind = "operation"
    if alone:
        kind = node.kind
    shade = None
    if most:
        shade = round(box.bytes / most * (SHADES - 1))
    return BoxLabel(tuple(lines), kind, shade, hooked=bool(box.hooks))


def called_again(boxes: Sequence[Box]) -> set[str | None]:
    """Return the modules with several calls in the drawing."""
    calls: set[Call] = set()
    for box in boxes:
        calls.update(box.calls)
        if box.of:
            calls.add(box.of)
    count = Counter(path for path, _ in calls)
    return {path for path, times in count.items() if times > 1}


def name_of_call(call: Call, around: Calls, words: GraphLabels, again: set[str | None]) -> str:
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
        name = name_of_call(box.of, box.calls, words, again)
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
