"""The effects of an intervention, site by site: `effects`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kedge.calls.arguments import called_as
from kedge.errors import CannotDraw
from kedge.figures.canvas import (
    NOTHING,
    ONE_SIGN,
    TEXT,
    TWO_SIGNS,
    WIDTH,
    Drawing,
    colours,
    dress,
    host,
    plain,
    shown,
)
from kedge.sites.leaves import describe

_WRITTEN = (24, 12)
"""The largest numbers of rows and columns at which cells contain their numbers."""


@runtime_checkable
class Patched(Protocol):
    """The part of a result of `patch` that is drawn."""

    rows: Sequence[Any]

    @property
    def effects(self) -> Tensor:
        """The effects by site, and by position if there are several positions."""
        ...


@called_as('figures.effects(recipes.patch(model, clean, corrupted, "layer4", metric))')
def effects(
    values: Any,
    rows: Sequence[object] = (),
    columns: Sequence[object] = (),
    *,
    unit: str = "effect",
    about: float = 0.0,
    title: str = "",
) -> Drawing:
    """Draw a table of effects as colours.

    Sites go down, in the order of the data, and positions or tokens across.

    Args:
        values: The effects, ``[sites]`` or ``[sites, positions]``, with NaN for missing ones; or
            the result of `patch`.
        rows: The names of the sites; a result of `patch` contains them.
        columns: The names of the positions.
        unit: The name of the effect, with its unit.
        about: The value that means no effect; it is white if any effect is below it.
        title: The title of the figure.

    Returns:
        The figure.

    Raises:
        CannotDraw: If the numbers of names and values differ, or `values` is not a table.

    Examples:
        >>> figure = figures.effects(torch.tensor([0.0, 0.4, 1.0]), rows=["conv", "relu", "fc"])
    """
    if isinstance(values, Patched):
        rows = list(dict.fromkeys(row.site for row in values.rows))
        values = values.effects
    table = host(values)
    if table.dim() == 1:
        table = table[:, None]
    is_table = table.dim() == 2 and table.numel() > 0 and len(rows) == len(table)
    if not is_table or (columns and len(columns) != table.shape[1]):
        raise CannotDraw(
            f"effects(...) got {describe(values)} with {len(rows)} rows' "
            f"and {len(columns)} columns' names; "
            "it takes [sites] or [sites, positions] and a name for each"
        )

    finite = table[table.isfinite()] - about
    most = float(finite.abs().max()) if finite.numel() else 1.0
    high = about + (most or 1.0)
    scale: dict[str, Any] = {"cmap": ONE_SIGN, "vmin": about, "vmax": high}
    if bool((finite < 0).any()):
        scale |= {"cmap": TWO_SIGNS, "vmin": about - most}

    height, width = table.shape
    figure = Drawing(min(0.27 * height + 1.1, 24), min(3.0 + 0.55 * width, WIDTH))
    axes = figure.subplots()
    image = axes.imshow(shown(table), aspect="auto", interpolation="nearest", **scale)
    axes.set_facecolor(NOTHING)
    dress(axes, title)
    axes.set_yticks(range(height), [plain(row) for row in rows], fontsize=TEXT - 1)
    axes.set_xticks(range(len(columns)), [plain(each) for each in columns], fontsize=TEXT - 1)
    if columns and max(len(str(column)) for column in columns) * width > 80:
        axes.tick_params(axis="x", labelrotation=90)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    if height <= _WRITTEN[0] and width <= _WRITTEN[1]:
        _write(axes, table, image)
    colours(figure, image, axes, unit)
    return figure


def _write(axes: Any, table: Any, image: Any) -> None:
    """Write each number into its cell, in black or white, whichever has more contrast."""
    finite = table[table.isfinite()]
    most = float(finite.abs().max()) if finite.numel() else 1.0
    places = max(2 - math.floor(math.log10(most or 1.0)), 0)
    form = f".{places}f" if places < 6 and most < 1e6 else ".2e"
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT - 1}
    for y, row in enumerate(table.tolist()):
        for x, number in enumerate(row):
            red, green, blue, _ = image.cmap(image.norm(number))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"
            axes.text(x, y, f"{round(number, places) + 0.0:{form}}", color=ink, **style)
