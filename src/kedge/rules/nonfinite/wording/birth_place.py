"""The place of a birth in words: the module, the operation, the program's line, and others that may have made the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kedge.rules.naming import NAMED, name_of
from kedge.rules.nonfinite.wording import phrases
from kedge.rules.nonfinite.wording.advice import operation
from kedge.rules.nonfinite.wording.birth_figures import BirthFigures
from kedge.rules.nonfinite.wording.birth_in_step import BirthInStep
from kedge.rules.recorded.losses import LOSS, maker_at
from kedge.rules.recorded.wiring import ModuleSites
from kedge.short_text import listed


@dataclass(frozen=True)
class BirthPlace:
    """The names of the place of one birth.

    Attributes:
        case: The birth in its step.
        figures: Its figures.
    """

    case: BirthInStep
    figures: BirthFigures

    def name(self) -> str:
        """Return the name of the module that made the value, or that holds the operation that did."""
        return (
            name_of(self.case.birth.module) if self.case.birth.module is not None else "the program"
        )

    def in_remedy(self) -> str:
        """Return the name of the place of the operation for a remedy."""
        how, name = self.case.birth.how, self.name()
        if how in ("module", "backward"):
            return name
        return f"the forward of {name}{', after its modules' if how == 'own' and not self.case.unmeasured() else ''}"

    def source(self) -> dict[str, Any] | None:
        """Return the program's line that calls the module; for an operation between two modules, that of the next one."""
        birth, sites = self.case.birth, self.case.wiring.sites
        module = birth.also[0] if birth.how == "beside" else birth.module
        own = (
            (*module.outs, *module.ins)
            if module is not None and birth.how not in phrases.BETWEEN
            else ()
        )
        found = (sites[site].source for site in (*own, birth.site))
        return next((dict(source) for source in found if source), None)

    def last_operation(self) -> str:
        """Return the name of the last operation on the value, in brackets; empty if it is not the module's own."""
        name = operation(self.node())
        return f" ({name} was its last operation)" if name else ""

    def node(self) -> str | None:
        """Return the autograd node of the value; None if the recorded one belongs to another module's value."""
        birth, wiring, site = self.case.birth, self.case.wiring, self.case.site
        if site.kind == LOSS:
            return maker_at(self.case.recording, site, self.case.step)[0]
        if birth.how == "between":
            return None if site.kind.startswith("out") else site.node
        if birth.module is None or self.case.bad_step.full:
            return site.node
        # The node is that of a measured step, in which the module may have returned its input or an
        # inner module's output.
        given = {wiring.sites[source].node for source in birth.module.sources if source is not None}
        return (
            None if site.node in given or wiring.returned(birth.module) is not None else site.node
        )

    def others(self) -> str:
        """Return a list of other users of the value: modules, and operations of containers' own forwards."""
        birth, wiring = self.case.birth, self.case.wiring
        own = wiring.modules.get(self.case.site.owner)
        around = {m.path for inner in (own, birth.module) if inner for m in wiring.ancestors(inner)}
        parts = [
            f"that of {name_of(m)}, which takes the same value"
            for m in birth.also
            if m.path not in around
        ]
        holders = [f"in {name_of(m)}'s own forward" for m in birth.also if m.path in around]
        if holders or not parts:
            place = " and ".join(holders) or "outside any watched module"
            parts.append(f"that of an operation {place} that takes the same value")
        return ", or ".join(parts)

    def between(self) -> str:
        """Return the modules without parameters between a bad gradient and the next finite one; empty if there are none."""
        birth, wiring = self.case.birth, self.case.wiring
        if birth.module is None:
            return ""
        ends = [wiring.modules[wiring.sites[site].owner].position for site in birth.near]
        inside = [
            m
            for m in wiring
            if birth.module.position < m.position < min(ends, default=len(wiring.sites))
        ]
        plain = [name_of(m) for m in inside if not m.params and not wiring.inside(m)]
        return f", such as that of {listed(plain[:NAMED])}" if plain else ""

    def finite_parts(self) -> str:
        """Return a sentence about the finite parts of the module: its inputs and parameters."""
        module, birth = self.case.birth.module, self.case.birth
        if module is None:
            return ""
        given, verb = (
            ("inputs", "were") if (len(module.ins) or len(module.sources)) > 1 else ("input", "was")
        )
        params = self._parameters(module)
        if birth.sure < 0.8:
            return f"{given} and parameters were finite, as far as they were watched"
        if vast := [self.case.wiring.text(site) for site in params if self.figures.is_vast(site)]:
            return f"{given} {verb} finite, and {listed(vast)} {'were' if len(vast) > 1 else 'was'} beyond 1e19 or infinite"
        if birth.stale:
            return f"{given} {verb} finite, and so were its parameters when they were last recorded"
        return f"{given} and parameters were finite" if params else f"{given} {verb} finite"

    def _parameters(self, module: ModuleSites) -> list[int]:
        return [site for m in (module, *self.case.wiring.inside(module)) for site in m.params]
