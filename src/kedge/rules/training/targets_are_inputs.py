"""TARGETS-ARE-INPUTS: a language model that is trained to return its own input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said
from kedge.rules.recorded.optimizers import events_of
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.rule import Finding, Rule
from kedge.store.events import TargetsEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class TargetsAreInputsEvidence(Evidence):
    """The targets that were compared."""

    positions: int = said("{} targets")
    before: bool = said("of the position before: {}")
    line: str = said("the loss is computed at {}")


@dataclass(frozen=True)
class TargetsAreInputs(Rule):
    """The targets of a loss are the tokens that the model is given, position by position.

    Meaning:
        A language model is to predict the next token, so its targets are its inputs moved by one.
        Without the shift it has only to return what it sees: the loss falls to almost nothing, and
        the model has learned nothing about the language. Moved the wrong way, the target is the
        token before, which it sees as well. A sequence autoencoder has such targets on purpose.

    Formula:
        In up to three measured steps, every target of torch.nn.functional.cross_entropy or nll_loss
        that is not ignored equals the token at its position, or at the one before it, among those
        that the model's embedding was given; there are at least min_targets, and they are not all one number.

    Window:
        The first measured steps.

    Thresholds:
        - min_targets (16): of fewer, some may be equal by chance.

    Evidence:
        The number of targets and the line of the loss.

    Remedy:
        Predict the next token: model(tokens[:, :-1]) with the targets tokens[:, 1:].

    Cannot see:
        Losses that are written by hand, tokens that are not looked up in a torch.nn.Embedding,
        programs under torch.compile or inside of a TorchFunctionMode of their own.
    """

    min_targets: int = 16

    code = "TARGETS-ARE-INPUTS"
    name = "the targets of a language model are its inputs"
    severity = "warning"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, TargetsEvent):
            if event.positions < self.min_targets:
                continue
            model = names_of(recording, [event.root])
            which = "the token at its own position"
            if event.before:
                which = "the token of the position before it"
            line = ""
            where = ""
            if event.source is not None:
                line = str(event.source)
                where = f" at {line}"
            yield Finding(
                code=self.code,
                severity=self.severity,
                site=f"{root_path(recording, event.root)}:out",
                step=event.step,
                message=f"{model} is trained to return its own input: each of the "
                f"{event.positions:,} targets of the loss{where} is {which} among those that the "
                "model embeds.",
                evidence=TargetsAreInputsEvidence(
                    positions=event.positions, before=event.before, line=line
                ),
                confidence=0.9,
                remedy="A language model predicts the next token: call model(tokens[:, :-1]) with "
                "the targets tokens[:, 1:]. Nothing is wrong with an autoencoder.",
            )

    def idle(self, recording: Recording) -> str:
        """Return that no model embeds tokens."""
        if any(site.type == "Embedding" for site in recording.sites):
            return ""
        return "no embedding"
