"""The search for the place where something that is not finite was born, in one step.

Values flow from module to module, and a NaN flows with them; so almost every site that holds one
only passes it on. A birth is a place whose inputs and parameters are known to be finite, and whose
product is not. The search is free of words: what is said about a birth is written elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kedge.rules.losses import LOSS
from kedge.rules.nonfinite.bad_steps import ABSENT, FINITE, TOTAL, Moment
from kedge.rules.nonfinite.cannot_overflow import contained, innocent
from kedge.rules.nonfinite.other_consumers import beside, uses_outside
from kedge.rules.wiring import Module, Wiring

How = Literal[
    "module",  # its inputs and parameters were finite, its output was not
    "own",  # the same, but it holds modules and all of them returned finite values
    "between",  # an input was not finite although what came before it was
    "entry",  # it entered a root from outside
    "unclear",  # the first in the order of the flow; where it came from cannot be told
    "parameter",  # a parameter, before anything else
    "stepped",  # a parameter that was finite in the step before
    "unseen",  # a parameter that was finite some steps before, of which nothing was recorded
    "update",  # the optimizer made it
    "within",  # a parameter, between two calls in one step
    "written",  # a gradient, between its backward and the optimizer's step
    "backward",  # a module's backward made it out of a finite gradient
    "either",  # the same, or the backward of another module, or of an operation outside of modules, that takes the value too
    "beside",  # the backward of such an operation: the module that takes the value cannot have made it
    "gap",  # a backward made it, somewhere between two modules
    "loss",  # the gradient that entered a root was not finite
    "made",  # what backward was called on was not finite, and what the modules returned was
    "glanced",  # a gradient, in a step of which nothing but gradients was seen
]


#: Births in a backward.
BACKWARD: tuple[How, ...] = ("backward", "either", "beside", "gap", "loss")


@dataclass(frozen=True)
class Birth:
    """Where something that is not finite was born.

    Attributes:
        how: In which way.
        site: The first site that held it.
        module: The module that made it, or the one that holds the operation that did; None outside
            of all modules.
        near: Sites with finite values next to it, which delimit the place.
        sure: From 0 to 1: how much of what the search would like to know was recorded.
        stale: Whether the module's parameters were seen for the last time in an earlier step.
        also: Modules that may have made it as well, or hold the operation that did; see `kedge.rules.nonfinite.other_consumers`.
    """

    how: How
    site: int
    module: Module | None
    near: tuple[int, ...] = ()
    sure: float = 1.0
    stale: bool = False
    also: tuple[Module, ...] = ()


def forward_births(wiring: Wiring, moment: Moment) -> list[Birth]:
    """Find every independent birth in the forward passes of a step, in the order of the flow."""
    search = _Forward(wiring, moment)
    found = [birth for module in wiring for birth in (search.entry(module), search.product(module)) if birth]
    if found or moment.tainted:
        return found
    return search.unclear()


def backward_birth(wiring: Wiring, moment: Moment) -> Birth | None:
    """Find the first birth in the backward passes of a step, the only one that is sure to be one."""
    arrived = [m for m in wiring if moment.finite(m.grads) is False]
    spoiled = [m for m in wiring if moment.finite(m.param_grads) is False and moment.finite(m.grads) is not False]
    # A parameter that a container owns is used anywhere inside it: its place in the order says little.
    spoiled = [m for m in spoiled if not wiring.inside(m)] or ([] if arrived else spoiled)
    last = max(arrived, key=lambda m: m.position, default=None)
    inner = max(spoiled, key=lambda m: m.position, default=None)
    if inner and (last is None or inner.position > last.position):
        return _spoiled(wiring, moment, inner)
    return _arrived(wiring, moment, last) if last else None


def loss_birth(wiring: Wiring, moment: Moment) -> Birth | None:
    """Find a loss that is not finite though no module returned anything of that kind."""
    bad = moment.bad(site.id for site in wiring.sites if site.kind == LOSS)
    outputs = [site.id for site in wiring.sites if site.kind == "out"]
    if not bad or moment.tainted or moment.bad(outputs):
        return None
    return Birth("made", bad[0], None, sure=0.95 if moment.finite(outputs) else 0.6)


def explains(wiring: Wiring, moment: Moment, forward: Birth, backward: Birth) -> bool:
    """Tell whether a birth in the forward lies where the backward went wrong.

    An infinity that the forward replaced by something finite still meets its own derivative. Off schedule gradients are
    seen behind their clipping, which spreads what is not finite to all: then they show no place.
    """
    if backward.how == "gap" and not backward.near and not moment.full:
        return True
    if forward.module is None:
        return False
    places = [wiring.modules[wiring.sites[site].owner].position for site in (backward.site, *backward.near)]
    nearest = max(places) if backward.near else forward.module.position
    return min(places) <= forward.module.position <= nearest


def parameter_birth(wiring: Wiring, moment: Moment) -> Birth | None:
    """Find the first parameter that is not finite, and whether it was so from the beginning."""
    for module in wiring:
        for site in module.params:
            if site in moment.tainted:
                how: How = "parameter" if moment.sane < 0 else "unseen"
                how = "stepped" if moment.sane == moment.step - 1 >= 0 else how
                return Birth(how, site, module, sure=0.6 if how == "unseen" else 0.9)
    return None


def written_birth(wiring: Wiring, moment: Moment) -> Birth | None:
    """Find gradients that were finite when the backward made them, and were not when the optimizer got them."""
    if not moment.full:  # only there gradients are seen as they are made
        return None
    for total in moment.bad(s.id for s in wiring.sites if s.kind == TOTAL):
        own = [s.id for s in wiring.sites if s.kind == "param.grad" and s.root == wiring.sites[total].root]
        if moment.finite(own):
            return Birth("written", total, None, near=tuple(own), sure=0.9)
    return None


def update_birth(wiring: Wiring, moment: Moment) -> Birth | None:
    """Find an optimizer step that made something that is not finite out of finite gradients."""
    for site in moment.bad(s.id for s in wiring.sites if s.kind == "update"):
        owner = wiring.modules.get(wiring.sites[site].owner)
        gradients = [s.id for s in wiring.sites if s.kind == "param.grad" and s.path == wiring.sites[site].path]
        return Birth("update", site, owner, near=tuple(gradients), sure=0.9 if gradients else 0.6)
    return None


@dataclass(frozen=True)
class _Forward:
    wiring: Wiring
    moment: Moment

    def entry(self, module: Module) -> Birth | None:
        """Find a birth on the way into a module."""
        bad = self.moment.bad(module.ins)
        if not bad or any(self.moment.bad(holder.ins) for holder in self.wiring.ancestors(module)):
            return None
        sources = {source for site in bad for source in self.wiring.sites[site].sources}
        known = [source for source in sources if source is not None]
        if self.moment.bad(known):
            return None
        if known and len(known) == len(sources) and self.moment.finite(known):
            return Birth("between", bad[0], self._holder(module), tuple(sorted(known)), 0.9)
        if self.moment.tainted or self._bad_before(module):
            return None
        before = self._before(module)
        if module.path in self.wiring.heads:
            return Birth("entry", bad[0], None, before, 0.9)
        return Birth("between", bad[0], self._holder(module), before, 0.8)

    def product(self, module: Module) -> Birth | None:
        """Find a birth in a module itself."""
        bad, inner = self.moment.bad(module.outs), self.wiring.inside(module)
        if not bad or self.moment.bad(site for m in inner for site in (*m.ins, *m.outs)):
            return None
        if not self.moment.tainted.isdisjoint(site for m in (module, *inner) for site in m.params):
            return None
        sure = self._inputs_finite(module)
        if sure is None:
            return None
        if contained(self.wiring, self.moment, module):
            return self._elsewhere(module, bad[0])
        near = tuple(site for m in inner for site in m.outs if self.moment.finite([site]))
        stale = any(self.moment.states[site] == ABSENT for site in module.params)
        sure = min(sure, 0.8) if stale else sure
        return Birth("own" if near else "module", bad[0], module, near or module.ins, sure, stale)

    def _elsewhere(self, module: Module, site: int) -> Birth:
        """Tell the birth of what a module returned, and cannot have made of what was seen of its input and parameters."""
        guessed = self.moment.worked.intersection(module.ins)
        if guessed:
            sources = {source for entry in guessed for source in self.wiring.sites[entry].sources if source is not None}
            return Birth("between", site, self._holder(module), tuple(sorted(sources)), 0.8)
        if spoiled := self.moment.bad(module.param_grads):
            return Birth("within", site, module, tuple(spoiled), 0.8)
        return Birth("module", site, module, module.ins, 0.7)

    def unclear(self) -> list[Birth]:
        """Name the first output of the flow that was not finite, as where a module is fed by itself."""
        bad = [m for m in self.wiring if self.moment.bad(m.outs)]
        return [Birth("unclear", self.moment.bad(m.outs)[0], m, sure=0.5) for m in bad[:1]]

    def _inputs_finite(self, module: Module) -> float | None:
        """Say how sure it is that a module's inputs were finite; None if they were not."""
        if module.ins and (finite := self.moment.finite(module.ins)) is not None:
            return (1.0 if self.moment.full else 0.9) if finite else None
        known = [source for source in module.sources if source is not None]
        seen = bool(known) and all(self.moment.states[source] == FINITE for source in known)
        complete = seen and None not in module.sources
        if self.moment.bad(known) or self._bad_before(module, after=max(known) if complete else -1):
            return None
        return 0.9 if complete else 0.7

    def _bad_before(self, module: Module, after: int = -1) -> bool:
        """Tell whether something went wrong before a module was entered, after some place in the flow."""
        start = self.wiring.start(module)
        return any(self.moment.bad(m.outs) for m in self.wiring if after < m.position < start)

    def _before(self, module: Module) -> tuple[int, ...]:
        """Give the last finite output before a module was entered."""
        start = self.wiring.start(module)
        seen = [m for m in self.wiring if m.position < start and self.moment.finite(m.outs)]
        return seen[-1].outs[:1] if seen else ()

    def _holder(self, module: Module) -> Module | None:
        return next(iter(self.wiring.ancestors(module)), None)


