"""Sites that never fired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kedge.rules.rule import Finding, Severity
from kedge.store.recording import Recording

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class NeverFired:
    """A site was watched and nothing ever passed there.

    What it says:
        A module that is never called learns nothing and is not seen; a trainable parameter that no
        backward reaches keeps its first values. Both are easy to overlook, because nothing fails.

    Formula:
        The sites that the run's ledger lists with no firing, grouped by their cause. Silent by design,
        and so not reported: what requires no gradient, holds no tensor, was not on schedule or belongs to a
        checkpoint's recompute; gradients where no backward ran; the gradient of an output that is not used.

    Window:
        The whole run. The ledger is written when the program ends; there is none before, and
        none after a kill.

    Thresholds:
        - named (6): how many sites the message names.

    Severity:
        - warning: a trainable parameter got no gradient in the whole run, a module that holds one was
          never called, or .forward() was called in place of the module, so that nobody's hooks fire.
        - info: a module without trainable parameters was never called, what it holds is called one
          by one, or something else computes what it would have, as in MultiheadAttention.

    Evidence:
        The sites, and the cause as the ledger gives it.

    Remedy:
        Call the module, or remove it; call layer(x) instead of layer.forward(x); for fused paths
        watch the module around it.
    """

    named: int = 6

    code: ClassVar[str] = "NEVER-FIRED"
    name: ClassVar[str] = "nothing ever passed through a site"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give one finding for every cause."""
        silent = [entry for entry in recording.ledger if not entry["fired"] and not _by_design(entry)]
        uncalled = [entry for entry in silent if not _is_gradient(entry)]
        paths = {_path(entry) for entry in uncalled if not _ran_inside(entry["cause"])}
        unreached = [e for e in silent if e["site"].endswith(":param.grad")]
        lost = [entry for entry in unreached if not any(_within(_path(entry), path) for path in paths)]
        trainable = {path for path in paths if any(_within(_path(entry), path) for entry in unreached)}
        yield from self._modules(uncalled, paths, trainable)
        yield from self._parameters(lost)

    def _modules(self, uncalled: list[Entry], paths: set[str], trainable: set[str]) -> Iterator[Finding]:
        """Give one finding for every cause and severity; of nested modules only the outermost is named."""
        groups: dict[tuple[Severity, str], dict[str, Entry]] = {}
        for entry in uncalled:
            path, cause = _path(entry), entry["cause"]
            if any(_within(path, other) for other in paths if other != path):
                continue
            loud = (path in trainable or _is_direct(cause)) and not _is_bypassed(cause)
            groups.setdefault(("warning" if loud else "info", cause), {}).setdefault(path, entry)
        for (severity, cause), entries in groups.items():
            yield self._finding(severity, list(entries.values()), f"never fired: {cause}")

    def _parameters(self, lost: list[Entry]) -> Iterator[Finding]:
        groups: dict[str, list[Entry]] = {}
        for entry in lost:
            groups.setdefault(entry["cause"], []).append(entry)
        for cause, entries in groups.items():
            yield self._finding("warning", entries, f"got no gradient in the whole run: {cause}")

    def _finding(self, severity: Severity, entries: list[Entry], says: str) -> Finding:
        sites, remedy = [entry["site"] for entry in entries], entries[0]["remedy"]
        more = f" and {len(sites) - self.named} more" if len(sites) > self.named else ""
        return Finding(
            code=self.code,
            severity=severity,
            site=sites[0],
            step=-1,
            message=f"{', '.join(sites[: self.named])}{more} {says}.",
            evidence={"sites": sites, "cause": entries[0]["cause"]},
            confidence=0.9,
            remedy=f"{remedy[:1].upper()}{remedy[1:].rstrip('.')}.",
        )


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


def _by_design(entry: Entry) -> bool:
    if any(words in entry["cause"] for words in _DESIGN):
        return True
    return _is_gradient(entry) and not entry["site"].endswith(":param.grad")


def _is_gradient(entry: Entry) -> bool:
    kind = str(entry["site"]).rpartition(":")[2]
    return kind.startswith(("out.grad", "in.grad", "in.share", "param.grad", "param.acc"))


def _is_bypassed(cause: str) -> bool:
    """Tell whether something else computes what the module would have."""
    return "bypassed" in cause or "fused" in cause or "ran without it" in cause


def _is_direct(cause: str) -> bool:
    return ".forward() was called directly" in cause


def _ran_inside(cause: str) -> bool:
    """Tell whether what the module holds ran, though the module itself was not called."""
    return _is_direct(cause) or "what it holds was" in cause


def _path(entry: Entry) -> str:
    return str(entry["site"].rpartition(":")[0])


def _within(path: str, holder: str) -> bool:
    return path == holder or path.startswith(f"{holder}.") or holder == ""
