"""Attribution maps with their images: `attributions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional

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

_COVER = 0.85


@called_as("figures.attributions(recipes.saliency(model)(images), images)")
def attributions(
    maps: Any | dict[str, Any],
    images: Any,
    *,
    how: Literal["beside", "over"] = "beside",
    labels: Sequence[str] = (),
    title: str = "",
) -> Drawing:
    """Draw attributions beside or over the images that they explain.

    Args:
        maps: Attributions ``[n, channels, height, width]``, which are summed over channels, or
            ``[n, height, width]``; a dict of several by name becomes columns. Smaller maps, as from
            Grad-CAM, are stretched over the image.
        images: The images, ``[n, channels, height, width]``, with 1 or 3 channels, in any range.
        how: "beside" the image, or "over" it in grey; a larger attribution hides more of the image.
        labels: The label of each image.
        title: The title of the figure.

    Returns:
        The figure. If any map has negative values, white is 0 in all maps of the figure; non-finite
        values are grey. Colours range to the largest magnitude of each picture, because
        attributions of different images have no common unit.

    Raises:
        CannotDraw: If the maps do not match the images, there are no maps, or `how` is unknown.

    Examples:
        >>> maps = recipes.gradient(model, target=2)(images)
        >>> figure = figures.attributions(maps, images)
    """
    if how not in ("beside", "over") or (isinstance(maps, Mapping) and not maps):
        raise CannotDraw(
            f'attributions(...) needs at least one map, and how="beside" or "over"; got how={how!r}'
        )
    pictures = _images(images)
    given = maps if isinstance(maps, Mapping) else {"": maps}
    named = {name: _maps(value, len(pictures)) for name, value in given.items()}
    signed = any(bool((found < 0).any()) for found in named.values())

    beside = how == "beside"
    columns = len(named) + beside
    height, width = pictures.shape[1:3]
    each = min((WIDTH - 1.45) / columns, 1.9)  # the rest is for the colour bar and its label
    row_height = min(each * height / width + 0.2, 4)
    figure = Drawing(row_height * len(pictures) + 0.4, min(WIDTH, each * columns + 1.5))
    grid = figure.subplots(len(pictures), columns, squeeze=False)

    image: Any = None
    for row, picture in enumerate(pictures):
        label = str(labels[row]) if row < len(labels) else ""
        if beside:
            grid[row, 0].imshow(shown(picture), cmap="gray", vmin=0, vmax=1)
            bare(grid[row, 0], label or "input")
        for column, (name, found) in enumerate(named.items(), start=int(beside)):
            axes = grid[row, column]
            image = _draw(axes, found[row], picture, over=not beside, signed=signed)
            words = []
            if row == 0 and name:
                words.append(name)
            if column == 0 and label:  # over the picture
                words.append(label)
            bare(axes, ", ".join(words))
    colours(figure, image, list(grid.flat), "share of each picture's\nlargest magnitude")
    if title:
        figure.suptitle(plain(title), fontsize=10, x=0.01, ha="left")
    return figure


def _draw(axes: Any, found: Tensor, picture: Tensor, *, over: bool, signed: bool) -> Any:
    """Draw one map in the size of its picture, relative to its largest magnitude.

    Returns:
        Matplotlib's image.
    """
    finite = found[found.isfinite()]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    relative = found / (most or 1.0)
    relative[~found.isfinite()] = nan
    height, width = picture.shape[:2]
    style: dict[str, Any] = {"cmap": ONE_SIGN, "vmin": 0.0, "vmax": 1.0}
    if signed:
        style |= {"cmap": TWO_SIGNS, "vmin": -1.0}
    if not over:
        style |= {"extent": (0, width, height, 0), "interpolation": "nearest"}
        return axes.imshow(shown(relative), **style)

    fitted = functional.interpolate(
        relative[None, None], (height, width), mode="bilinear", align_corners=False
    )[0, 0]
    grey = picture if picture.dim() == 2 else picture.mean(-1)
    axes.imshow(shown(grey), cmap="gray", vmin=-0.2, vmax=1.2)
    cover = fitted.abs().clamp(0, 1).nan_to_num() * _COVER
    return axes.imshow(shown(fitted), alpha=shown(cover), **style)


def _images(images: Any) -> Tensor:
    """Return images between 0 and 1 with channels last; grey images without channels."""
    found = host(images)
    if found.dim() == 3:
        found = found[None]
    if found.dim() != 4 or found.shape[1] not in (1, 3) or not found.numel():
        raise CannotDraw(
            "attributions(...) draws images [n, channels, "
            "height, width] of 1 or 3 channels, "
            f"and got {describe(images)}"
        )
    finite = found.isfinite()
    low = found.where(finite, inf).amin((1, 2, 3), keepdim=True)
    high = found.where(finite, -inf).amax((1, 2, 3), keepdim=True)
    found = ((found - low) / (high - low).clamp_min(1e-12)).where(finite, nan)
    if found.shape[1] == 1:
        return found[:, 0]
    return found.permute(0, 2, 3, 1)


def _maps(maps: Any, count: int) -> Tensor:
    found = host(maps)
    if found.dim() == 4:
        found = found.sum(1)
    elif found.dim() == 3 and count == 1 and len(found) != 1:
        found = found.sum(0, keepdim=True)
    elif found.dim() == 2 and count == 1:
        found = found[None]
    if found.dim() != 3 or len(found) != count or not found.numel():
        raise CannotDraw(
            f"attributions(...) got {describe(maps)} for {count} images; "
            "it takes one map per image, "
            "[n, channels, height, width] or [n, height, width]"
        )
    return found
