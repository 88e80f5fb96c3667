"""The words for births: the message and the remedy of each finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from kedge.rules.command import again, uncompiled, with_dump_on
from kedge.rules.naming import NAMED, line_of, name_of, quoted
from kedge.rules.nonfinite.advice import (
    OperationAdvice,
    domain_remedy,
    is_for_any,
    range_advice,
)
from kedge.rules.nonfinite.bad_steps import ABSENT, FINITE, BadStep
from kedge.rules.nonfinite.births import Birth, KeptCall, Producer
from kedge.rules.nonfinite.evidence import (
    NAMED_AT_END,
    VALUES,
    evidence_of,
    others_at_end,
    value_of,
)
from kedge.rules.nonfinite.figures import (
    VAST,
    Figures,
    long_step,
    risen_gradients,
)
from kedge.rules.nonfinite.search import Sighting
from kedge.rules.recorded.losses import LOSS, maker_at
from kedge.rules.recorded.wiring import Wiring, wire
from kedge.rules.rule import Finding
from kedge.short_text import counted, listed
from kedge.shown_text import typed
from kedge.sites.operation_names import recorded_name
from kedge.store.events import DumpEvent
from kedge.store.recording import Recording

_FIRST = "{site} was the first to contain {value}, at step {step}; "
_GRADIENT = "{site} was the first gradient to contain {value}, at step {step}; "

#: What the rows of a step show, by the place of a birth and the certainty about it.
_SENTENCES = {
    ("forward", "seen"): _FIRST + "its {parts}.",
    ("forward", "inferred"): _FIRST
    + "the modules inside it returned finite values, so an operation in its own "
    "forward made it{operation}.",
    ("forward", "between"): "{site} was the first to contain {value}, at step "
    "{step}, although {near} before it was finite: an operation in the forward of "
    "{name} made it, outside any watched module{operation}.",
    ("forward", "unknown"): _FIRST
    + "its input contained it too, or was not watched, so the call or operation that "
    "made it is not known.",
    ("entry", "seen"): "{site} was the first to contain {value}, at step {step}: it "
    "came from outside the model, with the batch or from a computation of the "
    "program before this call{operation}.",
    ("parameter", "inferred"): "{site} contained {value} already when the forward of "
    "step {step} used it, and nothing was recorded before: it came from the "
    "initialisation or a checkpoint, or from a step without records.",
    ("optimizer", "between"): "{site} contained {value} when the forward of step "
    "{step} used it, and all was finite in step {before}: the optimizer's step "
    "between the two made it, or the program's own code wrote it.",
    ("optimizer", "seen"): _FIRST
    + "the parameter and its gradient were finite, so the optimizer's step made it.",
    ("optimizer", "among"): _FIRST
    + "its gradient was not recorded: the optimizer's step made it, or took a "
    "gradient that was not finite.",
    ("optimizer", "inferred"): "{site} was the first to contain {value}, at step "
    "{step}, although its input and its parameters were finite where they were "
    "recorded, and too small to overflow. So its parameters changed between two "
    "calls in that step, for example by an optimizer's step with non-finite "
    "gradients, such as {near}.",
    ("unseen", "between"): "{site} contained {value} when the forward of step {step} "
    "used it, and all was finite in step {before}: it was made between the two, in "
    "steps that were not recorded.",
    ("written", "seen"): "{site} contained {value} when the optimizer got the "
    "gradients of step {step}, although all of them were finite after backward: they "
    "were changed in between, by accumulation, unscaling, clipping or the program "
    "itself.",
    ("loss", "seen"): "{site} contained {value} at step {step}, while the modules' "
    "outputs were finite: the program's own operations after them made it{operation}.",
    ("loss", "among"): "{site} contained {value} at step {step}, without records of "
    "the modules' outputs: a module or the program's own operations after them made "
    "it{operation}.",
    ("backward", "seen"): _GRADIENT
    + "the gradient that arrived at {name} was finite, so its backward made it.",
    ("backward", "among"): _GRADIENT
    + "the gradient that arrived at {name} was finite: its backward made it, or {others}.",
    ("backward", "inferred"): _GRADIENT
    + "there the gradient enters the model: an operation of the program after it, in "
    "the loss or before it, made it.",
    ("backward", "between"): _GRADIENT
    + "{near}, nearer to the loss, was finite: a backward between the two made it{written}.",
}
_OWN_OR_UNSEEN = (
    _FIRST + "all modules inside it that were recorded returned finite values, so an "
    "operation in its own forward made it{operation}, or {unseen} inside it did, "
    "which was not recorded."
)
_GIVEN = (
    "{site} contained {value} at step {step}, although {near} before it was finite: the forward "
    "of {name} passes it in from outside any watched module{operation}."
)
_COMPUTED = (
    "{site} was the first to contain {value}, at step {step}: the program computed it before this "
    "call{operation}."
)
_OF_ANOTHER_CALL = (
    "{site} was the first to contain {value}, at step {step}, in which {root} was called {calls} "
    "times: the result of one of these calls may have gone into the next, or it came from outside "
    "the model{operation}."
)
_AT_THE_START = (
    "{site} was the first to contain {value}, at step {step}: an operation in the "
    "forward of {name} made it, outside any watched module{operation}."
)
_BESIDE = (
    _GRADIENT + "the gradient that arrived at {cleared} was finite, and too small to overflow "
    "there: the backward of an operation in {name}'s own forward made it, or of one "
    "on its output, which takes the same value."
)
_OF_USERS = (
    _GRADIENT + "{name} takes the value, and the gradient that arrived there was not "
    "recorded: its backward made it, or that of an operation nearer to the loss."
)
_OF_A_FINITE_LOSS = (
    _GRADIENT + "the loss was finite, and so was {near}, nearer to it: it arose between the "
    "two, in a backward there{between}, or from a value of the forward that a mask "
    "hides from the loss."
)
_ALL_OF_A_FINITE_LOSS = (
    "{site} contained {value} at step {step}, and so did every gradient nearer to "
    "the loss, while the loss was finite: it arose in the loss or between it and "
    "this parameter, in a backward there{between}, or from a value of the forward "
    "that a mask hides from the loss."
)
_ALL_GRADIENTS = (
    "{site} contained {value} at step {step}, and so did every gradient nearer to "
    "the loss{outputs}: the loss or a backward made it{spread}."
)

#: Places of which the line of the program that calls the module says nothing.
_WITHOUT_LINE = ("parameter", "unseen", "written")

_GROWN = (
    "The optimizer's steps are probably too large: the rms of {site} had gone from "
    "{was:.2g} at step {first} to {words} at step {step}"
)
_DIVERGED = (
    "The values next to it had grown to {largest:.1e}: the run had diverged before, "
    "and this is where it overflowed the dtype. Lower the learning rate or warm it "
    "up, clip gradients, and look at the steps before."
)
_LARGE_INPUT = (
    "The values next to it were {largest:.1e}, and the input of the model in that "
    "step is as large: look at the batch."
)
_LARGE_FROM_THE_START = (
    "The values next to it were {largest:.1e} in the first step already, before any "
    "training: look at the inputs and at the initialisation."
)
_RISEN = (
    "The run had diverged before: the norm of all gradients had gone from {:.2g} to "
    "{:.2g} at step {}; lower the learning rate or warm it up, and clip gradients. "
)
_LONG_STEP = (
    "The optimizer's steps may be too large: that of step {2}, the last measured one "
    "before, changed {0} by {1:.2g} times its size; lower the learning rate or warm "
    "it up, and clip gradients. "
)
_UPDATED = (
    "Lower the learning rate: the step overflowed{figures}. If the rate is small, "
    "raise the optimizer's eps, and check its state if it came from a checkpoint."
)
_UPDATED_TO_NAN = (
    "The step made it of numbers of usual size{figures}: raise the optimizer's eps, "
    "which keeps its divisor from zero, and check its state if it came from a "
    "checkpoint."
)
_SCALED = (
    "Once in a while this is normal: the loss scale is too large for float16, and "
    "the scaler skips the step and halves the scale. If it goes on: "
)
_AT_THE_LOSS = (
    "Look at the loss, and at what lies between it and the model: log of 0, division "
    "by a zero count (an empty mask), sqrt at 0, or a loss scale that is too large."
)
_ENTRY = (
    "Check the batch before the model sees it: torch.isfinite(x).all(); missing "
    "values, a division by a zero standard deviation and a bad file are the usual "
    "causes."
)
#: What to look at first of a value that no module returned, by the place of its birth.
_UNUSED = {
    "entry": "If the model replaces missing values, this is as it should be. Else: ",
    "forward": "If it is memory of torch.empty that the module does not use, as it seems, nothing "
    "is wrong; torch.zeros shows no such values. Else: ",
}
_PARAMETER = "Check the checkpoint and the initialisation with torch.isfinite"
_STEPPED = (
    "If the program writes to the parameter itself between the steps, look there; "
    "else lower the learning rate or warm it up, clip gradients, and check the "
    "optimizer's state if it came from a checkpoint."
)
_WRITTEN = (
    "Look at what the program does between backward() and step(): clip_grad_norm_ "
    "with an infinite norm turns every gradient into NaN (error_if_nonfinite=True "
    "reports it), accumulated gradients can overflow, and unscaling divides by a "
    "scale that may be zero."
)
_BACKWARD = (
    "In {name}, look for an operation whose derivative is infinite where its value "
    "is not: sqrt at 0, pow below 1 at 0, a division, or torch.where, which "
    "multiplies the branch that is not taken by zero: infinity times zero is NaN. "
    "Change its input, not its output (clamp or where before the operation)."
)
_STEEP = (
    "an operation whose derivative is infinite{where}: sqrt at 0, pow below 1 at 0, a "
    "division, or torch.where around one of them. Change its input, not its output."
)
_BETWEEN_SITES = (
    "Look at the operations between these sites for one whose derivative is "
    "infinite: sqrt at 0, a division, or torch.where around one of them. Change its "
    "input, not its output."
)
_OF_ANY_LOSS = "Look at the loss first: log of 0, a division by a zero count, sqrt at 0, exp of a large number."
_OF_LAST_LOSS = (
    "Look at the loss and its inputs in that step: torch.isfinite tells which is the "
    "first that is not finite."
)
_PRINT = (
    "Print torch.isfinite(...).all() of the result of each of these operations in "
    "step {step}: the first that is False made it."
)
_PRINT_INPUTS = (
    "Print the inputs of these operations in step {step}, and look for numbers at "
    "which the slope is infinite: 0 for sqrt, log, a power below one and a divisor, "
    "1 for acos and asin. Change the input there, not the output."
)


def finding(recording: Recording, birth: Birth) -> Finding:
    """Return the finding of a birth.

    The rows tell most of it; without them the kept call does, else the graph of the loss, else what
    was not finite at the end. What a kept call and the graph know besides comes after that.
    """
    rows = kept = graph = None
    if birth.sighting is not None:
        rows = _RowWords(recording, birth, birth.sighting)
    if birth.kept is not None:
        kept = _KeptCallWords(recording, birth, birth.kept)
    if birth.operation is not None:
        graph = _ProducerWords(recording, birth, birth.operation)

    words = rows or kept or graph or _EndWords(recording, birth)
    message = words.message()
    remedy = words.remedy()
    if kept is not None and kept is not words:
        message += kept.addition()
        remedy = kept.remedy_after(remedy)
    graph_adds = graph is not None and graph is not words and graph.adds_words
    if graph is not None and graph_adds:
        message += graph.addition()
        remedy = graph.remedy_after(remedy)
    return Finding(
        code="NAN-BORN",
        severity=birth.severity,
        site=birth.site,
        step=birth.step,
        message=message,
        evidence=evidence_of(recording, birth, graph_adds=graph_adds),
        confidence=birth.sure,
        remedy=remedy,
    )


@dataclass(frozen=True)
class _RowWords:
    """The words for what the rows of one step show."""

    recording: Recording
    birth: Birth
    sighting: Sighting

    @property
    def wiring(self) -> Wiring:
        return wire(self.recording)

    @cached_property
    def figures(self) -> Figures:
        return Figures(self.wiring, self.sighting)

    def message(self) -> str:
        """Return the site, the value and the step in one sentence, the program's line in another, and how it went on."""
        first = self.sighting.shown_first
        message = self._sentence() + self._line()
        if first is not None:
            message = (
                f"Gradients were not finite at step {first.step}, of which nothing "
                f"else was recorded; the value was made {_span(first)}. The next "
                f"recorded step shows where it is still made: {message}"
            )
        if not self.birth.recovered:
            return message
        if self.sighting.went_no_further(self.recording):
            message += " No module returned it, and all gradients were finite."

        often = "The"
        if self.birth.times > 1:
            since = self.birth.since
            often = f"This happened in {self.birth.times} steps from step {since} on, and the"
        reason = ""
        if self.birth.kept_away:
            reason = ", because the optimizer never got these gradients"
        return f"{message} {often} run went on{reason}."

    def _sentence(self) -> str:
        sighting, figures = self.sighting, self.figures
        if sighting.is_of_gradients:
            return ". ".join(self._of_gradients()) + "."
        bad_step, kept = sighting.bad_step, self.birth.kept
        # The autograd node of a result names the last operation; a kept call knows the one that
        # made the value.
        operation = ""
        last = recorded_name(figures.node())
        if last and not (kept is not None and kept.operations):
            operation = f" ({last} was its last operation)"
        outputs = ""
        known = [site.id for site in self.recording.of_kind("out")]
        if bad_step.are_finite(known):
            outputs = ", while the outputs were finite"
        spread = written = ""
        if not bad_step.full:
            spread = ", and clipping by norm spreads it to all gradients"
            written = ", or the program changed it before the optimizer got it"
        return self._form().format(
            site=figures.site.site,
            value=figures.value(),
            step=bad_step.step,
            before=bad_step.last_sound,
            near=listed([self.wiring.text(site) for site in sighting.near]),
            name=figures.name,
            root=figures.root,
            calls=figures.calls_in_turn(),
            parts=self._finite_parts(),
            operation=operation,
            others=self._others(),
            between=self._between(),
            cleared=", ".join(map(name_of, sighting.cleared)),
            unseen=", ".join(name_of(module) for module in figures.unmeasured()[:NAMED]),
            written=written,
            outputs=outputs,
            spread=spread,
        )

    def _form(self) -> str:
        sighting = self.sighting
        bad_step, near = sighting.bad_step, sighting.near
        place = (sighting.place, sighting.certainty)
        if sighting.cleared:
            return _BESIDE
        if place == ("backward", "among") and not near:
            return _OF_USERS
        if place == ("backward", "between") and bad_step.in_backward:
            if near:
                return _OF_A_FINITE_LOSS
            return _ALL_OF_A_FINITE_LOSS
        if place == ("backward", "between") and not near:
            return _ALL_GRADIENTS
        if place == ("forward", "between") and not near:
            return _AT_THE_START
        if place == ("forward", "between") and sighting.went_no_further(self.recording):
            return _GIVEN
        if place[0] == "entry" and self.figures.calls_in_turn():
            return _OF_ANOTHER_CALL
        if place[0] == "entry" and self.figures.node() is not None:
            return _COMPUTED
        if self.figures.unmeasured():
            return _OWN_OR_UNSEEN
        return _SENTENCES[place]

    def _line(self) -> str:
        """Return the sentence about the program's line; empty if there is none."""
        sighting, source = self.sighting, self.figures.source()
        place, certainty = sighting.place, sighting.certainty
        is_of_step = place == "optimizer" and certainty != "inferred"
        is_of_loss = place == "backward" and certainty == "inferred" and not sighting.cleared
        if source is None or place in _WITHOUT_LINE or is_of_step or is_of_loss:
            return ""
        function = source.function
        if place == "loss":
            inside = ""
            if function:
                inside = f", in {function}"
            called = f"backward() is called on it at {line_of(source)}{inside}"
        elif sighting.is_given:
            called = f"The result goes in at {line_of(source)}, in {function}"
        else:
            name = name_of(sighting.cleared[0]) if sighting.cleared else self.figures.name
            called = f"{name} is called at {line_of(source)}, in {function}"
        return f" {called}{quoted(source.text)}."

    def _finite_parts(self) -> str:
        """Return what was finite of the module that made it: its inputs and parameters."""
        module = self.sighting.module
        if module is None:
            return ""
        is_one = (len(module.ins) or len(module.sources)) <= 1
        given = "inputs were"
        if is_one:
            given = "input was"
        if self.sighting.sure < 0.8:
            return f"{given.split(maxsplit=1)[0]} and parameters were finite, as far as they were watched"
        params = [site for m in (module, *self.wiring.inside(module)) for site in m.params]
        beyond = [self.wiring.text(s) for s in params if self.figures.is_beyond_range(s)]
        if beyond:
            were = "was"
            if len(beyond) > 1:
                were = "were"
            return f"{given} finite, and {listed(beyond)} {were} beyond 1e19 or infinite"
        if self.sighting.stale:
            return f"{given} finite, and so were its parameters when they were last recorded"
        if params:
            return f"{given.split(maxsplit=1)[0]} and parameters were finite"
        return f"{given} finite"

    def _others(self) -> str:
        """Return a list of other users of the value: modules, and operations of containers' own forwards."""
        own = self.wiring.modules.get(self.figures.site.owner)
        around = set()
        for inner in (own, self.sighting.module):
            if inner is not None:
                around |= {m.path for m in self.wiring.ancestors(inner)}
        parts = []
        holders = []
        for module in self.sighting.also:
            if module.path in around:
                holders.append(f"in {name_of(module)}'s own forward")
            else:
                parts.append(f"that of {name_of(module)}, which takes the same value")
        if holders or not parts:
            place = " and ".join(holders) or "outside any watched module"
            parts.append(f"that of an operation {place} that takes the same value")
        return ", or ".join(parts)

    def _between(self) -> str:
        """Return the modules without parameters between a bad gradient and the next finite one; empty if there are none."""
        module, wiring = self.sighting.module, self.wiring
        if module is None:
            return ""
        owners = [wiring.modules[wiring.sites[site].owner] for site in self.sighting.near]
        end = min((owner.position for owner in owners), default=len(wiring.sites))
        inside = [m for m in wiring if module.position < m.position < end]
        bare = [name_of(m) for m in inside if not m.params and not wiring.inside(m)]
        if not bare:
            return ""
        return f", such as that of {listed(bare[:NAMED])}"

    # A step of which only gradients are recorded; see Note [Guarded] in `...nonfinite.search`

    def _of_gradients(self) -> Iterator[str]:
        """Yield what is recorded of the step and of the next, and what is not."""
        sighting, figures = self.sighting, self.figures
        bad_step, later = sighting.bad_step, sighting.later
        step = bad_step.step
        yield (
            f"{figures.site.site} contained {figures.value()} at step {step}: it was "
            f"made {_span(bad_step)}"
        )
        yield (
            f"Step {step} has records only of gradients, not of outputs or parameters: "
            f"{self._possible()} can have made it"
        )
        near = [self.wiring.text(site) for site in sighting.near]
        if near:
            verb = "were" if len(near) > 1 else "was"
            yield f"{listed(near)} {verb} finite in this step"
        if later is None:
            return

        params = [site.id for site in self.recording.of_kind("param")]
        known = [site for site in params if later.states[site] or site in later.bad_params]
        bad = [site for site in known if site in later.bad_params]
        if bad:
            finite = {self.wiring.sites[site].path for site in sighting.near}
            odd = [site for site in bad if self.wiring.sites[site].path in finite]
            reason = (
                "because the optimizer's step used such gradients: this hides the first bad value"
            )
            if odd:
                text = self.wiring.text(odd[0])
                reason = f"{text} although its gradient was finite in step {step}"
            yield (
                f"In step {later.step}, {len(bad)} of {len(known)} parameters were "
                f"not finite, {reason}"
            )
        heads = [module for module in self.wiring if module.path in self.wiring.heads]
        if any(later.nonfinite(module.ins) for module in heads):
            yield f"The model's input was not finite in step {later.step} either"

    def _possible(self) -> str:
        """Return the possible places; the loss separates a backward from the forward before it."""
        bad_step = self.sighting.bad_step
        losses = [s for s in self.recording.of_kind(LOSS) if bad_step.states[s.id] != ABSENT]
        if not losses:
            return "a forward, the loss, a backward, the clipping or an optimizer's step"
        for loss in losses:
            if bad_step.states[loss.id] > FINITE:
                node, source = maker_at(self.recording, loss, bad_step.step)
                name = recorded_name(node)
                maker = ""
                if name:
                    maker = f" (made by {name})"
                line = ""
                if source:
                    line = f", on which {line_of(source)} calls backward()"
                return (
                    f"{loss.site}{maker}{line}, was not finite either: a forward, an "
                    "optimizer's step or the loss itself"
                )
        return "the loss was finite: a backward, the clipping or another change of the gradients"

    def remedy(self) -> str:
        """Return what to do about it."""
        sighting, figures = self.sighting, self.figures
        place, certainty = sighting.place, sighting.certainty
        if self.sighting.is_of_gradients:
            return self._remedy_of_gradients()
        if place == "optimizer" and certainty in ("seen", "among"):
            return self._remedy_of_update()

        if sighting.went_no_further(self.recording):
            remedy = self._remedy_of_place()
            return _UNUSED[place] + remedy[0].lower() + remedy[1:]

        growth = figures.growth()
        if growth and place not in ("entry", "written", "backward"):
            grown = _GROWN.format(**asdict(growth))
            return (
                f"{grown}. Lower the learning rate or warm it up, clip gradients, and "
                "look at the steps before."
            )
        if figures.are_vast() and place not in ("written", "backward"):
            form = _DIVERGED
            if sighting.bad_step.step == 0:
                form = _LARGE_FROM_THE_START
            elif figures.is_input_vast():
                form = _LARGE_INPUT
            return form.format(largest=figures.largest())
        if place == "forward" and certainty != "unknown":
            return self._operation().advice() + uncompiled(self.recording)
        if place == "backward":
            scaled = ""
            if figures.dtype == "float16":
                scaled = _SCALED
            return scaled + self._remedy_of_backward()
        return self._remedy_of_place()

    def _remedy_of_update(self) -> str:
        sizes = self.figures.of_update()
        words = zip(("its rms was", "its gradient's"), sizes, strict=True)
        known = [f"{word} {size:.2g}" for word, size in words if size is not None]
        figures = ""
        if known:
            figures = f" ({', '.join(known)})"
        is_usual = all(size is not None and size < VAST for size in sizes)
        if is_usual and self.figures.kind() == "NaN":
            return _UPDATED_TO_NAN.format(figures=figures)
        return _UPDATED.format(figures=figures)

    def _operation(self) -> OperationAdvice:
        """Return the operation that made the value, as far as it is known."""
        sighting, figures = self.sighting, self.figures
        name = f"the forward of {figures.name}"
        kind = ""
        node = figures.node()
        if sighting.module is not None and sighting.certainty == "seen":
            name, kind = figures.name, sighting.module.type
        unmeasured = figures.unmeasured()
        if sighting.certainty == "inferred" and not unmeasured:
            name += ", after its modules"
        for module in unmeasured:
            if not sighting.bad_step.excused.isdisjoint(module.ins):
                kind, node = module.type, None
                break
        if sighting.place == "backward":
            node = None
        return OperationAdvice(
            name=name,
            type=kind,
            node=node,
            dtype=figures.dtype,
            largest=figures.largest(),
            first=sighting.bad_step.step == 0,
            weights=figures.weights(),
        )

    def _remedy_of_backward(self) -> str:
        certainty, name = self.sighting.certainty, self.figures.name
        dumped = _to_name("the operation", with_dump_on(self.recording))
        if certainty == "seen":
            own = self._operation().backward_advice()
            return own or _BACKWARD.format(name=name) + uncompiled(self.recording)
        if certainty == "among":
            return (
                f"Look, there and in the forward around it, for {_STEEP.format(where='')}{dumped}"
            )
        if self.sighting.cleared:
            beside = _STEEP.format(where=", beside the modules that it calls")
            return f"Look in the forward of {name} for {beside}{dumped}"
        if certainty == "between" and self.sighting.near:
            return _BETWEEN_SITES + dumped
        return _AT_THE_LOSS + uncompiled(self.recording)

    def _remedy_of_place(self) -> str:
        place, step = self.sighting.place, self.sighting.bad_step.step
        named = again(self.recording, "To have the module named")
        if place == "entry" and self.figures.calls_in_turn():
            return (
                f"Check what {self.figures.root} is given in each of these calls: "
                "torch.isfinite(x).all(). If it is the batch, look for missing values and a division "
                "by a zero standard deviation; if it is the result of the call before, then in the "
                f"forward of {range_advice(self.figures.root, are_shown=False)}"
            )
        if place == "entry" and self.figures.node() is not None:
            return f"In {range_advice('the computation before the call', are_shown=False)}"
        if place == "entry":
            return _ENTRY
        if place == "written":
            return _WRITTEN
        if place == "parameter":
            lower = ""
            if step:
                lower = "; if the parameter was finite before, lower the learning rate"
            return f"{_PARAMETER}{lower}."
        if place == "forward":
            return f"{named}In {range_advice(self.figures.name, are_shown=False)}"
        if place == "unseen":
            dumped = _to_name("the operation", with_dump_on(self.recording))
            signs = _signs_of_large_steps(self.recording, step)
            return (
                f"{signs}{named}If no module is named then, the loss or an "
                f"optimizer's step made it.{dumped}"
            )
        if place == "optimizer" and self.sighting.certainty == "between":
            return _STEPPED
        return _risen(self.recording, step) + _AT_THE_LOSS + uncompiled(self.recording)

    def _remedy_of_gradients(self) -> str:
        """Return signs that the optimizer's steps were too large, and how to find the place."""
        bad_step = self.sighting.bad_step
        growth = self.figures.growth()
        if growth:
            signs = _GROWN.format(**asdict(growth)) + (
                "; lower the learning rate or warm it up, and clip gradients. "
            )
        else:
            signs = _signs_of_large_steps(self.recording, bad_step.step)
        start = ""
        if bad_step.last_sound > 0:
            sound = bad_step.last_sound
            start = f"from a checkpoint of step {sound} or before, if there is one, "
        named = again(self.recording, "To have the module named", start)
        operation_too = uncompiled(self.recording)
        if with_dump_on(self.recording) in named:
            operation_too = ""
        return f"{signs}{named}{_OF_ANY_LOSS}{operation_too}"


