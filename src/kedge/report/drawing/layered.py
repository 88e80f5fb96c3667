"""The places of a graph's boxes in a drawing: one below the other, in the direction of the data.

# Note [Layers]
Each box stands in the layer below the lowest box that it takes something from; a box that takes
nothing stands right above the first that uses it. An arrow over several layers has a point in each
layer between, so that no box stands on it. Within a layer the order is that of the means of the
neighbours' places, computed down and up a few times; the order with the fewest crossings is kept.
Then each box moves as close to the mean of its neighbours as the others of its layer allow.

# Note [Frames]
What is inside a frame is laid out by itself. Around it the frame is one large box. An arrow that
comes in, or goes out, has a point in each layer of the frame that it passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

BESIDE = 18.0
BELOW = 30.0
INSIDE = 12.0
TITLE = 18.0
MARGIN = 8.0
_SWEEPS = 8
_BEND = 4.0
"""The width of the place that an arrow has in a layer which it passes."""

FrameKey = tuple[Hashable, ...]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Size:
    """A width and a height."""

    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of the drawing."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The x of its middle."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The y of its lower side."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """The places of everything in a drawing.

    Attributes:
        boxes: The places of the boxes.
        frames: Those of the frames, the outermost first.
        arrows: The points that each arrow goes through.
        width: The width of the whole.
        height: Its height.
    """

    boxes: tuple[Rectangle, ...]
    frames: Mapping[FrameKey, Rectangle]
    arrows: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def lay_out(
    sizes: Sequence[Size],
    edges: Sequence[tuple[int, int]],
    frames: Sequence[FrameKey] = (),
    titles: Mapping[FrameKey, float] | None = None,
) -> GraphLayout:
    """Return the layout of a graph; see Note [Layers] and Note [Frames].

    Args:
        sizes: The size of each box; the boxes stand in the order of the data as far as it is known.
        edges: The arrows, from and to: places in `sizes`.
        frames: For each box the frames around it, the outermost first; none if empty.
        titles: The widths of the frames' titles.
    """
    given = list(frames) or [()] * len(sizes)
    whole = _Frame((), sizes, edges, given, titles or {})
    places: dict[int, Rectangle] = {}
    around: dict[FrameKey, Rectangle] = {}
    bends: dict[tuple[int, int], list[Point]] = {}
    whole.put(MARGIN, MARGIN, places, around, bends)
    arrows = []
    for edge in edges:
        before, after = edge
        start = places[before]
        end = places[after]
        between = bends.get(edge, [])
        arrows.append(((start.middle, start.bottom), *between, (end.middle, end.y)))
    return GraphLayout(
        boxes=tuple(places[i] for i in range(len(sizes))),
        frames=around,
        arrows=tuple(arrows),
        width=whole.size.width + 2 * MARGIN,
        height=whole.size.height + 2 * MARGIN,
    )


class _Frame:
    """A frame, or the whole drawing: its items are boxes and the frames right inside of it."""

    def __init__(
        self,
        key: FrameKey,
        sizes: Sequence[Size],
        edges: Sequence[tuple[int, int]],
        frames: Sequence[FrameKey],
        titles: Mapping[FrameKey, float],
    ) -> None:
        self.key = key
        self.size: Size
        level = len(key)
        self.item_of: dict[int, int] = {}
        self.items: list[int | _Frame] = []
        inner: dict[FrameKey, int] = {}
        for box, around in enumerate(frames):
            if around[:level] != key:
                continue
            if len(around) == level:
                self.item_of[box] = len(self.items)
                self.items.append(box)
                continue
            child = around[: level + 1]
            if child not in inner:
                inner[child] = len(self.items)
                self.items.append(_Frame(child, sizes, edges, frames, titles))
            self.item_of[box] = inner[child]

        # By items, or the box outside that is the other end: the arrows, from box to box.
        self.edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.comes_in: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.goes_out: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for before, after in edges:
            start = self.item_of.get(before)
            end = self.item_of.get(after)
            if start is not None and end is not None:
                if start != end:
                    self.edges.setdefault((start, end), []).append((before, after))
            elif end is not None:
                self.comes_in.setdefault((before, end), []).append((before, after))
            elif start is not None:
                self.goes_out.setdefault((start, after), []).append((before, after))

        self.sizes = [sizes[i] if isinstance(i, int) else i.size for i in self.items]
        into = [end for _, end in self.comes_in]
        out_of = [start for start, _ in self.goes_out]
        self.layers = _Layers(self.sizes, list(self.edges), into, out_of)
        width = self.layers.width
        height = self.layers.height
        if key:
            width = max(width, titles.get(key, 0.0)) + 2 * INSIDE
            height += 2 * INSIDE + TITLE
        self.size = Size(width, height)

    def put(
        self,
        x: float,
        y: float,
        places: dict[int, Rectangle],
        around: dict[FrameKey, Rectangle],
        bends: dict[tuple[int, int], list[Point]],
    ) -> None:
        """Put everything inside at its place, when the frame's own is known."""
        if self.key:
            around[self.key] = Rectangle(x, y, self.size.width, self.size.height)
            x += (self.size.width - self.layers.width) / 2
            y += INSIDE + TITLE

        def moved(points: Sequence[Point]) -> list[Point]:
            return [(x + right, y + down) for right, down in points]

        layers = self.layers
        for edge, arrows in self.edges.items():
            for arrow in arrows:
                bends[arrow] = moved(layers.bends.get(edge, ()))
        for arrows, points in zip(self.comes_in.values(), layers.comes_in, strict=True):
            for arrow in arrows:
                bends[arrow] = bends.get(arrow, []) + moved(points)
        for arrows, points in zip(self.goes_out.values(), layers.goes_out, strict=True):
            for arrow in arrows:
                bends[arrow] = moved(points) + bends.get(arrow, [])
        for number, item in enumerate(self.items):
            own = self.sizes[number]
            left = x + self.layers.x[number] - own.width / 2
            top = y + self.layers.y[number]
            if isinstance(item, _Frame):
                item.put(left, top, places, around, bends)
            else:
                places[item] = Rectangle(left, top, own.width, own.height)


