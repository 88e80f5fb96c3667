"""The record of a run besides the values at its modules.

It has the losses, gradients, updates, saved tensors, and facts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from kedge.actions.measure.meter import Meter
from kedge.stderr import say
from kedge.store.events import LedgerLine
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals import dynamo
from kedge.watch.kept.step_keeper import StepKeeper
from kedge.watch.models.backward_start import BackwardStart, began, programs_line
from kedge.watch.models.models import Models
from kedge.watch.models.optimizers import KnownOptimizer, Optimizers, params_of
from kedge.watch.models.parameters import ParameterSites
from kedge.watch.models.root_hooks import silent_sites
from kedge.watch.records.closing_exam import ClosingExam
from kedge.watch.records.curves import Curves
from kedge.watch.records.facts.facts import Facts, unused
from kedge.watch.records.first_step import FirstStep
from kedge.watch.records.gradient_checks import GradientChecks
from kedge.watch.records.logged_numbers import LoggedNumbers
from kedge.watch.records.losses import Losses
from kedge.watch.records.optimizer_states import OptimizerStates
from kedge.watch.records.optimizer_updates import Updates
from kedge.watch.records.steps_again import StepsAgain
from kedge.watch.records.updates_by_hand import UpdatesByHand
from kedge.watch.records.writer import MeterSink, StepSink
from kedge.watch.step import Step, StepKind
from kedge.watch.steps.shield import OFF

if TYPE_CHECKING:
    from kedge.repro.first_bad_call import FirstBadCall
    from kedge.watch.records.module_times import ModuleTimes
    from kedge.watch.steps.shield import WatchShield

_LEVELS = {StepKind.MEASURED: FULL, StepKind.GUARDED: LIGHT, StepKind.SKIPPED: OFF}
"""The levels of the meter."""
_AT_THE_END = "what the optimizers left out"
_LAST_LOSS = "the last losses"
_SILENT = "the reasons of sites that did not fire"
"""What the last work is about."""


class TrainingRecord:
    """Records backward passes and optimizer steps.

    Attributes:
        measured: Whether the current step is measured in full.
        dump: Set to a `FirstBadCall` to keep the call that made the first non-finite value.
        times: The times of modules; None if they are not asked for.
    """

    def __init__(
        self,
        log: StepSink,
        meter: Meter,
        models: Models,
        optimizers: Optimizers,
        step: Callable[[], int],
        first_step: FirstStep,
    ) -> None:
        self.meter = meter
        self.models = models
        self.optimizers = optimizers
        self.step = step
        self.first_step = first_step
        self.facts = Facts(step)
        self.exam = ClosingExam(models.places, step)

        finished = meter.finished
        self.curves = curves = Curves(finished.departures)
        self.logged = LoggedNumbers(finished.departures)
        self.updates = Updates(meter, curves, step, models.places.measured)
        self.states = OptimizerStates(meter, step, models.places)
        self.by_hand = UpdatesByHand(self.updates, curves, optimizers, models.places, step)
        self.losses = Losses(meter, curves, GradientChecks(models.passes))
        self.writer = MeterSink(log, meter, curves, models.roots, optimizers, self._sources)
        finished.sink = self.writer
        self.steps_again = again = StepsAgain(models)
        self.kept = StepKeeper(models, optimizers, lambda: again.random_state)
        again.prepare = self.kept.put_attributes_back
        self.measured = True
        self.dump: FirstBadCall | None = None
        self.times: ModuleTimes | None = None

    def _sources(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.first_step.sources, self.losses.described

    @property
    def is_bad(self) -> bool:
        """Whether something in the current step is known to be non-finite."""
        return self.losses.bad or self.updates.bad or self.meter.spoiled()

    def begin_step(self, step: Step) -> None:
        """Begin a step."""
        self.measured = measured = step.is_measured
        self.losses.bad = False
        lines = self.losses.lines
        lines.end()
        trains = self.optimizers.entries or self.optimizers.by_hand
        if measured and trains and not dynamo.has_compiled():
            lines.begin(sum(len(root.modules) for root in self.models.roots))
        self.updates.begin(measured=measured)
        self.facts.passes.measured = measured
        if not measured:
            self.facts.gradients.forget()
        self.meter.level = _LEVELS[step.kind]

    def backward_began(self, at: BackwardStart) -> bool:
        """Record a loss; returns whether it is the first non-finite one of a guarded step."""
        models, notes = self.models, self.writer.notes
        if not self.meter.sites.seats and not any(place.wanted for place in models.places):
            return False  # none of the selected sites is here

        was_bad = self.losses.bad
        notes += self.by_hand.backward_began(measured=self.measured)
        notes += self.losses.began(at, self.step(), measured=self.measured)
        self.kept.backward_began(at, self.step(), self.losses.scale)
        if self.losses.bad and not was_bad:
            self.kept.keep_bad(at, self.step(), self.losses.scale, began=True)
            self.steps_again.find_operation(at, self.step(), self.losses.path_of(at))
        elif self.losses.has_jumped:
            self.kept.keep_bad(at, self.step(), self.losses.scale, began=True)
            self.steps_again.find_rows(at, self.step(), self.losses.path_of(at))
        self.kept.passed()
        if self.measured:
            notes += self.facts.backward_began(self.step(), models.roots, models.passes, at.frame)
            return False
        if was_bad or not self.losses.bad:
            return False
        # So all gradients and parameters of this step are measured.
        self.updates.bad = True
        return True

    def skipped_began(self, loss: Tensor, number: Any, frame: FrameType) -> bool:
        """Record the loss of a skipped step; arguments as in `SkippedLosses.skipped_began`.

        Returns:
            Whether it is news that a loss or gradients on a device were not finite.
        """
        step = self.step()
        if self.by_hand.waits:
            self.writer.notes += self.by_hand.backward_began(measured=False)
        self.writer.notes += self.losses.skipped(loss, number, frame, step)
        if self.losses.has_jumped or self.kept.last:
            self._look_again(loss, frame, step)
        self.kept.passed()
        if number is not None:
            return False
        self.curves.look(step)
        return self._note_news()

    def _look_again(self, loss: Tensor, backward: FrameType, step: int) -> None:
        """Keep the pass of a skipped step; if its loss has jumped, begin to look for the rows of that."""
        line = programs_line(backward)
        if line is None:
            return
        start = BackwardStart((loss,), (line.f_code, line.f_lineno), line)
        self.kept.backward_began(start, step, None)
        if self.losses.has_jumped:
            self.kept.keep_bad(start, step, None, began=True)
            self.steps_again.find_rows(start, step, self.losses.path_of(start))

    def skipped_gradients(self, places: tuple[ParameterSites, ...]) -> None:
        """Check the gradients of some parameters on a device, in a skipped step."""
        if self.losses.recorded == self.step():
            self.updates.check(places)

    def _note_news(self) -> bool:
        """Note the losses and gradients on devices that were not finite; returns whether there are any.

        See Note [Late news] in `kedge.watch.records.curves`.
        """
        news = self.curves.news
        if not news:
            return False
        self.writer.notes += self.losses.late(news)
        news.clear()
        return True

    def backward_ended(self, task: int) -> None:
        """Measure the gradients that a backward pass made."""
        passes = self.models.passes
        was_bad = self.updates.bad
        known = list(self.optimizers.known().values())
        if self.optimizers.leading is None:  # some may not have stepped yet
            known = [*{id(o): o for o in (*known, *self.optimizers.waiting())}.values()]
        reached = (o for o in known if passes.reached_by(task, params_of(o)))
        self.updates.backward_ended(reached)
        held = {id(param) for optimizer in known for param in params_of(optimizer)}
        self.by_hand.backward_ended(task, held, measured=self.measured)
        if self.updates.bad and not was_bad:
            at = began()
            self.writer.notes += self.losses.gradients_are_bad(
                at, self.step(), measured=self.measured
            )
            if not self.losses.bad:
                self.kept.keep_bad(at, self.step(), self.losses.scale, began=False)
                self.steps_again.find_operation(at, self.step(), self.losses.path_of(at))
        if self.measured:
            self.facts.gradients.backward_ended(passes)
            if not passes.are_settled:
                self.losses.checks.learn(began().tensors, task)

    def before_update(self, optimizer: Optimizer, entry: KnownOptimizer, *, closure: bool) -> bool:
        """Measure the gradients and parameters that an optimizer is about to use.

        Returns:
            Whether a guarded step is non-finite since this update.
        """
        if self.measured:
            step = self.step()
            self.writer.notes += self.facts.rates.before_step(step, optimizer, entry.index)
            self.writer.notes += self.facts.gradients.before_step(step, optimizer, entry.index)
            self.facts.shared.before_step(step, entry.index)
        bad = self.updates.bad
        norms = self.updates.before(optimizer, closure=closure)
        if norms is not None:
            self.facts.used.add(entry.index, norms, self.losses.scale)
        return self.updates.bad and not bad and not self.measured

    def after_update(self, optimizer: Optimizer) -> None:
        """Measure the changes that an optimizer has made."""
        self.updates.after(optimizer)
        if self.measured:
            self.states.after(optimizer)
            self.facts.gradients.stepped(optimizer)

    def forget(self, step: int) -> None:
        """Discard the values of the current step so far: they are no data."""
        self.meter.drop()
        self.curves.drop(step)
        self.losses.bad = False

    def end_step(self, step: int) -> bool:
        """Write the values of the step; returns whether something was non-finite, as far as is known by now."""
        bad = self.is_bad
        models = self.models
        self.writer.notes += self.steps_again.arrived()
        self.writer.notes += self.kept.write()
        self.writer.notes += self.first_step.close(step)
        if self.dump is not None:
            self.dump.step_ended(bad)
        models.find_parameters(lazy_only=True)
        models.wanted.check()
        if self.measured:
            models.passes.keep_first(self._groups)
            self.facts.step_ended(self.optimizers, models.roots, models.places)

        if self.times is not None:
            self.writer.notes += self.times.take(step)
        if self.logged.is_due():
            self.writer.notes += self.logged.take(step)
        written = self.measured or bad or self.curves.is_due()
        if written:
            self.curves.depart(step)  # with the tables that `flush` sends
        self.meter.flush(finite=not (self.measured or bad))
        if written:
            self.writer.write_curves(step)
        # Of steps on a device the news may be of an earlier one.
        return self._note_news() or bad

    def write_so_far(self, step: int) -> None:
        """Write what is known of the current step, waiting for all of it; the rest comes at its end."""
        self.curves.depart(step)
        self.meter.finish()
        self.writer.write_curves(step, wait=True)
        self.writer.notes += self.steps_again.arrived(wait=True)
        self.writer.notes += self.logged.take(step, wait=True)
        self.writer.write_notes()

    def _groups(self) -> list[list[ParameterSites]]:
        """Return the parameters of each root, and of each optimizer."""
        places = self.models.places
        groups = places.by_root()
        for optimizer in self.optimizers.known().values():
            groups.append(list(places.among(params_of(optimizer))))
        return groups

    def end(self, shield: WatchShield) -> list[LedgerLine]:
        """Write the rest; returns an entry for each site that never fired."""
        models = self.models
        step = self.step()
        by_hand = shield.attempt(_AT_THE_END, self.by_hand.end)
        self.writer.notes += by_hand or ()
        is_bad = shield.attempt(_LAST_LOSS, self._look_last, step)
        self.writer.notes += shield.attempt(_AT_THE_END, self.steps_again.end) or ()
        # Values after the last step belong to none: an evaluation, or half a round.
        is_partial = self.optimizers.leading is not None and not is_bad
        if is_partial:
            self.meter.drop()
        self.writer.notes += self.first_step.close(step)
        facts = shield.attempt(
            _AT_THE_END, self.facts.at_end, self.optimizers, models.roots, models.places
        )
        exam = shield.attempt(_AT_THE_END, self.exam.end, models.roots)
        idle = shield.attempt(_AT_THE_END, self.states.idle)
        if idle:
            say(idle)
        hooks = [root.hooks for root in models.roots]
        silent = shield.attempt(_SILENT, silent_sites, hooks, models.session) or []
        outside = shield.attempt(_SILENT, models.outside.silent) or []
        if not self.meter.sites.seats:  # then there is no recording that could tell
            for line in outside:
                say(f"{line.site} never fired: {line.cause}; {line.remedy}")
        silent += outside
        self.writer.notes += [*(facts or ()), *(exam or ()), *shield.notes()]
        if is_partial:
            self.curves.drop(step)
        if models.roots:
            self.writer.notes += self.logged.take(step, wait=True)
            if self.times is not None and not self.times.timed:
                say(f"no module was timed: {self.times.why_none()}")
        self.writer.finish(step)
        for event in self.kept.write(at_end=True):
            self.writer.log.event(event)
        return silent + unused(models.places)

    def _look_last(self, step: int) -> bool:
        """Look at all losses of the run, waiting for devices; returns whether this step is bad."""
        self.curves.depart(step)
        self.curves.arrive(wait=True)
        is_bad = self.is_bad or any(news.step == step for news in self.curves.news)
        self._note_news()
        return is_bad

    def close(self) -> None:
        """Remove every hook."""
        self.losses.lines.end()
        if self.times is not None:
            self.times.close()
        self.first_step.end()
        self.exam.close()
        self.facts.passes.close()
        self.losses.checks.close()
        if self.dump is not None:
            self.dump.close()

    def release(self) -> None:
        """Drop the entries of all sites, when everything is written."""
        sites = self.meter.sites
        sites.seats.clear()
        self.updates.release()
        self.by_hand.release()
        self.writer.release()
