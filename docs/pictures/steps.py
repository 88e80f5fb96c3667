"""Draw `steps.svg`, the picture of docs/explanation/steps.md: the kinds of the first hundred steps of two runs.

python docs/pictures/steps.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

STEPS, FIRST, EVERY = 100, 40, 10
DISTANCE, GUARDED = 20, 5
"""In the run of short steps: one step in so many is measured, and one in so many is guarded."""

LEFT, RIGHT, BAR, ROW = 150, 990, 44, 74
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f } .small { font-size: 12px } .axis { stroke: #57606a }
.measured { fill: #0969da } .guarded { fill: #d4a72c } .skipped { fill: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .axis { stroke: #9198a1 }
  .measured { fill: #58a6ff } .guarded { fill: #bb8009 } .skipped { fill: #3d444d }
}
"""
KINDS = {
    "measured": ("every output, input, gradient,", "parameter and update", BAR),
    "guarded": ("the loss, the norm of all", "gradients, whether both are finite", BAR * 0.5),
    "skipped": ("the loss; on a CPU,", "whether it is finite", BAR * 0.18),
}
"""What is recorded in a step of each kind, in two lines, and how high its bar is drawn."""


def long_steps(step: int) -> str:
    """Return the kind of a step in a run whose steps are long enough for the budget."""
    return "measured" if step < FIRST or step % EVERY == 0 else "guarded"


def short_steps(step: int) -> str:
    """Return the kind of a step in a run whose steps are too short for that."""
    if step < FIRST or step % DISTANCE == 0:
        return "measured"
    return "guarded" if step % GUARDED == 1 else "skipped"


def bars(kind_of: Callable[[int], str], top: float) -> Iterator[str]:
    """Yield one bar for each step of a run."""
    width = (RIGHT - LEFT) / STEPS
    for step in range(STEPS):
        kind = kind_of(step)
        height = KINDS[kind][2]
        yield (
            f'<rect class="{kind}" x="{LEFT + step * width:.1f}" y="{top + BAR - height:.1f}" '
            f'width="{width - 1.4:.1f}" height="{height:.1f}"/>'
        )


def drawn() -> Iterator[str]:
    """Yield the lines of the SVG file."""
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {2 * ROW + 84}" role="img">'
    yield "<title>The kinds of the first hundred steps, with long steps and with short ones</title>"
    yield f"<style>{STYLE}</style>"
    for row, (name, example, kind_of) in enumerate(
        (("long steps", "10 ms", long_steps), ("short steps", "0.3 ms", short_steps))
    ):
        top = 10 + row * ROW
        yield f'<text x="10" y="{top + BAR - 22}">{name},</text><text x="10" y="{top + BAR - 4}">such as {example}</text>'
        yield from bars(kind_of, top)
        yield f'<path class="axis" d="M{LEFT} {top + BAR + 2}H{RIGHT}"/>'
    axis = 10 + ROW + BAR + 20
    for step in (0, FIRST, 60, 80, STEPS):
        x = LEFT + step * (RIGHT - LEFT) / STEPS
        anchor = "end" if step == STEPS else "middle" if step else "start"
        yield f'<text class="small" x="{x:.0f}" y="{axis}" text-anchor="{anchor}">{"step " if step == 0 else ""}{step}</text>'
    for place, (kind, (first, second, _)) in enumerate(KINDS.items()):
        x, y = 10 + place * 335, axis + 34
        yield f'<rect class="{kind}" x="{x}" y="{y - 12}" width="14" height="14"/>'
        yield f'<text x="{x + 22}" y="{y}" font-weight="600">{kind}</text>'
        yield f'<text class="small" x="{x + 22}" y="{y + 18}">{first}</text>'
        yield f'<text class="small" x="{x + 22}" y="{y + 34}">{second}</text>'
    yield "</svg>"


if __name__ == "__main__":
    Path(__file__).with_name("steps.svg").write_text("\n".join(drawn()) + "\n", encoding="utf-8")
