"""Modules that are never called, and what the ledger says of sites that stayed silent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import no_end
from kedge.rules.trained import root_of, trained_roots
from kedge.store.recording import Recording

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class NeverCalled:
    """A module is part of the model, and the program never calls it.

    What it says:
        A module that is never called computes nothing, learns nothing, and is not seen by anybody's hooks. It is easy
        to overlook, because nothing fails.

    Formula:
        The outputs that the run's ledger lists with no firing, grouped by their cause; of nested modules only the
        outermost. Silent by design, and so not reported: what was not on schedule, holds no tensor,
        or ran only in a checkpoint's recompute.

    Window:
        The whole run. The ledger is written when the program ends; there is none before, and
        none after a kill.

    Thresholds:
        - named (6): how many modules the message names.

    Severity:
        - warning: a module that holds trainable parameters was never called, or .forward() was called in place of the
          module, so that nobody's hooks fire.
        - info: a module without trainable parameters was never called, or what it holds is called one
          by one. Modules whose container computes them in one fused operation, as MultiheadAttention does, share one
          line. Nothing is said of models that no optimizer trains.

    Evidence:
        The sites, the cause as the ledger gives it, and how many parameters they hold.

    Remedy:
        Call the module, or remove it; call layer(x) instead of layer.forward(x); for fused paths
        watch the module around it.
    """

    named: int = 6

    code: ClassVar[str] = "NEVER-CALLED"
    name: ClassVar[str] = "a module is never called"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give one finding for every cause and severity."""
        paths = uncalled(recording)
        trainable = {path for path in paths if any(within(path_of(entry), path) for entry in unreached(recording))}
        groups: dict[tuple[Severity, str], dict[str, Entry]] = {}
        fused: dict[str, Entry] = {}
        for entry in silent(recording):
            path, cause = path_of(entry), entry["cause"]
            if is_gradient(entry) or any(within(path, other) for other in paths if other != path):
                continue
            if _is_bypassed(cause):
                fused.setdefault(path, entry)
                continue
            loud = path in trainable or _is_direct(cause)
            groups.setdefault(("warning" if loud else "info", cause), {}).setdefault(path, entry)
        for (severity, _), entries in groups.items():
            yield self._finding(recording, severity, list(entries.values()))
        if fused:
            yield self._fused(list(fused.values()))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that the program has not ended: the ledger is written then."""
        return no_end(self.code, recording)

    def _fused(self, entries: list[Entry]) -> Finding:
        sites = [str(entry["site"]) for entry in entries]
        verb, whose = (
            ("are", "their containers compute them") if len(sites) > 1 else ("is", "its container computes it")
        )
        return Finding(
            code=self.code,
            severity="info",
            site=sites[0],
            step=-1,
            message=f"{listed(sites, 2)} {verb} not seen: {whose} in one fused operation.",
            evidence={"sites": sites, "causes": sorted({str(entry["cause"]) for entry in entries})},
            confidence=0.9,
            remedy="Nothing is wrong; to see the result, watch the module around.",
        )

    def _finding(self, recording: Recording, severity: Severity, entries: list[Entry]) -> Finding:
        sites, cause = [str(entry["site"]) for entry in entries], entries[0]["cause"]
        return Finding(
            code=self.code,
            severity=severity,
            site=sites[0],
            step=-1,
            message=f"{listed(sites, self.named)} never fired: {cause}.",
            evidence={
                "sites": sites,
                "cause": cause,
                "parameters": _parameters(recording, list(map(path_of, entries))),
            },
            confidence=0.9,
            remedy=remedy_of(entries[0]),
        )


def silent(recording: Recording) -> Iterator[Entry]:
    """Give the entries of trained models in the ledger that never fired, but for those that are silent by design."""
    trained = trained_roots(recording)
    for entry in recording.ledger:
        if entry["fired"] or any(words in entry["cause"] for words in _DESIGN):
            continue
        if root_of(recording, path_of(entry)) in trained:
            yield entry


def unreached(recording: Recording) -> list[Entry]:
    """List the trainable parameters that got no gradient."""
    return [entry for entry in silent(recording) if entry["site"].endswith(":param.grad")]


def uncalled(recording: Recording) -> set[str]:
    """Name the modules that were not called and whose insides did not run either."""
    return {path_of(e) for e in silent(recording) if not is_gradient(e) and not _ran_inside(e["cause"])}


def path_of(entry: Entry) -> str:
    """Give the path of an entry's site."""
    return str(entry["site"].rpartition(":")[0])


def within(path: str, holder: str) -> bool:
    """Tell whether a path is another one or inside it."""
    return path == holder or path.startswith(f"{holder}.") or holder == ""


def is_gradient(entry: Entry) -> bool:
    """Tell whether an entry is of a gradient."""
    kind = str(entry["site"]).rpartition(":")[2]
    return kind.startswith(("out.grad", "in.grad", "in.share", "param.grad", "param.acc"))


def listed(names: list[str], most: int) -> str:
    """Name some and count the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def remedy_of(entry: Entry) -> str:
    """Make a sentence of what the ledger advises."""
    remedy = str(entry["remedy"])
    return f"{remedy[:1].upper()}{remedy[1:].rstrip('.')}."


#: Words of causes that say that nothing is wrong.
_DESIGN = (
    "requires no grad",
    "no tensor to see",
    "schedule did not",
    "checkpoint's recompute",
    "no backward reached",
    "has no leaf",
    "no forward called it",
    "model was not called",
)


def _is_bypassed(cause: str) -> bool:
    """Tell whether something else computes what the module would have."""
    return "bypassed" in cause or "fused" in cause or "ran without it" in cause


def _is_direct(cause: str) -> bool:
    return ".forward() was called directly" in cause


def _ran_inside(cause: str) -> bool:
    """Tell whether what the module holds ran, though the module itself was not called."""
    return _is_direct(cause) or "what it holds was" in cause


def _parameters(recording: Recording, holders: list[str]) -> int:
    """Count the elements of the parameters that some modules hold, as far as they are described."""
    described = [module for root in recording.roots for module in root.modules]
    return sum(m["parameters"] for m in described if any(within(m["path"], holder) for holder in holders))
