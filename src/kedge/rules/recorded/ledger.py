"""The entries of a run's ledger for sites that never fired."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.rules.recorded.roots import root_of
from kedge.rules.recorded.trained import trained_roots
from kedge.sites.site import unescape
from kedge.store.events import LedgerLine
from kedge.store.recording import Recording

#: Words of causes that say that nothing is wrong.
_EXPECTED = (
    "requires no grad",
    "contains no tensor",
    "no tensor to see",  # in recordings of earlier versions
    "schedule did not",
    "checkpoint's recompute",
    "no backward reached",
    "has no tensor [",
    "has no leaf",  # in recordings of earlier versions
    "no forward called it",
    "model was not called",
)


def silent(recording: Recording) -> Iterator[LedgerLine]:
    """Yield the ledger's entries of trained models that never fired, except those that are silent by design."""
    trained = trained_roots(recording)
    for entry in recording.ledger:
        if entry.fired or any(words in entry.cause for words in _EXPECTED):
            continue
        if root_of(recording, path_of(entry)) in trained:
            yield entry


def unreached(recording: Recording) -> list[LedgerLine]:
    """Return the entries of trainable parameters that got no gradient."""
    return [entry for entry in silent(recording) if entry.site.endswith(":param.grad")]


def uncalled(recording: Recording) -> set[str]:
    """Return the paths of modules that were not called and whose insides did not run either."""
    return {
        path_of(e) for e in silent(recording) if not is_gradient(e) and not _ran_inside(e.cause)
    }


def path_of(entry: LedgerLine) -> str:
    """Return the path of an entry's site."""
    return unescape(entry.site.rpartition(":")[0])


def is_gradient(entry: LedgerLine) -> bool:
    """Whether an entry is of a gradient."""
    kind = entry.site.rpartition(":")[2]
    return kind.startswith(("out.grad", "in.grad", "in.share", "param.grad", "param.acc"))


def is_bypassed(cause: str) -> bool:
    """Whether another operation computes the module's result."""
    return "bypassed" in cause or "fused" in cause or "ran without it" in cause


def is_direct(cause: str) -> bool:
    """Whether the program called the module's .forward()."""
    return (
        ".forward() directly, which" in cause or ".forward() was called directly" in cause
    )  # older recordings


def remedy_of(entry: LedgerLine) -> str:
    """Return the ledger's advice as a sentence."""
    return f"{entry.remedy[:1].upper()}{entry.remedy[1:].rstrip('.')}."


def _ran_inside(cause: str) -> bool:
    """Whether modules inside ran, though the module itself was not called."""
    inside = ("modules inside it were", "what it holds was")  # the second in older recordings
    return is_direct(cause) or any(words in cause for words in inside)
