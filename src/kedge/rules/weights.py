"""The weights of a recording with their courses: size, gradient, what arrived, change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.trained import trained_sites
from kedge.rules.wiring import Wiring, wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats

#: Modules whose weights are looked up and not multiplied: most of their rows get no gradient in a step.
TABLES = frozenset({"Embedding", "EmbeddingBag"})


@dataclass(frozen=True)
class Weight:
    """One parameter of at least two dimensions, and the sites that tell of it."""

    param: SiteInfo
    grad: SiteInfo | None
    update: SiteInfo | None
    arriving: SiteInfo | None
    "The gradient of its module's output."

    position: int
    table: bool


def weights(recording: Recording) -> tuple[Weight, ...]:
    """List the weights of trained models in the order in which their modules return.

    Biases, gains and other vectors are left out: they start at zero or one, and what is said of
    the size of a weight does not hold for them.
    """
    wiring = wire(recording)
    grads = {site.path: site for site in recording.of_kind("param.grad")}
    updates = {site.path: site for site in recording.of_kind("update")}
    found = [
        _weight(wiring, site, grads.get(site.path), updates.get(site.path))
        for site in trained_sites(recording, "param")
        if len(site.shape) >= 2
    ]
    return tuple(sorted(found, key=lambda weight: weight.position))


def rms(recording: Recording, sites: Sequence[SiteInfo | None]) -> Floats:
    """Give the root mean square of sites over ``recording.steps``: a row a site, NaN where there is none."""
    table = np.full((len(sites), len(recording.steps)), np.nan)
    for row, site in zip(table, sites, strict=True):
        if site is not None:
            row[:] = recording.series(site, "rms")
    table[~np.isfinite(table)] = np.nan
    return table


def share(part: Floats, whole: Floats) -> Floats:
    """Divide, NaN where there is nothing to divide by."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def middle(table: Floats) -> Floats:
    """Give the median of each column, NaN for a column with nothing but NaN."""
    result = np.full(table.shape[1], np.nan)
    some = ~np.isnan(table).all(axis=0)
    if some.any():
        result[some] = np.nanmedian(table[:, some], axis=0)
    return result


def _weight(wiring: Wiring, site: SiteInfo, grad: SiteInfo | None, update: SiteInfo | None) -> Weight:
    module = wiring.modules[site.owner]
    arriving = wiring.sites[module.grads[0]] if module.grads else None
    return Weight(site, grad, update, arriving, module.position, module.type in TABLES)
