"""A birth with everything that its words need."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.rules.nonfinite.bad_steps import BadStep
from kedge.rules.nonfinite.search.births import BACKWARD, Birth
from kedge.rules.recorded.wiring import ModuleSites, Wiring
from kedge.store.recording import Recording, Rows, SiteInfo


@dataclass(frozen=True)
class BirthInStep:
    """A birth, the step in which it shows, and the recording."""

    recording: Recording
    wiring: Wiring
    bad_step: BadStep
    birth: Birth

    @property
    def site(self) -> SiteInfo:
        """The first site that held the value."""
        return self.wiring.sites[self.birth.site]

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.bad_step.step

    @property
    def is_first_step(self) -> bool:
        """Whether this is the first step, before any training."""
        return self.step == 0

    @property
    def in_backward(self) -> bool:
        """Whether a backward made the value."""
        return self.birth.how in BACKWARD

    @property
    def dtype(self) -> str:
        """The dtype in which it was made: for a module's backward that of its output, which autocast chooses."""
        module = self.birth.module
        site = (
            module.outs[0]
            if module is not None and self.in_backward and module.outs
            else self.birth.site
        )
        return self.wiring.sites[site].dtype

    def rows(self, site: int) -> Rows:
        """Return the rows of a site."""
        return self.recording.rows(self.wiring.sites[site])

    def unmeasured(self) -> list[ModuleSites]:
        """Return the modules inside that of the birth whose output has no row, as in a step that is not measured."""
        if self.birth.how != "own" or self.birth.module is None or self.bad_step.full:
            return []
        return [
            m
            for m in self.wiring.inside(self.birth.module)
            if m.outs and self.bad_step.is_unmeasured(m.outs)
        ]