def _span(bad_step: BadStep) -> str:
    """Return the steps between which the value of a step was made of which only gradients are recorded."""
    if bad_step.last_sound < 0:
        return "then or before; no sound step was recorded before it"
    return (
        f"between the backward of step {bad_step.last_sound}, the last sound one that "
        f"was recorded, and the end of step {bad_step.step}"
    )


def _signs_of_large_steps(recording: Recording, step: int) -> str:
    """Return a sentence about signs of too large steps before a step; empty if there are none."""
    risen = _risen(recording, step)
    if risen:
        return risen
    long = long_step(recording, step)
    if not long:
        return ""
    return _LONG_STEP.format(*long)


def _risen(recording: Recording, step: int) -> str:
    risen = risen_gradients(recording, step)
    if not risen:
        return ""
    return _RISEN.format(*risen)


def _to_name(what: str, command: str) -> str:
    if not command:
        return ""
    return f' To have {what} named, run "{command}".'


def _went_on(birth: Birth) -> str:
    """Return the sentences about the consequence of a birth that the rows do not show, and about the run after it."""
    shown = birth.consequence
    text = ""
    if shown is not None and shown.step != birth.step:
        text = f" {shown.site} shows it at step {shown.step}."
    if birth.recovered:
        text += " The run went on."
    return text


