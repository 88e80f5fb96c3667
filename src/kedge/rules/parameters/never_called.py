"""NEVER-CALLED: modules that are never called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.recorded.ledger import (
    is_bypassed,
    is_direct,
    is_gradient,
    path_of,
    remedy_of,
    silent,
    uncalled,
    unreached,
)
from kedge.rules.recorded.roots import root_of, root_path, within
from kedge.rules.recorded.samples import no_end
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import listed
from kedge.store.events import LedgerLine
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class FusedEvidence(Evidence):
    """Modules whose container computes them in one operation."""

    sites: Sequence[str] = said("sites {}")
    causes: Sequence[str] = said("{}")


@dataclass(frozen=True, kw_only=True)
class NeverCalledEvidence(Evidence):
    """Modules that never fired for the same cause, and the number of their parameters."""

    sites: Sequence[str] = said("sites {}")
    cause: str = said("{}")
    parameters: int = said("parameters {}")


@dataclass(frozen=True)
class NeverCalled(Rule):
    """The program never calls a module of the model.

    Meaning:
        A module that is never called computes nothing, learns nothing, and no hook fires on it. It
        is easy to overlook, because there is no error.

    Formula:
        The outputs that the run's ledger (its list of hooks and how often each fired) lists without
        a firing, grouped by their cause; of nested modules only the outermost. Sites that are
        silent by design are not reported: those that were not on schedule, have no tensor, or ran
        only in a checkpoint's recompute.

    Window:
        The whole run. The ledger is written when the program ends; it is missing before that, and
        after a kill.

    Thresholds:
        - named (6): the most modules that the message names.

    Severity:
        - warning: a module with trainable parameters was never called, or the program called
          .forward() instead of the module, so that no hooks fire.
        - info: a module without trainable parameters was never called, or one that another model of
          the same class calls, so that it is an option of that class, or only the modules inside
          it are called, one by one. Modules whose container computes them in one fused operation,
          as MultiheadAttention does, or whose container reads their parameters, share one line.
          Models that no optimizer trains are not judged.

    Evidence:
        The sites, the cause according to the ledger, and the number of their parameters.

    Remedy:
        Call the module, or remove it; call layer(x) instead of layer.forward(x); for a fused
        operation, watch the module around it.

    Cannot see:
        Modules whose parameters the program uses without calling them, except as far as their
        gradients show it; modules that would be called later than the run lasted.
    """

    named: int = 6

    code = "NEVER-CALLED"
    name = "a module is never called"
    severity = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield one finding for every cause and severity."""
        paths = uncalled(recording)
        trainable = {
            path
            for path in paths
            if any(within(path_of(entry), path) for entry in unreached(recording))
        }
        groups: dict[tuple[Severity, str], dict[str, LedgerLine]] = {}
        fused: dict[str, LedgerLine] = {}
        for entry in silent(recording):
            path, cause = path_of(entry), entry.cause
            if is_gradient(entry) or any(within(path, other) for other in paths if other != path):
                continue
            if is_bypassed(cause):
                fused.setdefault(path, entry)
                continue
            severity: Severity = "info"
            is_idle = path in trainable and not _is_option(recording, path)
            if is_idle or is_direct(cause):
                severity = "warning"
            groups.setdefault((severity, cause), {}).setdefault(path, entry)
        for (severity, _), entries in groups.items():
            yield self._finding(recording, severity, list(entries.values()))
        if fused:
            yield self._fused(list(fused.values()))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of an end of the program, when the ledger is written."""
        return no_end(self.code, recording)

    def _fused(self, entries: list[LedgerLine]) -> Finding:
        sites = [entry.site for entry in entries]
        is_fused = not any(entry.cause.startswith(_READ) for entry in entries)
        verb, says = "is", entries[0].cause.removeprefix(_READ)
        if len(sites) > 1:
            verb, says = "are", "their containers use what they hold without calling them"
        if is_fused:
            says = "its container computes it in one fused operation"
            if len(sites) > 1:
                says = "their containers compute them in one fused operation"
        return Finding(
            code=self.code,
            severity="info",
            site=sites[0],
            step=-1,
            message=f"{listed(sites, 2)} {verb} not recorded: {says}.",
            evidence=FusedEvidence(
                sites=sites,
                causes=sorted({entry.cause for entry in entries}),
            ),
            confidence=0.9,
            remedy="Nothing is wrong; to see the result, watch the container.",
        )

    def _finding(
        self, recording: Recording, severity: Severity, entries: list[LedgerLine]
    ) -> Finding:
        sites = [entry.site for entry in entries]
        cause = entries[0].cause
        return Finding(
            code=self.code,
            severity=severity,
            site=sites[0],
            step=-1,
            message=f"{listed(sites, self.named)} never fired: {cause}.",
            evidence=NeverCalledEvidence(
                sites=sites,
                cause=cause,
                parameters=_parameters(recording, list(map(path_of, entries))),
            ),
            confidence=0.9,
            remedy=remedy_of(entries[0]),
        )


#: How the cause of a module begins of which the container reads a parameter or an attribute.
_READ = "bypassed: "


def _parameters(recording: Recording, holders: list[str]) -> int:
    """Return the number of elements of some modules' parameters, as far as the modules are described."""
    number = 0
    for root in recording.roots:
        for module in root.modules:
            if any(within(module["path"], holder) for holder in holders):
                number += module["parameters"]
    return number


def _is_option(recording: Recording, path: str) -> bool:
    """Whether another model of the same class calls the module that it has at the same place."""
    own = root_of(recording, path)
    if own < 0 or own >= len(recording.roots):
        return False
    inside = _inside(recording, own, path)
    alike = [
        root
        for root, other in enumerate(recording.roots)
        if root != own and other.type and other.type == recording.roots[own].type
    ]
    return any(
        site.root in alike
        and _inside(recording, site.root, site.path) == inside
        and len(recording.rows(site))
        for site in recording.of_kind("out")
    )


def _inside(recording: Recording, root: int, path: str) -> str:
    """Return a path as that model itself has it."""
    return path.removeprefix(root_path(recording, root)).removeprefix(".")
