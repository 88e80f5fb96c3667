"""A map of features in two dimensions: `scatter`, by principal components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kedge.calls.arguments import called_as
from kedge.errors import CannotDraw
from kedge.figures.canvas import (
    ACCENT,
    CLASSES,
    MARKERS,
    TEXT,
    Axes,
    Drawing,
    dress,
    host,
    plain,
    shown,
)
from kedge.sites.leaves import describe

_LINES = 22
_NAMED = 2 * _LINES


@called_as("figures.principal(features)")
def principal(features: Any, components: int = 2) -> tuple[Tensor, Tensor]:
    """Project features onto their principal components, the directions in which they vary most.

    Args:
        features: ``[n, ...]``, a row per sample; dimensions after the first are flattened.
        components: The number of directions.

    Returns:
        The projections ``[n, components]`` and each direction's share of the variance
        ``[components]``, in float64. The sign of each direction makes its largest weight positive,
        so that two runs give the same picture. Directions beyond those of the data are 0.

    Raises:
        CannotDraw: If there are fewer than two samples, or non-finite values.

    Examples:
        >>> projections, shares = figures.principal(images)
        >>> projections.shape
        torch.Size([8, 2])
    """
    table = host(features).double()
    if table.dim() < 2 or len(table) < 2 or not table.numel():
        raise CannotDraw(
            f"principal components need at least 2 samples, [n, ...], and got {describe(features)}"
        )
    table = table.flatten(1)
    if not bool(table.isfinite().all()):
        rows = (~table.isfinite().all(1)).nonzero().flatten().tolist()
        raise CannotDraw(
            "principal components need finite values, "
            f"and {len(rows)} samples hold a NaN "
            f"or an infinity; the first is {rows[0]}"
        )

    centred = table - table.mean(0)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:components]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)

    tiny = torch.finfo(sizes.dtype).tiny
    variance = (sizes / sizes.max().clamp_min(tiny)).square()
    share = variance[:components] / variance.sum().clamp_min(tiny)
    missing = (0, components - len(directions))
    return pad(centred @ directions.T, missing), pad(share, missing)


@called_as("figures.scatter(features, labels)")
def scatter(
    features: Any, labels: Any = None, *, names: Sequence[str] = (), title: str = ""
) -> Drawing:
    """Draw samples in the plane of the first two principal components of their features.

    Args:
        features: ``[n, ...]``, a row per sample.
        labels: The class of each sample, whole numbers ``[n]``; each class has its own colour and
            marker.
        names: The names of classes, by their number.
        title: The title of the figure.

    Returns:
        The figure; the axis labels give each component's share of the variance.

    Raises:
        CannotDraw: If the labels do not match the features; see also `principal`.

    Examples:
        >>> figure = figures.scatter(kedge.extract(model, "fc")(images)["fc"], labels)
    """
    points, share = principal(features)
    figure = Drawing(5.0)
    axes = figure.subplots()
    size = max(min(9000 / len(points), 36), 6)
    style: dict[str, Any] = {"s": size, "lw": 0, "alpha": 0.75}
    if labels is None:
        axes.scatter(shown(points[:, 0]), shown(points[:, 1]), c=ACCENT, **style)
    else:
        classes = _classes(labels, len(points))
        found = classes.unique().tolist()
        for number, label in enumerate(found):
            some = points[classes == label]
            style["c"] = CLASSES[number % len(CLASSES)]
            style["marker"] = MARKERS[number % len(MARKERS)]
            style["label"] = _legend_name(label, names)
            axes.scatter(shown(some[:, 0]), shown(some[:, 1]), **style)
        _legend(axes, len(found))

    first, second = (f"({float(part):.1%} of variance)" for part in share)
    dress(axes, title, f"principal component 1 {first}", f"principal component 2 {second}")
    axes.set_aspect("equal", adjustable="datalim")
    return figure


def _legend_name(label: int, names: Sequence[str]) -> str:
    name = plain(names[label]) if 0 <= label < len(names) else str(label)
    if name.startswith("_"):  # a legend leaves out such names
        return f"\u200b{name}"
    return name


def _legend(axes: Axes, count: int) -> None:
    marks, names = axes.get_legend_handles_labels()
    title = "class" if count <= _NAMED else f"the first {_NAMED} of {count} classes"
    axes.legend(
        marks[:_NAMED],
        names[:_NAMED],
        fontsize=TEXT,
        frameon=False,
        title=title,
        title_fontsize=TEXT,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        markerscale=1.4,
        handletextpad=0.2,
        ncols=-(-min(count, _NAMED) // _LINES),
    )


def _classes(labels: Any, count: int) -> Tensor:
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu()
    try:
        classes = torch.as_tensor(labels)
    except (TypeError, ValueError) as error:
        raise CannotDraw(
            "scatter(...) takes a whole number for each sample as labels, "
            f"and their names in names=: {error}"
        ) from error
    if classes.shape != (count,) or classes.is_floating_point():
        raise CannotDraw(
            f"scatter(...) got {describe(labels)} as labels of {count} samples; "
            "it takes a whole number for each"
        )
    return classes
