"""TWO-OPTIMIZERS: parameters that two optimizers hold, and that both change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.naming import NAMED
from kedge.rules.recorded.optimizers import events_of, listed_rates, optimizers
from kedge.rules.recorded.roots import names_of, root_of
from kedge.rules.recorded.samples import no_end
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import counted, listed
from kedge.sites.site import escape
from kedge.store.events import RecordedOptimizer, SharedParametersEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class TwoOptimizersEvidence(Evidence):
    """Two optimizers, and what both hold.

    Attributes:
        optimizers: Their classes and learning rates.
        parameters: The parameters that both hold.
        count: How many these are.
        compared: In how many measured steps both stepped, with gradients.
        same: In how many of them the second one used gradients that the first one had used.
    """

    optimizers: Sequence[str] = said("optimizers: {}")
    parameters: Sequence[str] = said("parameters {}")
    count: int = said("{} parameters")
    compared: int = said("compared in {} measured steps")
    same: int = said("the same gradients in {}")


@dataclass(frozen=True)
class TwoOptimizers(Rule):
    """Two optimizers that both step hold the same parameter.

    Meaning:
        Each optimizer changes the parameter as if it were alone, with its own momentum. If both step
        after one backward pass, every gradient is used twice: as where one optimizer has the whole
        model, and another one a part of it that is to learn faster.

    Formula:
        Both optimizers hold the same tensor, and each stepped after the other had stepped first. In
        measured steps in which both stepped, the gradients that the second one was about to use were
        those that the first one had used if they were the same memory and nothing had written to
        it: no backward pass, no zero_grad.

        Not reported: optimizers of which one never stepped, or stepped for the last time before the
        other began; and an optimizer that holds the other one as an attribute or shares its groups,
        as wrappers do.

    Window:
        The whole run; gradients are compared in measured steps.

    Thresholds:
        - min_same (3): steps with the same gradients.
        - named (6): the most parameters that the message names.

    Severity:
        - warning: the same gradients in at least min_same steps, and in half of those compared.
        - info: gradients of their own, as in an adversarial autoencoder, whose encoder belongs to
          both on purpose.

    Evidence:
        Both optimizers, the parameters and their number, in how many steps both stepped, and in how
        many of these with the same gradients.

    Remedy:
        Give each parameter to one optimizer. For other learning rates of some parameters, one
        optimizer takes several groups.

    Cannot see:
        Whether a wrapper holds another optimizer deeper inside; parameters of the same memory that
        are different tensors.
    """

    min_same: int = 3
    named: int = NAMED

    code = "TWO-OPTIMIZERS"
    name = "two optimizers change the same parameter"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield one finding for every two optimizers that share parameters."""
        known = {each.index: each for each in optimizers(recording) or ()}
        for event in events_of(recording, SharedParametersEvent):
            if event.parameters:
                yield self._finding(recording, event, known)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of an end of the program, when the optimizers are written."""
        return no_end(self.code, recording)

    def _finding(
        self,
        recording: Recording,
        event: SharedParametersEvent,
        known: Mapping[int | None, RecordedOptimizer],
    ) -> Finding:
        names = [escape(path) for path in event.parameters]
        roots = dict.fromkeys(root_of(recording, path) for path in event.parameters)
        both = [_described(known.get(number), number) for number in event.optimizers]
        is_same = event.same >= self.min_same and 2 * event.same >= event.compared
        severity: Severity = "info"
        says = "each step of one of them changes what the other one trains"
        remedy = (
            "Nothing is wrong if both are to train them, each with gradients of its own; else give "
            "each parameter to one optimizer."
        )
        if is_same:
            severity = "warning"
            says = (
                f"in {event.same} of {event.compared} measured steps in which both stepped, the "
                "second one used the gradients that the first one had used"
            )
            remedy = (
                "Give each parameter to one optimizer; for other learning rates of some, give one "
                "optimizer several groups."
            )
        elif event.compared and not event.same:
            says += f", with other gradients in all {event.compared} compared steps"
        return Finding(
            code=self.code,
            severity=severity,
            site=f"{names[0]}:param",
            step=-1,
            message=f"{both[0]} and {both[1]} both hold {counted(event.count, 'parameter')} "
            f"of {names_of(recording, roots)} ({listed(names, self.named)}), and both step: {says}.",
            evidence=TwoOptimizersEvidence(
                optimizers=both,
                parameters=names,
                count=event.count,
                compared=event.compared,
                same=event.same,
            ),
            confidence=0.9,
            remedy=remedy,
        )


def _described(optimizer: RecordedOptimizer | None, number: int) -> str:
    """Return an optimizer with its number, as there may be two of one class."""
    if optimizer is None:
        return f"optimizer {number}"
    rates = listed_rates(dict.fromkeys(optimizer.rates))
    if not rates:
        return f"{optimizer.type} (optimizer {number})"
    return f"{optimizer.type} (optimizer {number}, learning rate {rates})"
