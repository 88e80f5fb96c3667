"""Trainable parameters that nothing trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kedge.rules.ledger import Entry, listed, path_of, remedy_of, uncalled, unreached, within
from kedge.rules.rule import Finding, Severity
from kedge.rules.telling import NAMED
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL


@dataclass(frozen=True)
class UnusedParam:
    """A parameter asks for gradients, and gets none, or no optimizer knows it.

    What it says:
        It keeps its first value through the whole run. Either nothing that is differentiated depends on it, or it was
        left out of the list that the optimizer was given: a layer that is kept in a plain Python list, a head that
        was replaced after the optimizer was made, a group that was forgotten.

    Formula:
        No gradient: the run's ledger lists its param.grad with no firing, though a backward ran and the parameter
        requires one. Parameters of modules that were never called are for NEVER-CALLED. No optimizer:
        it got a gradient in min_samples sampled steps and no optimizer's step was seen to hold it,
        though other parameters of the same root are held by one.

    Window:
        The whole run. The first case needs the ledger, which is written when the program ends.

    Thresholds:
        - min_samples (3): an optimizer may step only every few backwards.
        - named (6): how many parameters the message names.

    Evidence:
        The parameters, and which of the two it is; the cause as the ledger gives it.

    Remedy:
        Use it in the forward, or remove it, or call requires_grad_(False); give the optimizer model.parameters() once the
        model is complete, and keep layers in nn.ModuleList.
    """

    min_samples: int = 3
    named: int = NAMED

    code: ClassVar[str] = "UNUSED-PARAM"
    name: ClassVar[str] = "a trainable parameter is not trained"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give one finding for every cause, and one for every root with parameters that no optimizer holds."""
        paths = uncalled(recording)
        groups: dict[str, list[Entry]] = {}
        for entry in unreached(recording):
            if not any(within(path_of(entry), path) for path in paths):
                groups.setdefault(entry["cause"], []).append(entry)
        for cause, entries in groups.items():
            sites = [str(entry["site"]) for entry in entries]
            says = f"got no gradient in the whole run: {cause}"
            yield self._finding(sites, says, {"cause": cause}, remedy_of(entries[0]))
        yield from self._forgotten(recording)

    def _forgotten(self, recording: Recording) -> Iterator[Finding]:
        held = {site.path for kind in ("param", "update") for site in recording.of_kind(kind)}
        grads = [site for site in recording.of_kind("param.grad") if self._often(recording, site)]
        for root in sorted({site.root for site in grads}):
            own = [site for site in grads if site.root == root]
            sites = [site.site for site in own if site.path not in held]
            if sites and len(sites) < len(own):
                says = "got gradients, and no optimizer's step was seen to hold it"
                yield self._finding(sites, says, {"cause": "in no optimizer", "of": len(own)}, _FORGOTTEN)

    def _often(self, recording: Recording, site: SiteInfo) -> bool:
        return bool((recording.rows(site).level == FULL).sum() >= self.min_samples)

    def _finding(self, sites: list[str], says: str, evidence: dict[str, object], remedy: str) -> Finding:
        return Finding(
            code=self.code,
            severity=self.severity,
            site=sites[0],
            step=-1,
            message=f"{listed(sites, self.named)} {says}.",
            evidence={"sites": sites, **evidence},
            confidence=0.9,
            remedy=remedy,
        )


_FORGOTTEN = (
    "Give it to an optimizer: make the optimizer when the model is complete, and keep layers in nn.ModuleList; if it is "
    "not to be trained, call requires_grad_(False), which saves its gradient."
)
