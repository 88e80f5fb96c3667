"""A course: what one site, or several things, had over the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Bools, Floats, Ints


@dataclass(frozen=True)
class Course:
    """Values over steps.

    Attributes:
        site: The site that they belong to.
        steps: The steps, in order.
        values: A value a step; of several things, such as ranks, a row for each. Steps in which
            nothing was measured are left out; NaN stands where one of several has no value.
    """

    site: SiteInfo
    steps: Ints
    values: Floats

    @classmethod
    def of(cls, recording: Recording, site: SiteInfo, statistic: str) -> Course:
        """Return a statistic of a site, in the steps in which it was measured and all elements were finite."""
        rows = recording.rows(site)
        values = rows.statistic(statistic)
        return Course(site, rows.step, values).where(np.isfinite(values) & rows.clean)

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, kept: Bools | Ints | slice) -> Self:
        """Return some of the steps."""
        return replace(self, steps=self.steps[kept], values=self.values[..., kept])

    def first_step(self, chosen: Bools) -> int:
        """Return the first of some steps, of which there is at least one."""
        return int(self.steps[chosen.argmax()])
