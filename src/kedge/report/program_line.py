"""The program's lines that stand beside findings and sites."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.frames import SourceLine
from kedge.rules.recorded.loss_graph import line_of_loss
from kedge.rules.rule import Finding
from kedge.store.recording import Recording, SiteInfo


@dataclass(frozen=True)
class ProgramLine:
    """A line of the program, and what happens there.

    Attributes:
        source: The line.
        said: What happens there; empty for a line that has the fault of a finding.
    """

    source: SourceLine
    said: str = ""

    @property
    def place(self) -> str:
        """The file, the line and the function, and what happens there."""
        place = str(self.source)
        if self.source.function not in ("", "<module>"):
            place += f" in {self.source.function}"
        if self.said:
            place += f": {self.said}"
        return place

    def entry(self) -> dict[str, str | None]:
        """Return the line as pages have it."""
        return {"place": self.place, "text": self.source.text}


def line_of_site(site: SiteInfo) -> ProgramLine | None:
    """Return the line that calls the module of a site, or backward on a loss; None if unknown."""
    if site.source is None:
        return None
    if site.kind == "loss":
        return ProgramLine(site.source, "backward is called here")
    return ProgramLine(site.source, f"{site.type or 'the module'} is called here")


def line_of_finding(recording: Recording, finding: Finding) -> ProgramLine | None:
    """Return the line that has the fault, or the nearest one that is known; None without any.

    A line that does not have it is left out if the message quotes it.
    """
    culprit = finding.evidence.culprit()
    if culprit is not None:
        return ProgramLine(culprit)
    site = next((site for site in recording.sites if site.site == finding.site), None)
    if site is None:
        return None
    near = line_of_site(site)
    if site.kind == "loss":
        computed = line_of_loss(recording, site.site)
        if computed is not None:
            near = ProgramLine(computed, "the loss is computed here")
    if near is not None and near.source.text and near.source.text in finding.message:
        return None
    return near
