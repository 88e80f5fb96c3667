"""The births of a recording with all evidence of each: rows, the call that was kept, the graph of the loss, the end.

# Note [Kept calls]
With ``--dump`` every value of every step is checked, while the rows of a recording cover some
steps, and of a guarded step few sites. So if a birth lies in a step with few rows or none, the kept
call shows it, and the rows show its consequences. If the rows of that very step name the place,
they have more: the input, the number of bad elements, the other sites with bad values. The
operation is known from running the kept call again.

# Note [Producers]
In the first step with a non-finite loss Kedge searches its autograd graph for the operation that
made it. The search finds the operation and the program's line, inside modules and between them, in
any step. If the rows of a recording name no place, or only a later one, the producer is reported
instead; if they name the module in that very step, its operation and line are added. Then no option
is advised, as there is nothing more to find, unless the operation is only probable.

# Note [No tick past a NaN]
The search for births follows values through rows, and a place that it cannot see gives no birth. So
two facts are findings whatever else is known: a loss that was not finite in some step, and a
parameter or buffer that is not finite at the end. They name what was seen, and between which steps
it was made; not a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kedge.frames import SourceLine
from kedge.rules.naming import name_at
from kedge.rules.nonfinite.bad_steps import BadSteps, recorded_steps
from kedge.rules.nonfinite.search import Certainty, Place, Sighting
from kedge.rules.recorded.losses import LOSS
from kedge.rules.recorded.wiring import ModuleSites, Wiring, wire
from kedge.rules.rule import Severity
from kedge.sites.operation_names import recorded_name
from kedge.sites.site import unescape
from kedge.store.events import (
    BadOperation,
    DumpEvent,
    NonfiniteAtEndEvent,
    OperationsEvent,
    PossibleProducer,
    ProducerEvent,
)
from kedge.store.recording import Recording


@dataclass(frozen=True)
class Birth:
    """One birth of a non-finite value: what was seen of it, and what follows from that.

    Attributes:
        place: Where the value was made.
        certainty: How that is known.
        site: The text of the site that shows it first.
        step: The step in which it does.
        severity: How bad it is.
        recovered: Whether the run went on with finite values.
        sure: From 0 to 1: the share of the information about it that was recorded.
        sighting: What the rows of a step show; None if they show no place.
        kept: The call that ``--dump`` kept, which shows it again.
        operation: The operation that made it, as the graph of the loss shows it.
        exam: What was not finite at the end of the run, if nothing else shows the birth.
        consequence: The first other birth, in whose place this one stands.
        times: In how many steps the same was seen.
        since: The first of these steps.
        kept_away: Whether the optimizer never got these gradients.
        births: The number of independent births that the rows show.
    """

    place: Place
    certainty: Certainty
    site: str
    step: int
    severity: Severity
    recovered: bool
    sure: float
    sighting: Sighting | None = None
    kept: KeptCall | None = None
    operation: Producer | None = None
    exam: NonfiniteAtEndEvent | None = None
    consequence: Birth | None = None
    times: int = 1
    since: int = 0
    kept_away: bool = False
    births: int = 1

    @property
    def names_operation(self) -> bool:
        """Whether the operation that made it is known."""
        if self.operation is not None:
            return True
        return self.kept is not None and bool(self.kept.operations)

    @property
    def names_call(self) -> bool:
        """Whether the module is known in whose call, or in whose own forward, it was made."""
        if self.place == "backward":
            return self.certainty == "seen"
        return self.place == "forward" and self.certainty != "unknown"


@dataclass(frozen=True)
class KeptCall:
    """One call that ``--dump`` kept, with the event that was written with it."""

    wiring: Wiring
    event: DumpEvent

    @property
    def step(self) -> int:
        """The step of the call."""
        return self.event.step

    @property
    def text(self) -> str:
        """The text of the site that held the value."""
        return self.event.site

    @property
    def path(self) -> str:
        """The module that was called."""
        if self.event.module is not None:
            return self.event.module
        owner, _, kind = self.text.rpartition(":")
        owner = unescape(owner)
        if kind == "out":
            return owner
        return owner.rpartition(".")[0]

    @property
    def in_backward(self) -> bool:
        """Whether a backward made the value."""
        return self.event.direction == "backward"

    @property
    def module(self) -> ModuleSites | None:
        """The sites of the module, if any were watched."""
        return self.wiring.modules.get(self.path)

    @property
    def name(self) -> str:
        """The name of the module in a sentence."""
        kind = ""
        if self.module is not None:
            kind = self.module.type
        return name_at(self.path, kind)

    @property
    def operations(self) -> Sequence[BadOperation]:
        """The operations that made the value when the call ran again, in their order."""
        for event in self.wiring.recording.of(OperationsEvent):
            if event.folder == self.event.folder:
                return event.operations
        return ()

    def source(self) -> SourceLine | None:
        """Return the program's line that calls the module."""
        module = self.module
        for site in () if module is None else (*module.outs, *module.ins):
            source = self.wiring.sites[site].source
            if source:
                return source
        return None


