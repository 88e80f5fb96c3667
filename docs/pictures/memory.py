"""Draw `memory.svg`, the picture of docs/how-to/offloading.md, from what the example measured.

python examples/bigger_than_memory.py --save memory.json
python docs/pictures/memory.py memory.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 738, 22, 280
EACH_MS = 10
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.grid { stroke: #24292f; stroke-opacity: .15 } .limit { stroke: #57606a; stroke-dasharray: 5 4 }
.bare { stroke: #b35900 } .kedge { stroke: #0969da } .bare, .kedge { fill: none; stroke-width: 2; stroke-linejoin: round }
text.bare { fill: #b35900; stroke: none } text.kedge { fill: #0969da; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #e6edf3 } .limit { stroke: #9198a1 }
  .bare { stroke: #f0883e } .kedge { stroke: #58a6ff } text.bare { fill: #f0883e } text.kedge { fill: #58a6ff }
}
"""

Points = Sequence[tuple[float, float]]


def thinned(points: Points) -> list[tuple[float, float]]:
    """Keep the highest of every few milliseconds; time in units of the step."""
    highest: dict[int, float] = {}
    for seconds, memory in points:
        at = int(seconds * 1000) // EACH_MS
        highest[at] = max(memory, highest.get(at, memory))
    last = max(highest)
    return [(at / last, memory) for at, memory in sorted(highest.items())]


def drawn(runs: dict[str, Points], limit: int) -> Iterator[str]:
    """Yield the lines of the SVG file."""
    top = 100 * (int(max(memory for points in runs.values() for _, memory in points)) // 100 + 1)

    def y(memory: float) -> float:
        return BOTTOM - memory / top * (BOTTOM - TOP)

    def x(share: float) -> float:
        return LEFT + share * (RIGHT - LEFT)

    def words(name: str, title: str, share: float) -> str:
        highest = max(memory for _, memory in runs[name])
        place = f'x="{x(share):.1f}" y="{y(highest) - 8:.1f}" text-anchor="middle"'
        return f'<text class="{name}" {place}>{title}: at most {highest:.0f} MB</text>'

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    yield "<title>Memory over one training step, without and with Kedge</title>"
    yield f"<style>{STYLE}</style>"
    for memory in range(0, top + 1, 100):
        yield f'<path class="grid" d="M{LEFT} {y(memory):.1f}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(memory) + 4:.1f}" text-anchor="end">{memory}</text>'
    for percent in range(0, 101, 25):
        yield f'<text x="{x(percent / 100):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{percent}</text>'
    yield f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" text-anchor="middle">time, % of the step (each of its own)</text>'
    middle = (TOP + BOTTOM) / 2
    yield (
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        "memory beyond that before training, MB</text>"
    )
    yield f'<path class="limit" d="M{LEFT} {y(limit):.1f}H{RIGHT}"/>'
    yield f'<text x="{LEFT + 6}" y="{y(limit) - 6:.1f}">limit, {limit} MB</text>'
    for name, points in runs.items():
        path = "L".join(f"{x(share):.1f} {y(memory):.1f}" for share, memory in thinned(points))
        yield f'<path class="{name}" d="M{path}"/>'
    yield words("bare", "without a limit, without Kedge", 0.5)
    yield words("kedge", "within the limit, with Kedge", 0.45)
    yield "</svg>"


def main() -> None:
    """Write the picture beside this file."""
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = drawn({name: found[name] for name in ("bare", "kedge")}, found["limit"])
    Path(__file__).with_name("memory.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
