"""What is done at a finding while the program runs.

# Note [When something is done]
Everything is done where an optimizer is about to step: parameters, their state and the random
numbers are whole there, and an error that is raised has the program's own line above it. Nothing is
done inside a backward pass, whose gradients the program may yet throw away, as a GradScaler does.

A loss or a gradient that is not finite is looked for there in every step, whatever the budget. All
other findings are those of the rules on the recording as it stands, which run at intervals. A step
with a closure computes its gradients itself: they are looked at when the closure first returns.

# Note [Whose failure]
Looking and judging are Kedge's work: if they fail, this is reported, and nothing is done any more.
Only what was ordered gets out of here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from kedge.errors import FindingRaised, TrainingStopped
from kedge.rules.paced_check import PAUSE, PacedCheck
from kedge.rules.registry import by_code, check
from kedge.rules.rule import Finding, Rule
from kedge.short_text import counted
from kedge.stderr import Shield, say
from kedge.store.events import SnapshotEvent, StepSkippedEvent
from kedge.store.follow import Follower
from kedge.store.recording import Recording
from kedge.torch_internals import device_graphs, dynamo
from kedge.torch_internals.own_work import own_work
from kedge.watch.acting.before_step import has_bad_gradients
from kedge.watch.acting.orders import (
    BEFORE_STEP,
    RAISE,
    SKIP,
    SNAPSHOT,
    STOP,
    Orders,
    actions_for,
    judges,
    looks_before_steps,
)
from kedge.watch.acting.set_aside import GradientsAside
from kedge.watch.kept.program_state import write_snapshot
from kedge.watch.records.record import TrainingRecord
from kedge.watch.steps.shield import WatchShield

_NONFINITE = "NAN-BORN"
_SHARE_OF_BUDGET = 1 / 3
"""The largest part of the budget that judging takes."""
_LOOKING = "looking at gradients before each step", "they are not looked at from here on"
_JUDGING = (
    "judging the run while it goes on",
    "what only the recording shows is not acted on from here on",
)
_LOCATING = "finding where a value was made", "messages do not say it"
_KEEPING = "a snapshot", "the program goes on, and no more are written"
_NOTING = "noting what was done", "the recording does not say it"


class StepMeasures(Protocol):
    """What measures a step that has turned out to be bad."""

    def measure_bad_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure the gradients and parameters that an optimizer is about to use."""


