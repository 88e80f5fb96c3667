"""Trainable parameters that no optimizer holds, and optimizers that hold what the model no longer has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kedge.rules.optimizers import Entry, events_of, has_optimizer, optimizers, trained_by
from kedge.rules.rule import Finding, Lack, Severity
from kedge.rules.samples import no_end
from kedge.rules.trained import names_of, trained_roots
from kedge.rules.training.never_called import listed
from kedge.store.recording import Recording


@dataclass(frozen=True)
class NotOptimized:
    """Parameters that are to be trained are in no optimizer that steps, or it holds parameters that the model lost.

    What it says:
        An optimizer keeps the tensors that it was given. What the model gets later, or what the list left out, never
        changes, though it gets gradients and nothing fails.

    Formula:
        unheld = the parameters of a trained model that require a gradient and are in no optimizer that has stepped; of a
        model that none trains, those that got gradients in min_passes backward passes. replaced = names under which an
        optimizer holds another tensor than the model has now. outside = modules that a model calls without holding them, so
        that parameters() does not have theirs, and tensors = tensors in its attributes that are no parameters: both if they
        got gradients and no optimizer has them. in vain = backward passes while an optimizer that holds the model's
        parameters never stepped.
        Nothing is said of parameters with requires_grad False.

    Window:
        The whole run, as it was at the end.

    Thresholds:
        - named (6): how many parameters the message names.
        - min_passes (10): backward passes; gradients may be added up over a few, and a model may be tried out with one.

    Severity:
        - error: replaced parameters; the optimizer steps, and the model does not move.
        - warning: parameters that got gradients, and that no optimizer holds; modules that a model calls and does not hold;
          an optimizer that never stepped.
        - info: the same of models and modules in evaluation mode, which may be meant to stay as they are; tensors, which may
          be inputs whose gradient is asked for; parameters that got no gradient either; or an optimizer's that belong to
          nothing that was seen and never got a gradient.

    Evidence:
        The parameters, how many elements they have, which of them got gradients, and the optimizer.

    Remedy:
        Make the optimizer when the model is complete (after replaced heads, added tokens, to(), reset), give it
        model.parameters(), and keep layers in nn.ModuleList. Set requires_grad to False for what is to stay as it is.
    """

    named: int = 6
    min_passes: int = 10

    code: ClassVar[str] = "NOT-OPTIMIZED"
    name: ClassVar[str] = "a parameter to be trained is in no optimizer"
    severity: ClassVar[Severity] = "error"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Give at most one finding of each kind for every root, and one for parameters that belong to nothing seen."""
        for event in events_of(recording, "not-optimized"):
            if event.get("in_vain"):
                yield from self._in_vain(event)
            elif event.get("root") is None:
                yield self._foreign(event)
            elif event.get("replaced"):
                yield self._replaced(recording, event)
            elif event.get("unheld") and (self._trained(recording, event) or event.get("passes", 0) >= self.min_passes):
                yield self._unheld(recording, event)
            for kind in ("outside", "tensors"):
                if event.get(kind):
                    yield self._not_held(recording, event, kind)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return that it is not known what the optimizers hold; without an optimizer there is nothing to judge."""
        if optimizers(recording) is not None or not has_optimizer(recording):
            return None
        return no_end(self.code, recording) or Lack(self.code, "record of what the optimizers hold", 0, 1, grows=False)

    def _replaced(self, recording: Recording, event: Entry) -> Finding:
        names, root = [str(name) for name in event["replaced"]], int(event["root"])
        model, by = names_of(recording, [root]), trained_by(recording, root)
        another, verb = ("other tensors", "are") if len(names) > 1 else ("another tensor", "is")
        return self._finding(
            "error",
            names,
            f"{listed(names, self.named)} of {model} {verb} not what the optimizer{f' ({by})' if by else ''} holds: it was "
            f"given {another} under {'these names' if len(names) > 1 else 'this name'}, and its steps do not change the model.",
            event,
            "Make the optimizer after the last change of the model's parameters, or change them in place "
            "(param.data.copy_, torch.nn.init) so that they stay the same tensors.",
        )

    def _unheld(self, recording: Recording, event: Entry) -> Finding:
        names, graded = [str(name) for name in event["unheld"]], [str(name) for name in event.get("graded") or ()]
        loud = [name for name in names if name in graded]
        fixed = event.get("training") is False and not self._trained(recording, event)
        shown, model = loud or names, names_of(recording, [int(event["root"])])
        verb = "are" if len(shown) > 1 else "is"
        got = f"; {'they get' if len(shown) > 1 else 'it gets'} gradients, and never {'change' if len(shown) > 1 else 'changes'}"
        return self._finding(
            "warning" if loud and not fixed else "info",
            shown,
            f"{listed(shown, self.named)} of {model} {verb} in no optimizer, though trainable{got if loud else ''}.",
            event,
            "Give all of model.parameters() to the optimizer once the model is complete, and keep layers in "
            "nn.ModuleList; call requires_grad_(False) on what is to stay as it is.",
        )

    def _trained(self, recording: Recording, event: Entry) -> bool:
        return int(event["root"]) in trained_roots(recording)

    def _not_held(self, recording: Recording, event: Entry, kind: str) -> Finding:
        names, root = [str(name) for name in event[kind]], int(event["root"])
        shown, model, site = listed(names, self.named), names_of(recording, [root]), f"{names[0]}:param"
        if kind == "outside":
            site = f"{recording.roots[root].prefix.rstrip('.')}:out"
            says = (
                f"{model} calls {shown} and does not hold {'them' if len(names) > 1 else 'it'}: model.parameters() lacks "
                f"{'their' if len(names) > 1 else 'its'} parameters, and so does every optimizer. They get gradients, and never "
                "change."
            )
            remedy = (
                "Keep modules in nn.ModuleList or nn.ModuleDict in place of a list or a dict; call requires_grad_(False) on what "
                "is to stay as it is."
            )
        else:
            are = "are tensors that require" if len(names) > 1 else "is a tensor that requires"
            says = (
                f"{shown} of {model} {are} a gradient, but no nn.Parameter: model.parameters() lacks it, and so does every "
                "optimizer. It gets gradients, and never changes."
            )
            remedy = "If it is to be trained, make it an nn.Parameter before the optimizer is made."
        severity: Severity = "warning" if kind == "outside" and not event.get("outside_fixed") else "info"
        return Finding(self.code, severity, site, -1, says, {kind: names}, 0.9, remedy)

    def _in_vain(self, event: Entry) -> Iterable[Finding]:
        passes = int(event["in_vain"])
        if passes >= self.min_passes:
            says = (
                f"An optimizer was made, and never stepped in {passes:,} backward passes, which changed no parameter."
            )
            yield Finding(
                self.code,
                "warning",
                "optimizer",
                -1,
                says,
                {"passes": passes},
                0.9,
                "Call optimizer.step() after backward(); with a GradScaler, scaler.step(optimizer) and scaler.update().",
            )

    def _foreign(self, event: Entry) -> Finding:
        number = int(event.get("foreign", 0))
        what = f"{number:,} parameters that belong" if number != 1 else "a parameter that belongs"
        return Finding(
            code=self.code,
            severity="info",
            site="optimizer",
            step=-1,
            message=f"An optimizer holds {what} to no model that was called and never got a gradient.",
            evidence={"foreign": number, "site": "optimizer"},
            confidence=0.7,
            remedy="Look at what it was given: parameters of a model that was replaced, or that is not used.",
        )

    def _finding(self, severity: Severity, names: Sequence[str], message: str, event: Entry, remedy: str) -> Finding:
        return Finding(
            code=self.code,
            severity=severity,
            site=f"{names[0]}:param",
            step=-1,
            message=message,
            evidence={
                "parameters": list(names),
                "elements": event.get("unheld_elements"),
                "graded": list(event.get("graded") or ()),
                "replaced": list(event.get("replaced") or ()),
            },
            confidence=0.95,
            remedy=remedy,
        )