@dataclass(frozen=True)
class Producer:
    """One operation in the graph of a loss, with the event that was written when it was found."""

    event: ProducerEvent

    @property
    def step(self) -> int:
        """The first step with a non-finite loss."""
        return self.event.step

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.event.operation or recorded_name(self.event.node) or "an operation"

    @property
    def module(self) -> str | None:
        """The path of the module that it lies in; empty outside of modules, None if that is not known."""
        return self.event.module

    @property
    def among(self) -> Sequence[PossibleProducer]:
        """The operations that may have made it, where the graph leaves several, in the order of the forward."""
        return self.event.among

    @property
    def shows_in_gradients(self) -> bool:
        """Whether the loss was finite: a slope made the value, or a result did that a mask hides from the loss."""
        return self.event.where in ("backward", "hidden")

    @property
    def is_unseen(self) -> bool:
        """Whether no value was read, so that only the operations are known that can make such a value."""
        return self.event.where == "unseen"

    @property
    def is_empty(self) -> bool:
        """Whether a mean was seen to be one of no elements; its squares may have overflowed, too."""
        return "no elements" in (self.event.detail or "")

    @property
    def place(self) -> Place:
        """Where the value was made."""
        if self.event.where == "input":
            return "entry"
        if self.event.where == "backward":
            return "backward"
        if self.module == "":
            return "loss"
        return "forward"

    @property
    def certainty(self) -> Certainty:
        """Whether the graph showed it with its inputs, or only that no other operation is likely to have made it."""
        if self.among:
            return "among"
        if self.event.certain:
            return "seen"
        return "inferred"


def with_kept_calls(
    recording: Recording, bad_steps: BadSteps, births: Sequence[Birth]
) -> list[Birth]:
    """Return births, with those of kept calls added or in their place; see Note [Kept calls]."""
    found = list(births)
    for event in sorted(recording.of(DumpEvent), key=lambda event: event.step):
        if any(b.kept and not b.sighting and b.severity == "error" for b in found):
            break  # calls that other ranks kept in this step or later are consequences of that one

        call = KeptCall(wire(recording), event)
        root = 0 if call.module is None else call.module.root
        was_sound = bad_steps.last_sound.get(root, -1) >= call.step
        recovered = was_sound or not event.reached

        near = [
            place
            for place, birth in enumerate(found)
            if _follows(recording, birth, call.step, recovered)
        ]
        same = [
            place
            for place in near
            if found[place].step == call.step
            and found[place].sighting is not None
            and found[place].names_call
        ]
        for place in same:
            if found[place].kept is None:
                found[place] = replace(found[place], kept=call)
        if not same:
            shown = found[near[0]] if near else None
            _put(found, near, _of_call(call, recovered, shown))
    return found


def _follows(recording: Recording, birth: Birth, step: int, recovered: bool) -> bool:
    """Whether a birth is a consequence of a call in some step: no step was recorded between them, or none recovered."""
    if birth.step < step:
        return False
    steps = recorded_steps(recording)
    last = int(steps[steps < birth.step].max(initial=-1))
    return last < step or not (recovered or birth.recovered)


def _of_call(call: KeptCall, recovered: bool, shown: Birth | None) -> Birth:
    """Return the birth that only a kept call shows."""
    module, wiring = call.module, call.wiring
    site = call.text
    if module is not None and all(other.site != site for other in wiring.sites):
        own = (*module.grads, *module.outs, *module.ins)
        if own:
            site = wiring.text(own[0])

    place: Place = "forward"
    if call.in_backward:
        place = "backward"
    certainty: Certainty = "seen"
    if call.text.endswith(":in") and not call.in_backward:
        certainty = "between"
    return Birth(
        place=place,
        certainty=certainty,
        site=site,
        step=call.step,
        severity=_severity(recovered),
        recovered=recovered,
        sure=0.95,
        kept=call,
        consequence=shown,
        births=_births_of(shown),
    )


def _severity(recovered: bool) -> Severity:
    if recovered:
        return "warning"
    return "error"


def _births_of(shown: Birth | None) -> int:
    if shown is None:
        return 1
    return shown.births


