"""Trainable parameters that nothing trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kedge.rules.naming import NAMED
from kedge.rules.optimizers import optimizers
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import no_end
from kedge.rules.trained import root_of, trained_sites
from kedge.rules.training.never_called import Entry, listed, path_of, remedy_of, uncalled, unreached, within
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL


@dataclass(frozen=True)
class UnusedParam:
    """A parameter asks for gradients, and gets none, or no optimizer knows it.

    What it says:
        It keeps its first value through the whole run. Either nothing that is differentiated depends on it, or it was
        left out of the list that the optimizer was given. Models that no optimizer trains, and that were never
        differentiated, are left alone.

    Formula:
        No gradient: the run's ledger lists its param.grad with no firing, though a backward ran and the parameter
        requires one, and no step of an optimizer moved it. Parameters of modules that were never called are for
        NEVER-CALLED. No optimizer: it got a gradient in min_samples sampled steps and no optimizer's step was seen to hold it,
        though other parameters of the same root are held by one. Where the recording tells what the optimizers hold,
        NOT-OPTIMIZED says so instead.

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
        paths, alive = uncalled(recording), _Alive.of(recording)
        groups: dict[str, list[Entry]] = {}
        for entry in unreached(recording):
            if alive.judges(path_of(entry)) and not any(within(path_of(entry), path) for path in paths):
                groups.setdefault(entry["cause"], []).append(entry)
        for cause, entries in groups.items():
            sites = [str(entry["site"]) for entry in entries]
            says = f"got no gradient in the whole run: {cause}"
            yield self._finding(sites, says, {"cause": cause}, remedy_of(entries[0]))
        if optimizers(recording) is None:
            yield from self._forgotten(recording)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that the program has not ended: the ledger is written then."""
        return no_end(self.code, recording)

    def _forgotten(self, recording: Recording) -> Iterator[Finding]:
        held = {site.path for kind in ("param", "update") for site in recording.of_kind(kind)}
        grads = [site for site in trained_sites(recording, "param.grad") if self._often(recording, site)]
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


@dataclass(frozen=True)
class _Alive:
    """What a recording saw of the training of parameters, whatever the ledger says of hooks that never fired.

    Attributes:
        recording: The recording.
        moved: The paths of parameters of which a gradient, or an update other than zero, was seen.
        roots: The roots in which any of these was seen.
    """

    recording: Recording
    moved: frozenset[str]
    roots: frozenset[int]

    @classmethod
    def of(cls, recording: Recording) -> _Alive:
        """Read it."""
        kinds = ("param.grad", "param.acc")
        seen = [site for kind in kinds for site in recording.of_kind(kind) if len(recording.rows(site))]
        # An optimizer skips what has no gradient: its updates are there, and are zero.
        seen += [site for site in recording.of_kind("update") if bool((recording.rows(site).sumsq > 0).any())]
        graded = [site for site in recording.of_kind("out.grad") if len(recording.rows(site))]
        return cls(recording, frozenset(s.path for s in seen), frozenset(s.root for s in (*seen, *graded)))

    def judges(self, path: str) -> bool:
        """Whether a parameter without a gradient was to get one: its model is trained, and it was never seen to move."""
        root = root_of(self.recording, path)
        roots = self.recording.roots
        trained = roots[root].trained if 0 <= root < len(roots) else None
        # A recording that does not tell: a model without any gradient beside one that has some only ran without grad.
        return path not in self.moved and (trained is True or not self.roots or root in self.roots)


_FORGOTTEN = (
    "Give it to an optimizer: make the optimizer when the model is complete, and keep layers in nn.ModuleList; if it is "
    "not to be trained, call requires_grad_(False), which saves its gradient."
)
