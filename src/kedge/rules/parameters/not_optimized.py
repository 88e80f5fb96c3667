"""NOT-OPTIMIZED: trainable parameters that no optimizer holds, and optimizers that hold tensors the model has lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.recorded.optimizers import (
    events_of,
    has_optimizer,
    optimizers,
    trained_by,
    trains_in_vain,
    without_optimizer,
)
from kedge.rules.recorded.roots import names_of, root_path
from kedge.rules.recorded.samples import no_end
from kedge.rules.recorded.trained import trained_roots
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import listed
from kedge.sites.site import escape
from kedge.store.events import NotOptimizedEvent
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class OutsideEvidence(Evidence):
    """Modules that a model calls but does not contain."""

    outside: Sequence[str] = said("outside: {}")


@dataclass(frozen=True, kw_only=True)
class TensorsEvidence(Evidence):
    """Tensors that get gradients and are no parameters."""

    tensors: Sequence[str] = said("tensors: {}")


@dataclass(frozen=True, kw_only=True)
class InVainEvidence(Evidence):
    """The backward passes after which no optimizer stepped."""

    passes: int = said("passes: {}")


@dataclass(frozen=True, kw_only=True)
class ForeignEvidence(Evidence):
    """How many tensors an optimizer holds that belong to no model."""

    foreign: int = said("{} tensors of no model")
    site: str = unsaid()


@dataclass(frozen=True, kw_only=True)
class UnheldEvidence(Evidence):
    """Parameters that no optimizer holds, and those of them with a gradient, or that were replaced."""

    parameters: Sequence[str] = said("parameters {}")
    elements: int | None = said("{} elements")
    graded: Sequence[str] = said("with a gradient: {}")
    replaced: Sequence[str] = said("replaced since: {}")


@dataclass(frozen=True)
class NotOptimized(Rule):
    """Trainable parameters are in no optimizer that steps, or an optimizer holds tensors that the model no longer uses.

    Meaning:
        An optimizer keeps the tensors that it was given when it was made. Parameters that the model
        gets later, or that were left out of the list, never change, even though they get gradients
        and no error is raised.

    Formula:
        unheld = the parameters of a trained model that require a gradient and are in no optimizer
        that has stepped; in a model that no optimizer trains, those that got gradients in
        min_passes backward passes, or in that many of several such models, as where one is made
        anew for each fold.

        replaced = those of them under whose names an optimizer holds a tensor that the model had before.

        outside = modules that a model calls but does not contain, so that parameters() does not
        return theirs; tensors = tensors in a model's attributes that are not parameters. Both count
        if they got gradients and no optimizer holds them.

        in vain = backward passes while an optimizer that holds the model's parameters never
        stepped.

        Parameters with requires_grad False are ignored, and those that the program changes
        itself, such as a target network into which it copies the weights of another model.

    Window:
        The whole run; the state at its end counts.

    Thresholds:
        - named (6): the most parameters that the message names.
        - min_passes (10): backward passes. A program may accumulate the gradients of a few, or try
          a model once.

    Severity:
        - error: replaced parameters: the optimizer steps, but the model does not change. Parameters
          that got gradients and are in no optimizer, if nothing that an optimizer holds got one.
        - warning: parameters that got gradients and are in no optimizer; modules that a model calls
          but does not contain; an optimizer that never stepped.
        - info: the same for models and modules in evaluation mode, which may be frozen on purpose;
          tensors, which may be inputs whose gradient the program needs; parameters that got no
          gradient either; parameters of an optimizer that belong to no recorded model and never got
          a gradient.

    Evidence:
        The parameters, the number of their elements, which of them got gradients, and which were
        replaced.

    Remedy:
        Make the optimizer when the model is complete (after replacing heads, adding tokens, to() or
        a reset), pass it model.parameters(), and keep layers in nn.ModuleList. Set requires_grad to
        False for parameters that should not change.

    Cannot see:
        Whether a parameter was left out on purpose without requires_grad_(False). An optimizer
        outside of PyTorch that writes to copies, of which only a change of the parameters would
        show.
    """

    named: int = 6
    min_passes: int = 10

    code = "NOT-OPTIMIZED"
    name = "a trainable parameter is in no optimizer"
    severity = "error"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding of each kind for every root, and one for parameters of no recorded model."""
        events = events_of(recording, NotOptimizedEvent)
        anew = [event for event in events if event.graded and 0 < event.passes < self.min_passes]
        is_anew = len(anew) > 1 and sum(event.passes for event in anew) >= self.min_passes
        for event in events:
            if event.in_vain:
                yield from self._in_vain(event.in_vain)
            elif event.root is None:
                yield self._foreign(event.foreign)
            else:
                long = event.passes >= self.min_passes or (is_anew and event is anew[0])
                yield from self._of_root(recording, event, event.root, long=long)

    def _of_root(
        self, recording: Recording, event: NotOptimizedEvent, root: int, *, long: bool
    ) -> Iterable[Finding]:
        is_trained = root in trained_roots(recording)
        if event.replaced:
            yield self._replaced(recording, event, root)
        elif event.unheld and (is_trained or long):
            fixed = event.training is False and not is_trained
            yield self._unheld(recording, event, root, fixed=fixed)
        if event.outside:
            yield self._outside(recording, event, root)
        if event.tensors:
            yield self._tensors(recording, event, root)

    def idle(self, recording: Recording) -> str:
        """Return that no optimizer stepped."""
        return without_optimizer(recording)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of a record of the optimizers; without an optimizer there is nothing to judge."""
        if optimizers(recording) is not None or not has_optimizer(recording):
            return None
        return no_end(self.code, recording) or Lack(
            self.code, "record of the optimizers' parameters", 0, 1, grows=False
        )

    def _replaced(self, recording: Recording, event: NotOptimizedEvent, root: int) -> Finding:
        names = [escape(name) for name in event.replaced]
        model = names_of(recording, [root])
        by = trained_by(recording, root)
        if by:
            by = f" ({by})"
        verb, another, name = "is", "another tensor", "this name"
        if len(names) > 1:
            verb = "are"
            another = "other tensors"
            name = "these names"
        return self._finding(
            "error",
            names,
            f"{listed(names, self.named)} of {model} {verb} not in the "
            f"optimizer{by}: it holds {another} under {name}, and its steps do not "
            "change the model.",
            event,
            "Make the optimizer after the last change of the model's parameters, or "
            "change them in place (param.data.copy_, torch.nn.init) so that they "
            "stay the same tensors.",
        )

    def _unheld(
        self, recording: Recording, event: NotOptimizedEvent, root: int, *, fixed: bool
    ) -> Finding:
        names = [escape(name) for name in event.unheld]
        loud = [escape(name) for name in event.unheld if name in event.graded]
        shown, model = loud or names, names_of(recording, [root])
        verb, got = "is", "; it gets gradients but never changes"
        if len(shown) > 1:
            verb, got = "are", "; they get gradients but never change"
        if not loud:
            got = ""
        severity: Severity = "info"
        in_vain = ""
        if loud and not fixed:
            severity = "warning"
            if trains_in_vain(recording):
                severity = "error"
                in_vain = " What the optimizer holds never got a gradient: nothing is trained."
        return self._finding(
            severity,
            shown,
            f"{listed(shown, self.named)} of {model} {verb} in no optimizer, though "
            f"trainable{got}.{in_vain}",
            event,
            "Pass all of model.parameters() to the optimizer once the model is "
            "complete, and make it anew with each new model; keep layers in nn.ModuleList; call "
            "requires_grad_(False) on parameters that should not change.",
        )

    def _outside(self, recording: Recording, event: NotOptimizedEvent, root: int) -> Finding:
        names = [escape(name) for name in event.outside]
        model = names_of(recording, [root])
        them, their = "it", "its"
        if len(names) > 1:
            them, their = "them", "their"
        severity: Severity = "warning"
        if event.outside_fixed:
            severity = "info"
        return Finding(
            code=self.code,
            severity=severity,
            site=f"{escape(root_path(recording, root))}:out",
            step=-1,
            message=f"{model} calls {listed(names, self.named)} but does not contain "
            f"{them}: neither model.parameters() nor an optimizer has {their} "
            "parameters. They get gradients but never change.",
            evidence=OutsideEvidence(kind="outside", outside=names),
            confidence=0.9,
            remedy="Keep modules in nn.ModuleList or nn.ModuleDict in place of a "
            "list or a dict; call requires_grad_(False) on modules that should not "
            "change.",
        )

    def _tensors(self, recording: Recording, event: NotOptimizedEvent, root: int) -> Finding:
        names = [escape(name) for name in event.tensors]
        model = names_of(recording, [root])
        unchanged = "it. It gets gradients but never changes"
        if len(names) > 1:
            unchanged = "them. They get gradients but never change"
        return Finding(
            code=self.code,
            severity="info",
            site=f"{names[0]}:param",
            step=-1,
            message=f"{listed(names, self.named)} of {model} {_ARE[len(names) > 1]}, "
            f"so neither model.parameters() nor an optimizer has {unchanged}.",
            evidence=TensorsEvidence(
                tensors=names,
            ),
            confidence=0.9,
            remedy="If it should be trained, make it an nn.Parameter before you make "
            "the optimizer.",
        )

    def _in_vain(self, passes: int) -> Iterable[Finding]:
        if passes >= self.min_passes:
            yield Finding(
                code=self.code,
                severity="warning",
                site="optimizer",
                step=-1,
                message=f"The program's optimizer never stepped in {passes:,} backward "
                "passes, which changed no parameter.",
                evidence=InVainEvidence(passes=passes),
                confidence=0.9,
                remedy="Call optimizer.step() after backward(); with a GradScaler, "
                "scaler.step(optimizer) and scaler.update().",
            )

    def _foreign(self, number: int) -> Finding:
        held = "a parameter that belongs"
        if number != 1:
            held = f"{number:,} parameters that belong"
        return Finding(
            code=self.code,
            severity="info",
            site="optimizer",
            step=-1,
            message=f"An optimizer holds {held} to no model that was called and never "
            "got a gradient.",
            evidence=ForeignEvidence(
                foreign=number,
                site="optimizer",
            ),
            confidence=0.7,
            remedy="Look at the parameters that it got: they may be those of a model "
            "that was replaced, or that is not used.",
        )

    def _finding(
        self,
        severity: Severity,
        names: Sequence[str],
        message: str,
        event: NotOptimizedEvent,
        remedy: str,
    ) -> Finding:
        return Finding(
            code=self.code,
            severity=severity,
            site=f"{names[0]}:param",
            step=-1,
            message=message,
            evidence=UnheldEvidence(
                parameters=list(names),
                elements=event.unheld_elements,
                graded=list(event.graded),
                replaced=list(event.replaced),
            ),
            confidence=0.95,
            remedy=remedy,
        )


#: Whether there are several tensors, and the words for it.
_ARE = {
    False: "is a tensor that requires a gradient, but is not an nn.Parameter",
    True: "are tensors that require a gradient, but are not nn.Parameters",
}
