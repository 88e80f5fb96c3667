"""Findings and rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from kedge.calls.arguments import called_as, described
from kedge.errors import WrongCall
from kedge.json_input.classes import as_json
from kedge.rules.evidence import Evidence, in_words
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
        evidence: The numbers that support it; each rule has a class for its own.
        confidence: From 0 to 1: the share of the rule's information that was recorded.
        remedy: What to do about it.
        ranks: The ranks that it holds for, if that is known; written with the evidence.
        follows: The code of the rule whose finding it may follow from; written with the evidence.
        snapshot: The folder of the recording that keeps the program's state; written with the
            evidence.
    """

    code: str
    severity: Severity
    site: str
    step: int
    message: str
    evidence: Evidence = field(default_factory=Evidence)
    confidence: float = 1.0
    remedy: str = ""
    ranks: tuple[int, ...] = field(default=(), kw_only=True)
    follows: str = field(default="", kw_only=True)
    snapshot: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Check that the evidence has a type."""
        if not isinstance(self.evidence, Evidence):
            raise WrongCall(
                f"kedge.Finding(evidence=...): {described(self.evidence)} has no "
                "fields; make a dataclass that is a subclass of "
                "kedge.rules.Evidence, and give an instance of it"
            )

    def entry(self) -> dict[str, Any]:
        """Return the finding as it is written."""
        evidence = as_json(self.evidence)
        if self.ranks:
            evidence["ranks"] = list(self.ranks)
        if self.follows:
            evidence["follows"] = self.follows
        if self.snapshot:
            evidence["snapshot"] = self.snapshot
        return {
            "code": self.code,
            "severity": self.severity,
            "site": self.site,
            "step": self.step,
            "message": self.message,
            "evidence": evidence,
            "confidence": self.confidence,
            "remedy": self.remedy,
        }

    def with_snapshot(self, folder: str) -> Finding:
        """Return the finding with the folder of the recording that keeps the program's state."""
        message = f"{self.message} The program's state is kept in {folder}."
        return replace(self, snapshot=folder, message=message)

    def words(self) -> list[str]:
        """Return its evidence in words, as far as neither the message nor the figure shows it."""
        said = list(self.evidence.words())
        ranks = in_words(self.ranks)
        if ranks:
            said.append(f"ranks: {ranks}")
        if self.follows:
            said.append(f"it follows from {self.follows}")
        return said


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


@dataclass(frozen=True)
class Idle:
    """A rule that had nothing to judge.

    Attributes:
        code: The rule's code.
        why: The reason in a few words, such as ``one process``.
    """

    code: str
    why: str


class Rule(ABC):
    """A pure function of a recording, with its thresholds as fields and its page as docstring.

    What reports, the page and other rules know about a rule is an attribute of it.

    Attributes:
        code: The name that users type: ``NAN-BORN``.
        name: The fault, in a few words.
        severity: The worst severity that its findings have.
        follows: The codes of the rules whose faults lead to this one, the deepest first, with
            spaces between; see Note [Consequences]. After a colon stands the kind of their
            evidence. A mapping by kind if the findings of this rule follow from different faults.
        leads_to: The codes of more rules whose faults follow from this one.
        is_symptom: Whether its findings are always hints, whose remedies mislead where the fault
            is known.
        of_the_beginning: Whether it judges the first steps of a training, and so no recording that
            begins later.
        ends_training: Whether the steps after an error of this rule show nothing else.
        compares_ranks: Whether its findings name ranks themselves.
        of_training: Whether it judges training, and so has nothing to judge where nothing is trained.
        statistic: The statistic whose curve shows a finding; by default the scale of its site.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]

    follows: ClassVar[str | Mapping[str, str]] = ""
    leads_to: ClassVar[str] = ""
    is_symptom: ClassVar[bool] = False
    of_the_beginning: ClassVar[bool] = False
    ends_training: ClassVar[bool] = False
    compares_ranks: ClassVar[bool] = False
    of_training: ClassVar[bool] = False

    statistic: ClassVar[str] = ""

    @abstractmethod
    def check(self, recording: Recording) -> Iterable[Finding]:
        """Return the findings of this rule in a recording."""

    def lacking(self, recording: Recording) -> Lack | None:  # noqa: ARG002 - others need it
        """Return what the rule lacks to judge a recording; None if it could judge, or if it does not apply."""
        return None

    def idle(self, recording: Recording) -> str:  # noqa: ARG002 - others need it
        """Return why the rule has nothing to judge in a recording, in a few words; empty if it has."""
        return ""

    def explains(
        self,
        recording: Recording,  # noqa: ARG002 - others need it
        finding: Finding,  # noqa: ARG002
        other: Finding,  # noqa: ARG002
    ) -> bool:
        """Return whether a finding of this rule can be the cause of another one, as `follows` says that it may.

        Args:
            recording: The recording.
            finding: The cause.
            other: What may follow from it.
        """
        return True

    def drawn(
        self,
        recording: Recording,  # noqa: ARG002 - others need it
        finding: Finding,
    ) -> Sequence[str]:
        """Return the sites whose curves the page draws beside a finding, as text."""
        return [finding.site]
