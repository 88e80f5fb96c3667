"""HEAVY-DROPOUT: dropout that leaves next to nothing, of modules and of functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kedge.frames import SourceLine
from kedge.rules.evidence import Evidence, said, said_share, unsaid
from kedge.rules.naming import line_of, plain
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.trained import trained_roots
from kedge.rules.recorded.wiring import ModuleSites, wire
from kedge.rules.rule import Finding, Rule
from kedge.store.events import DropoutCalled, DropoutsEvent
from kedge.store.recording import Recording

_NOTHING = 0.001
"""The share that is let through below which no gradient comes back."""


@dataclass(frozen=True, kw_only=True)
class HeavyDropoutEvidence(Evidence):
    """The share of the elements other than zero that a dropout lets through.

    Attributes:
        kept: That share.
        steps: The number of measured steps; none of a function, which shows in a loss's graph.
        source: The line of the program, of a function.
    """

    kept: float | None = said_share("lets through a share of {}")
    steps: int = said("{} measured steps", least=1)
    source: SourceLine | None = unsaid(unless=None)

    def culprit(self) -> SourceLine | None:
        """Return the line that calls the function."""
        return self.source


@dataclass(frozen=True)
class HeavyDropout(Rule):
    """A dropout lets next to nothing through.

    Meaning:
        Usual shares are 0.1 to 0.5, in convolutions less. A dropout of 0.95 passes one element in
        twenty, twenty times as large, so outputs and gradients are mostly noise. Often the share to
        keep was meant, as other libraries have it.

    Formula:
        kept = the elements other than zero in the output of a dropout module, as a share of those in
        its input. The median of kept over the measured steps < least. Or, of a dropout that a
        forward calls as a function: the share that it keeps < least, by the graph of the loss, where
        its node has that share, or saved a mask that consists of zeros and the inverse of that
        share, with about the mean 1 of a dropout; and a layer takes its result.

    Window:
        All measured steps; at least min_samples of them. Of a function: the first step of each line
        that calls backward.

    Thresholds:
        - least (0.15): a dropout of 0.85; published models use up to 0.8.
        - min_samples (5): enough for a median.

    Evidence:
        The share that is kept, and the number of measured steps.

    Remedy:
        Give nn.Dropout the share to drop, not the share to keep: 0.1 to 0.5.

    Cannot see:
        Dropout that a forward calls as a function behind the last layers, whose masks are freed
        when the first gradient arrives, or of few elements; that of fused attention; and whether a
        share below 0.85 is too much for this model.
    """

    least: float = 0.15
    min_samples: int = 5

    code = "HEAVY-DROPOUT"
    name = "a dropout lets next to nothing through"
    severity = "warning"
    of_training = True
    statistic = "zero"
    leads_to = "GRAD-ZERO NO-LEARNING"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every dropout module, and for every line that calls one as a function."""
        trained = trained_roots(recording)
        has_modules = False
        for module in wire(recording):
            is_dropout = module.type in _DROPOUTS and module.root in trained
            if is_dropout and module.ins and module.outs:
                for each in self._of(recording, module):
                    has_modules = True
                    yield each
        if not has_modules:  # whose dropouts are in the graph as well
            yield from self._of_functions(recording)

    def explains(
        self,
        recording: Recording,  # noqa: ARG002 - others need it
        finding: Finding,
        other: Finding,
    ) -> bool:
        """Return whether the dropout can be the cause: of gradients of zero, one that lets nothing through."""
        evidence = finding.evidence
        if other.code != "GRAD-ZERO" or not isinstance(evidence, HeavyDropoutEvidence):
            return True
        return evidence.kept is not None and evidence.kept < _NOTHING

    def idle(self, recording: Recording) -> str:
        """Return that nothing drops."""
        has_modules = any(site.type in _DROPOUTS for site in recording.of_kind("out"))
        if has_modules or events_of(recording, DropoutsEvent):
            return ""
        return "no dropout"

    def _of_functions(self, recording: Recording) -> Iterable[Finding]:
        events = events_of(recording, DropoutsEvent)
        first = {event.site: event.step for event in reversed(events)}
        heavy: dict[DropoutCalled, str] = {}
        for event in {event.site: event for event in events}.values():  # the last one has lines
            for each in event.dropouts:
                if each.kept < self.least:
                    heavy.setdefault(each, event.site)
        for each, site in heavy.items():
            where = ""
            if each.source is not None:
                where = f" at {line_of(each.source)}"
            yield Finding(
                code=self.code,
                severity=self.severity,
                site=site,
                step=first[site],
                message=f"A dropout{where} lets {each.kept:.1%} of its input through.",
                evidence=HeavyDropoutEvidence(kept=plain(each.kept), steps=0, source=each.source),
                confidence=0.9,
                remedy="Give functional.dropout the share to drop, not the share to keep: 0.1 "
                "to 0.5 is usual.",
            )

    def _of(self, recording: Recording, module: ModuleSites) -> Iterable[Finding]:
        sites = [recording.sites[module.ins[0]], recording.sites[module.outs[0]]]
        given, passed = 1 - recording.matrix(sites, "zero")
        known = np.isfinite(given) & np.isfinite(passed) & (given > 0)
        shares = passed[known] / given[known]
        if len(shares) < self.min_samples:
            return
        kept = float(np.median(shares))
        if kept < self.least:
            site = sites[1]
            yield Finding(
                code=self.code,
                severity=self.severity,
                site=site.site,
                step=int(recording.steps[known][0]),
                message=f"{site.path} ({module.type}) lets {kept:.1%} of its input through, in "
                f"{len(shares)} measured steps.",
                evidence=HeavyDropoutEvidence(kept=plain(kept), steps=len(shares)),
                confidence=0.9,
                remedy="Give nn.Dropout the share to drop, not the share to keep: 0.1 to 0.5 is "
                "usual.",
            )


_DROPOUTS = frozenset(
    {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"}
)