@dataclass(frozen=True)
class _KeptCallWords:
    """The words for a call that ``--dump`` kept."""

    recording: Recording
    birth: Birth
    call: KeptCall

    def message(self) -> str:
        """Return the message if the rows show no place."""
        call, source = self.call, self.call.source()
        how = f"The input was finite, so the forward of {call.name} made it"
        if call.in_backward:
            how = f"The gradient that arrived at {call.name} was finite, so its backward made it"
        elif self.birth.certainty == "between":
            how = f"An operation in the forward of {call.name} made it, before that call"
        rows = "nothing else was recorded in this step"
        if any(call.step in self.recording.rows(site).step for site in self.recording.sites):
            rows = "the recorded statistics of this step do not show the place"
        line = ""
        if source:
            function = f"{source.function}{quoted(source.text)}"
            line = f" {call.name} is called at {line_of(source)}, in {function}."
        gradient = ""
        if call.in_backward:
            gradient = "gradient "
        return (
            f"{call.text} was the first {gradient}to contain {value_of(self.call)}, "
            f"at step {call.step}: --dump checks every value and found it; {rows}. "
            f"{how}.{line}{self._operations()}{_went_on(self.birth)}"
        )

    def addition(self) -> str:
        """Return what the call adds to the message of the rows."""
        before = ""
        if self.call.text != self.birth.site:
            before = f" --dump found {self.call.text} before it."
        return before + self._operations()

    def _operations(self) -> str:
        """Return a sentence about the operations that made it, in their order; empty if they are not known."""
        made = []
        for bad in self.call.operations:
            place = ""
            if bad.file:
                place = f" ({line_of(bad)})"
            value = VALUES[bad.value]
            made.append(f"{value} in the operation {bad.site}{place}{quoted(bad.text)}")
        if not made:
            return ""
        return f" Run again by itself, that call makes {', then '.join(made)}."

    def remedy(self) -> str:
        """Return what to do if the rows show no place."""
        call, module = self.call, self.call.module
        remedy = self._remedy_of_operation()
        if not remedy and call.in_backward:
            steep = _STEEP.format(where=" where its value is not")
            remedy = f"In {call.name}, look for {steep}"
        if not remedy:
            kind = dtype = ""
            if module is not None and call.text == f"{call.path}:out":
                kind = module.type
            if module is not None and module.outs:
                dtype = self.recording.sites[module.outs[0]].dtype
            remedy = OperationAdvice(call.name, kind, None, dtype, 0.0).advice()
        return f"{self._rerun()} {remedy}"

    def remedy_after(self, remedy: str) -> str:
        """Return the remedy with that of the rows; the operation's own is better than one for any operation."""
        if is_for_any(remedy):
            remedy = self._remedy_of_operation() or remedy
        return f"{self._rerun()} {remedy}"

    def _rerun(self) -> str:
        script = self.recording.path / self.call.event.folder / "replay.py"
        return f"To run that call again by itself: {typed('python', script)}."

    def _remedy_of_operation(self) -> str:
        """Return the remedy of the operation that made the value first; empty if that is not known."""
        if not self.call.operations:
            return ""
        first = self.call.operations[0]
        is_nan = first.value == "nan"
        return domain_remedy(first.name, in_gradients=self.call.in_backward, is_empty=is_nan)


