"""The channels of a layer for one sample: `feature_maps`."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

from torch import Tensor

from kedge.calls.arguments import called_as
from kedge.errors import CannotDraw
from kedge.figures.canvas import (
    ONE_SIGN,
    TWO_SIGNS,
    WIDTH,
    Drawing,
    bare,
    colours,
    host,
    plain,
    shown,
)
from kedge.sites.leaves import describe

_COLUMNS = 8


@called_as('figures.feature_maps(acts["conv1"])')
def feature_maps(
    values: Any,
    *,
    sample: int = 0,
    most: int = 24,
    order: Literal["strength", "index"] = "strength",
    scale: Literal["shared", "own"] = "shared",
    title: str = "",
) -> Drawing:
    """Draw the channels of a layer's output for one sample.

    Args:
        values: A layer's output, ``[n, channels, height, width]``, or ``[channels, height, width]``
            for a single sample.
        sample: The index of the sample.
        most: The largest number of channels to draw.
        order: "strength" for the channels with the largest mean magnitude first, "index" for the
            lowest index first.
        scale: "shared" for one range of colours, "own" for one of each channel, which is written
            above it.
        title: The title of the figure.

    Returns:
        The figure; white is 0 if there are negative values.

    Raises:
        CannotDraw: If the values are not images of channels, there is no such sample, or a setting
            is unknown.

    Examples:
        >>> figure = figures.feature_maps(kedge.extract(model, "relu")(images)["relu"], sample=0)
    """
    maps = _of_sample(values, sample)
    if most < 1 or order not in ("strength", "index") or scale not in ("shared", "own"):
        raise CannotDraw(
            f"feature_maps(most={most}, order={order!r}, scale={scale!r}): "
            'most must be at least 1, order "strength" or "index", '
            'and scale "shared" or "own"'
        )
    drawn = list(range(len(maps)))
    chosen_by = "by index"
    if order == "strength":
        strength = maps.abs().flatten(1).mean(1)
        drawn = strength.argsort(descending=True, stable=True).tolist()
        chosen_by = "strongest first, by mean magnitude"
    drawn = drawn[:most]

    signed = bool((maps < 0).any())
    colour_map = TWO_SIGNS if signed else ONE_SIGN
    figure = Drawing(_height(maps, len(drawn)))
    grid = figure.subplots(ceil(len(drawn) / _COLUMNS), _COLUMNS, squeeze=False)
    image: Any = None
    for axes, channel in zip(grid.flat, drawn, strict=False):
        of = maps[channel] if scale == "own" else maps[drawn]
        low, high = _range(of, signed=signed)
        image = axes.imshow(shown(maps[channel]), cmap=colour_map, vmin=low, vmax=high)
        name = f"{channel}: to {high:.2g}" if scale == "own" else f"{channel}"
        bare(axes, name)
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)

    ranges = "each with its own range of colours"
    if scale == "shared":
        colours(figure, image, list(grid.flat), "activation")
        ranges = "one range of colours for all"
    text = f"{len(drawn)} of {len(maps)} channels, {chosen_by}; {ranges}"
    if title:
        text = f"{plain(title)}\n{text}"
    figure.suptitle(text, fontsize=10, x=0.01, ha="left")
    return figure


def _of_sample(values: Any, sample: int) -> Tensor:
    maps = host(values)
    if maps.dim() == 4 and -len(maps) <= sample < len(maps):
        maps = maps[sample]
    if maps.dim() != 3 or not maps.numel():
        raise CannotDraw(
            "feature_maps(...) draws one sample of [n, channels, height, width], "
            f"and got {describe(values)} and sample={sample}; "
            "turn tokens [n, tokens, channels] into images "
            "with .transpose(1, 2).unflatten(2, (height, width))"
        )
    return maps


def _range(maps: Tensor, *, signed: bool) -> tuple[float, float]:
    finite = maps[maps.isfinite()]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    low = -most if signed else 0.0
    return low, most or 1.0


def _height(maps: Tensor, count: int) -> float:
    _, height, width = maps.shape
    each = (WIDTH - 0.7) / _COLUMNS * height / width
    return min(ceil(count / _COLUMNS) * (each + 0.19) + 0.55, 24)
