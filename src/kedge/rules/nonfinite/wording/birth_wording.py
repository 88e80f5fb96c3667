"""The words for a birth: message, evidence and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kedge.rules.command import again, uncompiled, with_dump_on
from kedge.rules.naming import NAMED, name_of, text_of
from kedge.rules.nonfinite.search.births import BACKWARD
from kedge.rules.nonfinite.wording import phrases
from kedge.rules.nonfinite.wording.advice import OperationAdvice
from kedge.rules.nonfinite.wording.birth_figures import BirthFigures
from kedge.rules.nonfinite.wording.birth_in_step import BirthInStep
from kedge.rules.nonfinite.wording.birth_place import BirthPlace
from kedge.rules.nonfinite.wording.leadup import lead_up
from kedge.rules.nonfinite.wording.step_size import long_step_signs
from kedge.rules.recorded.losses import LOSS
from kedge.short_text import listed

#: The number of sites in the evidence that passed a value on.
PROPAGATORS = 12


@dataclass(frozen=True)
class BirthWording:
    """The words for one birth.

    Attributes:
        case: The birth in its step.
    """

    case: BirthInStep

    @cached_property
    def figures(self) -> BirthFigures:
        """The figures of the birth."""
        return BirthFigures(self.case)

    @cached_property
    def place(self) -> BirthPlace:
        """The place of the birth."""
        return BirthPlace(self.case, self.figures)

    def message(self) -> str:
        """Return the site, the value and the step in one sentence, and the program's line in another."""
        case, birth = self.case, self.case.birth
        sentence = self._form().format(
            site=case.site.site,
            value=self.figures.value(),
            step=case.step,
            before=case.bad_step.last_sound,
            near=listed([case.wiring.text(site) for site in birth.near]),
            name=self.place.name(),
            parts=self.place.finite_parts(),
            operation=self.place.last_operation(),
            others=self.place.others(),
            between=self.place.between(),
            takers=", ".join(map(name_of, birth.also)),
            unseen=", ".join(name_of(module) for module in case.unmeasured()[:NAMED]),
        )
        return sentence + self._line()

    def _line(self) -> str:
        """Return the sentence about the program's line; empty if there is none."""
        source, birth = self.place.source(), self.case.birth
        if source is None or birth.how in ("loss", "parameter", "stepped", "unseen", "update"):
            return ""
        if birth.how == "made":
            inside = f", in {source['function']}" if source.get("function") else ""
            called = phrases.BACKWARD_CALLED.format(
                file=source["file"], line=source["line"], inside=inside
            )
        else:
            name = name_of(birth.also[0]) if birth.how == "beside" else self.place.name()
            called = phrases.CALLED[birth.how in phrases.BETWEEN].format(name=name, **source)
        return f" {called}{text_of(source)}."

    def _form(self) -> str:
        """Return the form of the sentence."""
        how, near = self.case.birth.how, self.case.birth.near
        if how == "made" and self.case.birth.sure < 0.8:
            return phrases.MADE_UNSEEN
        if how == "gap":
            return self._form_of_gap()
        if self.case.unmeasured():
            return phrases.OWN_OR_UNSEEN
        if how == "between" and not near:
            return phrases.BETWEEN_AT_THE_START
        return phrases.MESSAGES[how]

    def _form_of_gap(self) -> str:
        bad_step, near = self.case.bad_step, self.case.birth.near
        if bad_step.in_backward:
            return phrases.GAP_OF_A_FINITE_LOSS if near else phrases.ALL_OF_A_FINITE_LOSS
        if not near:
            return phrases.GAP_AT_THE_LOSS
        return (
            phrases.MESSAGES["gap"]
            if bad_step.full
            else phrases.MESSAGES["gap"][:-1] + phrases.OR_WRITTEN
        )

    def remedy(self) -> str:
        """Return what to do about it."""
        how = self.case.birth.how
        if how == "update":
            return phrases.UPDATED.format(figures=self.figures.of_update())
        if (
            how != "written"
            and (grown := self.figures.growth())
            and how not in ("entry", *BACKWARD)
        ):
            return phrases.GROWN.format(**grown)
        if how not in ("written", *BACKWARD) and self.figures.had_diverged():
            form = phrases.LARGE_FROM_THE_START if self.case.is_first_step else phrases.DIVERGED
            return form.format(largest=self.figures.largest())
        if how in ("module", "own", "between"):
            return self._operation().advice() + uncompiled(self.case.recording)
        if self.case.in_backward:
            return self._backward_remedy(
                "loss" if how == "gap" and not self.case.birth.near else how
            )
        before = long_step_signs(self.case.recording, self.case.step) if how == "unseen" else ""
        return before + self._remedy_of(how)

    def _backward_remedy(self, how: str) -> str:
        own = self._operation().backward_advice() if how == "backward" else ""
        return (phrases.SCALED if self.case.dtype == "float16" else "") + (
            own or self._remedy_of(how)
        )

    def _remedy_of(self, how: str) -> str:
        """Return the remedy of one way, with the options that would show more and that the run did not have."""
        command = with_dump_on(self.case.recording)
        return phrases.REMEDIES[how].format(
            name=self.place.name(),
            again=again(self.case.recording, "To have the module named"),
            dumped=f' To have the operation named, run "{command}".' if command else "",
            uncompiled=uncompiled(self.case.recording),
            before=""
            if self.case.is_first_step
            else "; if the parameter was finite before, lower the learning rate",
        )

    def _operation(self) -> OperationAdvice:
        """Return the operation that made the value, as far as it is known."""
        birth = self.case.birth
        kind = (
            birth.module.type
            if birth.module is not None and birth.how in ("module", "backward")
            else ""
        )
        node = None if birth.how == "backward" else self.place.node()
        excused = self.case.bad_step.excused
        if masked := [m.type for m in self.case.unmeasured() if not excused.isdisjoint(m.ins)]:
            kind, node = masked[0], None
        largest, first = self.figures.largest(), self.case.is_first_step
        weights = self.figures.weights()
        return OperationAdvice(
            self.place.in_remedy(), kind, node, self.case.dtype, largest, first, weights
        )

    def evidence(self) -> dict[str, Any]:
        """Return the figures of the site and of its neighbours, the later course of the value, and the steps before it."""
        case, birth = self.case, self.case.birth
        row, module, text = self.figures.row(), birth.module, case.wiring.text
        healed = [
            m
            for m in case.wiring
            if case.bad_step.nonfinite(m.ins) and case.bad_step.are_finite(m.outs)
        ]
        bad = case.bad_step.nonfinite(range(len(case.wiring.sites)))
        others = sorted((site for site in bad if site != birth.site), key=self._flow)
        return {
            "how": birth.how,
            "module": module.path if module else None,
            "type": module.type if module else None,
            "also": [other.path for other in birth.also],
            "source": self.place.source(),
            "node": self.place.node() if case.site.kind == LOSS else case.site.node,
            "value": self.figures.kind(),
            "nonfinite": row["nonfinite"],
            "nan": row["nan"],
            "count": row["count"],
            "near": {text(site): self.figures.near(site) for site in birth.near[:NAMED]},
            "growth": self.figures.growth(),
            "propagated": len(others),
            "propagators": [text(site) for site in others[:PROPAGATORS]],
            "healed": [text(m.outs[0]) for m in healed[:NAMED]],
            "before": lead_up(case.recording, case.wiring, case.step, birth),
        }

    def _flow(self, site: int) -> tuple[bool, int]:
        """Return a key that sorts sites as values flow: forward before backward, then in the order of their first firing."""
        return self.case.wiring.sites[site].kind not in ("in", "out"), site