@dataclass(frozen=True)
class _ProducerWords:
    """The words for an operation that the graph of the loss shows."""

    recording: Recording
    birth: Birth
    producer: Producer

    @property
    def adds_words(self) -> bool:
        """Whether it says more than the rows and the kept call: than the module alone, and the operation itself."""
        sighting, kept = self.birth.sighting, self.birth.kept
        is_module = bool(sighting) and self.birth.names_call and self.birth.certainty == "seen"
        is_in_module = is_module and self.birth.place == "forward"
        if self.producer.place == "entry" or (kept is not None and kept.operations):
            return False
        return not (is_in_module and self.producer.among)

    def message(self) -> str:
        """Return the message if neither the rows nor a kept call show the place."""
        subject = f"{self.birth.site} was"
        if self.producer.shows_in_gradients:
            subject = f"The gradients of {self.birth.site} were"
        step = self.producer.step
        if self.producer.is_unseen:
            made = f".{self._before()} {self._able()}"
        elif self.producer.event.again:
            made = f". The lines of the step ran again in a copy of the process: {self._made()}"
        else:
            made = f": {self._made()}"
        return f"{subject} not finite at step {step}{made}.{_went_on(self.birth)}"

    def addition(self) -> str:
        """Return what it adds to the message of the rows, or of a kept call."""
        shown = "Of the operations in the graph of the loss,"
        if self.producer.is_unseen:
            return f"{self._before()} {self._able()}."
        if self.producer.event.again:
            shown = "The lines of the step ran again in a copy of the process:"
        elif self.producer.certainty == "seen":
            shown = "The graph of the loss shows it:"
        return f" {shown} {self._made()}."

    def _before(self) -> str:
        """Return the last step before with a finite loss, as a sentence; empty without one."""
        for loss in self.recording.of_kind(LOSS):
            if loss.site == self.producer.event.loss:
                rows = self.recording.rows(loss)
                sound = rows.step[rows.clean & (rows.step < self.producer.step)]
                if len(sound):
                    return f" It was last finite at step {int(sound[-1])}."
        return ""

    def _able(self) -> str:
        """Return a sentence that lists the operations that can make such a value; none was seen to."""
        number = self.producer.event.of
        by_line = self._among_by_line()
        places = _places(by_line)
        if len(by_line) == 1:
            places += quoted(self.producer.event.text)
        last = ""
        if number != len(self.producer.among):
            last = f" {number}, of which these are the last"
        before = ""
        if self.producer.event.detail:
            before = (
                ". If it was not one of these, it came with the batch, or with parameters that the "
                "step before left so: its gradients were not checked"
            )
        return (
            "Its values were not read, as they were on a device; the operations behind it "
            f"that can make such a value of usual numbers are{last}: {places}{before}"
        )

    def _made(self) -> str:
        """Return a clause with the operation and its place."""
        producer, event = self.producer, self.producer.event
        if producer.place == "entry":
            return f"it came from outside the model, with the batch; {event.detail}"
        if producer.among:
            return self._one_of()
        sure = "probably "
        if producer.certainty == "seen":
            sure = ""
        maker = producer.name
        if producer.place == "backward":
            maker = f"the backward of {maker}"
        inside = ""
        if producer.module is not None:
            inside = ", outside of modules"
            if producer.module:
                inside = f", in {producer.module}"
        line = ""
        if event.file:
            line = f", at {line_of(event)}"
        detail = ""
        if event.detail:
            detail = f"; {event.detail}"
        return f"{sure}{maker} made it{inside}{line}{quoted(event.text)}{detail}"

    def _one_of(self) -> str:
        """Return a clause that lists the operations that may have made it, each line of the program once."""
        places = _places(self._among_by_line())
        number = self.producer.event.of
        are_all = number == len(self.producer.among)
        if self.producer.place == "backward":
            last = f"{number} operations, of which these are the last"
            these = "these operations" if are_all else last
            return (
                f"the backward of one of {these} can have made it, whose inputs were "
                f"not seen: {places}"
            )
        detail = ""
        if self.producer.event.detail:
            detail = f"; {self.producer.event.detail}"
        if are_all:
            return f"one of these made it, in their order: {places}{detail}"
        return (
            f"one of {number} operations made it, of which these are the last, in "
            f"their order: {places}{detail}"
        )

    def _among_by_line(self) -> dict[str, list[str]]:
        """Return the possible operations by the program's line."""
        by_line: dict[str, list[str]] = {}
        for possible in self.producer.among:
            line = ""
            if possible.file:
                line = f" at {line_of(possible)}"
            by_line.setdefault(line, []).append(possible.operation)
        return by_line

    def remedy(self) -> str:
        """Return what to do; of an operation that is only probable, also how to have it named."""
        return self._remedy_of_operation() + self._to_be_certain()

    def remedy_after(self, remedy: str) -> str:
        """Return the remedy, or that of the rows: if they name the module, and the operation is only probable."""
        birth, producer = self.birth, self.producer
        if producer.event.again and self._advice().multiplies and not is_for_any(remedy):
            return remedy  # why its numbers had grown
        is_module = birth.names_call and birth.certainty == "seen" and birth.place == "forward"
        if birth.sighting and is_module and producer.certainty == "inferred":
            in_gradients = producer.shows_in_gradients
            if not is_for_any(remedy) or not domain_remedy(
                producer.name, in_gradients=in_gradients
            ):
                return remedy + self._to_be_certain()
        return self.remedy()

    def _remedy_of_operation(self) -> str:
        producer = self.producer
        backward = producer.place == "backward"
        if producer.among:
            return (_PRINT_INPUTS if backward else _PRINT).format(step=producer.step)
        if producer.place == "entry":
            return _ENTRY
        is_certain = producer.certainty == "seen"
        known = domain_remedy(
            producer.name,
            in_gradients=producer.shows_in_gradients,
            is_empty=producer.is_empty,
            is_certain=is_certain,
        )
        if known and is_certain:
            return known
        if known:
            return f"Print the inputs of {producer.name} in step {producer.step}. {known}"
        if backward:
            return _BACKWARD.format(name=producer.module or "the program")
        advice = self._advice()
        if advice.multiplies:
            return advice.advice()
        printed = f"Print the inputs of {advice.name} in step {producer.step}"
        if is_certain:
            return f"{printed}: they are finite, and its result is not."
        return f"{printed}."

    def _advice(self) -> OperationAdvice:
        producer = self.producer
        name = producer.name
        if producer.module:
            name = f"{producer.name} in {producer.module}"
        return OperationAdvice(
            name, "", producer.event.node, "float32", 0.0, first=producer.step == 0
        )

    def _to_be_certain(self) -> str:
        """Return how to have the operation named: --dump keeps calls of modules."""
        producer = self.producer
        command = with_dump_on(self.recording)
        is_kept = bool(self.recording.of(DumpEvent))
        if producer.certainty == "seen" or is_kept or (producer.module and not command):
            return ""
        run = "run it again with --dump"
        if command:
            run = f'run "{command}"'
        is_outside = self.birth.place == "loss" or producer.module == "" or not command
        if producer.module:
            return f" To have the operation named for certain, {run}."
        if is_outside:
            return (
                " To have the operation named for certain, put these lines into the "
                f"forward of a module, and {run}."
            )
        return (
            f" To have the operation named for certain, {run}; if these lines are "
            "outside modules, put them into the forward of one first."
        )


