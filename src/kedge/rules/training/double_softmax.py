"""DOUBLE-SOFTMAX: losses that get probabilities in place of logits, or the reverse, by the loss's autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kedge.frames import SourceLine
from kedge.rules.evidence import said, unsaid
from kedge.rules.recorded.loss_graph import (
    LossEvidence,
    computing,
    line_at,
    line_of_result,
    operations,
    place_of,
)
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import root_path
from kedge.rules.recorded.samples import no_loss_graph
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.store.events import LossGraphEvent, SoftmaxRead
from kedge.store.recording import Recording

_LINEAR = frozenset(
    ("addmm", "mm", "bmm", "baddbmm", "linear", "convolution", "mkldnn_convolution", "mv", "addmv")
)
_WITH_LOGITS = "binary_cross_entropy_with_logits"


@dataclass(frozen=True, kw_only=True)
class DoubleSoftmaxEvidence(LossEvidence):
    """The operations from the loss backwards, and the line that calls backward."""

    operations: Sequence[str] = said("operations {}")
    source: SourceLine | None = unsaid()


@dataclass(frozen=True)
class DoubleSoftmax(Rule):
    """Softmax or sigmoid is applied twice before the loss, not at all where the loss needs it, or over the batch.

    Meaning:
        cross_entropy and CrossEntropyLoss apply log_softmax themselves, and
        binary_cross_entropy_with_logits applies a sigmoid. If their input is already a probability,
        they apply it a second time: no prediction can become confident, and gradients are small.
        nll_loss and ctc_loss apply nothing: with logits or probabilities as input, their value
        means nothing and can fall without end. A softmax over another dimension than that of the
        classes, such as the batch, compares samples in place of classes.

    Formula:
        The autograd nodes from the loss backwards, without those that only change the shape or the
        dtype. Reported are softmax or sigmoid right before the log_softmax of the loss; the same
        right before binary_cross_entropy_with_logits; and nll_loss or ctc_loss right after softmax,
        sigmoid or a linear map. And anywhere behind the loss: nll_loss or ctc_loss of a softmax over
        another dimension than that in which they have the classes; a softmax over dimension 0 of a
        matrix of which gather picks values along the other one, as of a policy's actions; and a
        softmax of what softmax returned, over the same dimension or over that of the samples.
        Dimensions are followed through views, permutations, elementwise operations, what picks or
        stacks samples, and buffers into which results are written. If both dimensions have the same
        size, they may be of pairs of samples, whose diagonal is read.

    Window:
        The first measured step of each line that calls backward.

    Thresholds:
        - shown (6): the number of nodes of the graph that the evidence lists. The rule has no other
          threshold: the graph decides.

    Severity:
        - warning: the loss does not measure what it should.
        - info: log_softmax after log_softmax, or after softmax and log. It changes nothing, but
          takes time.

    Evidence:
        The operations from the loss backwards, the line of the one that is wrong, as far as it is
        known, and the line that calls backward.

    Remedy:
        Pass the output of the last linear layer to the loss: remove the softmax or sigmoid from the
        model, or apply it only where you need probabilities. Or keep log_softmax and use nll_loss.

    Cannot see:
        Softmax and logarithm that are written by hand, a loss that is a
        torch.autograd.Function, and operations between the two that are not known to keep
        probabilities. A softmax over a wrong dimension where nothing else tells the dimension of
        the classes.
    """

    shown: int = 6

    code = "DOUBLE-SOFTMAX"
    name = "softmax or sigmoid twice before the loss, not at all, or over the batch"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every line that calls backward."""
        for event in events_of(recording, LossGraphEvent):
            chain = operations(event)
            fault = _in_chain(chain)
            if fault is not None and fault.severity == "info" and _normalises_anew(event.softmaxes):
                fault = None
            if fault is None:
                fault = _in_reads(recording, event.softmaxes, chain)
            if fault is not None:
                yield self._finding(recording, event, chain, fault)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a recorded graph of the loss; without training there is none."""
        return no_loss_graph(self.code, recording)

    def _finding(
        self, recording: Recording, event: LossGraphEvent, chain: list[str], fault: _Fault
    ) -> Finding:
        made_at = None
        if fault.place is not None:
            made_at = line_at(recording, event, fault.place)
        elif fault.read is not None:
            made_at = line_of_result(recording, event, fault.read.softmax, fault.read.shape)
        place = place_of(recording, event)
        return Finding(
            code=self.code,
            severity=fault.severity,
            site=event.site,
            step=place.step,
            message=f"The loss ({place.name}) {fault.says}.",
            evidence=DoubleSoftmaxEvidence(
                operations=chain[: self.shown],
                source=place.source,
                made_at=made_at,
            ),
            confidence=0.95,
            remedy=fault.remedy,
        )


@dataclass(frozen=True)
class _Fault:
    """What is wrong with a loss, and what to do.

    Attributes:
        severity: How bad it is.
        says: What the loss does, for a sentence.
        remedy: What to do.
        place: The place of the operation to change, from the loss backwards; None if it is not
            among those.
        read: The softmax to change, where the place is not known.
    """

    severity: Severity
    says: str
    remedy: str
    place: int | None = None
    read: SoftmaxRead | None = None


_TAKE_OUT = (
    "Pass the output of the last linear layer to the loss: remove the {name} from "
    "the model, or apply it only where you need probabilities."
)
#: Losses of log-probabilities.
_OF_LOGARITHMS = ("nll_loss", "ctc_loss")

_LOG_OF_CTC = "Give ctc_loss the log_softmax over the classes (dim=-1) of the last linear layer."
_LOG = "Use cross_entropy on the output of the last linear layer, or log_softmax before nll_loss."


_OVER_BATCH = "applies {} over dimension 0, the batch, and not over the classes"
_PICKED = (
    "picks values along dimension {} of a softmax over dimension 0, so that those it picks from do "
    "not add up to one"
)
_OVER_OTHERS = "applies {} over dimension {} of {}, but {} takes the classes from dimension {}"
_OVER_CLASSES = "Use dim=1, or dim=-1, for softmax and log_softmax of samples by classes."
_SECOND = (
    "Take the second softmax out: it gets numbers between 0 and 1, and makes them almost equal."
)


def _in_reads(
    recording: Recording, reads: Sequence[SoftmaxRead], chain: Sequence[str]
) -> _Fault | None:
    """Return what is wrong with how softmaxes are read; None if nothing is."""
    for read in reads:
        is_over_others = read.dim not in read.classes and read.shape[read.dim] > 1
        is_over_rows = len(read.shape) == 2 and read.dim == 0
        if read.by == "softmax":
            says = ""
            if read.softmax == "softmax" and not is_over_others:
                says = "applies softmax to the output of softmax"
            elif read.softmax == "softmax" and _are_samples(recording, read):
                says = "applies softmax over dimension 0, the batch, to the output of softmax"
            if says:
                second = None
                if chain.count("softmax") == 2:
                    second = chain.index("softmax")  # the nearest to the loss
                return _Fault("warning", says, _SECOND, second)
        elif not is_over_others or _takes_turns(read, reads):
            continue
        elif read.shape[read.dim] in (read.shape[at] for at in read.classes):
            continue  # pairs of samples, of which the diagonal is read: both dimensions are right
        elif read.by == "gather":
            if is_over_rows and not _has_both_directions(read, reads):
                return _Fault("warning", _PICKED.format(1), _OVER_CLASSES, read=read)
        elif is_over_rows and read.by == "nll_loss":
            return _Fault("warning", _OVER_BATCH.format(read.softmax), _OVER_CLASSES, read=read)
        elif read.by != "log_softmax":
            last = read.classes[-1]
            says = _OVER_OTHERS.format(read.softmax, read.dim, read.shape, read.by, last)
            return _Fault("warning", says, f"Use dim={last} there.", read=read)
    return None


def _are_samples(recording: Recording, read: SoftmaxRead) -> bool:
    """Whether a second softmax runs over dimension 0, whose size is that of what a trained model takes."""
    heads = {root_path(recording, i) for i, root in enumerate(recording.roots) if root.trained}
    taken = {site.shape[0] for site in recording.of_kind("in") if site.path in heads and site.shape}
    return read.classes == (0,) and read.shape[0] > 1 and read.shape[0] in taken


def _takes_turns(read: SoftmaxRead, reads: Sequence[SoftmaxRead]) -> bool:
    """Whether a softmax is of another one's logarithms, as where rows and columns take turns."""
    return any(
        (other.by, other.softmax, other.shape) == (read.softmax, "log_softmax", read.shape)
        for other in reads
    )


