"""A good run and another one of the same program, with the sites and roots that both have.

# Note [Relations]
A relation is taken from the good run and must hold with another seed, another number of steps and
another batch size. So it is never about one value: it is about what there is, what happens in each
step, and orders of magnitude. A relation that the good run shows late, after the last step of the
other run, is not asked. Where the other run has another number of steps, only its steps up to the
good run's last one are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.compare.alignment.sites import Alignment, SameSite, align
from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.recorded.optimizers import events_of
from kedge.store.events import ModesEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Floats, Ints

#: Fewer measured steps of a site do not show what holds in each step.
LEAST_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class DepartureEvidence(Evidence):
    """What was seen in either run.

    Attributes:
        good: What was seen in the good run.
        here: What is seen in this one.
        paths: The modules, parameters or sites that it concerns.
        inferred: Whether the relation is inferred from the range of values in the good run, and
            not a fact of the program.
    """

    good: str = said("in the good run: {}")
    here: str = said("here: {}")
    paths: tuple[str, ...] = unsaid()
    inferred: bool = said("inferred from the range of values in the good run")


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A relation of the good run that does not hold in the other one.

    Attributes:
        kind: The relation, in one word.
        site: The site that shows it, or a module or optimizer.
        step: The first step that shows it; -1 if it belongs to no step.
        message: What departs, in a sentence.
        good: What was seen in the good run.
        here: What is seen in the other one.
        paths: What it concerns.
        remedy: What to look at.
        inferred: Whether the relation is a range of values.
    """

    kind: str
    site: str
    step: int
    message: str
    good: str
    here: str
    paths: tuple[str, ...] = ()
    remedy: str
    inferred: bool = False

    @property
    def evidence(self) -> DepartureEvidence:
        """What it rests on."""
        return DepartureEvidence(
            kind=self.kind,
            good=self.good,
            here=self.here,
            paths=self.paths,
            inferred=self.inferred,
        )


@dataclass(frozen=True, eq=False)
class RunPair:
    """A good run and another one.

    Attributes:
        good: The good run.
        run: The other one.
        alignment: Their pairs of modules and sites; A is the good run.
    """

    good: Recording
    run: Recording
    alignment: Alignment

    @classmethod
    def of(cls, good: Recording, run: Recording) -> RunPair:
        """Return a pair of runs."""
        return cls(good, run, align(good, run))

    def of_kind(self, *kinds: str) -> list[SameSite]:
        """Return the sites of some kinds that both have, in the order in which they fire."""
        return [same for same in self.alignment.sites if same.kind in kinds]

    @cached_property
    def last_step(self) -> int:
        """The last measured step of the other run; -1 without one."""
        return int(self.run.steps[-1]) if len(self.run.steps) else -1

    @cached_property
    def last_good_step(self) -> int:
        """The last measured step of the good run; -1 without one."""
        return int(self.good.steps[-1]) if len(self.good.steps) else -1

    @cached_property
    def names(self) -> dict[str, str]:
        """The paths of the good run's modules and parameters in the other run."""
        names = {same.a.path: same.b.path for same in self.alignment.modules}
        for same in self.alignment.sites:
            names.setdefault(same.a.path, same.b.path)
        return names

    @cached_property
    def roots(self) -> dict[int, int]:
        """The good run's roots in the other run."""
        votes = Counter(
            (same.a.sites[0].root, same.b.sites[0].root) for same in self.alignment.modules
        )
        roots: dict[int, int] = {}
        for (good, other), _ in votes.most_common():
            if good not in roots and other not in roots.values():
                roots[good] = other
        return roots

    @cached_property
    def measures_alike(self) -> bool:
        """Whether both were recorded at the same sites."""
        return self.good.manifest.get("sites") == self.run.manifest.get("sites")


def steps_of(recording: Recording, site: SiteInfo) -> Ints:
    """Return the steps in which a site was measured in full."""
    rows = recording.rows(site)
    return np.asarray(rows.step[rows.level == FULL])


def values_of(recording: Recording, site: SiteInfo, statistic: str) -> tuple[Ints, Floats]:
    """Return the steps in which a site was measured in full, with one of its finite statistics."""
    rows = recording.rows(site)
    values = rows.statistic(statistic)
    known = (rows.level == FULL) & np.isfinite(values)
    return rows.step[known], values[known]


def last_modes(recording: Recording, root: int) -> Sequence[ModesEvent]:
    """Return the modes in which a root was trained, in the order of steps."""
    return [event for event in events_of(recording, ModesEvent) if event.root == root]