class _Layers:
    """The places of items that are connected by edges; see Note [Layers].

    Attributes:
        x: The middle of each item.
        y: The upper side of each.
        bends: The points of the edges over several layers.
        comes_in: The points of what comes in from above.
        goes_out: Those of what goes out below.

    Args:
        sizes: The sizes of the items.
        edges: The edges between them.
        into: For each edge from above, the item that it leads to.
        out_of: For each edge that leads out below, the item that it comes from.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        edges: Sequence[tuple[int, int]],
        into: Sequence[int] = (),
        out_of: Sequence[int] = (),
    ) -> None:
        self.x: list[float] = [0.0] * len(sizes)
        self.y: list[float] = [0.0] * len(sizes)
        self.bends: dict[tuple[int, int], list[Point]] = {}
        self.comes_in: list[list[Point]] = []
        self.goes_out: list[list[Point]] = []
        self.width = self.height = 0.0
        if not sizes:
            return
        edges = _without_cycles(len(sizes), edges)
        ranks = _ranks(len(sizes), edges)

        # Vertices are the items, then the points of long edges.
        widths = [size.width for size in sizes]
        rank_of = list(ranks)
        short: list[tuple[int, int]] = []

        def passing(first: int, end: int, before: int | None, after: int | None) -> list[int]:
            points = []
            for rank in range(first, end):
                points.append(len(widths))
                widths.append(_BEND)
                rank_of.append(rank)
            chain = [each for each in (before, *points, after) if each is not None]
            short.extend(pairwise(chain))
            return points

        points = {}
        for before, after in edges:
            points[before, after] = passing(ranks[before] + 1, ranks[after], before, after)
        above = [passing(0, ranks[after], None, after) for after in into]
        below = [passing(ranks[before] + 1, max(ranks) + 1, before, None) for before in out_of]

        layers = _ordered(rank_of, short)
        middles = _middles(layers, widths, short)
        left = min(middles[v] - widths[v] / 2 for v in range(len(widths)))
        right = max(middles[v] + widths[v] / 2 for v in range(len(widths)))
        self.width = right - left
        self.x = [middles[i] - left for i in range(len(sizes))]

        down = 0.0
        spans: list[tuple[float, float]] = []
        for layer in layers:
            tallest = max((sizes[v].height for v in layer if v < len(sizes)), default=0.0)
            for v in layer:
                if v < len(sizes):
                    self.y[v] = down + (tallest - sizes[v].height) / 2
            spans.append((down, down + tallest))
            down += tallest + BELOW
        self.height = down - BELOW

        def places(passed: Iterable[int]) -> list[Point]:
            found: list[Point] = []
            for v in passed:
                found += [(middles[v] - left, side) for side in spans[rank_of[v]]]
            return found

        self.bends = {edge: places(passed) for edge, passed in points.items()}
        self.comes_in = [places(passed) for passed in above]
        self.goes_out = [places(passed) for passed in below]


def _without_cycles(count: int, edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the edges without those that lead back to where they come from."""
    behind: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for before, after in edges:
        behind[before].append(after)
        waiting[after] += 1
    order: dict[int, int] = {}
    ready = [i for i in range(count) if not waiting[i]]
    left = dict.fromkeys(range(count))
    while left:
        if not ready:  # a cycle: it is cut before the earliest of its items
            ready.append(next(iter(left)))
        item = ready.pop(0)
        if item not in left:
            continue
        del left[item]
        order[item] = len(order)
        for after in behind[item]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return [(before, after) for before, after in edges if order[before] < order[after]]


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each item."""
    taken: list[list[int]] = [[] for _ in range(count)]
    users: list[list[int]] = [[] for _ in range(count)]
    for before, after in edges:
        taken[after].append(before)
        users[before].append(after)
    ranks = [0] * count
    waiting = [len(each) for each in taken]
    ready = [i for i in range(count) if not waiting[i]]
    for item in ready:
        for after in users[item]:
            ranks[after] = max(ranks[after], ranks[item] + 1)
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    for item in range(count):
        if not taken[item] and users[item]:
            ranks[item] = min(ranks[after] for after in users[item]) - 1
    return ranks


def _ordered(rank_of: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the layers, each in the order with the fewest crossings that was found."""
    layers: list[list[int]] = [[] for _ in range(max(rank_of) + 1)]
    for vertex, rank in enumerate(rank_of):
        layers[rank].append(vertex)
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for before, after in edges:
        above.setdefault(after, []).append(before)
        below.setdefault(before, []).append(after)

    best = [list(layer) for layer in layers]
    fewest = _crossings(layers, below)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        neighbours = below if sweep % 2 else above
        for layer in reversed(layers) if sweep % 2 else layers:
            places = {v: place for each in layers for place, v in enumerate(each)}
            layer.sort(key=_mean_place(neighbours, places))
        crossings = _crossings(layers, below)
        if crossings < fewest:
            fewest = crossings
            best = [list(layer) for layer in layers]
    return best


