"""The operation that made the first non-finite loss, as the search of its autograd graph found it.

# Note [Producers]
In the first step with a non-finite loss Kedge searches its autograd graph for the operation that
made it. The search finds the operation and the program's line, inside modules and between them, in
any step. If the rows of a recording name no place, or only a later one, the producer is reported
instead; if they name the module in that very step, its operation and line are added. Then no option
is advised, as there is nothing more to find, unless the operation is only probable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.rules.command import with_dump_on
from kedge.rules.naming import line_of, text_of
from kedge.rules.nonfinite.bad_steps import BadSteps
from kedge.rules.nonfinite.from_repro import put_in_place
from kedge.rules.nonfinite.wording.advice import OperationAdvice, domain_remedy, operation
from kedge.rules.nonfinite.wording.phrases import REMEDIES
from kedge.rules.recorded.losses import LOSS
from kedge.rules.recorded.wiring import wire
from kedge.rules.rule import Finding
from kedge.store.recording import Recording

Entry = Mapping[str, Any]

_PRINT = (
    "Print torch.isfinite(...).all() of the result of each of these operations in step {step}: the first that is False "
    "made it."
)
_PRINT_INPUTS = (
    "Print the inputs of these operations in step {step}, and look for numbers at which the slope is infinite: 0 for sqrt, "
    "log, a power below one and a divisor, 1 for acos and asin. Change the input there, not the output."
)

#: Where an operation shows in gradients, while the loss is finite: its slope made the value, or its
#: result did, which a mask hides from the loss.
_OF_A_FINITE_LOSS = ("backward", "hidden")

#: Kinds of births that name the module in whose call they lie, or that came with the batch.
_EXACT = ("module", "own", "between", "entry", "backward", "made")

#: How to have an operation named for certain: --dump keeps calls of modules.
_INSIDE = " To have the operation named for certain, {run}."
_OUTSIDE = " To have the operation named for certain, put these lines into the forward of a module, and {run}."
_ANYWHERE = (
    _INSIDE[:-1] + "; if these lines are outside modules, put them into the forward of one first."
)


def with_producer(
    recording: Recording, bad_steps: BadSteps, findings: Sequence[Finding]
) -> list[Finding]:
    """Return findings, with the producer of the first non-finite loss added or in their place; see Note [Producers]."""
    found = list(findings)
    events = [event for event in recording.events if event.get("kind") == "producer"]
    if not events:
        return found
    producer = Producer(recording, min(events, key=lambda event: int(event["step"])), bad_steps)
    earlier = [
        f for f in found if f.step < producer.step and not f.evidence.get("recovered", False)
    ]
    if any("operation" in f.evidence or f.severity == "error" for f in earlier):
        return found
    same = [
        i
        for i, f in enumerate(found)
        if f.step == producer.step and (_is_exact(f) or producer.is_within(f))
    ]
    if same:
        found[same[0]] = producer.added_to(found[same[0]])
        return found
    later = [
        i
        for i, f in enumerate(found)
        if f.step >= producer.step and not f.evidence.get("recovered", False)
    ]
    near = later or [i for i, f in enumerate(found) if f.step >= producer.step]
    put_in_place(found, near, producer.finding(found[near[0]] if near else None))
    return found


@dataclass(frozen=True)
class Producer:
    """One operation, with the recording around it.

    Attributes:
        recording: The recording.
        event: The event with the operation.
        bad_steps: The steps in which a row was not finite.
    """

    recording: Recording
    event: Entry
    bad_steps: BadSteps

    @property
    def step(self) -> int:
        """The first step with a non-finite loss."""
        return int(self.event["step"])

    @property
    def name(self) -> str:
        """The name of the operation."""
        return str(
            self.event.get("operation") or operation(self.event.get("node")) or "an operation"
        )

    @property
    def _certain(self) -> bool:
        return bool(self.event.get("certain", True))

    @property
    def _is_empty(self) -> bool:
        """Whether a mean was seen to be one of no elements; its squares may have overflowed, too."""
        return "no elements" in str(self.event.get("detail"))

    @property
    def recovered(self) -> bool:
        """Whether all hurt models were sound in a later step."""
        bad_step = next((m for m in self.bad_steps.steps if m.step == self.step), None)
        if bad_step is not None:
            return self.bad_steps.recovered(self.recording, bad_step)
        return max(self.bad_steps.last_sound.values(), default=-1) > self.step

    def is_within(self, finding: Finding) -> bool:
        """Whether the rows delimit the place in the backward of the step, and the operation is one that lies there."""
        return (
            self.event.get("where") in _OF_A_FINITE_LOSS
            and not self._certain
            and finding.evidence.get("how") == "gap"
        )

    def finding(self, shown: Finding | None) -> Finding:
        """Return the finding of an operation that the rows do not show.

        Args:
            shown: The first finding that is a consequence of it.
        """
        site = self._site()
        shows = (
            f" {shown.site} shows it at step {shown.step}."
            if shown is not None and shown.step != self.step
            else ""
        )
        run_on = " The run went on." if self.recovered else ""
        return Finding(
            code="NAN-BORN",
            severity="warning" if self.recovered else "error",
            site=site,
            step=self.step,
            message=f"{self._subject(site)} not finite at step {self.step}: {self._made()}.{shows}{run_on}",
            evidence={
                "how": "produced",
                "module": str(self.event.get("module") or "") or None,
                "also": [],
                "recovered": self.recovered,
                "births": shown.evidence.get("births", 1) if shown is not None else 1,
                **self._evidence(),
            },
            confidence=0.95 if self._certain else 0.7,
            remedy=self._remedy(),
        )

    def added_to(self, finding: Finding) -> Finding:
        """Return a finding of the same step with the operation and its line."""
        known = finding.evidence.get("how") == "module" and bool(
            self._among
        )  # the module says more than its operations
        if known or "operation" in finding.evidence or self.event.get("where") == "input":
            return replace(finding, evidence={**self._evidence(), **finding.evidence})
        shown = "The graph of the loss shows it: "
        if not self._certain:
            shown = "Of the operations in the graph of the loss, "
        return replace(
            finding,
            message=f"{finding.message} {shown}{self._made()}.",
            evidence={
                **finding.evidence,
                **{k: v for k, v in self._evidence().items() if v is not None},
            },
            remedy=self._remedy(outside=finding.evidence.get("how") == "made"),
        )

    def _subject(self, site: str) -> str:
        return (
            f"The gradients of {site} were"
            if self.event.get("where") in _OF_A_FINITE_LOSS
            else f"{site} was"
        )

    def _made(self) -> str:
        """Return a clause with the operation and its place."""
        module, backward = self.event.get("module"), self.event.get("where") == "backward"
        if self.event.get("where") == "input":
            return f"it came from outside the model, with the batch; {self.event['detail']}"
        if self._among:
            return self._one_of()
        inside = f", in {module}" if module else ", outside of modules" if module == "" else ""
        sure = "" if self._certain else "probably "
        maker = f"the backward of {self.name}" if backward else self.name
        line = f", at {line_of(self.event)}" if self.event.get("file") else ""
        detail = f"; {self.event['detail']}" if self.event.get("detail") else ""
        return f"{sure}{maker} made it{inside}{line}{text_of(self.event)}{detail}"

    @property
    def _among(self) -> Sequence[Entry]:
        """The operations that may have made it, where the graph leaves several, in the order of the forward."""
        return self.event.get("among") or ()

    def _one_of(self) -> str:
        """Return a clause that lists the operations that may have made it, each line of the program once."""
        by_line: dict[str, list[str]] = {}
        for entry in self._among:
            line = ""
            if entry.get("file"):
                line = f" at {line_of(entry)}"
            by_line.setdefault(line, []).append(str(entry["operation"]))
        places = [", ".join(names) + line for line, names in by_line.items()]
        number = int(self.event["of"])
        if self.event.get("where") == "backward":
            last = f"{number} operations, of which these are the last"
            these = last if number > len(self._among) else "these operations"
            return f"the backward of one of {these} can have made it, whose inputs were not seen: {'; '.join(places)}"
        detail = f"; {self.event['detail']}" if self.event.get("detail") else ""
        if number > len(self._among):
            return f"one of {number} operations made it, of which these are the last, in their order: {'; '.join(places)}{detail}"
        return f"one of these made it, in their order: {'; '.join(places)}{detail}"

    def _remedy(self, *, outside: bool = False) -> str:
        """Return what to do; of an operation that is only probable, also how to have it named.

        Args:
            outside: Whether the rows show that it lies outside modules.
        """
        kept = any(event.get("kind") == "dump" for event in self.recording.events)
        module, command = self.event.get("module"), with_dump_on(self.recording)
        if self._certain or kept or (module and not command):
            return self._own_remedy()
        run = f'run "{command}"' if command else "run it again with --dump"
        form = (
            _INSIDE if module else _OUTSIDE if outside or module == "" or not command else _ANYWHERE
        )
        return self._own_remedy() + form.format(run=run)

    def _own_remedy(self) -> str:
        if self._among:
            backward = self.event.get("where") == "backward"
            return (_PRINT_INPUTS if backward else _PRINT).format(step=self.step)
        module = str(self.event.get("module") or "")
        if self.event.get("where") == "input":
            return REMEDIES["entry"]
        backward = self.event.get("where") == "backward"
        hidden = self.event.get("where") == "hidden"
        if known := domain_remedy(self.name, backward=backward or hidden, empty=self._is_empty):
            if self._certain:
                return known
            first = f"Print the inputs of {self.name} in step {self.step}; if they are the cause: "
            return first + known[0].lower() + known[1:]
        if backward:
            return REMEDIES["backward"].format(name=module or "the program", uncompiled="")
        name = self.name + (f" in {module}" if module else "")
        advice = OperationAdvice(name, "", self.event.get("node"), "float32", 0.0, self.step == 0)
        if advice.multiplies:
            return advice.advice()
        return f"Print the inputs of {name} in step {self.step}: they are finite, and its result is not."

    def _evidence(self) -> dict[str, Any]:
        keys = (
            "operation",
            "node",
            "module",
            "file",
            "line",
            "text",
            "where",
            "certain",
            "detail",
            "among",
            "of",
        )
        found = {key: self.event[key] for key in keys if self.event.get(key) is not None}
        return {"operation": found, "source": found if found.get("file") else None}

    def _site(self) -> str:
        """Return a site of the recording: an output of the module, else the loss."""
        module = wire(self.recording).modules.get(str(self.event.get("module") or ""))
        if self.event.get("module") and module is not None and module.outs:
            return self.recording.sites[module.outs[0]].site
        losses = [site.site for site in self.recording.of_kind(LOSS)] or ["loss"]
        return str(self.event["loss"]) if self.event.get("loss") in losses else losses[0]


def _is_exact(finding: Finding) -> bool:
    return finding.evidence.get("how") in (*_EXACT, "kept")
