"""What ``--dump`` kept, beside what the rows of a recording say.

# Note [What a dump knows]
A dump looks at every value of every step, and the rows of a recording are of some steps, and of a light one not
of all sites. So where a birth lies in a step of which little or nothing was recorded, the dump saw it, and the
rows its consequences. Where the rows of that very step name the place, they know more: what went in, how much
of it was not finite, which other sites held it. The operation is known from running the kept call again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kedge.rules.nonfinite.advice import Maker
from kedge.rules.nonfinite.bad_steps import Course, Moment, seen_steps
from kedge.rules.nonfinite.births import Birth
from kedge.rules.nonfinite.leadup import lead_up
from kedge.rules.rule import Finding
from kedge.rules.wiring import Module, Wiring, wire
from kedge.store.recording import Recording

Entry = Mapping[str, Any]

_LAST = re.compile(r" \(\w+ was its last\)")

#: Ways of a birth that the rows of its own step name exactly.
_EXACT = ("module", "own", "between", "backward")

_SAW = (
    "{site} was the first {what}to hold {value} at step {step}: --dump saw it, which looks at every value; of this step "
    "{rows}. {how}."
)
_HOWS = {
    "out": "What went in was finite, so the forward of {name} made it",
    "in": "An operation in the forward of {name} made it, before that call",
    "backward": "The gradient that arrived at {name} was finite, so its backward made it",
}
_VALUES = {"nan": "NaN", "inf": "infinities"}
_INFINITE_SLOPE = (
    "In {name}, look for an operation whose derivative is infinite where its value is not: sqrt or norm at 0, pow below 1 "
    "at 0, a division, or torch.where around one of them. Change its input, not its output."
)


def with_dump(recording: Recording, seen: Course, findings: Sequence[Finding]) -> list[Finding]:
    """Have a call that was kept say what it knows of births; see Note [What a dump knows].

    Args:
        recording: The recording.
        seen: The steps in which something was not finite.
        findings: What the rows say.
    """
    found = list(findings)
    kept = (event for event in recording.events if event.get("kind") == "dump")
    for event in sorted(kept, key=lambda event: int(event["step"])):
        if any(f.evidence.get("how") == "kept" and f.severity == "error" for f in found):
            break  # what another rank kept in this step or later comes of it
        dump = Dumped(recording, wire(recording), event, seen)
        near = [i for i, finding in enumerate(found) if dump.explains(finding)]
        exact = [i for i in near if found[i].step == dump.step and found[i].evidence.get("how") in _EXACT]
        for i in (i for i in exact if "dump" not in found[i].evidence):
            found[i] = dump.beside(found[i])
        if not exact:
            told = dump.finding(found[near[0]] if near else None)
            found[near[0] if near else 0 : near[0] + 1 if near else 0] = [told]
    return found


@dataclass(frozen=True)
class Dumped:
    """One call that was kept.

    Attributes:
        recording: The recording.
        wiring: Its sites, by module.
        event: What was noted when it was written.
        seen: The steps of which the rows tell that something was not finite.
    """

    recording: Recording
    wiring: Wiring
    event: Entry
    seen: Course

    @property
    def step(self) -> int:
        """The step of the call."""
        return int(self.event["step"])

    @property
    def path(self) -> str:
        """The module that was called."""
        owner, _, kind = str(self.event["site"]).rpartition(":")
        return str(self.event.get("module", owner if kind == "out" else owner.rpartition(".")[0]))

    @property
    def module(self) -> Module | None:
        """Its sites, if any were watched."""
        return self.wiring.modules.get(self.path)

    @property
    def recovered(self) -> bool:
        """Whether the run went on: what it made never came to the optimizer, or all was well after it."""
        root = self.module.root if self.module is not None else 0
        return not self.event.get("reached", True) or self.seen.sound.get(root, -1) >= self.step

    def explains(self, finding: Finding) -> bool:
        """Tell whether what a finding says of later steps, or of this one, comes of what this call made."""
        if finding.step is None or finding.step < self.step:
            return False
        earlier = seen_steps(self.recording)
        before = int(earlier[earlier < finding.step].max(initial=-1))
        return before < self.step or not (self.recovered or finding.evidence.get("recovered"))

    def beside(self, finding: Finding) -> Finding:
        """Give a finding with the call that shows it again, and its operation."""
        # The autograd node of a result names the last operation; here the one is known that made it.
        said = _LAST.sub("", finding.message) if self._operations() else finding.message
        if self.event["site"] != finding.site:
            said += f" --dump saw {self.event['site']} go first."
        return replace(
            finding,
            message=said + self._operation_said(),
            evidence={**finding.evidence, **self._evidence()},
            remedy=f"{self._again()} {finding.remedy}",
        )

    def finding(self, shown: Finding | None) -> Finding:
        """Give the finding of what the rows do not tell.

        Args:
            shown: The first finding that comes of it.
        """
        module, site = self.module, self._site()
        shows = f" {shown.site} shows it at step {shown.step}." if shown is not None and shown.step != self.step else ""
        run_on = " The run went on." if self.recovered else ""
        return Finding(
            code="NAN-BORN",
            severity="warning" if self.recovered else "error",
            site=site,
            step=self.step,
            message=self._said() + self._called() + self._operation_said() + shows + run_on,
            evidence={
                "how": "kept",
                "module": self.path,
                "type": module.type if module is not None else None,
                "source": self._source(),
                "value": self._value(),
                "recovered": self.recovered,
                "births": shown.evidence.get("births", 1) if shown is not None else 1,
                "before": self._before(site),
                **self._evidence(),
            },
            confidence=0.95,
            remedy=f"{self._again()} {self._advice()}",
        )

    def _said(self) -> str:
        where, backward = str(self.event["site"]).rpartition(":")[2], self.event.get("direction") == "backward"
        known = any(self.step in self.recording.rows(site).step for site in self.recording.sites)
        return _SAW.format(
            site=self.event["site"],
            what="gradient " if backward else "",
            value=self._value(),
            step=self.step,
            rows="the rows leave the place open" if known else "nothing was recorded",
            how=_HOWS["backward" if backward else where if where in _HOWS else "out"].format(name=self._name()),
        )

    def _called(self) -> str:
        source = self._source()
        if not source:
            return ""
        text = f": `{source['text']}`" if source.get("text") else ""
        return f" {self._name()} is called at {source['file']}:{source['line']}, in {source['function']}{text}."

    def _operation_said(self) -> str:
        """Say which operations made it, in their order."""
        made = [_told(entry) for entry in self._operations()]
        return f" Run again alone, that call makes {', then '.join(made)}." if made else ""

    def _operations(self) -> tuple[Entry, ...]:
        folder = self.event["folder"]
        runs = (e for e in self.recording.events if e.get("kind") == "operation" and e.get("folder") == folder)
        return tuple(next((e.get("operations", ()) for e in runs), ()))

    def _evidence(self) -> dict[str, Any]:
        made = self._operations()
        told = {name: self.event[name] for name in ("step", "site", "folder")}
        return {"dump": told, **({"operation": dict(made[0]), "operations": [dict(e) for e in made]} if made else {})}

    def _again(self) -> str:
        script = self.recording.path / str(self.event["folder"]) / "replay.py"
        return f"To run that call again alone: python {script}."

    def _advice(self) -> str:
        name, module = self._name(), self.module
        if self.event.get("direction") == "backward":
            return _INFINITE_SLOPE.format(name=name)
        own = module is not None and str(self.event["site"]) == f"{self.path}:out"
        dtype = self.recording.sites[module.outs[0]].dtype if module is not None and module.outs else ""
        return Maker(name, module.type if module is not None and own else "", None, dtype, 0.0).advice()

    def _site(self) -> str:
        """Name a site of the recording: that of the dump if it has one of its own, else one of the module's."""
        seen, module = str(self.event["site"]), self.module
        own = (*module.grads, *module.outs, *module.ins) if module is not None else ()
        if any(site.site == seen for site in self.wiring.sites) or not own:
            return seen
        return self.wiring.text(own[0])

    def _before(self, text: str) -> dict[str, Any]:
        """Give the course of the site and of what went into the module, up to the call."""
        site = next((site.id for site in self.wiring.sites if site.site == text), None)
        if site is None:
            return {}
        near = self.module.ins if self.module is not None else ()
        states = np.zeros(len(self.wiring.sites), dtype=np.int8)
        moment = Moment(self.step, states, frozenset(), sound=False, full=False, steps=1)
        return lead_up(self.recording, self.wiring, moment, Birth("module", site, self.module, near))

    def _source(self) -> dict[str, Any] | None:
        module = self.module
        own = (*module.outs, *module.ins) if module is not None else ()
        found = (self.recording.sites[site].source for site in own)
        return next((dict(source) for source in found if source), None)

    def _name(self) -> str:
        kind = self.module.type if self.module is not None else ""
        return f"{self.path} ({kind})" if self.path and kind else self.path or kind or "the model"

    def _value(self) -> str:
        return _VALUES.get(str(self.event.get("value")), "what is not finite")


def _told(entry: Entry) -> str:
    """Name an operation, where it stands, and what it made."""
    place = f" ({entry['file']}:{entry['line']})" if entry.get("file") else ""
    text = f": `{entry['text']}`" if entry.get("text") else ""
    return f"{_VALUES[entry['value']]} in the operation {entry['site']}{place}{text}"
