"""The weights of a recording over the steps: their size, their gradient, their change, and the gradient of their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.recorded.once import once
from kedge.rules.recorded.roots import by_root
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.recorded.wiring import Wiring, wire
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats, Ints

#: Modules whose weights are looked up and not multiplied: most of their rows get no gradient in a
#: step.
TABLES = frozenset({"Embedding", "EmbeddingBag"})

#: Parameters with a gradient below this share of the largest one's hardly get a gradient.
STARVED = 1e-3


@dataclass(frozen=True)
class Weight:
    """One parameter of at least two dimensions, and the sites that belong to it."""

    param: SiteInfo
    grad: SiteInfo | None
    update: SiteInfo | None
    arriving: SiteInfo | None
    "The gradient of its module's output."

    position: int
    table: bool

    @property
    def root(self) -> int:
        """The root that holds it."""
        return self.param.root


@once
def weights(recording: Recording) -> tuple[Weight, ...]:
    """Return the weights of trained models in the order in which their modules return.

    Biases, gains and other vectors are left out: they start at zero or one, and the usual bounds on
    the size of a weight do not hold for them.
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


@dataclass(frozen=True)
class WeightCourses:
    """Weights over the measured steps: a row a weight, a column a step, NaN where nothing was measured.

    Attributes:
        weights: The weights, in the order in which their modules return.
        steps: The steps.
        size: The root mean squares.
        gradient: Those of the gradients, relative to the weight.
        update: Those of the changes by the optimizer, relative to the weight.
        arriving: Those of the gradients of their modules' outputs.
    """

    weights: tuple[Weight, ...]
    steps: Ints
    size: Floats
    gradient: Floats
    update: Floats
    arriving: Floats

    def by_root(self, chosen: Callable[[Weight], bool]) -> list[tuple[int, WeightCourses]]:
        """Return the chosen weights of each root."""
        rows = [row for row, weight in enumerate(self.weights) if chosen(weight)]
        groups = by_root(rows, lambda row: self.weights[row].root)
        return [(root, self.part(np.array(own))) for root, own in groups]

    def part(self, rows: Ints, columns: Ints | slice = slice(None)) -> WeightCourses:
        """Return some of the weights, in some of the steps."""
        return WeightCourses(
            weights=tuple(self.weights[row] for row in rows),
            steps=self.steps[columns],
            size=self.size[rows][:, columns],
            gradient=self.gradient[rows][:, columns],
            update=self.update[rows][:, columns],
            arriving=self.arriving[rows][:, columns],
        )


@once
def weight_courses(recording: Recording) -> WeightCourses:
    """Return the weights of trained models over the measured steps."""
    known = weights(recording)
    size = rms(recording, [weight.param for weight in known])
    return WeightCourses(
        weights=known,
        steps=recording.steps,
        size=size,
        gradient=share(rms(recording, [weight.grad for weight in known]), size),
        update=share(rms(recording, [weight.update for weight in known]), size),
        arriving=rms(recording, [weight.arriving for weight in known]),
    )


def rms(recording: Recording, sites: Sequence[SiteInfo | None]) -> Floats:
    """Return the root mean square of sites over ``recording.steps``: a row a site, NaN where there is none."""
    table = recording.matrix(sites, "rms")
    table[~np.isfinite(table)] = np.nan
    return table


def share(part: Floats, whole: Floats) -> Floats:
    """Return a quotient, NaN where the divisor is zero or not known."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


def middle(table: Floats) -> Floats:
    """Return the median of each column, NaN for a column without numbers."""
    result = np.full(table.shape[1], np.nan)
    some = ~np.isnan(table).all(axis=0)
    if some.any():
        result[some] = np.nanmedian(table[:, some], axis=0)
    return result


def finite_median(values: Floats) -> float:
    """Return the median of the finite ones of some values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    if len(finite):
        return float(np.median(finite))
    return float("nan")


def finite_medians(table: Floats) -> Floats:
    """Return the median of the finite values of each row, NaN for a row without one."""
    return middle(np.where(np.isfinite(table), table, np.nan).T)


def first_finites(table: Floats) -> Floats:
    """Return the first finite value of each row, NaN for a row without one."""
    known = np.isfinite(table)
    result = np.full(len(table), np.nan)
    some = known.any(axis=1)
    if some.any():
        result[some] = table[some, known[some].argmax(axis=1)]
    return result


def _weight(
    wiring: Wiring, site: SiteInfo, grad: SiteInfo | None, update: SiteInfo | None
) -> Weight:
    module = wiring.modules[site.owner]
    arriving = wiring.sites[module.grads[0]] if module.grads else None
    return Weight(site, grad, update, arriving, module.position, module.type in TABLES)
