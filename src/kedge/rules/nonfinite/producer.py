"""The operation that made the first loss that was not finite, as the search of its autograd graph found it.

# Note [Producers]
In the step in which the loss is not finite for the first time its autograd graph is searched for the operation that made it.
That names the operation and the program's line, inside modules and between them, in any step. So where the rows of a
recording name no place, or only a later one, the producer is what is told; where they name the module in that very step, its
operation and line are told with it. No option is advised then: nothing more is to be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.rules.losses import LOSS
from kedge.rules.nonfinite.advice import DOMAIN, Maker, operation
from kedge.rules.nonfinite.bad_steps import Course
from kedge.rules.nonfinite.phrases import REMEDIES
from kedge.rules.rule import Finding
from kedge.rules.wiring import wire
from kedge.store.recording import Recording

Entry = Mapping[str, Any]

#: Ways of a birth that name the module in whose call it lies, or that it came with the batch.
_EXACT = ("module", "own", "between", "entry", "backward", "made")

#: What helps where an operation left its domain.
_REMEDIES = {
    "log": "Keep what goes into log above zero: clamp it (x.clamp_min(eps)), or take log_softmax, logsumexp or log1p, which "
    "need no such care.",
    "div": "Keep the divisor away from zero: add an epsilon or clamp it, and leave out empty masks.",
    "sqrt": "Keep what goes into sqrt above zero, by more than rounding: its value is NaN below, its slope infinite at zero.",
    "pow": "A power of a negative number, or below one of zero, has no finite value or slope: clamp the base.",
    "exp": "exp of more than 88 is infinite in float32: clamp the input, subtract the largest, or take softmax or logsumexp.",
    "acos": "Clamp the input to a little less than 1 and more than -1.",
}
_REMEDIES |= {
    "log2": _REMEDIES["log"],
    "log10": _REMEDIES["log"],
    "asin": _REMEDIES["acos"],
    "reciprocal": _REMEDIES["div"],
}
_REMEDIES |= {"rsqrt": _REMEDIES["div"], "true_divide": _REMEDIES["div"]}


def with_producer(recording: Recording, seen: Course, findings: Sequence[Finding]) -> list[Finding]:
    """Have the producer of the first loss that was not finite take its place among findings; see Note [Producers]."""
    found = list(findings)
    events = [event for event in recording.events if event.get("kind") == "producer"]
    if not events:
        return found
    producer = Producer(recording, min(events, key=lambda event: int(event["step"])), seen)
    earlier = [f for f in found if f.step < producer.step and not f.evidence.get("recovered", False)]
    if any("operation" in f.evidence or f.severity == "error" for f in earlier):
        return found
    same = [i for i, f in enumerate(found) if f.step == producer.step and _is_exact(f)]
    if same:
        found[same[0]] = producer.beside(found[same[0]])
        return found
    later = [i for i, f in enumerate(found) if f.step >= producer.step and not f.evidence.get("recovered", False)]
    near = later or [i for i, f in enumerate(found) if f.step >= producer.step]
    told = producer.finding(found[near[0]] if near else None)
    found[near[0] if near else 0 : near[0] + 1 if near else 0] = [told]
    return found


@dataclass(frozen=True)
class Producer:
    """One operation, with the recording around it.

    Attributes:
        recording: The recording.
        event: What was noted of the operation.
        seen: The steps of which the rows tell that something was not finite.
    """

    recording: Recording
    event: Entry
    seen: Course

    @property
    def step(self) -> int:
        """The step in which the loss was not finite for the first time."""
        return int(self.event["step"])

    @property
    def name(self) -> str:
        """The name of the operation."""
        return str(self.event.get("operation") or operation(self.event.get("node")) or "an operation")

    @property
    def recovered(self) -> bool:
        """Whether all that was hurt was well in a later step."""
        moment = next((m for m in self.seen.moments if m.step == self.step), None)
        if moment is not None:
            return self.seen.recovered(self.recording, moment)
        return max(self.seen.sound.values(), default=-1) > self.step

    def finding(self, shown: Finding | None) -> Finding:
        """Return the finding of what the rows do not tell.

        Args:
            shown: The first finding that comes of it.
        """
        site = self._site()
        shows = f" {shown.site} shows it at step {shown.step}." if shown is not None and shown.step != self.step else ""
        run_on = " The run went on." if self.recovered else ""
        return Finding(
            code="NAN-BORN",
            severity="warning" if self.recovered else "error",
            site=site,
            step=self.step,
            message=f"{self._what(site)} not finite at step {self.step}: {self._made()}.{shows}{run_on}",
            evidence={
                "how": "produced",
                "module": str(self.event.get("module") or "") or None,
                "also": [],
                "recovered": self.recovered,
                "births": shown.evidence.get("births", 1) if shown is not None else 1,
                **self._evidence(),
            },
            confidence=0.95 if self.event.get("certain", True) else 0.7,
            remedy=self._remedy(),
        )

    def beside(self, finding: Finding) -> Finding:
        """Return a finding of the same step with the operation and its line."""
        if "operation" in finding.evidence or self.event.get("where") == "input":
            return replace(finding, evidence={**self._evidence(), **finding.evidence})
        return replace(
            finding,
            message=f"{finding.message} The graph of the loss shows it: {self._made()}.",
            evidence={**finding.evidence, **{k: v for k, v in self._evidence().items() if v is not None}},
            remedy=self._remedy(),
        )

    def _what(self, site: str) -> str:
        return f"the gradients of {site} were" if self.event.get("where") == "backward" else f"{site} was"

    def _made(self) -> str:
        """Say what made it, and where it stands."""
        module, backward = self.event.get("module"), self.event.get("where") == "backward"
        if self.event.get("where") == "input":
            return f"it came in from outside the model, with the batch; {self.event['detail']}"
        inside = f", in {module}" if module else ", outside of modules" if module == "" else ""
        sure = "" if self.event.get("certain", True) else "probably "
        what = f"the backward of {self.name}" if backward else self.name
        line = f", at {self.event['file']}:{self.event['line']}" if self.event.get("file") else ""
        text = f": `{self.event['text']}`" if self.event.get("text") else ""
        detail = f"; {self.event['detail']}" if self.event.get("detail") else ""
        return f"{sure}{what} made it{inside}{line}{text}{detail}"

    def _remedy(self) -> str:
        module = str(self.event.get("module") or "")
        if self.event.get("where") == "input":
            return REMEDIES["entry"]
        if self.event.get("where") == "backward":
            return REMEDIES["backward"].format(name=module or "the program")
        if self.name in _REMEDIES:
            return _REMEDIES[self.name]
        name = self.name + (f" in {module}" if module else "")
        maker = Maker(name, "", self.event.get("node"), "float32", 0.0, self.step == 0)
        return maker.advice() if maker.multiplies else f"For {name}, {DOMAIN}."

    def _evidence(self) -> dict[str, Any]:
        keys = ("operation", "node", "module", "file", "line", "text", "where", "certain", "detail")
        told = {key: self.event[key] for key in keys if self.event.get(key) is not None}
        return {"operation": told, "source": told if told.get("file") else None}

    def _site(self) -> str:
        """Name a site of the recording: an output of the module, else the loss."""
        module = wire(self.recording).modules.get(str(self.event.get("module") or ""))
        if self.event.get("module") and module is not None and module.outs:
            return self.recording.sites[module.outs[0]].site
        losses = [site.site for site in self.recording.of_kind(LOSS)] or ["loss"]
        return str(self.event["loss"]) if self.event.get("loss") in losses else losses[0]


def _is_exact(finding: Finding) -> bool:
    return finding.evidence.get("how") in (*_EXACT, "kept")
