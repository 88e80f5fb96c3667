"""Births of which a recording shows only bad gradients.

# Note [Guarded]
In a guarded step only the loss and gradients are recorded, and in many steps nothing. If a gradient
is not finite there, the cause may lie in any forward, loss, backward or optimizer's step since the
last step that was recorded and sound; and the parameters that such gradients spoil hide it from
then on. So no place is named, with three exceptions. Finite gradients of the same step are listed.
If the loss is known to have been finite, and the parameters were, the backward of this step made
it, between the parameters with finite gradients and the others. And if the next recorded step makes
something non-finite out of finite inputs and parameters, that is reported as the birth of that
step.
"""

from __future__ import annotations

from collections.abc import Iterator

from kedge.rules.nonfinite.bad_steps import FINITE, TOTAL, BadStep
from kedge.rules.nonfinite.search.births import BACKWARD, Birth
from kedge.rules.recorded.wiring import ModuleSites, Wiring

#: The share of the certainty about a step that holds for the guarded step before it.
AGAIN = 0.8


def shows_only_gradients(wiring: Wiring, bad_step: BadStep) -> bool:
    """Whether only gradients of parameters of the hurt roots are recorded, and show no place.

    A parameter that was not finite before the step shows one, and so does a backward of a finite
    loss.
    """
    gradients = [site for site in wiring.sites if site.kind in ("param.grad", TOTAL)]
    hurt = {wiring.sites[site].root for site in bad_step.nonfinite(site.id for site in gradients)}
    values = (s.id for s in wiring.sites if s.kind in ("in", "out", "out.grad") and s.root in hurt)
    params = (s.id for s in wiring.sites if s.kind == "param" and s.root in hurt)
    if not hurt or bad_step.are_finite(values) is not None:
        return False
    if bad_step.nonfinite(_values_of_any(wiring)) or bad_step.nonfinite(params):
        return False
    return not bad_step.in_backward and not (
        bad_step.full and any(bad_step.states[site.id] == FINITE for site in gradients)
    )


def _values_of_any(wiring: Wiring) -> Iterator[int]:
    return (site.id for site in wiring.sites if site.kind in ("in", "out"))


def gradient_only_birth(wiring: Wiring, bad_step: BadStep) -> Birth:
    """Return the birth of which only gradients are recorded; its site is not its place."""
    gradients = [site for site in wiring.sites if site.kind == "param.grad"]
    bad = bad_step.nonfinite(site.id for site in gradients)
    totals = bad_step.nonfinite(site.id for site in wiring.sites if site.kind == TOTAL)
    sound = tuple(site.id for site in gradients if bad_step.states[site.id] == FINITE)
    return Birth(
        "guarded", (bad if sound and bad else totals or bad)[0], None, near=sound, sure=0.5
    )


def makes_again(wiring: Wiring, later: BadStep, birth: Birth) -> bool:
    """Whether a birth in a later step shows its place in spite of the values that were spoiled before."""
    if birth.how in BACKWARD:
        return birth.how != "gap"
    if birth.how not in ("module", "own", "between", "entry") or birth.sure < 0.7:
        return False
    inner = (
        (birth.module, *wiring.inside(birth.module))
        if birth.module and birth.how in ("module", "own")
        else ()
    )
    return not (later.bad_params and any(_shares_parameters(wiring, module) for module in inner))


def _shares_parameters(wiring: Wiring, module: ModuleSites) -> bool:
    """Whether a module's parameters are recorded as another one's, so that they may have been spoiled."""
    return not module.params and wiring.described.get(module.path, {}).get("parameters", 0) > 0
