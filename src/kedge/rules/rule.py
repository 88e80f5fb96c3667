"""What a finding is, and what a rule looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kedge.store.recording import Recording

Severity = Literal["error", "warning", "info"]

#: The severities, the worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing that a rule has to say about a recording.

    Attributes:
        code: The rule's code.
        severity: How bad it is; a rule may find the same thing in several degrees.
        site: The text of the site it is about.
        step: The step in which it shows first; -1 where it belongs to no step.
        message: One sentence that names the site, the step and the figure.
        evidence: The figures it rests on, as plain JSON values.
        confidence: From 0 to 1: how much of what the rule would like to know was recorded.
        remedy: What to do about it.
    """

    code: str
    severity: Severity
    site: str
    step: int
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    confidence: float = 1.0
    remedy: str = ""


@dataclass(frozen=True)
class Lack:
    """Why a rule cannot judge a recording.

    Attributes:
        code: The rule's code.
        lacks: What there is too little of, such as ``measured steps``; in the singular where one is needed.
        have: How many there are.
        need: How many it takes.
        grows: Whether a run of which more steps are measured has more of it.
    """

    code: str
    lacks: str
    have: int
    need: int
    grows: bool = True


class Rule(Protocol):
    """A pure function of a recording, with its thresholds as fields and its page as docstring."""

    @property
    def code(self) -> str:
        """The name that users type: ``NAN-BORN``."""

    @property
    def name(self) -> str:
        """What is wrong, in a few words."""

    @property
    def severity(self) -> Severity:
        """The worst severity that its findings have."""

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give what this rule finds in a recording."""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return what the rule would need to judge a recording; None if it could, or if nothing there concerns it."""
