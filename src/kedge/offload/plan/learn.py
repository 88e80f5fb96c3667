"""The planner that learns: a warm-up step, a timed step, and then a plan.

# Note [Phases]
In the first step rules are verified, memory grows and kernels are chosen, so its times are not
representative. The second step is timed. In both, every tensor is rebuilt, compressed or moved if
possible, so that they stay within a limit of memory if that can be reached. From the third step on
the plan is in force. A tensor that the plan does not know, or that is larger than planned, is
treated as in the first step, and the following step is timed again; a smaller one is treated as
planned. The calls of modules that may be run again are run again in both, and their tensors are not
seen. Before a plan that runs one of them only once, another timed step shows them.

A tensor that the plan keeps is also treated as in the first step if graphs of earlier
steps are still alive and hold so much that it would not fit. A plan for a limit of time is tried;
see Note [A promise] in `kedge.offload.plan.trial`.

# Note [Steps that differ]
A new plan is made of a timed step that has all that the former one lacked. If several in a row have
not, the former one holds again. So a program whose batches differ in length soon has a plan for
long ones. Where steps differ otherwise, as in a program that skips blocks at random, no plan knows
all of them: what made the plan anew some times does so no more, unless it is larger than ever, and
is treated as in the first step.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from kedge.errors import LimitOutOfReach, warn
from kedge.offload.engine.policy import Choice, Policy
from kedge.offload.outcomes import OffloadAccount, Outcome
from kedge.offload.plan.link import measured
from kedge.offload.plan.measured_step import MeasuredStep, SeenCall
from kedge.offload.plan.plan import OffloadPlan, PlanToCome, size
from kedge.offload.plan.solve import solve
from kedge.offload.plan.tables import CallKey, Limit, Link, StepTable, TensorKey
from kedge.offload.plan.timing import CallTimes, TimedCodec, TimedStore, Timings, timed_find
from kedge.offload.plan.trial import MARGIN, MeasuredSlowdown, Trial, has_room
from kedge.offload.stores.store import Store

_TRIALS = 8
"""Most trials that are begun: of programs whose batches differ, few come to an end."""
_WAITS = 4
"""The steps that are timed until one of them has what a plan lacked."""
_MISSES = 3
"""How often one tensor or call that a plan does not know makes it anew."""


class _Miss(NamedTuple):
    """What plans lacked, so far.

    Attributes:
        times: How often it made a plan anew.
        nbytes: The most bytes that it had.
    """

    times: int = 0
    nbytes: int = -1


class Learner:
    """The planner that chooses within a limit; see Note [Phases].

    Args:
        limit: The limit of memory or of time.

    Attributes:
        plan: The plan in force; None while it learns.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.plan: OffloadPlan | None = None
        self._timings = Timings()
        self._store: Store | None = None
        self._link: Link | None = None
        self._warm = False
        self._former: OffloadPlan | None = None
        self._misses: dict[TensorKey | CallKey, _Miss] = {}
        self._missing: dict[TensorKey | CallKey, int] = {}  # by this plan, with the bytes
        self._chosen: tuple[TensorKey, int] | None = None
        self._waited = 0
        self._warned = False
        self._room = math.inf  # for tensors kept by choice, whenever they were saved
        self._beyond = False
        self._account = OffloadAccount()
        self._counts: Counter[tuple[str | None, int]] = Counter()
        self._calls: Counter[str] = Counter()
        self._seen: dict[CallKey, SeenCall] = {}
        self._once: frozenset[CallKey] = frozenset()  # the calls that are not run again
        self._trial: Trial | None = None
        self._trials = _TRIALS
        self._failed = 0
        self._freed = math.inf  # at most, under a limit of time

    def equip(self, policy: Policy) -> Policy:
        """Return the policy with timed parts."""
        timings = self._timings
        self._store = policy.store
        timed = replace(policy, planner=self)
        if policy.find is not None:
            timed = replace(timed, find=timed_find(policy.find, timings))
        if policy.store is not None:
            timed = replace(timed, store=TimedStore(policy.store, timings))
        if policy.codec is not None:
            timed = replace(timed, codec=TimedCodec(policy.codec, timings))
        return timed

    def choose(self, path: str | None, index: int, nbytes: int) -> Choice:
        """Return the planned choice, or `Choice.ALL` while there is no plan."""
        call = self._timings.thread.call
        if call is None:
            nth = self._counts[path, index]
            self._counts[path, index] = nth + 1
            key = TensorKey(path, index, nth)
        else:
            key = call.key_of(path)
        if self.plan is None:
            self._timings.begin_tensor(key, nbytes)
            return Choice.ALL
        if self._keeps_all and self.plan.repeats:
            return Choice.KEEP  # where no call is run again, other tensors are saved than planned
        self._chosen = key, nbytes
        choice, known = self.plan.choices.get(key, (Choice.ALL, 0))
        if nbytes > known:
            self._miss(key, nbytes)
            return Choice.ALL
        if self._keeps_all:
            return Choice.KEEP
        self._beyond = choice is Choice.KEEP and self._account.staying + nbytes > self._room
        if self._beyond:
            return Choice.ALL
        return choice

    def plan_call(self, path: str) -> CallTimes:
        """Return what is planned for a call; one that is not known is run again."""
        nth = self._calls[path]
        self._calls[path] = nth + 1
        key = CallKey(path, nth)
        if key not in self._seen:
            self._miss(key, 0)
        again = key not in self._once and not self._keeps_all
        return CallTimes(key, self._timings, again=again)

    @property
    def _keeps_all(self) -> bool:
        """Whether everything is kept in this step, to compare it with the plan."""
        return self._trial is not None and self._trial.keeps

    def took(self, outcome: Outcome) -> None:
        """Record the outcome of the tensor chosen last."""
        if self._timings.current is not None:
            self._timings.end_tensor(outcome.group)
            return
        unplanned = outcome.group == "kept" and outcome.name != "planned"
        if self._chosen is not None and unplanned and not self._beyond:
            self._miss(*self._chosen)  # what is planned for it is not possible any more

    def turn(self, account: OffloadAccount) -> None:
        """End a step: plan, learn or keep the plan."""
        self._counts.clear()
        self._calls.clear()
        self._account = account
        if self._timings.started is not None:
            self._plan()
        elif not self._warm:
            self._warm = True
            self._learn()
        elif self._missing:
            self._waited = 0
            self._learn()
        elif self._trial is not None:
            self._trial.turn()
            if self._trial.is_over:
                self._judge(self._trial.measured())
        account.plan = self.shown

    @property
    def shown(self) -> OffloadPlan | PlanToCome:
        """The plan in force, or what prints that there is none yet."""
        return self.plan or PlanToCome(self.limit)

    def _miss(self, key: TensorKey | CallKey, nbytes: int) -> None:
        """Note what the plan does not know; see Note [Steps that differ]."""
        if self.plan is None:
            return
        known = self._misses.get(key, _Miss())
        if key not in self._missing and (known.times < _MISSES or nbytes > known.nbytes):
            self._misses[key] = _Miss(known.times + 1, max(nbytes, known.nbytes))
            self._missing[key] = nbytes

    def _learn(self) -> None:
        self._former = self.plan or self._former
        self.plan = self._trial = self._chosen = None
        self._timings.begin_step()

    def _lacks(self, table: StepTable) -> bool:
        """Whether a timed step has not all that the former plan lacked."""
        sizes: dict[TensorKey | CallKey, int] = {call.key: 0 for call in table.calls}
        sizes.update((each.key, each.nbytes) for each in table.candidates)
        return any(sizes.get(key, -1) < nbytes for key, nbytes in self._missing.items())

    def _plan(self) -> None:
        timings = self._timings
        ended = timings.clock.mark()
        store = self._store
        if store is not None and self._link is None and store.takes(timings.device):
            self._link = measured(store, timings.device)
            if self._link is None:
                # No room to measure it: another step as the first, then try again.
                self._learn()
                return

        table = MeasuredStep(timings, ended).table(self._link, self._seen)
        timings.end_step()
        if self._lacks(table) and self._former is not None:
            self._waited += 1
            if self._waited < _WAITS:
                self._learn()
                return
            self._missing.clear()
            self._adopt(self._former)
            return
        self._missing.clear()
        plan = solve(table, self.limit, self._freed)
        self._adopt(plan)
        if self.plan is None:
            return

        self._room = math.inf
        if plan.feasible and self.limit.memory is not None:
            _, kept = plan.bytes_of(Choice.KEEP)
            self._room = self.limit.memory - plan.peak + kept
        if not plan.feasible and not self._warned:
            self._warned = True
            warn(
                LimitOutOfReach(
                    f"{self.limit} is out of reach: although every possible measure is taken, "
                    f"{size(plan.peak)} of saved tensors stay in memory "
                    f"(of {size(table.nbytes)}). To lower this, use a destination "
                    "(to=kedge.Disk() or kedge.Cpu()), modules that are run again "
                    "(recompute=), a codec, a smaller min_bytes, a wider `where`, "
                    "or a smaller batch"
                )
            )

    def _adopt(self, plan: OffloadPlan) -> None:
        """Put a plan in force; one for a limit of time is tried if there is room.

        First, calls that it runs only once are seen in another timed step.
        """
        self._once = plan.once
        if not plan.is_known:
            self._learn()
            return
        self.plan = plan
        self._trial = None
        if plan.measured is not None:
            return
        if self.limit.slowdown is None or not plan.freed or not self._trials:
            return
        if has_room(plan.freed, self._timings.device):
            self._trials -= 1
            self._trial = Trial(self._timings.clock)

    def _judge(self, measured: MeasuredSlowdown) -> None:
        """Keep a plan that was tried, or make another for fewer bytes; see Note [A promise]."""
        plan = self.plan
        promised = self.limit.slowdown
        assert plan is not None  # noqa: S101 - what was tried
        assert promised is not None  # noqa: S101 - no plan for another limit is tried
        self._trial = None
        if measured.exceeded <= promised + MARGIN:
            self.plan = replace(plan, measured=measured.median)
            return

        self._failed += 1
        if self._failed == 1:
            self._freed = plan.freed * (promised - 1) / (measured.median - 1)
            smaller = solve(plan.table, self.limit, self._freed)
            if smaller.freed:
                self._adopt(smaller)
                return

        self._freed = 0.0
        self._adopt(solve(plan.table, self.limit, self._freed))
        warn(
            LimitOutOfReach(
                f"{self.limit} is out of reach: a step takes {measured.median:.2f} times as long "
                f"with {size(plan.freed)} of {size(plan.table.nbytes)} of saved tensors not kept, "
                "as measured in turns. Everything is kept from now on, so no memory is saved. "
                "Allow more, select fewer modules by `where`, or give max_memory= instead"
            )
        )
