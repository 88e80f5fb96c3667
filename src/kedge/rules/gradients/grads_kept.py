"""GRADS-KEPT: gradients of the last step that are still there in the next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, axis, said, said_share, unsaid
from kedge.rules.naming import plain
from kedge.rules.recorded.optimizers import events_of, optimizers
from kedge.rules.recorded.roots import names_of
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.recorded.trained import recorded_gradients, steps_of_training, trained_sites
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.events import GradsKeptEvent
from kedge.store.recording import Recording
from kedge.store.rows import Ints


@dataclass(frozen=True, kw_only=True)
class GradsKeptEvidence(Evidence):
    """The steps that began with old gradients, and how many parameters had them."""

    optimizer: int = unsaid()
    steps: Sequence[int] = axis("steps {}")
    checked: int = said("{} parameters checked")
    kept: int = said("{} of them kept a gradient")
    share: float | None = said_share("a share of {}")


@dataclass(frozen=True)
class GradsKept(Rule):
    """Each step's gradients are added to those of the steps before: zero_grad is missing.

    Meaning:
        backward() adds to .grad. If .grad is not cleared between two optimizer steps, each step
        follows the sum of all gradients so far, which keeps growing and belongs to earlier states
        of the model.

    Formula:
        kept = the share of an optimizer's parameters whose .grad, when a step began, still held the
        gradient of the step before, unchanged and not zero. Reported if kept >= share in in_a_row
        consecutive measured steps. Accumulating several backward passes for one optimizer step does
        not count.

    Window:
        The measured steps.

    Thresholds:
        - share (0.5): of the parameters that were checked. zero_grad clears all of its parameters
          or none.
        - in_a_row (3): a first step may begin with gradients that were set on purpose.

    Evidence:
        The steps, the number of parameters that were checked, and the number that kept their
        gradient.

    Remedy:
        Call optimizer.zero_grad() in each step, before backward().

    Cannot see:
        Gradients that are kept in some steps only, between which the measured ones lie;
        gradients that the program adds up itself and gives to the optimizer.
    """

    share: float = 0.5
    in_a_row: int = 3

    code = "GRADS-KEPT"
    name = "gradients of the last step are still there: zero_grad is missing"
    severity = "error"
    of_training = True

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every optimizer."""
        events = events_of(recording, GradsKeptEvent)
        kept = [event for event in events if self._counts(event)]
        for optimizer in sorted({event.optimizer for event in kept}):
            own = [event for event in kept if event.optimizer == optimizer]
            steps = _judged_steps(recording, optimizer)
            run = self._longest(steps, [event.step for event in own])
            if len(run) >= self.in_a_row:
                yield self._finding(
                    recording, optimizer, [event for event in own if event.step in run]
                )

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured gradients; without gradients there is nothing to judge."""
        grads = recorded_gradients(recording)
        # A kept gradient shows from the second measured step on.
        if not grads:
            return None
        return too_few(self.code, measured(recording, grads), self.in_a_row + 1)

    def _counts(self, event: GradsKeptEvent) -> bool:
        return event.checked > 0 and event.kept >= self.share * event.checked

    def _longest(self, measured: Ints, steps: list[int]) -> list[int]:
        """Return the longest run of steps with no measured step between them."""
        longest: list[int] = []
        current: list[int] = []
        for step in sorted(set(steps)):
            between = (
                (measured > current[-1]) & (measured < step) if current else np.zeros(0, dtype=bool)
            )
            current = [step] if between.any() else [*current, step]
            longest = max(longest, current, key=len)
        return longest

    def _finding(self, recording: Recording, number: int, seen: list[GradsKeptEvent]) -> Finding:
        first = seen[0]
        kept = max(event.kept for event in seen)
        known = optimizers(recording) or ()
        optimizer = next((each for each in known if each.index == number), None)
        sites = trained_sites(recording, "param.grad")
        if optimizer is not None:
            sites = [site for site in sites if site.root in optimizer.roots]
        site = next(iter(sites), None)
        roots = optimizer.roots if optimizer is not None else ()
        if not roots and site is not None:
            roots = (site.root,)
        model = names_of(recording, roots)
        by = "the optimizer" if optimizer is None else optimizer.type
        remedy = "Call optimizer.zero_grad() in each step, before backward()."
        if optimizer is not None and optimizer.by_hand:
            by = "the program"
            remedy = "Call model.zero_grad() in each step, before backward()."
        shares = [event.kept / event.checked for event in seen]
        text = "param.grad"
        if site is not None:
            text = site.site
        return Finding(
            code=self.code,
            severity=self.severity,
            site=text,
            step=first.step,
            message=f"The gradients of {model}, such as {text}, were not cleared "
            f"between steps: {kept:,} of {first.checked:,} still had those of the "
            f"step before in {len(seen)} measured steps in a row, from step "
            f"{first.step} on, so each step of {by} follows the sum of all gradients "
            "so far.",
            evidence=GradsKeptEvidence(
                optimizer=number,
                steps=[event.step for event in seen],
                checked=first.checked,
                kept=kept,
                share=plain(float(np.median(shares))),
            ),
            confidence=0.95,
            remedy=remedy,
        )


def _judged_steps(recording: Recording, number: int) -> Ints:
    """Return the measured steps of an optimizer.

    By hand, each backward pass is a step, and several may lead to one update.
    """
    known = optimizers(recording) or ()
    own = next((each for each in known if each.index == number), None)
    if own is None or not own.by_hand:
        return recording.steps
    return np.unique(np.concatenate([steps_of_training(recording, root) for root in own.roots]))