class Acting:
    """Acts on findings where an optimizer is about to step; see Note [When something is done].

    Args:
        orders: What is to be done.
        rules: The project's rules.
        record: The record of the run.
        shield: That of the watch.
        measures: Measures bad steps.
        place: Returns the folder of the recording; None as long as there is none.
        rank: The rank of this process.
        budget: The share of the time that watching may take; None for no limit.

    Attributes:
        seconds: Seconds that looking has taken.
    """

    def __init__(
        self,
        orders: Orders,
        rules: Sequence[Rule],
        record: TrainingRecord,
        shield: WatchShield,
        measures: StepMeasures,
        place: Callable[[], Path | None],
        rank: int = 0,
        budget: float | None = None,
    ) -> None:
        self.orders = orders
        self.record = record
        self.shield = shield
        self.measures = measures
        self.place = place
        self.rank = rank
        self.seconds = 0.0

        self._looks = looks_before_steps(orders)
        self._judges = judges(orders)
        own = {code: rule for code, rule in by_code(rules).items() if code in orders}
        asked = {rule.code: rule for rule in rules} | own
        self._nonfinite = by_code(rules)[_NONFINITE]
        others = [rule for code, rule in asked.items() if code not in BEFORE_STEP]
        pause = PAUSE
        if budget:
            pause = max(PAUSE, 1 / (budget * _SHARE_OF_BUDGET))
        self._checks = PacedCheck([self._nonfinite, *others], pause=pause)
        self._follower: Follower | None = None
        self._recording: Recording | None = None
        self._done: set[tuple[str, str]] = set()
        self._kept: set[str] = set()
        self._found_until = -1
        self._skipped = 0
        self._aside = GradientsAside()

        self._looking = Shield(*_LOOKING)
        self._judging = Shield(*_JUDGING)
        self._locating = Shield(*_LOCATING)
        self._keeping = Shield(*_KEEPING)
        self._noting = Shield(*_NOTING)

    def install(self) -> Iterable[RemovableHandle]:
        """Install the hooks, after those of the watch, and yield their handles."""
        yield register_optimizer_step_pre_hook(self._about_to_step)
        yield register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Say how many steps were skipped, or why nothing could be done."""
        optimizers = self.record.optimizers
        if optimizers.by_hand and not optimizers.entries:
            say("nothing was done at findings: it is done where an optimizer steps, and none did")
        if self._skipped:
            say(f"skipped {counted(self._skipped, 'optimizer step')} in all, for {_NONFINITE}")

    # -- the hooks --------------------------------------------------------------------

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Called before an optimizer steps; may return other arguments for the step."""
        shield = self.shield
        if is_compiling():
            dynamo.break_graph()  # the rest of this is not compiled
        if shield.in_child or shield.over or device_graphs.leaves_alone():
            return None
        self._aside.forget(optimizer)
        if self._judges and self._checks.is_due:
            self._act_on_others(optimizer)
        if not self._looks:
            return None
        changed = _with_closure(args, kwargs, lambda work: self._watched(work, optimizer))
        if changed is None and self._is_bad(optimizer):
            self._act_before(optimizer, args, kwargs)
        return changed

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Called after an optimizer has stepped."""
        if is_compiling():
            dynamo.break_graph()
        self._aside.put_back(optimizer)

    def _watched(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Return a closure whose gradients are looked at when it first returns."""
        was_called = False

        @wraps(closure)
        def watched() -> Any:
            nonlocal was_called
            loss = closure()
            is_first = not was_called
            was_called = True
            if is_first and self._is_bad(optimizer):
                self._act_before(optimizer, (optimizer, closure), {})
            return loss

        return watched

    # -- what is known ----------------------------------------------------------------

    def _is_bad(self, optimizer: Optimizer) -> bool:
        losses = self.record.losses
        start = perf_counter()
        with own_work():
            bad = self._looking(has_bad_gradients, optimizer, losses.last)
        self.seconds += perf_counter() - start
        return bool(bad)

    def _act_before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Do what is ordered at values that are not finite, before a step that would use them."""
        self.measures.measure_bad_step(optimizer, args, kwargs)
        step = self.record.step()
        actions = actions_for(self.orders, _unlocated(step))
        if actions == (SKIP,) and self._skipped:
            self._skip(optimizer)
            return
        found = self._locating(self.shield.alone, self._find_nonfinite, step)
        self._act(actions, found or _unlocated(step), optimizer)

    def _find_nonfinite(self, step: int) -> Finding | None:
        """Return what the rule says of this step, given all that is known of it.

        Of several steps with the same fault it names the first, which is not this one.
        """
        self.record.write_so_far(step)
        self._read()
        if self._recording is None:
            return None
        found = check(self._recording, [self._nonfinite])
        since, self._found_until = self._found_until, step
        news = [each for each in found if each.severity == "error" and since < each.step <= step]
        return max(news, key=lambda each: each.step, default=None)

    def _act_on_others(self, optimizer: Optimizer) -> None:
        """Judge the recording as it stands, and do what is ordered at new findings."""
        found = self._judging(self.shield.alone, self._checks.run, self._read)
        for finding in found or ():
            known = (finding.code, finding.site)
            is_here = not finding.ranks or self.rank in finding.ranks
            if finding.code in BEFORE_STEP or known in self._done or not is_here:
                continue
            self._done.add(known)
            actions = actions_for(self.orders, finding)
            self._act(actions, finding, optimizer)

    def _read(self) -> Recording | None:
        """Read on; return the recording so far, or None if there is none, or nothing new in it."""
        place = self.place()
        if place is None:
            return None
        if self._follower is None:
            self._follower = Follower(place)
        grown = self._follower.poll()
        self._recording = grown or self._recording
        return grown

    # -- what is done -----------------------------------------------------------------

    def _act(self, actions: Sequence[str], finding: Finding, optimizer: Optimizer) -> None:
        """Do what is ordered at a finding.

        Raises:
            TrainingStopped: The order is to stop.
            FindingRaised: The order is to raise.
        """
        when = f"before the optimizer's step {self.record.step()}"
        about = f"{finding.code}: {finding.message.removesuffix('.')}"
        if SNAPSHOT in actions and finding.code not in self._kept:
            self._kept.add(finding.code)
            folder = self._keeping(self._keep, finding.code, optimizer)
            if folder is not None:
                finding = finding.with_snapshot(folder.name)
                say(f"kept the program's state {when}, in {folder.name} ({about})")
        if SKIP in actions:
            say(f"skipped the optimizer's step {self.record.step()} ({about})")
            self._skip(optimizer)
        if STOP in actions:
            say(f"stopped {when} ({about})")
            raise TrainingStopped(finding)
        if RAISE in actions:
            raise FindingRaised(about, finding)

    def _skip(self, optimizer: Optimizer) -> None:
        self._skipped += 1
        self._aside.take(optimizer)
        index = self.record.optimizers.entry(optimizer).index
        event = StepSkippedEvent(step=self.record.step(), code=_NONFINITE, optimizer=index)
        self._noting(self.record.writer.log.event, event)

    def _keep(self, code: str, optimizer: Optimizer) -> Path | None:
        """Write a snapshot; return its folder, or None if there is no recording.

        Its time does not count as watching: it was ordered, and no measured step is to be given up
        for it.
        """
        step = self.record.step()
        # What is recorded so far makes the recording, if nothing else has.
        self.shield.alone(self.record.write_so_far, step)
        place = self.place()
        if place is None:
            return None
        name = f"snapshot-{step}"
        if self.rank:
            name += f"-{self.rank}"
        folder = place / name
        if not folder.exists():
            known = dict(self.record.optimizers.known())
            known[self.record.optimizers.entry(optimizer).index] = optimizer
            with own_work():
                write_snapshot(folder, step, self.record.models.roots, known)
        self.record.writer.log.event(SnapshotEvent(step=step, code=code, folder=name))
        return folder


def _with_closure(
    args: Any, kwargs: Any, watched: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> Any:
    """Return the arguments of a step with its closure replaced; None if it has none."""
    first, *given = args
    if given and callable(given[0]):
        return (first, watched(given[0]), *given[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": watched(kwargs["closure"])}
    return None


def _unlocated(step: int) -> Finding:
    """Return the finding that something is not finite, where the recording does not show what."""
    return Finding(
        code=_NONFINITE,
        severity="error",
        site="",
        step=step,
        message=(
            f"a gradient that the optimizer was about to use at step {step}, or the loss before it, "
            "was not finite"
        ),
    )


dynamo.untraced(Acting._about_to_step, Acting._stepped)
