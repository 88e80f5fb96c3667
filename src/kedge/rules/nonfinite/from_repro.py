"""The call that ``--dump`` kept, beside the rows of a recording.

# Note [Kept calls]
With ``--dump`` every value of every step is checked, while the rows of a recording cover some
steps, and of a guarded step few sites. So if a birth lies in a step with few rows or none, the kept
call shows it, and the rows show its consequences. If the rows of that very step name the place,
they have more: the input, the number of bad elements, the other sites with bad values. The
operation is known from running the kept call again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.rules.naming import line_of, name_at, text_of
from kedge.rules.nonfinite.bad_steps import BadSteps, recorded_steps
from kedge.rules.nonfinite.search.births import Birth
from kedge.rules.nonfinite.wording.advice import DOMAIN, OperationAdvice, domain_remedy
from kedge.rules.nonfinite.wording.leadup import lead_up
from kedge.rules.recorded.wiring import ModuleSites, Wiring, wire
from kedge.rules.rule import Finding
from kedge.shown_text import typed
from kedge.store.recording import Recording

Entry = Mapping[str, Any]

_LAST = re.compile(r" \(\w+ was its last operation\)")

#: Kinds of births that the rows of their own step place exactly.
_EXACT = ("module", "own", "between", "backward")

_FIRST = (
    "{site} was the first {gradient}to contain {value}, at step {step}: --dump checks every value and found it; "
    "{rows}. {how}."
)
_HOWS = {
    "out": "The input was finite, so the forward of {name} made it",
    "in": "An operation in the forward of {name} made it, before that call",
    "backward": "The gradient that arrived at {name} was finite, so its backward made it",
}
_VALUES = {"nan": "NaN", "inf": "infinities"}
_INFINITE_SLOPE = (
    "In {name}, look for an operation whose derivative is infinite where its value is not: sqrt at 0, pow below 1 "
    "at 0, a division, or torch.where around one of them. Change its input, not its output."
)


def with_kept_calls(
    recording: Recording, bad_steps: BadSteps, findings: Sequence[Finding]
) -> list[Finding]:
    """Return the findings of the rows, with those of kept calls added or in their place; see Note [Kept calls].

    Args:
        recording: The recording.
        bad_steps: The steps in which something was not finite.
        findings: The findings of the rows.
    """
    found = list(findings)
    kept = (event for event in recording.events if event.get("kind") == "dump")
    for event in sorted(kept, key=lambda event: int(event["step"])):
        if any(f.evidence.get("how") == "kept" and f.severity == "error" for f in found):
            break  # calls that other ranks kept in this step or later are consequences of that one
        call = KeptCall(recording, wire(recording), event, bad_steps)
        near = [i for i, finding in enumerate(found) if call.explains(finding)]
        exact = [
            i for i in near if found[i].step == call.step and found[i].evidence.get("how") in _EXACT
        ]
        words = KeptCallWording(call)
        for i in (i for i in exact if "dump" not in found[i].evidence):
            found[i] = words.added_to(found[i])
        if not exact:
            put_in_place(found, near, words.finding(found[near[0]] if near else None))
    return found


def put_in_place(found: list[Finding], near: Sequence[int], finding: Finding) -> None:
    """Put a finding in the place of the first of some others; at the beginning if there are none."""
    found[near[0] if near else 0 : near[0] + 1 if near else 0] = [finding]


@dataclass(frozen=True)
class KeptCall:
    """One call that was kept.

    Attributes:
        recording: The recording.
        wiring: Its sites, by module.
        event: The event that was written with the call.
        bad_steps: The steps in which a row was not finite.
    """

    recording: Recording
    wiring: Wiring
    event: Entry
    bad_steps: BadSteps

    @property
    def step(self) -> int:
        """The step of the call."""
        return int(self.event["step"])

    @property
    def path(self) -> str:
        """The module that was called."""
        owner, _, kind = self.text.rpartition(":")
        return str(self.event.get("module", owner if kind == "out" else owner.rpartition(".")[0]))

    @property
    def text(self) -> str:
        """The text of the site that held the value."""
        return str(self.event["site"])

    @property
    def in_backward(self) -> bool:
        """Whether a backward made the value."""
        return self.event.get("direction") == "backward"

    @property
    def module(self) -> ModuleSites | None:
        """The sites of the module, if any were watched."""
        return self.wiring.modules.get(self.path)

    @property
    def name(self) -> str:
        """The name of the module in a sentence."""
        return name_at(self.path, self.module.type if self.module is not None else "")

    @property
    def recovered(self) -> bool:
        """Whether the run went on: the value never reached the optimizer, or all was well after it."""
        root = self.module.root if self.module is not None else 0
        return (
            not self.event.get("reached", True)
            or self.bad_steps.last_sound.get(root, -1) >= self.step
        )

    def explains(self, finding: Finding) -> bool:
        """Whether a finding about this step or a later one is a consequence of this call."""
        if finding.step < self.step:
            return False
        earlier = recorded_steps(self.recording)
        before = int(earlier[earlier < finding.step].max(initial=-1))
        return before < self.step or not (self.recovered or finding.evidence.get("recovered"))

    def operations(self) -> tuple[Entry, ...]:
        """Return the operations that made the value when the call ran again, in their order."""
        folder = self.event["folder"]
        runs = (
            e
            for e in self.recording.events
            if e.get("kind") == "operation" and e.get("folder") == folder
        )
        return tuple(next((e.get("operations", ()) for e in runs), ()))

    def site(self) -> str:
        """Return a site of the recording: the site of the event if it is recorded, else one of the module's."""
        module = self.module
        own = (*module.grads, *module.outs, *module.ins) if module is not None else ()
        if any(site.site == self.text for site in self.wiring.sites) or not own:
            return self.text
        return self.wiring.text(own[0])

    def source(self) -> dict[str, Any] | None:
        """Return the program's line that calls the module."""
        own = (*self.module.outs, *self.module.ins) if self.module is not None else ()
        found = (self.recording.sites[site].source for site in own)
        return next((dict(source) for source in found if source), None)

    def before(self, text: str) -> dict[str, Any]:
        """Return the steps before the call at a site and at the module's inputs."""
        site = next((site.id for site in self.wiring.sites if site.site == text), None)
        if site is None:
            return {}
        near = self.module.ins if self.module is not None else ()
        return lead_up(
            self.recording, self.wiring, self.step, Birth("module", site, self.module, near)
        )


