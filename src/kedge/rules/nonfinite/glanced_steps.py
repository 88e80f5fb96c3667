"""A step of which nothing but gradients was seen: what can be said of a birth then, and what cannot.

# Note [Glanced at]
In a program of very short steps most steps are not looked at, and at some only a few gradients are, behind the optimizer's
step. Where one of those is not finite, what made it may lie in any forward, loss, backward or optimizer's step since the last
step that was recorded and sound; and the parameters that such gradients spoil hide it from then on. So no place is named,
with two exceptions. Gradients of the same step that were finite are listed. And where the next step that was seen makes
something not finite out of finite inputs and parameters, that is told as what was seen there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kedge.rules.command import again
from kedge.rules.losses import LOSS
from kedge.rules.naming import NAMED
from kedge.rules.nonfinite.advice import operation
from kedge.rules.nonfinite.bad_steps import ABSENT, FINITE, TOTAL, Moment
from kedge.rules.nonfinite.births import BACKWARD, Birth
from kedge.rules.nonfinite.step_size import LOWER, strides
from kedge.rules.nonfinite.wording import Telling
from kedge.rules.wiring import Module, Wiring

#: How much of the certainty of what was seen in the step after holds for the step before.
AGAIN = 0.8


def is_glance(wiring: Wiring, moment: Moment) -> bool:
    """Tell whether of the roots that were hurt only gradients of parameters were seen, and those do not show a place.

    A parameter that was not finite before the step does.
    """
    gradients = [site for site in wiring.sites if site.kind in ("param.grad", TOTAL)]
    hurt = {wiring.sites[site].root for site in moment.bad(site.id for site in gradients)}
    values = (s.id for s in wiring.sites if s.kind in ("in", "out", "out.grad") and s.root in hurt)
    params = (s.id for s in wiring.sites if s.kind == "param" and s.root in hurt)
    if not hurt or moment.finite(values) is not None or moment.bad(_values_of_any(wiring)) or moment.bad(params):
        return False
    return not (moment.full and any(moment.states[site.id] == FINITE for site in gradients))


def _values_of_any(wiring: Wiring) -> Iterator[int]:
    return (site.id for site in wiring.sites if site.kind in ("in", "out"))


def glance_of(wiring: Wiring, moment: Moment) -> Birth:
    """Give the birth of which only gradients show that there was one; its site is no place."""
    gradients = [site for site in wiring.sites if site.kind == "param.grad"]
    bad = moment.bad(site.id for site in gradients)
    totals = moment.bad(site.id for site in wiring.sites if site.kind == TOTAL)
    sound = tuple(site.id for site in gradients if moment.states[site.id] == FINITE)
    return Birth("glanced", (bad if sound and bad else totals or bad)[0], None, near=sound, sure=0.5)


def makes_again(wiring: Wiring, later: Moment, birth: Birth) -> bool:
    """Tell whether a birth in a later step shows who makes it, whatever was spoiled before."""
    if birth.how in BACKWARD:
        return birth.how != "gap"
    if birth.how not in ("module", "own", "between", "entry") or birth.sure < 0.7:
        return False
    inner = (birth.module, *wiring.inside(birth.module)) if birth.module and birth.how in ("module", "own") else ()
    return not (later.tainted and any(_borrows(wiring, module) for module in inner))


def _borrows(wiring: Wiring, module: Module) -> bool:
    """Tell whether a module has parameters that are recorded as another one's, so that they may have been spoiled."""
    return not module.params and wiring.described.get(module.path, {}).get("parameters", 0) > 0