def _spoiled(wiring: Wiring, moment: Moment, module: Module) -> Birth:
    """Tell the birth of a parameter's gradient, in a module whose output's gradient was finite or not seen."""
    site = _weight(wiring, moment.bad(module.param_grads))
    if moment.finite(module.grads):
        return Birth("backward", site, module, _seen(moment, module.grads), 1.0)
    later = [m for m in wiring if m.position > module.position and moment.finite(m.param_grads)]
    near = (_weight(wiring, later[0].param_grads),) if later else ()
    return Birth("gap", site, module, near, 0.7 if near else 0.6)


def _arrived(wiring: Wiring, moment: Moment, module: Module) -> Birth:
    """Tell where the gradient of a module's output was spoiled, the first one in the order of backward."""
    chain = list(_tail(wiring, moment, module))
    site = moment.bad(chain[-1].grads)[0]
    for same in (*reversed(chain), *_holders(wiring, module)):
        if same not in chain and moment.finite(same.grads):  # its own forward goes on after the module
            return Birth("gap", site, same, same.grads[:1], 0.9)
        consumers = [m for m in wiring.consumers(same) if m.position > same.position]
        if consumers:
            return _consumed(wiring, moment, site, same)
        if same.path in wiring.heads:
            return Birth("loss", site, None, sure=0.9)
    later = _following(wiring, moment, module)
    return Birth("gap", site, module, later, 0.8 if later else 0.6)


