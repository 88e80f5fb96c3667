"""Findings and rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kedge.calls.arguments import called_as
from kedge.store.recording import Recording

Severity = Literal["error", "warning", "info"]

#: The severities, the worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@called_as(
    'kedge.Finding(code="MY-RULE", severity="warning", site="fc:out", step=0, message="...")'
)
@dataclass(frozen=True)
class Finding:
    """One problem that a rule found in a recording.

    Attributes:
        code: The code of the rule, such as ``"NAN-BORN"``.
        severity: How bad it is; a rule may report the same problem with several severities.
        site: The site that it belongs to, as text.
        step: The first step in which it appears; -1 if it belongs to no step.
        message: One sentence that names the site, the step and the number.
        evidence: The numbers that support it, as plain JSON values.
        confidence: From 0 to 1: the share of the rule's information that was recorded.
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
    """The reason why a rule cannot judge a recording.

    Attributes:
        code: The rule's code.
        lacks: The missing samples, such as ``measured steps``; in the singular if one is needed.
        have: The number of them in the recording.
        need: The number that the rule needs.
        grows: Whether a run with more measured steps has more of them.
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
        """The fault, in a few words."""

    @property
    def severity(self) -> Severity:
        """The worst severity that its findings have."""

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Return the findings of this rule in a recording."""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return what the rule lacks to judge a recording; None if it could judge, or if it does not apply."""
