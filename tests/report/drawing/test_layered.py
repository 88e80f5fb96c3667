"""The layout of a drawing: nothing overlaps, arrows go down, frames hold what is theirs."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from kedge.report.drawing.layered import GraphLayout, Rectangle, Size, lay_out
from kedge.report.drawing.svg import SvgBox, graph_svg

Frames = list[tuple[int, ...]]


def random_graph(seed: int) -> tuple[list[Size], list[tuple[int, int]], Frames]:
    """Return boxes of some sizes in nested frames, and arrows from earlier boxes to later ones."""
    rng = Random(seed)
    count = rng.randrange(1, 40)
    sizes = [Size(rng.randrange(20, 200), rng.randrange(15, 60)) for _ in range(count)]
    edges = set()
    for after in range(1, count):
        for _ in range(rng.randrange(3)):
            edges.add((rng.randrange(after), after))
    frames: Frames = []
    for box in range(count):
        depth = rng.randrange(3)
        frames.append((box // 10, box // 5)[:depth])
    return sizes, sorted(edges), frames


def overlap(a: Rectangle, b: Rectangle) -> bool:
    """Whether two rectangles have a point in common."""
    beside = a.x + a.width <= b.x + 0.01 or b.x + b.width <= a.x + 0.01
    return not beside and not (a.bottom <= b.y + 0.01 or b.bottom <= a.y + 0.01)


def holds(outer: Rectangle, inner: Rectangle) -> bool:
    """Whether one rectangle is inside of another."""
    across = outer.x <= inner.x + 0.01 and inner.x + inner.width <= outer.x + outer.width + 0.01
    return across and outer.y <= inner.y + 0.01 and inner.bottom <= outer.bottom + 0.01


def whole(layout: GraphLayout) -> Rectangle:
    """Return the rectangle of the whole drawing."""
    return Rectangle(0, 0, layout.width, layout.height)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_do_not_overlap(seed):
    """No two boxes of any graph overlap, and all are inside of the drawing."""
    sizes, edges, frames = random_graph(seed)
    layout = lay_out(sizes, edges, frames)

    assert not [pair for pair in combinations(layout.boxes, 2) if overlap(*pair)]
    assert all(holds(whole(layout), box) for box in layout.boxes)
    assert [(box.width, box.height) for box in layout.boxes] == [
        (size.width, size.height) for size in sizes
    ]


@pytest.mark.parametrize("seed", range(20))
def test_frames_hold_their_boxes(seed):
    """A frame is around its boxes and no others."""
    sizes, edges, frames = random_graph(seed)
    layout = lay_out(sizes, edges, frames)

    for key, frame in layout.frames.items():
        for box, around in zip(layout.boxes, frames, strict=True):
            assert holds(frame, box) == (around[: len(key)] == key)
            assert overlap(frame, box) == (around[: len(key)] == key)


@pytest.mark.parametrize("seed", range(20))
def test_arrows_go_down(seed):
    """Without frames each arrow goes down, from the lower side of a box to the upper one of another."""
    sizes, edges, _ = random_graph(seed)
    layout = lay_out(sizes, edges)

    for (before, after), points in zip(edges, layout.arrows, strict=True):
        heights = [y for _, y in points]
        assert heights == sorted(heights)
        assert points[0] == (layout.boxes[before].middle, layout.boxes[before].bottom)
        assert points[-1] == (layout.boxes[after].middle, layout.boxes[after].y)


@pytest.mark.parametrize("seed", range(20))
def test_arrows_pass_beside_boxes(seed):
    """Where an arrow passes a layer, it goes straight down beside the boxes there."""
    sizes, edges, frames = random_graph(seed)
    layout = lay_out(sizes, edges, frames)

    for points in layout.arrows:
        inner = points[1:-1]
        for (x, top), (right, bottom) in zip(inner[::2], inner[1::2], strict=True):
            assert x == right
            for box in layout.boxes:
                assert not overlap(box, Rectangle(x, top, 0.5, max(bottom - top, 0.1)))


def test_a_cycle_is_drawn():
    """A graph that is none of data, with a cycle, has a drawing too."""
    layout = lay_out([Size(20, 20)] * 3, [(0, 1), (1, 2), (2, 0)])

    assert len(layout.arrows) == 3
    assert not [pair for pair in combinations(layout.boxes, 2) if overlap(*pair)]


def test_a_chain_is_straight():
    """Boxes of a chain stand exactly below each other."""
    layout = lay_out([Size(20, 20), Size(90, 20), Size(50, 20)], [(0, 1), (1, 2)])

    assert len({round(box.middle, 6) for box in layout.boxes}) == 1


def test_an_empty_graph_is_a_drawing():
    """A graph without a box is drawn, too."""
    assert graph_svg([], []).startswith("<svg")


def test_text_is_no_markup():
    """Names that look like markup, or have control characters, are shown as they are."""
    svg = graph_svg([SvgBox(("<script>", "a\x00b"), tip="&")], [], head="<b>")

    assert "&lt;script&gt;" in svg
    assert "<script" not in svg
    assert "\x00" not in svg
    assert "<title>&amp;</title>" in svg
