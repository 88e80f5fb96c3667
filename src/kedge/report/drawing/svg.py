"""A graph as SVG: boxes with lines of text, frames around them, and arrows in the direction of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kedge.report.drawing.layered import FrameKey, GraphLayout, Point, Rectangle, Size, lay_out
from kedge.shown_text import visible

_LINE = 15.0
_LETTER = 6.65
"""The width of a letter: the type has letters of one width, 11 pixels high."""
_SIDES = 9.0
_ENDS = 6.0
_LEAST = 44.0
_TITLE = 16.0

PLAIN_STYLE = """
.graph { background: #ffffff; }
.graph text { font: 11px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1b1f24; }
.graph .name { font-weight: 700; }
.graph .more { fill: #57606a; }
.graph .box > rect { fill: #ffffff; stroke: #57606a; }
.graph .leaf > rect { fill: #eef1f4; }
.graph .input > rect { fill: #f6f7f9; stroke-dasharray: 3 2; }
.graph .shade-1 > rect { fill: #fff3e6; }
.graph .shade-2 > rect { fill: #ffe3c7; }
.graph .shade-3 > rect { fill: #ffcf9e; }
.graph .shade-4 > rect { fill: #ffb870; }
.graph .hooked > rect { stroke: #0072b2; stroke-width: 2; }
.graph .broken > rect { stroke: #d1242f; stroke-width: 2; }
.graph .frame > rect { fill: none; stroke: #8c959f; }
.graph .frame > text, .graph .head { fill: #57606a; }
.graph .arrow { fill: none; stroke: #57606a; }
.graph .tip { fill: #57606a; }
"""
"""The style of a drawing that stands alone; a page has its own, in the colours of its theme."""


@dataclass(frozen=True, slots=True)
class SvgBox:
    """One box.

    Attributes:
        lines: Its text; the first line is its name.
        kinds: What it is, as names of the style: ``leaf``, ``input``, ``hooked``, ``broken``, and
            ``shade-1`` to ``shade-4``.
        frames: The frames around it, the outermost first.
        tip: A text that a browser shows beside the pointer; empty for none.
    """

    lines: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    frames: FrameKey = ()
    tip: str = ""

    @property
    def size(self) -> Size:
        """The size that its text needs."""
        longest = max((len(line) for line in self.lines), default=0)
        width = max(longest * _LETTER + 2 * _SIDES, _LEAST)
        return Size(width, len(self.lines) * _LINE + 2 * _ENDS)


def graph_svg(
    boxes: Sequence[SvgBox],
    edges: Sequence[tuple[int, int]],
    frames: Mapping[FrameKey, str] | None = None,
    head: str = "",
    label: str = "a graph",
    *,
    style: str = PLAIN_STYLE,
) -> str:
    """Return a graph as SVG.

    Args:
        boxes: The boxes, in the order of the data.
        edges: The arrows: pairs of places in `boxes`, from and to.
        frames: The titles of the frames.
        head: Lines above the drawing.
        label: What the drawing is, for those who do not see it.
        style: The style sheet inside of it; none if empty.
    """
    titles = frames or {}
    widths = {key: len(title) * _LETTER for key, title in titles.items()}
    layout = lay_out([box.size for box in boxes], edges, [box.frames for box in boxes], widths)
    heading = head.splitlines()
    above = len(heading) * _TITLE
    width = max(layout.width, *(len(line) * _LETTER + 2 * _SIDES for line in heading), 0.0)
    height = layout.height + above

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" role="img" '
            f'aria-label="{_text(label)}" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.1f} {height:.1f}">'
        )
    ]
    if style:
        parts.append(f"<style>{style}</style>")
    for number, line in enumerate(heading):
        down = (number + 1) * _TITLE - 3
        parts.append(f'<text class="head" x="{_SIDES}" y="{down:.1f}">{_text(line)}</text>')
    right = (width - layout.width) / 2
    parts.append(f'<g transform="translate({right:.1f} {above:.1f})">')
    parts += _frames(layout, titles)
    parts += [_arrow(points) for points in layout.arrows]
    parts += [_box(box, place) for box, place in zip(boxes, layout.boxes, strict=True)]
    parts.append("</g></svg>")
    return "\n".join(parts) + "\n"


def _frames(layout: GraphLayout, titles: Mapping[FrameKey, str]) -> list[str]:
    parts = []
    for key in sorted(layout.frames, key=len):
        place = layout.frames[key]
        x, y = place.x + 8, place.y + 14
        title = f'<text x="{x:.1f}" y="{y:.1f}">{_text(titles.get(key, ""))}</text>'
        parts.append(f'<g class="frame">{_rect(place, 6)}{title}</g>')
    return parts


def _box(box: SvgBox, place: Rectangle) -> str:
    parts = []
    if box.tip:
        parts.append(f"<title>{_text(box.tip)}</title>")
    parts.append(_rect(place, 5))
    for number, line in enumerate(box.lines):
        down = place.y + _ENDS + (number + 0.75) * _LINE
        kind = "more" if number else "name"
        parts.append(
            f'<text class="{kind}" x="{place.middle:.1f}" y="{down:.1f}" '
            f'text-anchor="middle">{_text(line)}</text>'
        )
    kinds = " ".join(("box", *box.kinds))
    return f'<g class="{kinds}">{"".join(parts)}</g>'


def _rect(place: Rectangle, corner: int) -> str:
    return (
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" '
        f'height="{place.height:.1f}" rx="{corner}"/>'
    )


def _arrow(points: Sequence[Point]) -> str:
    """Return a line through some points, which leaves and enters boxes vertically, with its tip."""
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    last = len(rest) - 1
    for number, (right, end) in enumerate(rest):
        down = end
        if number == last:
            down -= 5  # where the tip begins
        half = (y + down) / 2
        path.append(f"C{x:.1f} {half:.1f} {right:.1f} {half:.1f} {right:.1f} {down:.1f}")
        x, y = right, down
    tip = f"M{x - 3:.1f} {y - 1:.1f}L{x + 3:.1f} {y - 1:.1f}L{x:.1f} {y + 5:.1f}Z"
    return f'<path class="arrow" d="{"".join(path)}"/><path class="tip" d="{tip}"/>'


def _text(text: str) -> str:
    return escape(visible(text))
