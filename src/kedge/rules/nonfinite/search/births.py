"""The search for the places where non-finite values were made, in one step.

Values flow from module to module, and a NaN flows with them; so almost every site that holds one
only passes it on. A birth is a place with finite inputs and parameters and a non-finite result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kedge.rules.nonfinite.bad_steps import ABSENT, FINITE, TOTAL, BadStep
from kedge.rules.nonfinite.search.cannot_overflow import (
    backward_cannot_overflow,
    forward_cannot_overflow,
)
from kedge.rules.nonfinite.search.other_consumers import operations_beside, uses_outside
from kedge.rules.recorded.losses import LOSS
from kedge.rules.recorded.wiring import ModuleSites, Wiring

How = Literal[
    "module",  # its inputs and parameters were finite, its output was not
    "own",  # the same, but it holds modules and all of them returned finite values
    "between",  # an input was not finite although what came before it was
    "entry",  # it came into a root from outside
    "unclear",  # the first in the order of the flow; its origin is not known
    "parameter",  # a parameter, before anything else
    "stepped",  # a parameter that was finite in the step before
    "unseen",  # a parameter that was finite some steps before, without records in between
    "update",  # the optimizer made it
    "within",  # a parameter, between two calls in one step
    "written",  # a gradient, between its backward and the optimizer's step
    "backward",  # a module's backward made it from a finite gradient
    "either",  # the same, or the backward of another module, or of an operation outside of modules, that takes the value too
    "beside",  # the backward of such an operation: the module that takes the value cannot have made it
    "gap",  # a backward made it, somewhere between two modules
    "loss",  # the gradient of a root's output was not finite
    "made",  # the loss was not finite, and the modules' outputs were
    "guarded",  # a gradient, in a step of which only gradients are recorded
]


#: Births in a backward.
BACKWARD: tuple[How, ...] = ("backward", "either", "beside", "gap", "loss")


@dataclass(frozen=True)
class Birth:
    """The place where a non-finite value was made.

    Attributes:
        how: The kind of place.
        site: The first site that held it.
        module: The module that made it, or the one that holds the operation that did; None outside
            of all modules.
        near: Sites with finite values next to it, which delimit the place.
        sure: From 0 to 1: the share of the search's information that was recorded.
        stale: Whether the last rows of the module's parameters are of an earlier step.
        also: Modules that may have made it too, or hold the operation that did; see
            `kedge.rules.nonfinite.search.other_consumers`.
    """

    how: How
    site: int
    module: ModuleSites | None
    near: tuple[int, ...] = ()
    sure: float = 1.0
    stale: bool = False
    also: tuple[ModuleSites, ...] = ()


def forward_births(wiring: Wiring, bad_step: BadStep) -> list[Birth]:
    """Return every independent birth in the forward passes of a step, in the order of the flow."""
    search = _Forward(wiring, bad_step)
    found = [
        birth
        for module in wiring
        for birth in (search.entry(module), search.product(module))
        if birth
    ]
    if found or bad_step.bad_params:
        return found
    return search.unclear()


def backward_birth(wiring: Wiring, bad_step: BadStep) -> Birth | None:
    """Return the first birth in the backward passes of a step; later ones may be consequences of it."""
    arrived = [m for m in wiring if bad_step.are_finite(m.grads) is False]
    spoiled = [
        m
        for m in wiring
        if bad_step.are_finite(m.param_grads) is False and bad_step.are_finite(m.grads) is not False
    ]
    # A parameter that a container owns is used anywhere inside it: its place in the order says
    # little.
    spoiled = [m for m in spoiled if not wiring.inside(m)] or ([] if arrived else spoiled)
    last = max(arrived, key=lambda m: m.position, default=None)
    inner = max(spoiled, key=lambda m: m.position, default=None)
    if inner and (last is None or inner.position > last.position):
        return _of_parameter(wiring, bad_step, inner)
    return _of_output(wiring, bad_step, last) if last else None


def loss_birth(wiring: Wiring, bad_step: BadStep) -> Birth | None:
    """Return the birth of a non-finite loss if all outputs of modules were finite."""
    bad = bad_step.nonfinite(site.id for site in wiring.sites if site.kind == LOSS)
    outputs = [site.id for site in wiring.sites if site.kind == "out"]
    if not bad or bad_step.bad_params or bad_step.nonfinite(outputs):
        return None
    return Birth("made", bad[0], None, sure=0.95 if bad_step.are_finite(outputs) else 0.6)


def explains(wiring: Wiring, bad_step: BadStep, forward: Birth, backward: Birth) -> bool:
    """Whether a birth in the forward lies at the place of a birth in the backward.

    The derivative of an infinity that the forward replaced by a finite value is still not finite,
    and so is a gradient that a module computed from a value of its own forward that was not.
    Between measured steps gradients are recorded after clipping, which spreads non-finite values to
    all of them: then they show no place.
    """
    if backward.module is not None and bad_step.nonfinite(
        (*backward.module.ins, *backward.module.outs)
    ):
        return True
    if backward.how == "gap" and not backward.near and not bad_step.full:
        return True
    if forward.module is None:
        return False
    places = [
        wiring.modules[wiring.sites[site].owner].position
        for site in (backward.site, *backward.near)
    ]
    nearest = max(places) if backward.near else forward.module.position
    return min(places) <= forward.module.position <= nearest


def parameter_birth(wiring: Wiring, bad_step: BadStep) -> Birth | None:
    """Return the birth of the first non-finite parameter, and whether it was so from the beginning."""
    for module in wiring:
        for site in module.params:
            if site in bad_step.bad_params:
                how: How = "parameter" if bad_step.last_sound < 0 else "unseen"
                how = "stepped" if bad_step.last_sound == bad_step.step - 1 >= 0 else how
                return Birth(how, site, module, sure=0.6 if how == "unseen" else 0.9)
    return None


def written_birth(wiring: Wiring, bad_step: BadStep) -> Birth | None:
    """Return the birth of gradients that were finite after the backward, and were not when the optimizer got them."""
    if not bad_step.full:  # only measured steps have the gradients of the backward itself
        return None
    for total in bad_step.nonfinite(s.id for s in wiring.sites if s.kind == TOTAL):
        own = [
            s.id
            for s in wiring.sites
            if s.kind == "param.grad" and s.root == wiring.sites[total].root
        ]
        if bad_step.are_finite(own):
            return Birth("written", total, None, near=tuple(own), sure=0.9)
    return None


def update_birth(wiring: Wiring, bad_step: BadStep) -> Birth | None:
    """Return the birth of a non-finite update from finite gradients."""
    for site in bad_step.nonfinite(s.id for s in wiring.sites if s.kind == "update"):
        owner = wiring.modules.get(wiring.sites[site].owner)
        gradients = [
            s.id
            for s in wiring.sites
            if s.kind == "param.grad" and s.path == wiring.sites[site].path
        ]
        return Birth("update", site, owner, near=tuple(gradients), sure=0.9 if gradients else 0.6)
    return None


@dataclass(frozen=True)
class _Forward:
    wiring: Wiring
    bad_step: BadStep

    def entry(self, module: ModuleSites) -> Birth | None:
        """Return the birth of a module's input; None if it came from there."""
        bad = self.bad_step.nonfinite(module.ins)
        if not bad or any(
            self.bad_step.nonfinite(holder.ins) for holder in self.wiring.ancestors(module)
        ):
            return None
        sources = {source for site in bad for source in self.wiring.sites[site].sources}
        known = [source for source in sources if source is not None]
        if self.bad_step.nonfinite(known):
            return None
        if known and len(known) == len(sources) and self.bad_step.are_finite(known):
            return Birth("between", bad[0], self._holder(module), tuple(sorted(known)), 0.9)
        if self.bad_step.bad_params or self._bad_before(module):
            return None
        before = self._before(module)
        if module.path in self.wiring.heads:
            return Birth("entry", bad[0], None, before, 0.9)
        return Birth("between", bad[0], self._holder(module), before, 0.8)

    def product(self, module: ModuleSites) -> Birth | None:
        """Return the birth of a module's output; None if it was not made there."""
        bad, inner = self.bad_step.nonfinite(module.outs), self.wiring.inside(module)
        if not bad or self.bad_step.nonfinite(site for m in inner for site in (*m.ins, *m.outs)):
            return None
        if not self.bad_step.bad_params.isdisjoint(
            site for m in (module, *inner) for site in m.params
        ):
            return None
        sure = self._inputs_finite(module)
        if sure is None:
            return None
        if forward_cannot_overflow(self.wiring, self.bad_step, module):
            return self._elsewhere(module, bad[0])
        near = tuple(site for m in inner for site in m.outs if self.bad_step.are_finite([site]))
        stale = any(self.bad_step.states[site] == ABSENT for site in module.params)
        sure = min(sure, 0.8) if stale else sure
        return Birth("own" if near else "module", bad[0], module, near or module.ins, sure, stale)

    def _elsewhere(self, module: ModuleSites, site: int) -> Birth:
        """Return the birth of an output that the module cannot have made of its recorded inputs and parameters."""
        guessed = self.bad_step.inferred.intersection(module.ins)
        if guessed:
            sources = {
                source
                for entry in guessed
                for source in self.wiring.sites[entry].sources
                if source is not None
            }
            return Birth("between", site, self._holder(module), tuple(sorted(sources)), 0.8)
        if spoiled := self.bad_step.nonfinite(module.param_grads):
            return Birth("within", site, module, tuple(spoiled), 0.8)
        return Birth("module", site, module, module.ins, 0.7)

    def unclear(self) -> list[Birth]:
        """Return the first non-finite output of the flow, for example of a module that takes its own output."""
        bad = [m for m in self.wiring if self.bad_step.nonfinite(m.outs)]
        return [Birth("unclear", self.bad_step.nonfinite(m.outs)[0], m, sure=0.5) for m in bad[:1]]

    def _inputs_finite(self, module: ModuleSites) -> float | None:
        """Return how sure it is that a module's inputs were finite; None if they were not."""
        if module.ins and (finite := self.bad_step.are_finite(module.ins)) is not None:
            return (1.0 if self.bad_step.full else 0.9) if finite else None
        known = [source for source in module.sources if source is not None]
        seen = bool(known) and all(self.bad_step.states[source] == FINITE for source in known)
        complete = seen and None not in module.sources
        if self.bad_step.nonfinite(known) or self._bad_before(
            module, after=max(known) if complete else -1
        ):
            return None
        return 0.9 if complete else 0.7

    def _bad_before(self, module: ModuleSites, after: int = -1) -> bool:
        """Whether an output was not finite before a module was entered, and after some place in the flow."""
        start = self.wiring.start(module)
        return any(
            self.bad_step.nonfinite(m.outs) for m in self.wiring if after < m.position < start
        )

    def _before(self, module: ModuleSites) -> tuple[int, ...]:
        """Return the last finite output before a module was entered."""
        start = self.wiring.start(module)
        seen = [m for m in self.wiring if m.position < start and self.bad_step.are_finite(m.outs)]
        return seen[-1].outs[:1] if seen else ()

    def _holder(self, module: ModuleSites) -> ModuleSites | None:
        return next(iter(self.wiring.ancestors(module)), None)


