"""SAVED-MEMORY: the memory that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, places, said, said_share
from kedge.rules.naming import NAMED, plain
from kedge.rules.rule import Finding, Lack, Rule
from kedge.sites.site import escape
from kedge.store.events import SavedEvent
from kedge.store.recording import Recording
from kedge.store.saved_account import Sums

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class SavedMemoryEvidence(Evidence):
    """What one module saves for backward, and what the next largest ones do."""

    bytes: int = said("{} bytes")
    tensors: int = said("{} tensors")
    total: int = said("of {} bytes in all")
    share: float | None = said_share("a share of {}")
    next: Mapping[str | None, int] = places("bytes held by the next modules", preferred=True)


@dataclass(frozen=True)
class SavedMemory(Rule):
    """One module accounts for a large part of the memory that autograd saves for backward.

    Meaning:
        Between forward and backward autograd keeps tensors, which are most of the memory of a
        training. A module that accounts for a good part of them is the place to save memory.

    Formula:
        B = bytes saved for backward in one step by the innermost module that saved them, without
        parameters. Reported if B > share of all bytes saved in that step, and B > floor.

    Window:
        The step in which the saved tensors were recorded, once in a run.

    Thresholds:
        - share (0.2): a fifth. The finding is a hint; this number only keeps the list short.
        - floor (67,108,864): 64 MiB; there is little to save below that.

    Evidence:
        The bytes and tensors of the module, the bytes of the step, and the modules that save most
        after it.

    Remedy:
        torch.utils.checkpoint around the module computes it again in backward and keeps only its
        inputs; kedge.offload keeps its saved tensors elsewhere; scaled_dot_product_attention saves
        less than attention written with softmax; and cross-entropy saves less if it is computed in
        parts.

    Cannot see:
        What is saved by operations after the last module, such as a functional loss, and memory
        that is not autograd's: of parameters, gradients, optimizers and caches.
    """

    share: float = 0.2
    floor: int = 67_108_864

    code = "SAVED-MEMORY"
    name = "one module holds a large part of the memory saved for backward"
    severity = "info"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield one finding for every such module of the step in which most was saved."""
        fullest = max(recording.of(SavedEvent), key=lambda event: event.bytes, default=None)
        if fullest is None:
            return
        modules = sorted(fullest.modules, key=lambda module: -module.bytes)
        for place, module in enumerate(modules):
            if module.bytes > self.floor and module.bytes > self.share * fullest.bytes:
                yield self._finding(fullest, module, modules[place + 1 :])

    def idle(self, recording: Recording) -> str:
        """Return that saved tensors were not recorded."""
        if not recording.of(SavedEvent):
            return "no record of saved tensors"
        return ""

    def lacking(self, recording: Recording) -> Lack | None:  # noqa: ARG002 - nothing can be missing
        """Return None: a run without this hint about memory is judged in full."""
        return None

    def _finding(self, event: SavedEvent, module: Sums, after: list[Sums]) -> Finding:
        held, total, path = module.bytes, event.bytes, module.path
        return Finding(
            code=self.code,
            severity=self.severity,
            site=f"{escape(path or '')}:saved",
            step=event.step,
            message=f"{_named(path)} holds {held / MIB:,.0f} MiB of the "
            f"{total / MIB:,.0f} MiB ({held / total:.0%}) that autograd saves for "
            f"backward in step {event.step}.",
            evidence=SavedMemoryEvidence(
                bytes=held,
                tensors=module.tensors,
                total=total,
                share=plain(held / total),
                next={other.path: other.bytes for other in after[:NAMED]},
            ),
            confidence=0.95,
            remedy="Checkpoint it (torch.utils.checkpoint) to compute it again in "
            "backward, or keep its saved tensors elsewhere (kedge.offload); for "
            "attention use scaled_dot_product_attention, which saves no scores.",
        )


def _named(path: str | None) -> str:
    """Return the name of a module's saved tensors; operations outside of modules, such as a functional loss, have no path."""
    if path is None:
        return "The program outside of modules"
    return f"{escape(path)}:saved"
