"""The distribution of values, layer by layer: `distributions`.

# Note [Magnitudes on a log axis]
Activations and gradients differ by powers of ten between layers, so the figure shows magnitudes on
a log axis. Zero has no place on a log axis: quantiles are those of nonzero values, and a panel
below shows the share of exact zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.calls.arguments import called_as
from kedge.errors import CannotDraw
from kedge.figures.canvas import (
    ACCENT,
    QUIET,
    TEXT,
    TITLE,
    Axes,
    Drawing,
    dress,
    host,
    plain,
    shown,
)
from kedge.sites.leaves import describe

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BANDS = (
    (0, 6, "#dbe9f4", "1 to 99 %"),
    (1, 5, "#b3d1e8", "5 to 95 %"),
    (2, 4, "#7fb2d9", "25 to 75 %"),
)
_MOST = 2**20
_BINS = 120
_TICKS = 50
_WARM = "#d55e00"


@dataclass(frozen=True)
class SiteSpread:
    """The data drawn for one site.

    Attributes:
        site: The site's name.
        magnitudes: Magnitudes of the finite nonzero elements, sorted.
        zero: The share of exact zeros among the finite elements.
        nonfinite: The number of non-finite elements.
    """

    site: str
    magnitudes: Tensor
    zero: float
    nonfinite: int


@called_as('figures.distributions({"conv1": acts["conv1"], "fc": acts["fc"]})')
def distributions(
    values: Mapping[str, Any],
    gradients: Mapping[str, Any] | None = None,
    *,
    kind: Literal["bands", "ridges"] = "bands",
    units: tuple[str, str] = ("activation", "gradient"),
    title: str = "",
) -> Drawing:
    """Draw the distribution of magnitudes at each site, with the sites in the order of the dict.

    Args:
        values: Tensors by site, such as the result of `kedge.extract`.
        gradients: Gradients by site, drawn in a second panel; their sites may differ from those of
            `values`.
        kind: "bands" between quantiles, or "ridges", one curve per site. Above 2**20 elements, a
            site is sampled evenly.
        units: The names of the values and of the gradients, with a unit if they have one.
        title: The title of the figure.

    Returns:
        The figure; see Note [Magnitudes on a log axis].

    Raises:
        CannotDraw: If there are no sites, a site has no elements, or an argument is of the wrong
            kind.

    Examples:
        >>> figure = figures.distributions(kedge.extract(model, ["conv", "relu", "fc"])(images))
    """
    for given in (values, gradients):
        if given is not None and not isinstance(given, Mapping):
            raise CannotDraw(
                f"distributions(...) got {describe(given)}; it takes tensors by site, in a dict"
            )
    panels = [(units[0], values)]
    if gradients is not None:
        panels.append((units[1], gradients))
    spreads = []
    for unit, some in panels:
        spreads.append((unit, [_spread(site, value) for site, value in some.items()]))
    if not all(found for _, found in spreads):
        raise CannotDraw(
            "distributions(...) got no site; "
            "it takes tensors by site, such as kedge.extract returns"
        )
    if kind not in ("bands", "ridges"):
        raise CannotDraw(f'kind={kind!r}: use "bands" or "ridges"')

    figure = _bands(spreads) if kind == "bands" else _ridges(spreads)
    if title:
        figure.suptitle(plain(title), fontsize=TITLE, x=0.01, ha="left")
    return figure


def _spread(site: str, value: Any) -> SiteSpread:
    elements = host(value).flatten()
    if not elements.numel():
        raise CannotDraw(f'distributions(...) got no elements for "{site}": {describe(value)}')
    elements = elements[:: max(-(-elements.numel() // _MOST), 1)].abs()
    finite = elements[elements.isfinite()]
    there = finite[finite > 0].sort().values
    zero = 0.0
    if finite.numel():
        zero = 1 - there.numel() / finite.numel()
    return SiteSpread(site, there, zero, elements.numel() - finite.numel())


def _bands(panels: Sequence[tuple[str, list[SiteSpread]]]) -> Drawing:
    longest = 0
    for _, found in panels:
        longest = max(longest, *(len(spread.site) for spread in found))
    figure = Drawing(2.6 * len(panels) + 0.8 + min(longest, 40) * 0.06 * len(panels))
    heights = [4, 1] * len(panels)
    grid = figure.subplots(2 * len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for number, (unit, found) in enumerate(panels):
        band = grid[2 * number]
        zeros = grid[2 * number + 1]
        _band(band, unit, found)
        if not number:
            _legend(band)
        _zeros(zeros, found)
        band.sharex(zeros)
        band.tick_params(labelbottom=False)
    return figure


def _band(axes: Axes, unit: str, found: Sequence[SiteSpread]) -> None:
    quantiles = torch.tensor([_quantiles(spread) for spread in found], dtype=torch.float64)
    places: list[float] = list(range(len(found)))
    ends = places
    if len(found) == 1:  # otherwise its bands would have no width
        ends = [-0.25, 0.25]
    wide = quantiles.expand(len(ends), -1)
    for low, high, tint, label in _BANDS:
        below = wide[:, low].tolist()
        above = wide[:, high].tolist()
        axes.fill_between(ends, below, above, color=tint, lw=0, label=label)

    median = quantiles[:, 3].tolist()
    axes.plot(places, median, color=ACCENT, marker="o", ms=3.5, lw=1.4, label="median")
    _bad(axes, found)
    if bool((quantiles > 0).any()):
        axes.set_yscale("log")
    axes.grid(axis="y", color=QUIET, alpha=0.15)
    dress(axes, y=f"|{unit}|, not zero")


def _legend(axes: Axes) -> None:
    axes.legend(
        fontsize=TEXT - 1,
        frameon=False,
        ncols=5,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
    )


def _bad(axes: Axes, found: Sequence[SiteSpread]) -> None:
    """Mark sites with non-finite elements at the upper edge."""
    bad = [place for place, spread in enumerate(found) if spread.nonfinite]
    if bad:
        above = axes.get_xaxis_transform()
        axes.scatter(
            bad,
            [0.97] * len(bad),
            marker="x",
            color=_WARM,
            transform=above,
            label="has NaN or Inf",
            zorder=3,
        )


def _zeros(axes: Axes, found: Sequence[SiteSpread]) -> None:
    shares = [100 * spread.zero for spread in found]
    axes.bar(range(len(found)), shares, color=QUIET, width=0.6)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 100])
    dress(axes, y="zero, %")
    step = -(-len(found) // _TICKS)
    names = [_named(spread.site) for spread in found][::step]
    axes.set_xticks(range(0, len(found), step), names, rotation=90, fontsize=TEXT - 1)
    if step > 1:
        axes.set_xlabel(f"one site in {step} is named", fontsize=TEXT)
    axes.set_xlim(-0.5, len(found) - 0.5)


def _ridges(panels: Sequence[tuple[str, list[SiteSpread]]]) -> Drawing:
    most = max(len(found) for _, found in panels)
    figure = Drawing(min(0.34 * most + 1.2, 24))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (unit, found) in zip(grid, panels, strict=True):
        _ridge(axes, unit, found)
    return figure


def _ridge(axes: Axes, unit: str, found: Sequence[SiteSpread]) -> None:
    there = [spread.magnitudes.log10() for spread in found if spread.magnitudes.numel()]
    low, high = _ends(there)
    for place, spread in enumerate(found):
        line = len(found) - 1 - place
        above = place + 1
        counts = torch.histc(spread.magnitudes.log10().float(), _BINS, low, high)
        heights = shown(line + 1.5 * counts / max(float(counts.max()), 1.0))
        bins = shown(torch.logspace(low, high, _BINS))
        axes.fill_between(bins, line, heights, color=_BANDS[1][2], lw=0, zorder=above)
        axes.plot(bins, heights, color="white", lw=1.6, zorder=above)
        axes.plot(bins, heights, color=ACCENT, lw=0.9, zorder=above)

    axes.set_xscale("log")
    labels = [_named(spread.site) + _besides(spread) for spread in reversed(found)]
    axes.set_yticks(range(len(found)), labels, fontsize=TEXT - 1)
    dress(axes, title="each curve to its own height", x=f"|{unit}|, not zero")
    axes.grid(axis="x", color=QUIET, alpha=0.15)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _ends(there: Sequence[Tensor]) -> tuple[float, float]:
    """Return the range of exponents without the lowest 0.2 % of each site."""
    if not there:
        return -1.0, 1.0
    low = min(float(some[int(0.002 * (len(some) - 1))]) for some in there)
    high = max(float(some[-1]) for some in there)
    return low - 0.1, high + 0.1


def _besides(spread: SiteSpread) -> str:
    parts = []
    if spread.zero:
        parts.append(f"{spread.zero:.0%} zero")
    if spread.nonfinite:
        parts.append(f"{spread.nonfinite:,} not finite")
    if not parts:
        return ""
    return f"  ({', '.join(parts)})"


def _quantiles(spread: SiteSpread) -> list[float]:
    some = spread.magnitudes
    if not len(some):
        return [float("nan")] * len(_QUANTILES)
    return [float(some[round(share * (len(some) - 1))]) for share in _QUANTILES]


def _named(site: str) -> str:
    """Return a name, shortened in the middle, where paths differ least."""
    if len(site) > 40:
        site = f"{site[:15]}…{site[-24:]}"
    return plain(site)