def _of_parameter(wiring: Wiring, bad_step: BadStep, module: ModuleSites) -> Birth:
    """Return the birth of a parameter's gradient, in a module whose output's gradient was finite or is not recorded."""
    site = _weight(wiring, bad_step.nonfinite(module.param_grads))
    if bad_step.are_finite(module.grads):
        return Birth("backward", site, module, _recorded(bad_step, module.grads), 1.0)
    later = [
        m for m in wiring if m.position > module.position and bad_step.are_finite(m.param_grads)
    ]
    near = (_weight(wiring, later[0].param_grads),) if later else ()
    return Birth("gap", site, module, near, 0.7 if near else 0.6)


def _of_output(wiring: Wiring, bad_step: BadStep, module: ModuleSites) -> Birth:
    """Return the birth of the gradient of a module's output, the first bad one in the order of backward."""
    chain = list(_tail(wiring, bad_step, module))
    site = bad_step.nonfinite(chain[-1].grads)[0]
    for same in (*reversed(chain), *_holders(wiring, module)):
        if same not in chain and bad_step.are_finite(
            same.grads
        ):  # its own forward goes on after the module
            return Birth("gap", site, same, same.grads[:1], 0.9)
        consumers = [m for m in wiring.consumers(same) if m.position > same.position]
        if consumers:
            return _made_by_consumers(wiring, bad_step, site, same)
        if same.path in wiring.heads:
            return Birth("loss", site, None, sure=0.9)
    later = _following(wiring, bad_step, module)
    return Birth("gap", site, module, later, 0.8 if later else 0.6)