@dataclass(frozen=True)
class KeptCallWording:
    """The words for one kept call.

    Attributes:
        call: The call.
    """

    call: KeptCall

    def added_to(self, finding: Finding) -> Finding:
        """Return a finding of the rows with the call that shows it again, and its operation."""
        # The autograd node of a result names the last operation; the kept call knows the one that
        # made the value.
        message = _LAST.sub("", finding.message) if self.call.operations() else finding.message
        if self.call.text != finding.site:
            message += f" --dump found {self.call.text} before it."
        return replace(
            finding,
            message=message + self._operations(),
            evidence={**finding.evidence, **self._evidence()},
            remedy=f"{self._rerun()} {(DOMAIN in finding.remedy and self._known_remedy()) or finding.remedy}",
        )

    def finding(self, shown: Finding | None) -> Finding:
        """Return the finding of a call that the rows do not show.

        Args:
            shown: The first finding that is a consequence of it.
        """
        call, site = self.call, self.call.site()
        shows = (
            f" {shown.site} shows it at step {shown.step}."
            if shown is not None and shown.step != call.step
            else ""
        )
        run_on = " The run went on." if call.recovered else ""
        return Finding(
            code="NAN-BORN",
            severity="warning" if call.recovered else "error",
            site=site,
            step=call.step,
            message=self._first() + self._line() + self._operations() + shows + run_on,
            evidence={
                "how": "kept",
                "module": call.path,
                "type": call.module.type if call.module is not None else None,
                "source": call.source(),
                "value": self._value(),
                "recovered": call.recovered,
                "births": shown.evidence.get("births", 1) if shown is not None else 1,
                "before": call.before(site),
                **self._evidence(),
            },
            confidence=0.95,
            remedy=f"{self._rerun()} {self._remedy()}",
        )

    def _first(self) -> str:
        call, where = self.call, self.call.text.rpartition(":")[2]
        known = any(call.step in call.recording.rows(site).step for site in call.recording.sites)
        return _FIRST.format(
            site=call.text,
            gradient="gradient " if call.in_backward else "",
            value=self._value(),
            step=call.step,
            rows="the recorded statistics of this step do not show the place"
            if known
            else "nothing else was recorded in this step",
            how=_HOWS[
                "backward" if call.in_backward else where if where in _HOWS else "out"
            ].format(name=call.name),
        )

    def _line(self) -> str:
        source = self.call.source()
        if not source:
            return ""
        return f" {self.call.name} is called at {line_of(source)}, in {source['function']}{text_of(source)}."

    def _operations(self) -> str:
        """Return a sentence about the operations that made it, in their order; empty if they are not known."""
        made = [_operation(entry) for entry in self.call.operations()]
        return f" Run again by itself, that call makes {', then '.join(made)}." if made else ""

    def _evidence(self) -> dict[str, Any]:
        made = self.call.operations()
        kept = {name: self.call.event[name] for name in ("step", "site", "folder")}
        return {
            "dump": kept,
            **({"operation": dict(made[0]), "operations": [dict(e) for e in made]} if made else {}),
        }

    def _rerun(self) -> str:
        script = self.call.recording.path / str(self.call.event["folder"]) / "replay.py"
        return f"To run that call again by itself: {typed('python', script)}."

    def _remedy(self) -> str:
        call, module = self.call, self.call.module
        if known := self._known_remedy():
            return known
        if call.in_backward:
            return _INFINITE_SLOPE.format(name=call.name)
        own = module is not None and call.text == f"{call.path}:out"
        dtype = (
            call.recording.sites[module.outs[0]].dtype if module is not None and module.outs else ""
        )
        return OperationAdvice(
            call.name, module.type if module is not None and own else "", None, dtype, 0.0
        ).advice()

    def _known_remedy(self) -> str:
        """Return the remedy of the operation that made the value first; empty if that is not known."""
        made = self.call.operations()
        if not made:
            return ""
        name, is_nan = str(made[0].get("name")), made[0].get("value") == "nan"
        return domain_remedy(name, backward=self.call.in_backward, empty=is_nan)

    def _value(self) -> str:
        return _VALUES.get(str(self.call.event.get("value")), "non-finite values")


def _operation(entry: Entry) -> str:
    """Return the name of an operation, its line, and the value that it made."""
    place = f" ({line_of(entry)})" if entry.get("file") else ""
    return f"{_VALUES[entry['value']]} in the operation {entry['site']}{place}{text_of(entry)}"
