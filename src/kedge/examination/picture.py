"""The results of an examination as a picture: what depends on what, and the losses at several rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kedge.errors import CannotDraw
from kedge.examination.examination import Examination
from kedge.examination.result import OWN, Grid, Rates
from kedge.figures.canvas import CLASSES, Axes, Drawing, dress
from kedge.short_text import compact

ENDINGS = (".svg", ".png", ".pdf")


def check_picture(file: str) -> None:
    """Check that a picture can be written into a file of this name.

    Raises:
        CannotDraw: Its ending is of no kind of picture.
    """
    if not file.endswith(ENDINGS):
        raise CannotDraw(f"cannot draw {file}: a picture's name ends in {', '.join(ENDINGS)}")


def draw(examination: Examination, file: str) -> None:
    """Draw the figures of an examination side by side into a file; its ending decides the format.

    Raises:
        CannotDraw: No trial has a figure, as where all were left out.
    """
    shown = [result for result in examination.results if result.figure is not None]
    if not shown:
        raise CannotDraw(f"cannot draw {file}: no trial that was made has a figure")
    width = 3.4 * len(shown)
    drawing = Drawing(3.4, width)
    every: Sequence[Axes] = drawing.subplots(1, len(shown), squeeze=False)[0]
    for axes, result in zip(every, shown, strict=True):
        if isinstance(result.figure, Rates):
            _draw_rates(axes, result.figure)
        elif result.figure is not None:
            _draw_grid(axes, result.figure, result.model)
    drawing.savefig(Path(file))


def _draw_grid(axes: Axes, grid: Grid, model: str) -> None:
    size = len(grid.rows)
    shown = [[float(hit) for hit in row[:size]] for row in grid.rows]
    axes.imshow(shown, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    one = grid.of.removesuffix("s")
    dress(
        axes,
        f"{model}: what changes with what",
        f"{one} whose output changed",
        f"{one} that was changed",
    )
    axes.set_xticks(range(0, size, max(size // 8, 1)))
    axes.set_yticks(range(0, size, max(size // 8, 1)))


def _draw_rates(axes: Axes, rates: Rates) -> None:
    colours = dict(zip(rates.curves, CLASSES, strict=False))
    for factor, losses in rates.curves.items():
        label = compact(rates.rate * factor)
        if factor == OWN:
            axes.plot(losses, color="black", linewidth=2.4, label=f"{label}, its own")
        else:
            axes.plot(losses, color=colours[factor], linewidth=1.2, label=label)
    first = rates.curves[OWN][0]
    lowest = min(loss for losses in rates.curves.values() for loss in losses)
    axes.set_ylim(lowest - 0.05 * abs(first), first + 0.5 * abs(first))
    dress(axes, "one batch, over and over", "step", "loss")
    axes.legend(title="rate", fontsize=7, title_fontsize=7, frameon=False)
