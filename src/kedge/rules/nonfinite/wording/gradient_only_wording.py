"""The words for a birth of which a recording shows only bad gradients; see Note [Guarded] in `...search.gradient_only_steps`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kedge.rules.command import again, uncompiled, with_dump_on
from kedge.rules.naming import NAMED, line_of
from kedge.rules.nonfinite.bad_steps import ABSENT, FINITE, BadStep
from kedge.rules.nonfinite.wording.advice import operation
from kedge.rules.nonfinite.wording.birth_figures import BirthFigures
from kedge.rules.nonfinite.wording.birth_in_step import BirthInStep
from kedge.rules.nonfinite.wording.birth_wording import BirthWording
from kedge.rules.nonfinite.wording.step_size import LOWER, long_step_signs
from kedge.rules.recorded.losses import LOSS, maker_at
from kedge.rules.recorded.wiring import Wiring
from kedge.short_text import listed


@dataclass(frozen=True)
class GradientOnlyWording:
    """The words for one such birth.

    Attributes:
        birth: The words for the birth; if the next recorded step shows its place, for the birth in
            that step.
        bad_step: The step in which only gradients are recorded.
        later: The first step after it with other rows, if that shows no birth; None also if there
            is none.
    """

    birth: BirthWording
    bad_step: BadStep
    later: BadStep | None

    @property
    def case(self) -> BirthInStep:
        """The birth in its step."""
        return self.birth.case

    @property
    def wiring(self) -> Wiring:
        """The sites of the recording, by module."""
        return self.case.wiring

    @property
    def _is_shown_later(self) -> bool:
        return self.case.birth.how != "guarded"

    def message(self) -> str:
        """Return what is recorded of which step, and what is not."""
        step = self.bad_step.step
        if self._is_shown_later:
            return (
                f"Gradients were not finite at step {step}, of which nothing else was recorded; the value was made "
                f"{self._span()}. "
                f"The next recorded step shows where it is still made: {self.birth.message()}"
            )
        first = f"{self.case.site.site} contained {self.birth.figures.value()} at step {step}: it was made {self._span()}"
        unseen = (
            f"Step {step} has records only of gradients, not of outputs or parameters: "
            f"{self._possible()} can have made it"
        )
        return ". ".join([first, unseen, *self._finite(), *self._afterwards()]) + "."

    def remedy(self) -> str:
        """Return how to find the place; and signs that the optimizer's steps were too large."""
        if self._is_shown_later:
            return self.birth.remedy()
        recording, sound = self.case.recording, self.bad_step.last_sound
        signs = self._growth() or long_step_signs(recording, self.bad_step.step)
        start = (
            f"from a checkpoint of step {sound} or before, if there is one, " if sound > 0 else ""
        )
        module = again(recording, "To have the module named", start)
        operation_too = "" if with_dump_on(recording) in module else uncompiled(recording)
        return f"{signs}{module}{_LOOK}{operation_too}"

    def evidence(self) -> dict[str, Any]:
        """Return the figures that support the words."""
        later = self.case.bad_step if self._is_shown_later else self.later
        recorded = {
            "step": self.bad_step.step,
            "sound": self.bad_step.last_sound if self.bad_step.last_sound >= 0 else None,
            "finite": [self.wiring.text(site) for site in self._near()[:NAMED]],
            "later": later.step if later else None,
        }
        return self.birth.evidence() | {"guarded": recorded}

    def _possible(self) -> str:
        """Return the possible places; the loss separates a backward from the forward before it."""
        states = self.bad_step.states
        losses = [
            site for site in self.wiring.sites if site.kind == LOSS and states[site.id] != ABSENT
        ]
        if not losses:
            return "a forward, the loss, a backward, the clipping or an optimizer's step"
        if bad := [site for site in losses if states[site.id] > FINITE]:
            node, source = maker_at(self.case.recording, bad[0], self.bad_step.step)
            name = operation(node)
            line = f", on which {line_of(source)} calls backward()" if source else ""
            loss = f"{bad[0].site} (made by {name})" if name else bad[0].site
            return f"{loss}{line}, was not finite either: a forward, an optimizer's step or the loss itself"
        return "the loss was finite: a backward, the clipping or another change of the gradients"

    def _near(self) -> tuple[int, ...]:
        return () if self._is_shown_later else self.case.birth.near

    def _span(self) -> str:
        """Return the steps between which it was made."""
        if self.bad_step.last_sound < 0:
            return "then or before; no sound step was recorded before it"
        sound, until = self.bad_step.last_sound, f"and the end of step {self.bad_step.step}"
        return (
            f"between the backward of step {sound}, the last sound one that was recorded, {until}"
        )

    def _finite(self) -> Iterator[str]:
        texts = [self.wiring.text(site) for site in self._near()]
        if texts:
            yield f"{listed(texts)} {'were' if len(texts) > 1 else 'was'} finite in this step"

    def _afterwards(self) -> Iterator[str]:
        """Yield what the next step shows: spoiled parameters, and non-finite input of the model."""
        if self.later is None:
            return
        later = self.later
        params = [site.id for site in self.wiring.sites if site.kind == "param"]
        known = [site for site in params if later.states[site] or site in later.bad_params]
        bad = [site for site in known if site in later.bad_params]
        if bad:
            yield f"In step {later.step}, {len(bad)} of {len(known)} parameters were not finite, {self._spoiled_by(bad)}"
        heads = [m for m in self.wiring if m.path in self.wiring.heads]
        if any(later.nonfinite(m.ins) for m in heads):
            yield f"The model's input was not finite in step {later.step} either"

    def _spoiled_by(self, bad: list[int]) -> str:
        """Return what spoiled some parameters: the gradients of the step, unless one with a finite gradient is among them."""
        finite = {self.wiring.sites[site].path for site in self._near()}
        odd = [site for site in bad if self.wiring.sites[site].path in finite]
        if odd:
            return f"{self.wiring.text(odd[0])} although its gradient was finite in step {self.bad_step.step}"
        return "because the optimizer's step used such gradients: this hides the first bad value"

    def _growth(self) -> str | None:
        """Return a sentence about a parameter that had grown far up to the step after; None if none had."""
        last = replace(self.case, bad_step=self.later or self.bad_step)
        grown = BirthFigures(last).growth()
        return _GROWN.format(**grown) if grown else None


_GROWN = (
    "The optimizer's steps are too large: the rms of {site} had gone from {was:.2g} at step {first} to {words} at step "
    "{step}; " + LOWER
)
_LOOK = "Look at the loss first: log of 0, a division by a zero count, sqrt at 0, exp of a large number."