def with_producer(
    recording: Recording, bad_steps: BadSteps, births: Sequence[Birth]
) -> list[Birth]:
    """Return births, with the producer of the first non-finite loss added or in their place; see Note [Producers]."""
    found = list(births)
    written = recording.of(ProducerEvent)
    if not written:
        return found

    # In one step, what was seen when its lines ran again counts before what its graph shows.
    producer = Producer(min(written, key=lambda event: (event.step, not event.again)))
    lasting = [birth for birth in found if not birth.recovered]
    earlier = [birth for birth in lasting if birth.step < producer.step]
    if any(birth.names_operation or birth.severity == "error" for birth in earlier):
        return found

    for place, birth in enumerate(found):
        if birth.step == producer.step and _fits(producer, birth):
            found[place] = replace(birth, operation=producer)
            return found

    late = [place for place, birth in enumerate(found) if birth.step >= producer.step]
    near = [place for place in late if not found[place].recovered] or late
    shown = None
    if near:
        shown = found[near[0]]
    birth = _of_producer(recording, bad_steps, producer, shown)
    if producer.event.again and producer.shows_in_gradients and birth.recovered and not shown:
        return found  # such as a scaler keeps from the optimizer: the rows show no fault
    _put(found, near, birth)
    return found


def _fits(producer: Producer, birth: Birth) -> bool:
    """Whether an operation of the graph belongs to a birth of the same step: that names the place, or an interval around it."""
    if birth.names_call or birth.place in ("entry", "loss"):
        return True
    is_interval = birth.place == "backward" and birth.certainty == "between"
    return is_interval and producer.shows_in_gradients and producer.certainty != "seen"


def _of_producer(
    recording: Recording, bad_steps: BadSteps, producer: Producer, shown: Birth | None
) -> Birth:
    """Return the birth that only the graph of the loss shows."""
    wiring = wire(recording)
    losses = [loss.site for loss in recording.of_kind(LOSS)] or ["loss"]
    site = producer.event.loss
    if site not in losses:
        site = losses[0]
    module = wiring.modules.get(producer.module or "")
    if producer.module and module is not None and module.outs:
        site = wiring.text(module.outs[0])

    recovered = max(bad_steps.last_sound.values(), default=-1) > producer.step
    for bad_step in bad_steps.steps:
        if bad_step.step == producer.step:
            recovered = bad_steps.recovered(recording, bad_step)
    severity = _severity(recovered)
    is_same_step = shown is not None and shown.step == producer.step
    if shown is not None and is_same_step and shown.place == producer.place == "backward":
        severity = shown.severity  # whether the optimizer ever got them
    sure = 0.7
    if producer.certainty == "seen":
        sure = 0.95
    return Birth(
        place=producer.place,
        certainty=producer.certainty,
        site=site,
        step=producer.step,
        severity=severity,
        recovered=recovered,
        sure=sure,
        operation=producer,
        consequence=shown,
        births=_births_of(shown),
    )


def _put(found: list[Birth], near: Sequence[int], birth: Birth) -> None:
    """Put a birth in the place of the first of some others; at the beginning if there are none."""
    if near:
        found[near[0]] = birth
    else:
        found.insert(0, birth)


def with_end(recording: Recording, births: Sequence[Birth]) -> list[Birth]:
    """Return births, with those of Note [No tick past a NaN] that no other one explains."""
    found = list(births)
    bad = []
    for site in recording.of_kind(LOSS):
        rows = recording.rows(site)
        bad += [(int(step), site.id) for step in rows.step[~rows.clean][:1]]
    if bad:
        step, lost = min(bad)
        if not any(birth.step <= step for birth in found):
            rows = recording.rows(recording.sites[lost])
            found.append(
                Birth(
                    place="loss",
                    certainty="unknown",
                    site=recording.sites[lost].site,
                    step=step,
                    severity="error",
                    recovered=bool(rows.clean[-1]),
                    sure=0.9,
                    times=int((~rows.clean).sum()),
                )
            )

    is_explained = any(birth.severity == "error" and not birth.recovered for birth in found)
    exams = [event for event in recording.of(NonfiniteAtEndEvent) if event.tensors]
    if exams and not is_explained:
        found.append(_of_exam(exams[0]))
    return found


def _of_exam(event: NonfiniteAtEndEvent) -> Birth:
    """Return the birth of the worst of the tensors that were not finite at the end."""
    worst = event.worst
    site = worst.path
    severity: Severity = "warning"
    if worst.of == "param":
        site = f"{worst.path}:param"
        severity = "error"
    elif worst.nan:
        severity = "error"
    return Birth(
        place="unseen",
        certainty="unknown",
        site=site,
        step=event.step,
        severity=severity,
        recovered=False,
        sure=1.0,
        exam=event,
    )