def _consumed(wiring: Wiring, moment: Moment, site: int, same: Module) -> Birth:
    """Tell in whose backward the gradient of an output was spoiled, of the modules that take it and of what lies beside them."""
    consumers = [m for m in wiring.consumers(same) if m.position > same.position]
    near = tuple(grad for m in consumers for grad in _seen(moment, m.grads))
    able = [m for m in consumers if moment.finite(m.grads)] or consumers
    guilty = [m for m in able if not innocent(wiring, moment, m)]
    others = beside(wiring, same, consumers)
    if not guilty:
        holder = others[0] if others else next(iter(wiring.ancestors(same)), None)
        return Birth("beside", site, holder, near, 0.8 if others else 0.6, also=tuple(able))
    others = [*guilty[1:], *others]
    if others or uses_outside(wiring, same):
        return Birth("either", site, guilty[0], near, 0.7 if near else 0.6, also=tuple(others))
    return Birth("backward", site, guilty[0], near, 0.9 if near else 0.7)


def _tail(wiring: Wiring, moment: Moment, module: Module) -> Iterator[Module]:
    """Follow a container to the module inside it whose output it returned, as long as the gradient is bad."""
    yield module
    inner = wiring.returned(module)
    if inner and moment.finite(inner.grads) is False:
        yield from _tail(wiring, moment, inner)


def _holders(wiring: Wiring, module: Module) -> Iterator[Module]:
    """Follow a module to the containers that return right after it, perhaps with its very output."""
    for holder in wiring.ancestors(module):
        if wiring.inside(holder)[-1].position > module.position:
            return
        yield holder
        if wiring.returned(holder) is None:
            return


def _following(wiring: Wiring, moment: Moment, module: Module) -> tuple[int, ...]:
    """Give the gradient of the next module towards the loss."""
    for later in wiring:
        if later.position > module.position and later.root == module.root and moment.finite(later.grads):
            return later.grads[:1]
    return ()


def _seen(moment: Moment, sites: Iterable[int]) -> tuple[int, ...]:
    return tuple(site for site in sites if moment.states[site] != ABSENT)


def _weight(wiring: Wiring, sites: Iterable[int]) -> int:
    """Choose the parameter with the most dimensions."""
    return max(sites, key=lambda site: len(wiring.sites[site].shape))
