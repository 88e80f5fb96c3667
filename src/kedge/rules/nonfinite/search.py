"""The search for the places where non-finite values were made, in the states of one step; free of words.

Values flow from module to module, and a NaN flows with them; so almost every site that holds one
only passes it on. A birth is a place with finite inputs and parameters and a non-finite result.

# Note [Beside]
The gradient of a value is the sum of the gradients from all its users. Modules that use it are
recorded. Operations in a container's own forward are not; only their results show: an input of a
module that no module returned, or an output of the container that no module inside it returned. A
value is available in the forward of the container in which it was returned; further out only if
that container returns it unchanged; and in containers that take it as input. So for `b(h) + f(h)`
both `b` and `f` can have spoiled the gradient of `h`, unless b is a sum of products, such as a
linear map, and all its numbers are far too small to leave the range of their format. Values that a
program passes by other ways than a return, such as an attribute, do not show.

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

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kedge.rules.nonfinite.bad_steps import ABSENT, FINITE, TOTAL, BadStep, judged
from kedge.rules.recorded.losses import LOSS
from kedge.rules.recorded.wiring import ModuleSites, Wiring
from kedge.store.formats import FORMATS
from kedge.store.recording import Recording

Place = Literal[
    "entry",  # it came into a root from outside, with the batch
    "forward",  # in the forward of a module
    "loss",  # in the program's own operations after the modules
    "backward",  # in a backward
    "written",  # in gradients, between their backward and the optimizer's step
    "optimizer",  # in a parameter, by the optimizer's step
    "parameter",  # in a parameter, before anything was recorded
    "unseen",  # in steps that were not recorded
]

Certainty = Literal[
    "seen",  # what went in was recorded and finite, what came out was recorded and not
    "inferred",  # nothing else that was recorded can have made it
    "among",  # it is one of several that can have made it
    "between",  # only the sites or steps are known between which it was made
    "unknown",  # nothing but the value itself was recorded
]

#: Modules that only add products of their input with their weights, forward and backward, or pass
#: their input on.
_SUMS = re.compile(r"(Lazy)?(Linear|Conv(Transpose)?\dd)$")
_PASSING = re.compile(r"(ReLU6?|Identity|Flatten|Unflatten)$")

#: The factor by which a bound on the sums has to stay below the largest number of the format.
_ROOM = 1e3


@dataclass(frozen=True)
class Sighting:
    """What the rows of one step show of a birth.

    Attributes:
        place: Where the value was made.
        certainty: How that is known.
        bad_step: The step.
        site: The first site that held the value.
        module: The module that made it, or the one that holds the operation that did; None outside
            of all modules.
        near: Sites with finite values next to it, which delimit the place.
        sure: From 0 to 1: the share of the search's information that was recorded.
        also: Modules that may have made it too, or hold the operation that did; see Note [Beside].
        cleared: Modules that use the value and cannot have made it.
        stale: Whether the last rows of the module's parameters are of an earlier step.
        shown_first: The step before, of which only gradients are recorded and in which the value showed
            first; None if it showed first in this step.
        later: If this is such a step: the first step after it with other rows, if there is one.
    """

    place: Place
    certainty: Certainty
    bad_step: BadStep = field(repr=False)
    site: int
    module: ModuleSites | None = None
    near: tuple[int, ...] = ()
    sure: float = 1.0
    also: tuple[ModuleSites, ...] = ()
    cleared: tuple[ModuleSites, ...] = ()
    stale: bool = False
    shown_first: BadStep | None = None
    later: BadStep | None = None

    @property
    def is_of_gradients(self) -> bool:
        """Whether only gradients are recorded of the step, so that its site is not its place; see Note [Guarded]."""
        return self.place == "unseen" and self.certainty == "unknown"

    @property
    def is_given(self) -> bool:
        """Whether a module was given the value, and not the result of another module."""
        return self.place == "entry" or (self.place == "forward" and self.certainty == "between")

    def went_no_further(self, recording: Recording) -> bool:
        """Whether the value was given to modules and no module returned it, in a step that was sound."""
        if not self.is_given or not self.bad_step.sound:
            return False
        return all(site.kind == "in" for site in self.bad_step.nonfinite_of(recording))


@dataclass(frozen=True)
class Search:
    """The search in one step."""

    wiring: Wiring
    bad_step: BadStep

    def sightings(self) -> list[Sighting]:
        """Return the independent births of the step: in the forward, else in the backward, else around the optimizer."""
        forward = self._in_forward()
        if not forward:
            lost = self._in_loss()
            if lost:
                return [lost]

        backward = None
        returned = judged(self.wiring.recording)[1]
        is_sound = not self.bad_step.nonfinite(site.id for site in returned)
        if is_sound and not self.bad_step.bad_params:
            backward = self._in_backward()
        if backward:
            causes = [cause for cause in forward if self._explains(cause, backward)]
            return causes or [backward]
        if forward:
            return forward

        other = self._written() or self._in_parameter() or self._in_update()
        if not other:
            return []
        return [other]

    # The forward

    def _in_forward(self) -> list[Sighting]:
        found: list[Sighting] = []
        for module in self.wiring:
            births = (self._at_input(module), self._at_output(module))
            found += [birth for birth in births if birth]
        if found or self.bad_step.bad_params:
            return found

        # The first of the flow, for example a module that takes its own output.
        for module in self.wiring:
            bad = self.bad_step.nonfinite(module.outs)
            if bad:
                return [self._sighting("forward", "unknown", bad[0], module, sure=0.5)]
        return []

    def _at_input(self, module: ModuleSites) -> Sighting | None:
        """Return the birth of a module's input; None if the value came from a recorded place."""
        bad = self.bad_step.nonfinite(module.ins)
        holders = self.wiring.ancestors(module)
        if not bad or any(self.bad_step.nonfinite(holder.ins) for holder in holders):
            return None

        sources = {source for site in bad for source in self.wiring.sites[site].sources}
        known = sorted(source for source in sources if source is not None)
        if self.bad_step.nonfinite(known):
            return None
        holder = next(iter(holders), None)
        if None not in sources and self.bad_step.are_finite(known):
            return self._sighting("forward", "between", bad[0], holder, known, 0.9)

        if self.bad_step.bad_params or self._bad_before(module):
            return None
        start = self.wiring.start(module)
        last: tuple[int, ...] = ()
        for each in self.wiring:
            if each.position < start and self.bad_step.are_finite(each.outs):
                last = each.outs[:1]
        if module.path in self.wiring.heads:
            return self._sighting("entry", "seen", bad[0], None, last, 0.9)
        return self._sighting("forward", "between", bad[0], holder, last, 0.8)

    def _at_output(self, module: ModuleSites) -> Sighting | None:
        """Return the birth of a module's output; None if it was not made there."""
        bad = self.bad_step.nonfinite(module.outs)
        inner = self.wiring.inside(module)
        if not bad:
            return None
        if self.bad_step.nonfinite(site for m in inner for site in (*m.ins, *m.outs)):
            return None
        params = [site for m in (module, *inner) for site in m.params]
        if not self.bad_step.bad_params.isdisjoint(params):
            return None
        sure = self._inputs_finite(module)
        if sure is None:
            return None

        if self._cannot_overflow_forward(module):
            return self._elsewhere(module, bad[0])
        stale = any(self.bad_step.states[site] == ABSENT for site in module.params)
        if stale:
            sure = min(sure, 0.8)
        returned = [site for m in inner for site in m.outs if self.bad_step.are_finite([site])]
        if returned:
            return self._sighting(
                "forward", "inferred", bad[0], module, returned, sure, stale=stale
            )
        return self._sighting("forward", "seen", bad[0], module, module.ins, sure, stale=stale)

    def _elsewhere(self, module: ModuleSites, site: int) -> Sighting:
        """Return the birth of an output that the module cannot have made of its recorded inputs and parameters."""
        inferred = self.bad_step.inferred.intersection(module.ins)
        if inferred:
            holder = next(iter(self.wiring.ancestors(module)), None)
            sources: set[int | None] = set()
            for entry in inferred:
                sources.update(self.wiring.sites[entry].sources)
            known = sorted(source for source in sources if source is not None)
            return self._sighting("forward", "between", site, holder, known, 0.8)
        spoiled = self.bad_step.nonfinite(module.param_grads)
        if spoiled:
            return self._sighting("optimizer", "inferred", site, module, spoiled, 0.8)
        return self._sighting("forward", "seen", site, module, module.ins, 0.7)

    def _inputs_finite(self, module: ModuleSites) -> float | None:
        """Return how sure it is that a module's inputs were finite; None if they were not."""
        finite = self.bad_step.are_finite(module.ins)
        if finite is not None:
            sure = 0.9
            if self.bad_step.full:
                sure = 1.0
            if not finite:
                return None
            return sure

        known = [source for source in module.sources if source is not None]
        seen = bool(known) and all(self.bad_step.states[source] == FINITE for source in known)
        complete = seen and None not in module.sources
        after = max(known) if complete else -1
        if self.bad_step.nonfinite(known) or self._bad_before(module, after):
            return None
        if complete:
            return 0.9
        return 0.7

    def _bad_before(self, module: ModuleSites, after: int = -1) -> bool:
        """Whether an output was not finite before a module was entered, and after some place in the flow."""
        start = self.wiring.start(module)
        between = (m for m in self.wiring if after < m.position < start)
        return any(self.bad_step.nonfinite(m.outs) for m in between)

    def _in_loss(self) -> Sighting | None:
        """Return the birth of a non-finite loss if no output of a module was bad."""
        bad = self.bad_step.nonfinite(self._ids(LOSS))
        outputs = self._ids("out")
        if not bad or self.bad_step.bad_params or self.bad_step.nonfinite(outputs):
            return None
        if self.bad_step.are_finite(outputs):
            return self._sighting("loss", "seen", bad[0], sure=0.95)
        return self._sighting("loss", "among", bad[0], sure=0.6)

    # The backward

    def _in_backward(self) -> Sighting | None:
        """Return the first birth in the backward passes; later ones may be consequences of it."""
        finite = self.bad_step.are_finite
        arrived = [m for m in self.wiring if finite(m.grads) is False]
        spoiled = [
            m
            for m in self.wiring
            if finite(m.param_grads) is False and finite(m.grads) is not False
        ]
        # A parameter that a container owns is used anywhere inside it: its place in the order says
        # little.
        placed = [m for m in spoiled if not self.wiring.inside(m)]
        if placed or arrived:
            spoiled = placed

        last = max(arrived, key=lambda m: m.position, default=None)
        inner = max(spoiled, key=lambda m: m.position, default=None)
        if inner and (last is None or inner.position > last.position):
            return self._of_parameter(inner)
        if not last:
            return None
        return self._of_output(last)

    def _of_parameter(self, module: ModuleSites) -> Sighting:
        """Return the birth of a parameter's gradient, in a module whose output's gradient was finite or is not recorded."""
        site = self._weight(self.bad_step.nonfinite(module.param_grads))
        if self.bad_step.are_finite(module.grads):
            near = self._recorded(module.grads)
            return self._sighting("backward", "seen", site, module, near)
        for later in self.wiring:
            is_nearer = later.position > module.position
            if is_nearer and self.bad_step.are_finite(later.param_grads):
                near = [self._weight(later.param_grads)]
                return self._sighting("backward", "between", site, module, near, 0.7)
        return self._sighting("backward", "between", site, module, sure=0.6)

    def _of_output(self, module: ModuleSites) -> Sighting:
        """Return the birth of the gradient of a module's output, the first bad one in the order of backward."""
        chain = list(self._returned_while_bad(module))
        site = self.bad_step.nonfinite(chain[-1].grads)[0]
        for same in (*reversed(chain), *self._returning(module)):
            # The forward of a container may go on after the module.
            if same not in chain and self.bad_step.are_finite(same.grads):
                return self._sighting("backward", "between", site, same, same.grads[:1], 0.9)
            users = [m for m in self.wiring.consumers(same) if m.position > same.position]
            if users:
                return self._of_users(site, same, users)
            if same.path in self.wiring.heads:
                return self._sighting("backward", "inferred", site, sure=0.9)

        for later in self.wiring:
            is_nearer = later.position > module.position and later.root == module.root
            if is_nearer and self.bad_step.are_finite(later.grads):
                return self._sighting("backward", "between", site, module, later.grads[:1], 0.8)
        return self._sighting("backward", "between", site, module, sure=0.6)

    def _of_users(self, site: int, same: ModuleSites, users: list[ModuleSites]) -> Sighting:
        """Return the birth of an output's gradient, in the backward of the modules or operations that take the output."""
        near = [grad for m in users for grad in self._recorded(m.grads)]
        able = [m for m in users if self.bad_step.are_finite(m.grads)] or users
        suspects = [m for m in able if not self._cannot_overflow_backward(m)]
        holders = self._operating_beside(same, users)
        if not suspects:
            sure = 0.6
            if holders:
                sure = 0.8
            holder = next(iter(holders or self.wiring.ancestors(same)), None)
            return self._sighting(
                "backward", "inferred", site, holder, near, sure, cleared=tuple(able)
            )

        also = (*suspects[1:], *holders)
        if not near:
            # What arrived at the suspects may have been bad already.
            return self._sighting("backward", "among", site, suspects[0], sure=0.6, also=also)
        if also or self._is_used_outside(same):
            return self._sighting("backward", "among", site, suspects[0], near, 0.7, also=also)
        return self._sighting("backward", "seen", site, suspects[0], near, 0.9)

    def _returned_while_bad(self, module: ModuleSites) -> Iterator[ModuleSites]:
        """Yield a container, the module inside it whose output it returned, and so on, while the gradient is bad."""
        inner: ModuleSites | None = module
        while inner is not None and (inner is module or self.bad_step.nonfinite(inner.grads)):
            yield inner
            inner = self.wiring.returned(inner)

    def _returning(self, module: ModuleSites) -> Iterator[ModuleSites]:
        """Yield the containers that return right after a module, as long as they may return its output."""
        for holder in self.wiring.ancestors(module):
            if self.wiring.inside(holder)[-1].position > module.position:
                return
            yield holder
            if self.wiring.returned(holder) is None:
                return

    def _explains(self, forward: Sighting, backward: Sighting) -> bool:
        """Whether a birth in the forward lies at the place of a birth in the backward.

        The derivative of an infinity that the forward replaced by a finite value is still not
        finite, and so is a gradient that a module computed from a value of its own forward that was
        not. Between measured steps gradients are recorded after clipping, which spreads non-finite
        values to all of them: then they show no place.
        """
        module = backward.module
        if module is not None and self.bad_step.nonfinite((*module.ins, *module.outs)):
            return True
        is_anywhere = backward.certainty == "between" and not backward.near
        if is_anywhere and not self.bad_step.full:
            return True
        if forward.module is None:
            return False
        places = [self._position(site) for site in (backward.site, *backward.near)]
        nearest = max(places) if backward.near else forward.module.position
        return min(places) <= forward.module.position <= nearest

    # Other users of a value; see Note [Beside]

    def _operating_beside(
        self, module: ModuleSites, users: Iterable[ModuleSites]
    ) -> list[ModuleSites]:
        """Return the containers in whose own forward an operation may take a module's output."""
        reached: dict[str, None] = {}
        for holder in self.wiring.ancestors(module):
            reached[holder.path] = None
            if not self._returns_output_of(holder, module):
                break
        for user in users:
            for holder in self.wiring.ancestors(user):
                if not holder.sources.isdisjoint(module.outs):
                    reached[holder.path] = None

        found = []
        for path in reached:
            holder = self.wiring.modules[path]
            inner = self.wiring.inside(holder)
            later = [m for m in inner if self.wiring.start(m) > module.position]
            is_own_result = bool(inner) and self.wiring.returned(holder) is None
            if is_own_result or any(self._computed_input(holder, m) for m in later):
                found.append(holder)
        return found

    def _returns_output_of(self, holder: ModuleSites, module: ModuleSites) -> bool:
        """Whether a container returned a module's output unchanged."""
        inner = self.wiring.returned(holder)
        while inner is not None and inner is not module:
            inner = self.wiring.returned(inner)
        return inner is not None

    def _computed_input(self, holder: ModuleSites, module: ModuleSites) -> bool:
        """Whether a container's own forward computed an input of a module inside it."""
        if None not in module.sources or self.wiring.ancestors(module)[0] is not holder:
            return False
        if not self.wiring.has_nodes:
            return True
        sites = self.wiring.sites
        given = {sites[site].node for site in holder.ins if None in sites[site].sources}
        for entry in (sites[site] for site in module.ins if None in sites[site].sources):
            # Of several input values only the first one's node is recorded, so that of the unknown
            # one is not known.
            if len(entry.sources) > 1:
                return True
            if entry.node is not None and entry.node not in given:
                return True
        return False

    def _is_used_outside(self, module: ModuleSites) -> bool:
        """Whether an operation outside of all watched containers may take a module's output."""
        if self.wiring.ancestors(module):
            return False
        for other in self.wiring:
            is_later = other.root == module.root and self.wiring.start(other) > module.position
            if is_later and None in other.sources and not self.wiring.ancestors(other):
                return True
        return False

    # Around the optimizer

    def _written(self) -> Sighting | None:
        """Return the birth of gradients that were finite after the backward, and were not when the optimizer got them."""
        if not self.bad_step.full:  # only measured steps have the gradients of the backward itself
            return None
        sites = self.wiring.sites
        for total in self.bad_step.nonfinite(self._ids(TOTAL)):
            own = [s for s in self._ids("param.grad") if sites[s].root == sites[total].root]
            if self.bad_step.are_finite(own):
                return self._sighting("written", "seen", total, near=own, sure=0.9)
        return None

    def _in_parameter(self) -> Sighting | None:
        """Return the birth of the first non-finite parameter, and whether it was so from the beginning."""
        last_sound = self.bad_step.last_sound
        for module in self.wiring:
            for site in module.params:
                if site not in self.bad_step.bad_params:
                    continue
                if last_sound < 0:
                    return self._sighting("parameter", "inferred", site, module, sure=0.9)
                if last_sound == self.bad_step.step - 1:
                    return self._sighting("optimizer", "between", site, module, sure=0.9)
                return self._sighting("unseen", "between", site, module, sure=0.6)
        return None

    def _in_update(self) -> Sighting | None:
        """Return the birth of a non-finite update from finite gradients."""
        sites = self.wiring.sites
        for site in self.bad_step.nonfinite(self._ids("update")):
            owner = self.wiring.modules.get(sites[site].owner)
            near = [s for s in self._ids("param.grad") if sites[s].path == sites[site].path]
            if self.bad_step.are_finite(near):
                return self._sighting("optimizer", "seen", site, owner, near, 0.9)
            return self._sighting("optimizer", "among", site, owner, near, 0.6)
        return None

    # Steps of which only gradients are recorded; see Note [Guarded]

    def shows_only_gradients(self) -> bool:
        """Whether only gradients of parameters of the hurt roots are recorded, and show no place.

        A parameter that was not finite before the step shows one, and so does a backward of a
        finite loss.
        """
        sites = self.wiring.sites
        gradients = self._ids("param.grad", TOTAL)
        hurt = {sites[site].root for site in self.bad_step.nonfinite(gradients)}
        values = [s for s in self._ids("in", "out", "out.grad") if sites[s].root in hurt]
        params = [s for s in self._ids("param") if sites[s].root in hurt]
        if not hurt or self.bad_step.are_finite(values) is not None:
            return False
        if self.bad_step.nonfinite(self._ids("in", "out")) or self.bad_step.nonfinite(params):
            return False
        shows_place = self.bad_step.full and any(
            self.bad_step.states[site] == FINITE for site in gradients
        )
        return not self.bad_step.in_backward and not shows_place

    def only_gradients(self, later: BadStep | None) -> Sighting:
        """Return the birth of which only gradients are recorded; its site is not its place."""
        gradients = self._ids("param.grad")
        bad = self.bad_step.nonfinite(gradients)
        sound = [site for site in gradients if self.bad_step.states[site] == FINITE]
        first = self.bad_step.nonfinite(self._ids(TOTAL)) or bad
        if sound and bad:
            first = bad
        return self._sighting("unseen", "unknown", first[0], near=sound, sure=0.5, later=later)

    def makes_again(self, sighting: Sighting) -> bool:
        """Whether a birth shows its place in spite of the values that were spoiled in an earlier step."""
        if sighting.place == "backward":
            return sighting.certainty != "between"
        if sighting.place not in ("forward", "entry") or sighting.sure < 0.7:
            return False
        module = sighting.module
        if module is None or sighting.certainty == "between" or not self.bad_step.bad_params:
            return True
        # Parameters that are recorded as another module's may have been spoiled.
        for inner in (module, *self.wiring.inside(module)):
            described = self.wiring.described.get(inner.path, {})
            if not inner.params and described.get("parameters", 0) > 0:
                return False
        return True

    # Modules that cannot have made a non-finite value, by their kind and the size of their figures

    def _cannot_overflow_backward(self, module: ModuleSites) -> bool:
        if not self.bad_step.full or not self.bad_step.are_finite(module.grads):
            return False
        if _PASSING.match(module.type):
            return self._is_of_torch(module)
        return self._fits(module, module.grads, (*module.grads, *module.ins))

    def _cannot_overflow_forward(self, module: ModuleSites) -> bool:
        """Whether it holds for a forward whose input had the recorded figures, or those of the outputs that it usually is."""
        entries: set[int | None] = set()
        for site in module.ins:
            if site in self.bad_step.inferred:
                entries.update(self.wiring.sites[site].sources)
            else:
                entries.add(site)
        given = [site for site in entries if site is not None]
        if not given or None in entries:
            return False
        return self._fits(module, given, (*given, *module.outs))

    def _is_of_torch(self, module: ModuleSites) -> bool:
        file = str(self.wiring.described.get(module.path, {}).get("file"))
        return "/torch/nn/modules/" in file.replace("\\", "/")

    def _fits(self, module: ModuleSites, given: Iterable[int], formed: Iterable[int]) -> bool:
        """Whether a module sums products of some values with its weights alone, which stay far within all formats."""
        if not _SUMS.match(module.type) or not module.params or not self._is_of_torch(module):
            return False
        sites = (*module.params, *formed)
        formats = [FORMATS.get(self.wiring.sites[site].dtype) for site in sites]
        ends = [form.largest for form in formats if form is not None]
        arrived = max(self._norm(site) for site in given)
        weights = max(self._norm(site) for site in module.params)
        # No sum of products is larger than the product of the two norms; the bias is added as if it
        # met a one.
        bound = max(arrived, 1.0) * weights
        return len(ends) == len(formats) and bound * _ROOM < min(ends)

    def _norm(self, site: int) -> float:
        rows = self.wiring.recording.rows(self.wiring.sites[site])
        at = np.flatnonzero(rows.step == self.bad_step.step)
        size = math.sqrt(rows.sumsq[at[0]]) if len(at) else math.inf
        if math.isfinite(size):
            return size
        return math.inf

    # Sites

    def _ids(self, *kinds: str) -> list[int]:
        return [site.id for site in self.wiring.sites if site.kind in kinds]

    def _position(self, site: int) -> int:
        return self.wiring.modules[self.wiring.sites[site].owner].position

    def _recorded(self, sites: Iterable[int]) -> list[int]:
        return [site for site in sites if self.bad_step.states[site] != ABSENT]

    def _weight(self, sites: Iterable[int]) -> int:
        """Return the parameter with the most dimensions."""
        return max(sites, key=lambda site: len(self.wiring.sites[site].shape))

    def _sighting(
        self,
        place: Place,
        certainty: Certainty,
        site: int,
        module: ModuleSites | None = None,
        near: Iterable[int] = (),
        sure: float = 1.0,
        **more: Any,
    ) -> Sighting:
        return Sighting(place, certainty, self.bad_step, site, module, tuple(near), sure, **more)
