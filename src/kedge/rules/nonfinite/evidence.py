"""The evidence of NAN-BORN, one class for each source of it, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.frames import SourceLine
from kedge.json_input.classes import fields_as_json, left_out
from kedge.rules.evidence import Evidence, LeadUp, said, unsaid
from kedge.rules.naming import NAMED
from kedge.rules.nonfinite.births import Birth, KeptCall, Producer
from kedge.rules.nonfinite.figures import VAST, Figures, Growth, NearRange, inputs_of, lead_up
from kedge.rules.nonfinite.search import Certainty, Place, Sighting
from kedge.rules.recorded.losses import LOSS
from kedge.rules.recorded.wiring import wire
from kedge.store.events import (
    BadOperation,
    DumpEvent,
    NonfiniteAtEndEvent,
    PossibleProducer,
    ProducerEvent,
)
from kedge.store.recording import Recording

#: The number of sites in the evidence that passed a value on.
_PROPAGATORS = 12
#: The number of tensors that are named as not finite at the end, besides the first.
NAMED_AT_END = 4

#: The kinds of values in recordings, in words.
VALUES = {"nan": "NaN", "inf": "infinities"}


@dataclass(frozen=True)
class GradientStep:
    """What is recorded of a step of which only gradients are, and of the next one.

    Attributes:
        step: The step.
        sound: The last sound step before it.
        finite: Sites that were finite in it.
        later: The first step after it with other rows.
    """

    step: int
    sound: int | None
    finite: Sequence[str]
    later: int | None


@dataclass(frozen=True)
class KeptIn:
    """Where ``--dump`` kept a call."""

    step: int
    site: str
    folder: str

    @classmethod
    def of(cls, event: DumpEvent) -> KeptIn:
        """Return the place of a kept call."""
        return cls(event.step, event.site, event.folder)


@dataclass(frozen=True, kw_only=True)
class GraphOperation:
    """The operation that the graph of a loss shows; see `ProducerEvent`."""

    operation: str | None = left_out(None)
    node: str | None = left_out(None)
    module: str | None = left_out(None)
    where: str | None = left_out(None)
    file: str | None = left_out(None)
    line: int | None = left_out(None)
    function: str | None = left_out(None)
    text: str | None = left_out(None)
    detail: str | None = left_out(None)
    certain: bool
    among: Sequence[PossibleProducer] = left_out(())
    of: int = left_out(0)

    @classmethod
    def of_event(cls, event: ProducerEvent) -> GraphOperation:
        """Return the operation of an event."""
        return cls(
            operation=event.operation,
            node=event.node,
            module=event.module,
            where=event.where,
            file=event.file,
            line=event.line,
            function=event.function,
            text=event.text,
            detail=event.detail,
            certain=event.certain,
            among=event.among,
            of=event.of,
        )


@dataclass(frozen=True, kw_only=True)
class NanBornEvidence(Evidence):
    """What is known of a birth, from whatever source.

    Attributes:
        how: Where the value was made.
        certainty: How that is known.
        leading: The names that are written first: of what the graph of the loss adds.
        module: The module that made it, or holds the operation that did.
    """

    how: Place = unsaid()
    certainty: Certainty = unsaid()
    leading: Sequence[str] = unsaid(unless=())
    module: str | None = unsaid()

    def to_json(self) -> dict[str, Any]:
        """Return it as it is written."""
        written = fields_as_json(self)
        written.pop("leading", None)
        first = {name: written[name] for name in self.leading}
        return first | written

    def culprit(self) -> SourceLine | None:
        """Return the line of the operation that made the value, if it was seen and not inferred."""
        made: BadOperation | GraphOperation | None = getattr(self, "operation", None)
        if made is None or made.file is None or made.line is None:
            return None
        if isinstance(made, GraphOperation) and not made.certain:
            return None
        return SourceLine(made.file, made.line, made.function or "", made.text)


@dataclass(frozen=True, kw_only=True)
class RowEvidence(NanBornEvidence):
    """What the rows of a step show, and what a kept call and the graph of the loss add to it.

    Attributes:
        also: Modules that may have made it too.
        source: The program's line that calls the module, or has the operation.
        node: The autograd node of the value.
        value: The kind of the value.
        nonfinite: The number of elements that are not finite.
        nan: The number of those that are NaN.
        count: The number of elements.
        near: The values next to it.
        growth: A parameter that had grown a thousandfold.
        propagated: The number of other sites that were not finite in that step.
        propagators: The first of them.
        healed: Modules that returned finite values for others.
        before: The steps before it.
        gradient_step: What is recorded of a step with gradients alone.
        recovered: Whether the run went on with finite values.
        births: The number of independent births.
        steps: The number of steps with the same birth, if the run recovered.
        skipped: Whether the optimizer never got the values, if the run recovered.
        dump: Where the call was kept.
        operation: The operation that made it.
        operations: All operations that made it when the kept call ran again.
    """

    type: str | None = unsaid()
    also: Sequence[str] = said("also at {}")
    source: SourceLine | GraphOperation | None = unsaid()
    node: str | None = unsaid()
    value: str = said("its value is {}")
    nonfinite: int | None = said("{} not finite")
    nan: int | None = said("{} of them NaN")
    count: int = said("of {} elements")
    near: Mapping[str, NearRange] = unsaid()
    growth: Growth | None = unsaid()
    propagated: int = said("{} more sites not finite in that step")
    propagators: Sequence[str] = said("not finite too: {}")
    healed: Sequence[str] = said("finite again at {}")
    before: LeadUp = unsaid()
    gradient_step: GradientStep | None = unsaid(unless=None)
    recovered: bool = said("finite again later", no="not finite again until the end")
    births: int = said("it began at {} places", least=2)
    steps: int | None = said("steps {}", unless=None)
    skipped: bool | None = said("skipped: yes", no="skipped: no", unless=None)
    dump: KeptIn | None = unsaid(unless=None)
    operation: BadOperation | GraphOperation | None = unsaid(unless=None)
    operations: Sequence[BadOperation] = unsaid(unless=())

    @property
    def has_grown(self) -> bool:
        """Whether the values next to it, or a parameter, had grown far before."""
        is_vast = any(near.largest > VAST for near in self.near.values())
        return is_vast or self.growth is not None

    def to_json(self) -> dict[str, Any]:
        """Return it as it is written: files have a word of their own for steps of which only gradients are recorded."""
        written = super().to_json()
        names = {"gradient_step": "guarded"}
        return {names.get(name, name): held for name, held in written.items()}

    def lead_up(self) -> LeadUp:
        """Return the steps before the birth."""
        return self.before


@dataclass(frozen=True, kw_only=True)
class CallEvidence(NanBornEvidence):
    """What a call that ``--dump`` kept shows, where the rows show no place; see `RowEvidence`."""

    type: str | None = unsaid()
    source: SourceLine | GraphOperation | None = unsaid()
    value: str = said("its value is {}")
    recovered: bool = said("finite again later", no="not finite again until the end")
    births: int = said("it began at {} places", least=2)
    before: LeadUp = unsaid()
    dump: KeptIn = unsaid()
    operation: BadOperation | GraphOperation | None = unsaid(unless=None)
    operations: Sequence[BadOperation] = unsaid(unless=())

    def lead_up(self) -> LeadUp:
        """Return the steps before the call."""
        return self.before


@dataclass(frozen=True, kw_only=True)
class GraphEvidence(NanBornEvidence):
    """What the graph of the loss shows, where nothing else shows the place; see `RowEvidence`."""

    also: Sequence[str] = said("also at {}")
    source: GraphOperation | None = unsaid()
    recovered: bool = said("finite again later", no="not finite again until the end")
    births: int = said("it began at {} places", least=2)
    operation: GraphOperation = unsaid()


@dataclass(frozen=True, kw_only=True)
class EndEvidence(NanBornEvidence):
    """What was not finite in a loss or at the end, where nothing shows the place.

    Attributes:
        also: Other tensors that were not finite at the end.
        recovered: Whether the run went on with finite values.
        births: The number of independent births.
        nan: The number of elements of the tensor that are NaN.
        inf: The number of those that are infinite.
    """

    also: Sequence[str] = said("also at {}")
    recovered: bool = said("finite again later", no="not finite again until the end")
    births: int = said("it began at {} places", least=2)
    nan: int | None = said("{} of them NaN", unless=None)
    inf: int | None = said("inf: {}", unless=None)


def evidence_of(recording: Recording, birth: Birth, *, graph_adds: bool) -> NanBornEvidence:
    """Return the evidence of a birth.

    Args:
        recording: The recording.
        birth: The birth.
        graph_adds: Whether the message has words about what the graph of the loss shows, besides
            those about the rows or the kept call.
    """
    found: RowEvidence | CallEvidence
    if birth.sighting is not None:
        found = _of_rows(recording, birth, birth.sighting)
        if birth.kept is not None:
            found = replace(found, dump=KeptIn.of(birth.kept.event))
    elif birth.kept is not None:
        found = _of_call(recording, birth, birth.kept)
    elif birth.operation is not None:
        return _of_graph(birth, birth.operation)
    else:
        return _of_end(birth)

    made: Sequence[BadOperation] = ()
    if birth.kept is not None:
        made = birth.kept.operations
    if made:
        found = replace(found, operation=made[0], operations=made)
    if birth.operation is None:
        return found
    if birth.operation.place == "entry" and birth.place != "entry":
        # The rows show what went in finite, and the graph only what a cast made of it.
        return found

    shown = GraphOperation.of_event(birth.operation.event)
    if shown.file:
        found = replace(found, leading=("operation", "source"))
    else:
        found = replace(found, leading=("operation",))
    if graph_adds or not made:
        found = replace(found, operation=shown)
    if graph_adds and shown.file:
        found = replace(found, source=shown)
    return found


def _of_rows(recording: Recording, birth: Birth, sighting: Sighting) -> RowEvidence:
    wiring = wire(recording)
    figures = Figures(wiring, sighting)
    bad_step, text = sighting.bad_step, wiring.text
    row, module = figures.row(), sighting.module
    healed = [
        text(each.outs[0])
        for each in wiring
        if bad_step.nonfinite(each.ins) and bad_step.are_finite(each.outs)
    ]

    bad = bad_step.nonfinite(range(len(wiring.sites)))
    others = [wiring.sites[site] for site in bad if site != sighting.site]
    # As values flow: forward before backward, then in the order of their first firing.
    others.sort(key=lambda site: (site.kind not in ("in", "out"), site.id))
    path = kind = None
    if module is not None:
        path, kind = module.path, module.type
    node = figures.site.node
    if figures.site.kind == LOSS:
        node = figures.node()
    gradient_step = None
    if sighting.shown_first or sighting.is_of_gradients:
        gradient_step = _gradient_step(sighting, text)
    steps = skipped = None
    if birth.recovered:
        steps, skipped = birth.times, birth.kept_away
    return RowEvidence(
        how=birth.place,
        certainty=birth.certainty,
        module=path,
        type=kind,
        also=[other.path for other in sighting.also],
        source=figures.source(),
        node=node,
        value=figures.kind(),
        nonfinite=row.nonfinite,
        nan=row.nan,
        count=row.count,
        near={text(site): figures.near(site) for site in sighting.near[:NAMED]},
        growth=figures.growth(),
        propagated=len(others),
        propagators=[other.site for other in others[:_PROPAGATORS]],
        healed=healed[:NAMED],
        before=figures.before(),
        gradient_step=gradient_step,
        recovered=birth.recovered,
        births=birth.births,
        steps=steps,
        skipped=skipped,
    )


def _gradient_step(sighting: Sighting, text: Callable[[int], str]) -> GradientStep:
    """Return what is recorded of the step of which only gradients are, and of the next one."""
    first = sighting.bad_step
    later = sighting.later
    near = sighting.near
    if sighting.shown_first:
        first = sighting.shown_first
        later = sighting.bad_step
        near = ()
    sound = None
    if first.last_sound >= 0:
        sound = first.last_sound
    later_step = None
    if later is not None:
        later_step = later.step
    return GradientStep(
        step=first.step,
        sound=sound,
        finite=[text(site) for site in near[:NAMED]],
        later=later_step,
    )


def _of_call(recording: Recording, birth: Birth, call: KeptCall) -> CallEvidence:
    module = call.module
    kind = None
    inputs: list[int] = []
    if module is not None:
        kind = module.type
        inputs = inputs_of(call.wiring, module)
    before = LeadUp()
    for site in recording.sites:
        if site.site == birth.site:
            before = lead_up(call.wiring, call.step, [site.id, *inputs])
    return CallEvidence(
        how=birth.place,
        certainty=birth.certainty,
        module=call.path,
        type=kind,
        source=call.source(),
        value=value_of(call),
        recovered=birth.recovered,
        births=birth.births,
        before=before,
        dump=KeptIn.of(call.event),
    )


def value_of(call: KeptCall) -> str:
    """Return the kind of a kept call's value in words."""
    return VALUES.get(call.event.value or "", "non-finite values")


def _of_graph(birth: Birth, producer: Producer) -> GraphEvidence:
    shown = GraphOperation.of_event(producer.event)
    source = None
    if shown.file:
        source = shown
    return GraphEvidence(
        how=birth.place,
        certainty=birth.certainty,
        module=producer.module or None,
        also=[],
        source=source,
        recovered=birth.recovered,
        births=birth.births,
        operation=shown,
    )


def _of_end(birth: Birth) -> EndEvidence:
    also: list[str] = []
    nan = inf = None
    if birth.exam is not None:
        also = others_at_end(birth.exam)
        nan, inf = birth.exam.worst.nan, birth.exam.worst.inf
    return EndEvidence(
        how=birth.place,
        certainty=birth.certainty,
        module=None,
        also=also,
        recovered=birth.recovered,
        births=birth.births,
        nan=nan,
        inf=inf,
    )


def others_at_end(exam: NonfiniteAtEndEvent) -> list[str]:
    """Return the first of the tensors that were not finite at the end, besides the worst."""
    others = [tensor for tensor in exam.tensors if tensor is not exam.worst]
    return [tensor.path for tensor in others[:NAMED_AT_END]]