def _made_by_consumers(wiring: Wiring, bad_step: BadStep, site: int, same: ModuleSites) -> Birth:
    """Return the birth of an output's gradient, in the backward of the modules or operations that take the output."""
    consumers = [m for m in wiring.consumers(same) if m.position > same.position]
    near = tuple(grad for m in consumers for grad in _recorded(bad_step, m.grads))
    able = [m for m in consumers if bad_step.are_finite(m.grads)] or consumers
    suspects = [m for m in able if not backward_cannot_overflow(wiring, bad_step, m)]
    others = operations_beside(wiring, same, consumers)
    if not suspects:
        holder = others[0] if others else next(iter(wiring.ancestors(same)), None)
        return Birth("beside", site, holder, near, 0.8 if others else 0.6, also=tuple(able))
    others = [*suspects[1:], *others]
    if others or uses_outside(wiring, same):
        return Birth("either", site, suspects[0], near, 0.7 if near else 0.6, also=tuple(others))
    return Birth("backward", site, suspects[0], near, 0.9 if near else 0.7)


def _tail(wiring: Wiring, bad_step: BadStep, module: ModuleSites) -> Iterator[ModuleSites]:
    """Yield a container, the module inside it whose output it returned, and so on, while the gradient is bad."""
    yield module
    inner = wiring.returned(module)
    if inner and bad_step.are_finite(inner.grads) is False:
        yield from _tail(wiring, bad_step, inner)


def _holders(wiring: Wiring, module: ModuleSites) -> Iterator[ModuleSites]:
    """Yield the containers that return right after a module, as long as they may return its output."""
    for holder in wiring.ancestors(module):
        if wiring.inside(holder)[-1].position > module.position:
            return
        yield holder
        if wiring.returned(holder) is None:
            return


def _following(wiring: Wiring, bad_step: BadStep, module: ModuleSites) -> tuple[int, ...]:
    """Return the gradient of the next module towards the loss."""
    for later in wiring:
        if (
            later.position > module.position
            and later.root == module.root
            and bad_step.are_finite(later.grads)
        ):
            return later.grads[:1]
    return ()


def _recorded(bad_step: BadStep, sites: Iterable[int]) -> tuple[int, ...]:
    return tuple(site for site in sites if bad_step.states[site] != ABSENT)


def _weight(wiring: Wiring, sites: Iterable[int]) -> int:
    """Return the parameter with the most dimensions."""
    return max(sites, key=lambda site: len(wiring.sites[site].shape))
