"""MOSTLY-FROZEN: models of which most does not train, although its weights are as fresh layers have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, places, said
from kedge.rules.recorded.optimizers import events_of, optimizers
from kedge.rules.recorded.roots import names_of, root_path, within
from kedge.rules.recorded.samples import no_end
from kedge.rules.recorded.trained import recorded_gradients, trained_roots
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import listed, percent
from kedge.sites.site import escape
from kedge.store.events import FrozenEvent, FrozenPart
from kedge.store.recording import Recording


@dataclass(frozen=True, kw_only=True)
class MostlyFrozenEvidence(Evidence):
    """What does not train, and what does.

    Attributes:
        frozen: How many elements have requires_grad False.
        elements: How many the model has.
        weights: How many of the frozen ones are in weights whose spread was judged.
        even: How many of these are in evenly spread weights.
        trains: The parts of the model of which anything trains.
        shares: The frozen share of each part.
    """

    frozen: int = said("{} frozen")
    elements: int = said("of {} elements")
    weights: int = said("{} in judged weights")
    even: int = said("{} of them in evenly spread ones")
    trains: Sequence[str] = said("trains: {}")
    shares: Mapping[str, float] = places("frozen share of each part")


@dataclass(frozen=True)
class MostlyFrozen(Rule):
    """Most of a trained model has requires_grad False, and its weights were never trained.

    Meaning:
        What is frozen keeps its values. Of a pretrained model this is what is wanted; layers that
        are as random as on the first day learn nothing, and what trains has to make do with what
        they return. Perhaps they were frozen for a stage that is over, or the weights that they
        were to get were not loaded. Random features are used on purpose, too.

    Formula:
        frozen = the elements of a trained model that had requires_grad False, from the first step
        of an optimizer to the end, and never a gradient. Of the frozen weights with at least two
        dimensions and 256 elements, those are evenly spread whose largest magnitude is 1.6 to 1.9
        root mean squares (up to 1,024 elements are drawn). So PyTorch draws the weights of linear,
        convolutional, recurrent and attention layers; training does not leave them so, as a few
        become much larger than the rest. Reported if more than share of the model is frozen, and
        more than even of the judged elements are in evenly spread weights.

        Adapters are not reported: if more than half of the frozen elements stand in a module of
        which something trains, or directly beside such a module within a part of the model, as with
        LoRA.

    Window:
        The whole run; the state at its end counts.

    Thresholds:
        - share (0.5): of the elements of a model.
        - even (0.5): of the elements whose spread was judged.
        - named (6): the most parts that the message names.

    Evidence:
        The frozen elements and all, those in judged and in evenly spread weights, the parts that
        train, and the frozen share of each part.

    Remedy:
        Load the weights that the frozen part is to have, or call requires_grad_(True) on it before
        the optimizer is made.

    Cannot see:
        Layers with other initialisations, such as the bell-shaped ones of transformers, which look
        like trained ones; stages that should be frozen and train.
    """

    share: float = 0.5
    even: float = 0.5
    named: int = 6

    code = "MOSTLY-FROZEN"
    name = "most of the model is frozen as it was drawn"
    severity = "info"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        for event in events_of(recording, FrozenEvent):
            if event.root in trained_roots(recording) and self.judges(recording, event):
                yield self._finding(recording, event)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of an end of the program, where an optimizer stepped."""
        if optimizers(recording) is not None:
            return None
        return no_end(self.code, recording)

    def judges(self, recording: Recording, event: FrozenEvent) -> bool:
        """Whether what an event says is no plan that can be seen."""
        if event.frozen <= self.share * event.elements:
            return False
        if event.even <= self.even * event.weights or 2 * event.beside > event.frozen:
            return False
        whole = [part.path for part in event.parts if part.frozen == part.elements]
        grads = recorded_gradients(recording)
        return not any(within(site.path, path) for site in grads for path in whole)

    def _finding(self, recording: Recording, event: FrozenEvent) -> Finding:
        model = names_of(recording, [event.root])
        share = event.frozen / event.elements
        frozen = _by_frozen(event.parts, whole=True)
        some = _by_frozen(event.parts, whole=False)
        where = []
        if frozen:
            where.append(f"all of {listed(frozen, self.named)}")
        if some:
            where.append(f"a part of {listed(some, self.named)}")
        trains = [escape(p.path) for p in event.parts if p.frozen < p.elements]
        return Finding(
            code=self.code,
            severity=self.severity,
            site=f"{root_path(recording, event.root)}:out",
            step=event.step,
            message=f"{percent(share)} of {model} is frozen ({event.frozen:,} of {event.elements:,} "
            f"elements have requires_grad False): {', '.join(where)}. Most of these weights are "
            "spread evenly, as PyTorch draws those of a fresh layer and as training does not leave "
            f"them. What trains is in {listed(trains, self.named)}.",
            evidence=MostlyFrozenEvidence(
                frozen=event.frozen,
                elements=event.elements,
                weights=event.weights,
                even=event.even,
                trains=trains,
                shares={escape(p.path): p.frozen / p.elements for p in event.parts if p.elements},
            ),
            confidence=0.8,
            remedy="Load the weights that the frozen part is to have, or call requires_grad_(True) "
            "on it before the optimizer is made. Nothing is wrong if it is to be random.",
        )


def _by_frozen(parts: Iterable[FrozenPart], *, whole: bool) -> list[str]:
    """Return the names of parts that are frozen as a whole, or in part, the largest first."""
    found = [p for p in parts if p.frozen and (p.frozen == p.elements) == whole]
    return [escape(part.path) for part in sorted(found, key=lambda part: -part.frozen)]