def _places(by_line: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(", ".join(names) + line for line, names in by_line.items())


@dataclass(frozen=True)
class _EndWords:
    """The words for what is not finite in a loss, or at the end, and that nothing explains."""

    recording: Recording
    birth: Birth

    def message(self) -> str:
        """Return the site, and the steps between which it was made."""
        birth, exam = self.birth, self.birth.exam
        if exam is None:
            often = ""
            if birth.times > 1:
                often = f", as in {counted(birth.times, 'recorded step')} in all"
            end = " It is not finite at the end."
            if birth.recovered:
                end = " It was finite again later."
            return (
                f"{birth.site} was not finite at step "
                f"{birth.step}{often}; what made it was "
                f"not recorded.{end}"
            )

        worst = exam.worst
        amounts = []
        if worst.nan:
            amounts.append(f"{worst.nan} NaN")
        if worst.inf:
            amounts.append(f"{worst.inf} infinite")
        more = exam.count - 1
        also = ""
        if more:
            were = "was"
            if more > 1:
                were = "were"
            rest = ""
            if more > NAMED_AT_END:
                rest = f" and {more - NAMED_AT_END} more"
            also = f", and so {were} {listed(others_at_end(exam))}{rest}"
        kind = "buffer"
        if worst.of == "param":
            kind = "parameter"
        return (
            f"The {kind} {worst.path} was not finite at the end of its training "
            f"({' and '.join(amounts)}){also}. {self._since()}"
        )

    def _since(self) -> str:
        """Return a sentence about the last record in which the parameter was finite."""
        for site in self.recording.of_kind("param"):
            if site.site == self.birth.site:
                rows = self.recording.rows(site)
                sound = rows.step[rows.clean]
                if len(sound):
                    return (
                        "It was finite when last recorded, before the optimizer's "
                        f"step of step {int(sound[-1])}: what made it came after "
                        "that, in steps of which it was not recorded."
                    )
        return "No step recorded it."

    def remedy(self) -> str:
        """Return how to have the place named."""
        named = again(self.recording, "To have the place named")
        if self.birth.exam is not None:
            return f"{named}Do not use this checkpoint."
        return named.strip() or _OF_LAST_LOSS
