"""Losses that take something else than what they are given, by the autograd graph of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from kedge.rules.nonfinite.advice import operations
from kedge.rules.optimizers import Entry, events_of
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.trained import trains
from kedge.store.recording import Recording, SiteInfo

#: Operations that hand on the values they are given, in another shape, layout or dtype.
_HANDS_ON = frozenset(
    (
        *(
            "view",
            "unsafe_view",
            "reshape",
            "reshape_alias",
            "transpose",
            "t",
            "permute",
            "squeeze",
            "unsqueeze",
            "expand",
        ),
        *("slice", "select", "split", "unbind", "clone", "alias", "to_copy", "contiguous", "index", "as_strided"),
        *("movedim", "flatten", "unflatten"),
    )
)
_LINEAR = frozenset(("addmm", "mm", "bmm", "baddbmm", "linear", "convolution", "mkldnn_convolution", "mv", "addmv"))
_WITH_LOGITS = "binary_cross_entropy_with_logits"


@dataclass(frozen=True)
class DoubleSoftmax:
    """The loss applies softmax or sigmoid, and what it is given has been through one already, or through none.

    What it says:
        cross_entropy and CrossEntropyLoss apply log_softmax themselves, binary_cross_entropy_with_logits a sigmoid. Given
        probabilities they squeeze them a second time: no answer can be sure, and gradients are small. nll_loss applies
        nothing: given logits or probabilities its value means nothing, and can fall without end.

    Formula:
        The autograd nodes from the loss backwards, those that only change the shape or the dtype left out. Reported is
        softmax or sigmoid right before the log_softmax of the loss; the same right before
        binary_cross_entropy_with_logits; nll_loss right after softmax, sigmoid or a linear map.

    Window:
        The first measured step of each line that calls backward.

    Thresholds:
        - shown (6): how many nodes of the graph the evidence lists. There is no other: it is read off the graph.

    Severity:
        - warning: the loss is of something else than meant.
        - info: log_softmax of what went through log_softmax, or through softmax and log. It changes nothing, and costs time.

    Evidence:
        The operations from the loss backwards, and the line that calls backward.

    Remedy:
        Give the loss what the last linear layer returns: take the softmax or sigmoid out of the model, or apply it only
        where probabilities are wanted. Or keep log_softmax and take nll_loss.
    """

    shown: int = 6

    code: ClassVar[str] = "DOUBLE-SOFTMAX"
    name: ClassVar[str] = "softmax or sigmoid twice before the loss, or not at all"
    severity: ClassVar[Severity] = "warning"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding for every line that calls backward."""
        for event in events_of(recording, "loss-graph"):
            chain = operations(event.get("nodes", ()))
            severity, says, remedy = _judged(chain)
            if severity is not None:
                yield self._finding(recording, event, chain, (severity, says, remedy))

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that the graph of the loss was not recorded; without training there is none."""
        told = any(event.get("kind") == "loss-graph" for event in recording.events)
        return (
            None if told or not trains(recording) else Lack(self.code, "record of the loss's graph", 0, 1, grows=False)
        )

    def _finding(
        self, recording: Recording, event: Entry, chain: list[str], judged: tuple[Severity, str, str]
    ) -> Finding:
        severity, says, remedy = judged
        text = str(event.get("site", "loss"))
        site = next((site for site in recording.sites if site.site == text), None)
        return Finding(
            code=self.code,
            severity=severity,
            site=text,
            step=int(event.get("step", -1)),
            message=f"The loss ({text}{_line(site)}) {says}.",
            evidence={"operations": chain[: self.shown], "source": dict(site.source) if site and site.source else None},
            confidence=0.95,
            remedy=remedy,
        )


_TAKE_OUT = (
    "Give the loss what the last linear layer returns: take the {name} out of the model, or apply it only where "
    "probabilities are wanted."
)
_LOG = "Take cross_entropy on what the last linear layer returns, or log_softmax before nll_loss."


def _judged(chain: Sequence[str]) -> tuple[Severity | None, str, str]:
    """Return how bad a chain of operations is, what is to be said of it, and what to do."""
    kept = [name for name in chain if name not in _HANDS_ON]
    for at, (name, before) in enumerate(pairwise(kept)):
        further = kept[at + 2] if at + 2 < len(kept) else ""
        if name == "log_softmax" and before in ("softmax", "sigmoid"):
            says = f"applies log_softmax to what has been through {before} already"
            return "warning", says, _TAKE_OUT.format(name=before)
        if name == _WITH_LOGITS and before in ("sigmoid", "softmax"):
            says = f"applies a sigmoid to what has been through {before} already"
            return "warning", says, _TAKE_OUT.format(name=before)
        if name.startswith("nll_loss") and (before in ("softmax", "sigmoid") or before in _LINEAR):
            given = "logits" if before in _LINEAR else f"the output of {before}"
            return "warning", f"is nll_loss of {given}, which takes logarithms of probabilities", _LOG
        if name == "log_softmax" and (before == "log_softmax" or (before, further) == ("log", "softmax")):
            says = "applies log_softmax to what are logarithms of probabilities already, which changes nothing"
            return "info", says, "Take nll_loss instead of cross_entropy, or leave the first log_softmax out."
    return None, "", ""


def _line(site: SiteInfo | None) -> str:
    source: Any = site.source if site is not None else None
    return f" at {source['file']}:{source['line']}" if source else ""