def _has_both_directions(read: SoftmaxRead, reads: Sequence[SoftmaxRead]) -> bool:
    """Whether the rows have a softmax as well, as where two views of a sample find each other."""
    (at,) = read.classes[:1]
    return any(
        (other.by, other.softmax, other.shape, other.dim, other.classes)
        == (read.by, read.softmax, read.shape, at, (at,))
        for other in reads
    )


def _normalises_anew(reads: Sequence[SoftmaxRead]) -> bool:
    """Whether a log_softmax of log-probabilities runs over another dimension, which does change them."""
    return any(
        (read.by, read.softmax) == ("log_softmax", "log_softmax") and read.dim not in read.classes
        for read in reads
    )


def _in_chain(chain: Sequence[str]) -> _Fault | None:
    """Return what is wrong with a chain of operations, from the loss backwards; None if nothing is."""
    kept = computing(chain)
    for at, (name, before) in enumerate(pairwise(kept)):
        further = ""
        if at + 2 < len(kept):
            further = kept[at + 2]
        place = _place_in(chain, at + 1)
        if name == "log_softmax" and before in ("softmax", "sigmoid"):
            says = f"applies log_softmax to the output of {before}"
            return _Fault("warning", says, _TAKE_OUT.format(name=before), place)
        if name == _WITH_LOGITS and before in ("sigmoid", "softmax"):
            says = f"applies a sigmoid to the output of {before}"
            return _Fault("warning", says, _TAKE_OUT.format(name=before), place)
        if name.startswith(_OF_LOGARITHMS):
            given = ""
            if before in _LINEAR:
                given = "logits"
                place = _place_in(chain, at)
            elif before in ("softmax", "sigmoid"):
                given = f"the output of {before}"
            if given:
                loss, remedy = "nll_loss", _LOG
                if name.startswith("ctc"):
                    loss, remedy = "ctc_loss", _LOG_OF_CTC
                says = f"is {loss} of {given}, which expects log-probabilities"
                return _Fault("warning", says, remedy, place)
        if name == "log_softmax" and (
            before == "log_softmax" or (before, further) == ("log", "softmax")
        ):
            return _Fault(
                "info",
                "applies log_softmax to log-probabilities, which changes nothing",
                "Use nll_loss instead of cross_entropy, or leave the first log_softmax out.",
                place,
            )
    return None


def _place_in(chain: Sequence[str], number: int) -> int:
    """Return the place in a chain of one of its operations that compute."""
    places = [place for place, name in enumerate(chain) if computing([name])]
    return places[number]