@dataclass(frozen=True)
class Glance:
    """What is told where a birth showed first in gradients alone; see Note [Glanced at].

    Attributes:
        told: The words for the birth: for one that the step after showed, as it was there.
        moment: The step in which only gradients were seen.
        later: The first step after it of which more was seen, if that shows no birth; None also if there is none.
    """

    told: Telling
    moment: Moment
    later: Moment | None

    @property
    def _again(self) -> bool:
        return self.told.birth.how != "glanced"

    def message(self) -> str:
        """Say what was seen when, and what was not."""
        step = self.moment.step
        if self._again:
            return (
                f"Gradients were not finite at step {step}, of which nothing else was seen: it was made {self._span()}. "
                f"The next step that was seen shows who goes on making it: {self.told.message()}"
            )
        site = self.told.wiring.text(self.told.birth.site)
        first = f"{site} held {self.told.value()} at step {step}: it was made {self._span()}"
        unseen = (
            f"Of step {step} gradients alone were seen, not what the modules returned nor the parameters: "
            f"{self._possible()} can have made it"
        )
        return ". ".join([first, unseen, *self._sound(), *self._afterwards()]) + "."

    def remedy(self) -> str:
        """Say how to catch it; and if the steps were too large, that they were."""
        if self._again:
            return self.told.remedy()
        signs = self._grown() or strides(self.told.recording, self.moment.step)
        sane = max(self.moment.sane, self._glanced)
        start = f"from a checkpoint of step {sane} or before, if there is one, " if sane > 0 else ""
        return f"{signs}{again(self.told.recording, 'To have the module named', start)}{_LOOK}"

    def evidence(self) -> dict[str, Any]:
        """Give what the words rest on."""
        seen = {
            "step": self.moment.step,
            "sound": self.moment.sane if self.moment.sane >= 0 else None,
            "glanced": self._glanced if self._glanced >= 0 else None,
            "finite": [self.told.wiring.text(site) for site in self._near()[:NAMED]],
            "later": self.told.moment.step if self._again else self.later.step if self.later else None,
        }
        return self.told.evidence() | {"glance": seen}

    def _possible(self) -> str:
        """Say what can have made it; the loss tells a backward from what comes before it."""
        sites = self.told.wiring.sites
        losses = [site for site in sites if site.kind == LOSS and self.moment.states[site.id] != ABSENT]
        if not losses:
            return "a forward, the loss, a backward, the clipping or an optimizer's step"
        if bad := [site for site in losses if self.moment.states[site.id] > FINITE]:
            source = bad[0].source
            line = f", on which {source['file']}:{source['line']} calls backward()" if source else ""
            name = operation(bad[0].node)
            loss = f"{bad[0].site} (made by {name})" if name else bad[0].site
            return f"{loss}{line}, was not finite either: a forward, an optimizer's step or the loss itself"
        return "the loss was finite: a backward, the clipping or what else changes gradients"

    def _near(self) -> tuple[int, ...]:
        return () if self._again else self.told.birth.near

    @property
    def _glanced(self) -> int:
        """The last step before of which a glance met only finite gradients; -1 if there is none."""
        told = (event for event in self.told.recording.events if event.get("kind") == "glance")
        return max((int(event["sound"]) for event in told if event["step"] == self.moment.step), default=-1)

    def _span(self) -> str:
        """Say between which steps it was made."""
        until, sane, glanced = f"and the end of step {self.moment.step}", self.moment.sane, self._glanced
        if glanced > sane:
            return f"between the backward of step {glanced}, of which a glance met finite gradients alone, {until}"
        if sane < 0:
            return "then or before, and no sound step was recorded before"
        return f"between the backward of step {sane}, the last that was recorded and sound, {until}"

    def _sound(self) -> Iterator[str]:
        texts = [self.told.wiring.text(site) for site in self._near()]
        if texts:
            rest = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
            yield f"Finite in this step {'were' if len(texts) > 1 else 'was'} {', '.join(texts[:NAMED])}{rest}"

    def _afterwards(self) -> Iterator[str]:
        """Say what the next step shows: parameters that are spoiled, and what came into the model."""
        if self.later is None:
            return
        params = [site.id for site in self.told.wiring.sites if site.kind == "param"]
        seen = [site for site in params if self.later.states[site] or site in self.later.tainted]
        bad = [site for site in seen if site in self.later.tainted]
        fine = {site.path for site in self.told.wiring.sites if site.id in self._near()}
        odd = [site for site in bad if self.told.wiring.sites[site].path in fine]
        if bad:
            how = "as the optimizer's step makes them of such gradients: what came first no longer shows"
            if odd:
                how = f"{self.told.wiring.text(odd[0])} although its gradient was finite in step {self.moment.step}"
            yield f"In step {self.later.step}, {len(bad)} of {len(seen)} parameters were not finite, {how}"
        heads = [m for m in self.told.wiring if m.path in self.told.wiring.heads]
        if any(self.later.bad(m.ins) for m in heads):
            yield f"What came into the model was not finite in step {self.later.step} either"

    def _grown(self) -> str | None:
        """Tell of a parameter that had left all bounds, up to the step after."""
        last = self.later or self.moment
        grown = replace(self.told, moment=last).growth()
        return _GROWN.format(**grown) if grown else None


_GROWN = (
    "The optimizer's steps are too large: the rms of {site} had gone from {was:.2g} at step {first} to {words} at step "
    "{step}; " + LOWER
)
_LOOK = "Look at the loss first: log of 0, a division by a zero count, sqrt at 0, exp of a large number."
