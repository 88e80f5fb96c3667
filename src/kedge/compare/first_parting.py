"""The first step in which two recordings differ: the evidence for its cause."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.compare.alignment.sites import SameSite
from kedge.compare.comparison import Comparison, Parting
from kedge.compare.measures import Compared
from kedge.rules.recorded.roots import root_path
from kedge.store.recording import Recording
from kedge.store.rows import Floats

#: Sums of many numbers in another order are some tens of units in the last place apart.
ROUNDING_ULPS = 64


@dataclass(frozen=True)
class PartingCause:
    """The cause of a difference, as far as the recordings show it.

    Attributes:
        code: One word for programs.
        headline: The cause, in a few words.
        evidence: The facts that show it.
    """

    code: str
    headline: str
    evidence: str


class FirstParting:
    """The first step in which two recordings differ, and the values that are equal until then.

    Attributes:
        comparison: The comparison.
        first: The first difference.
        column: The place of its step in the comparison's matrices.
    """

    def __init__(self, comparison: Comparison, first: Parting) -> None:
        self.comparison = comparison
        self.first = first
        self.column = int(np.searchsorted(comparison.steps, first.step))

    @property
    def sites(self) -> Sequence[SameSite]:
        """All aligned sites, in the order in which they fire in a step."""
        return self.comparison.alignment.sites

    @property
    def step(self) -> int:
        """The step in which they differ."""
        return self.first.step

    def compared(self, *kinds: str) -> list[int]:
        """Return the places of the sites of some kinds that were compared in that step."""
        return list(filter(self.is_compared, self._of_kinds(kinds)))

    def _of_kinds(self, kinds: Collection[str]) -> list[int]:
        return [i for i, same in enumerate(self.sites) if same.kind in kinds]

    def is_compared(self, site: int) -> bool:
        """Whether a site was compared in that step."""
        return not np.isnan(self.comparison.apart[site, self.column])

    def parted(self, *kinds: str) -> list[int]:
        """Return the places of the sites of some kinds that differ in that step."""
        return [i for i in self.compared(*kinds) if self.comparison.parted[i, self.column]]

    def parting(self, site: int) -> Parting:
        """Return the difference of a site in that step."""
        return self.comparison.parting(site, self.column)

    def pair(self, site: int, statistic: Compared) -> tuple[float, float]:
        """Return one statistic of a site in that step, in A and in B."""
        return self.comparison.pair(site, self.column, statistic)

    def earlier(self, *kinds: str) -> int | None:
        """Return the last step before in which sites of some kinds were compared, if any."""
        rows = self._of_kinds(kinds)
        before = self.comparison.apart[rows, : self.column]
        found = np.flatnonzero((~np.isnan(before)).any(axis=0))
        if not len(found):
            return None
        return int(self.comparison.steps[found[-1]])

    @cached_property
    def at_start(self) -> bool:
        """Whether both recordings begin with that step."""
        first = [self.step]
        a, b = self.comparison.a, self.comparison.b
        return bool(a.steps[:1].tolist() == first == b.steps[:1].tolist())

    def paths(self, sites: Iterable[int]) -> list[str]:
        """Return the paths of sites in A, such as those of parameters."""
        return [self.sites[i].a.path for i in sites]

    def ratios(
        self,
        sites: Iterable[int],
        statistic: Compared = "rms",
        column: int | None = None,
    ) -> Floats:
        """Return a statistic of each site in B relative to A; NaN if both are zero.

        Args:
            sites: The places of the sites.
            statistic: The statistic.
            column: The place of the step; that of the first difference if None.
        """
        if column is None:
            column = self.column
        values = [self.comparison.pair(i, column, statistic) for i in sites]
        both = np.array(values, dtype=np.float64).reshape(-1, 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = both[:, 1] / both[:, 0]
        ratios[~np.isfinite(ratios)] = np.inf
        ratios[~both.any(axis=1)] = np.nan
        return ratios

    @property
    def is_rounding(self) -> bool:
        """Whether another order of the same operations explains the size of the first difference."""
        return self.first.ulps is not None and self.first.ulps <= ROUNDING_ULPS

    def differing_dtypes(self, sites: Iterable[int]) -> list[int]:
        """Return the sites that have another dtype in B."""
        return [i for i in sites if self.sites[i].a.dtype != self.sites[i].b.dtype]

    def dtypes(self, site: int) -> tuple[str, str]:
        """Return the dtypes of a site in A and in B."""
        same = self.sites[site]
        return same.a.dtype, same.b.dtype

    def fits_dtypes(self, site: int) -> bool:
        """Whether the coarser of both dtypes explains the difference of a site in that step."""
        ulps = self.parting(site).ulps
        return ulps is not None and ulps <= ROUNDING_ULPS / 8

    def equal_before(self) -> str:
        """Return words for the equality of everything before the difference."""
        if self.comparison.tolerance:
            return "equal within the tolerance"
        return "equal to the last bit"


def is_from_outside(recording: Recording, same: SameSite) -> bool:
    """Whether a site is an input from the program: of a module it calls, and made by none."""
    outside = same.kind == "in" and is_called_from_outside(recording, same)
    return outside and all(source is None for source in same.a.sources)


def is_called_from_outside(recording: Recording, same: SameSite) -> bool:
    """Whether the program itself calls the module of a site: the whole model, or the loss."""
    return same.a.path == root_path(recording, same.a.root)


def common_factor(ratios: Floats, spread: float) -> float | None:
    """Return the factor that all ratios equal up to a share; None if they differ."""
    known = ratios[~np.isnan(ratios)]
    if not len(known) or not np.all(np.isfinite(known) & (known > 0)):
        return None
    middle = float(np.median(known))
    if not np.all(np.abs(known / middle - 1) <= spread):
        return None
    return middle