def _mean_place(
    neighbours: Mapping[int, Sequence[int]], places: Mapping[int, int]
) -> Callable[[int], float]:
    def mean(vertex: int) -> float:
        beside = neighbours.get(vertex)
        if not beside:
            return places[vertex]
        return sum(places[each] for each in beside) / len(beside)

    return mean


def _crossings(layers: Sequence[Sequence[int]], below: Mapping[int, Sequence[int]]) -> int:
    """Return how many pairs of edges cross."""
    crossings = 0
    for upper, lower in pairwise(layers):
        places = {v: place for place, v in enumerate(lower)}
        ends: list[int] = []
        for vertex in upper:
            own = sorted(places[after] for after in below.get(vertex, ()))
            crossings += sum(end > each for each in own for end in ends)
            ends += own
    return crossings


def _middles(
    layers: Sequence[Sequence[int]], widths: Sequence[float], edges: Sequence[tuple[int, int]]
) -> dict[int, float]:
    """Return the x of the middle of each vertex."""
    neighbours: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for before, after in edges:
        neighbours[0].setdefault(after, []).append(before)
        neighbours[1].setdefault(before, []).append(after)
    middles: dict[int, float] = {}
    for layer in layers:
        right = 0.0
        for vertex in layer:
            middles[vertex] = right + widths[vertex] / 2
            right += widths[vertex] + BESIDE
    for sweep in range(_SWEEPS):
        beside = neighbours[sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = []
            for vertex in layer:
                own = beside.get(vertex) or [vertex]
                wanted.append(sum(middles[each] for each in own) / len(own))
            gaps = [(widths[left] + widths[right]) / 2 + BESIDE for left, right in pairwise(layer)]
            middles.update(zip(layer, _apart(wanted, gaps), strict=True))
    return middles


def _apart(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return the places nearest to the wanted ones that keep their gaps and their order.

    Nearest in the sense of squares: neighbours that would overlap are moved together.
    """
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    groups: list[list[float]] = []  # of each the sum of the wanted places, and how many they are
    for place, offset in zip(wanted, offsets, strict=True):
        groups.append([place - offset, 1.0])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    places: list[float] = []
    for total, count in groups:
        places += [total / count + offset for offset in offsets[len(places) :][: int(count)]]
    return places
