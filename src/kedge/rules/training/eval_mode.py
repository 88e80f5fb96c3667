"""EVAL-MODE: training in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kedge.rules.evidence import Evidence, said, said_share, unsaid
from kedge.rules.gradients.grad_zero import GradZeroEvidence
from kedge.rules.naming import NAMED, plain
from kedge.rules.parameters.unused_param import CutPathEvidence
from kedge.rules.recorded.optimizers import events_of, has_optimizer
from kedge.rules.recorded.roots import names_of, root_of, root_path, within
from kedge.rules.recorded.samples import too_few
from kedge.rules.recorded.trained import steps_of_training, trained_roots
from kedge.rules.recorded.wiring import wire
from kedge.rules.rule import Finding, Lack, Rule
from kedge.short_text import counted, listed
from kedge.sites.site import unescape
from kedge.store.events import ModesEvent
from kedge.store.recording import Recording
from kedge.store.rows import Ints


@dataclass(frozen=True, kw_only=True)
class EvalModeEvidence(Evidence):
    """The modules in evaluation mode, and the steps of training in which they were."""

    modules: Sequence[str] = said("modules {}")
    of: int = said("of {} in all")
    since: int = said("since step {}")
    interruptions: int = unsaid()
    steps: int = said("steps {}")
    share: float | None = said_share("a share of {}")


@dataclass(frozen=True)
class EvalMode(Rule):
    """The model is trained in evaluation mode: dropout is off, or batch statistics do not change.

    Meaning:
        eval() was called, or the model was loaded in this mode, without train() afterwards. Then
        dropout does nothing, and batch normalisation uses running statistics that no longer follow
        the weights.

    Formula:
        The model as a whole has training False in steps of its optimizer, and contains dropout or
        batch normalisation, or modules of the program whose forward reads self.training, as for
        functional.dropout; all of them in evaluation mode. A model of which only a part is in
        evaluation mode is trained this way on purpose, and is not reported.

    Window:
        The measured steps in which parameters of the model had gradients and an optimizer stepped,
        because a model that was trained and then serves as a teacher stays in evaluation mode. All
        measured steps, if no gradient was recorded.

    Thresholds:
        - min_steps (3): of these steps in that mode; a single one may be a check.
        - share (0.25): of all of them, so that a short phase is not reported.

    Evidence:
        The modules in evaluation mode, the first such step, how often the mode was interrupted, and
        the number of measured steps of training. The message has the lines that call eval() in the
        program's files around the training loop, of which one may be what did it.

    Remedy:
        Call model.train() before the training loop, and again after each evaluation. To keep
        statistics as they are, put only those modules into evaluation mode.

    Cannot see:
        A part of a model that should be in training mode, since many programs keep a part in
        evaluation mode on purpose; a forward that takes the mode from elsewhere.
    """

    min_steps: int = 3
    share: float = 0.25

    code = "EVAL-MODE"
    name = "the model is trained in evaluation mode"
    severity = "warning"
    of_training = True
    leads_to = "UNUSED-PARAM INIT-SCALE GRAD-ZERO"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        events = events_of(recording, ModesEvent)
        trained = trained_roots(recording)
        for root in sorted({event.root for event in events} & trained):
            own = [event for event in events if event.root == root]
            steps = steps_of_training(recording, root)
            phases = [phase for phase in _phases(own, steps) if phase[1] >= self.min_steps]
            in_eval = sum(number for _, number in phases)
            if phases and in_eval >= self.share * len(steps):
                yield self._finding(
                    recording, root, [event for event, _ in phases], (in_eval, len(steps))
                )

    def idle(self, recording: Recording) -> str:
        """Return that no module works differently in training."""
        if not any(event.eval or event.train for event in events_of(recording, ModesEvent)):
            return "no dropout or batch statistics"
        return ""

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured steps; nothing is missing where no optimizer stepped."""
        if not has_optimizer(recording):
            return None
        if not events_of(recording, ModesEvent):
            return Lack(self.code, "record of the model's modes", 0, 1, grows=False)
        return too_few(self.code, len(recording.steps), self.min_steps)

    def explains(self, recording: Recording, finding: Finding, other: Finding) -> bool:
        """Return whether the mode can be the cause of another finding.

        A batch norm that does not normalise leaves the scale at the start as it is; and a parameter
        of a module that works otherwise in training may be used only there. Experts that get no
        sample may get one where their mixture has noise in training.
        """
        mode, unused = finding.evidence, other.evidence
        if not isinstance(mode, EvalModeEvidence):
            return True
        was_always = _was_always(mode)
        model = names_of(recording, [root_of(recording, "")])
        if isinstance(other.evidence, GradZeroEvidence):
            idle = other.evidence.idle
            own = ["" if path == model else path for path in mode.modules]
            mixtures = [path for path in own if not _is_known(recording, path)]
            inside = [each for each in idle if any(within(each, path) for path in mixtures)]
            return was_always and bool(idle) and len(inside) == len(idle)
        if other.code != "UNUSED-PARAM":
            modules = wire(recording).modules.items()
            kinds = [module.type for path, module in modules if path in mode.modules]
            return any("BatchNorm" in kind for kind in kinds)

        if not isinstance(unused, CutPathEvidence):
            return False
        owners = {site.path: site.owner or model for site in recording.of_kind("param")}
        paths = [unescape(site.rpartition(":")[0]) for site in unused.sites]
        return was_always and all(owners.get(path) in mode.modules for path in paths)

    def _finding(
        self, recording: Recording, root: int, phases: list[ModesEvent], shown: tuple[int, int]
    ) -> Finding:
        (steps, of), event, since = shown, phases[-1], phases[0].step
        site = f"{root_path(recording, root)}:out"
        model = names_of(recording, [root])
        paths = [path or model for path in event.eval]
        broken = ""
        if len(phases) > 1:
            broken = f" with {counted(len(phases) - 1, 'interruption')}"
        verb = "do" if len(paths) > 1 else "does"
        return Finding(
            code=self.code,
            severity=self.severity,
            site=site,
            step=since,
            message=f"{model} ({site}) has been trained in evaluation mode since step "
            f"{since}{broken}, in {steps:,} of {of:,} measured steps of its training: "
            f"{listed(paths, 3)} {verb} not work as in training.{_calls(phases[0])}",
            evidence=EvalModeEvidence(
                modules=paths[:NAMED],
                of=len(paths),
                since=since,
                interruptions=len(phases) - 1,
                steps=steps,
                share=plain(steps / max(of, 1)),
            ),
            confidence=0.9,
            remedy="Call model.train() before the training loop, and again after "
            "each evaluation. To keep statistics as they are, put only those modules "
            "into evaluation mode.",
        )


def _calls(event: ModesEvent) -> str:
    """Return where the program calls ``.eval()``, as a sentence."""
    lines = [str(line) for line in event.eval_calls]
    if not lines:
        return ""
    calls = "a call" if len(lines) == 1 else "calls"
    return f" The program has {calls} of eval() at {listed(lines, 3)}."


def _was_always(mode: EvalModeEvidence) -> bool:
    """Whether it was in all steps of training; it is noted only once an optimizer has stepped."""
    return bool(mode.share) and mode.steps / (mode.share or 1) - mode.steps < 1.5


def _is_known(recording: Recording, path: str) -> bool:
    """Whether a module is a norm or a dropout, of which it is known what it does in training."""
    module = wire(recording).modules.get(path)
    return module is not None and any(part in module.type for part in ("Norm", "Dropout"))


def _phases(own: list[ModesEvent], steps: Ints) -> Iterable[tuple[ModesEvent, int]]:
    """Yield each phase of a model in evaluation mode, with the number of these steps in it."""
    ends = [event.step for event in own[1:]]
    for event, end in zip(own, [*ends, None], strict=True):
        if not event.training and event.eval and not event.train:
            phase = steps >= event.step
            if end is not None:
                phase &= steps < end
            yield event, int(phase.sum())
