"""Decides whether the hooks of measured steps leave compiled code in the other steps.

# Note [Two variants]
Dynamo compiles a model with the hooks that it finds, and checks for them at each call. So code that
was compiled with the hooks of measured steps compiles once more when they are out for the first
time. Then there are two variants of it, and the kind of a step decides which one runs, without
compiling: the hooked code in measured steps, the program's own code in all others.

The first variant costs nothing besides, because the program's code has to be compiled in any case;
so the first steps are measured as those of any model. The second one takes the seconds that the
first one took. It comes when the budget pays for them. Until then the hooks stay, and their
operators run in every step without measuring, which costs a little in each. When that has added up
to what the second variant costs, it comes, too: whatever the length of the run, both together take
at most twice the time that the better of the two would have taken.

The hooks stay for good where compiling again would fail, or where all processes must compile
together: in a program that sets `torch.compiler.set_stance`, `error_on_recompile` or
`enable_compiler_collectives`, or limits of its own. A stance may be set when the hooks are out
already; see Note [Where nothing may be compiled] in `kedge.torch_internals.stance`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from kedge.hooks.firing.owner import Owner
from kedge.stderr import say
from kedge.torch_internals import dynamo
from kedge.torch_internals.stance import follow_stance, is_refusing, stance, unfollow_stance
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.shield import STEP, WatchShield

_STAYS = (
    'torch.compiler.set_stance("{stance}") allows no more compiling, and there is no code of '
    "the model without Kedge's hooks: they stay in it, also in steps that are not measured, "
    "which may cost more than --budget. Set the stance later, or before the first step"
)
_IS_OUT = (
    'torch.compiler.set_stance("{stance}") allows no more compiling, and there is code of the '
    "model only without Kedge's hooks: as long as it is set, what runs in that code is not "
    "measured. Set the stance later, after a measured step"
)


class CodeVariants:
    """The two variants of compiled code, of which one may not exist.

    See Note [Where nothing may be compiled].

    Args:
        place: Puts the hooks of measured steps in, or takes them out.
        shield: Runs this inside calls of the program.

    Attributes:
        hooked: Whether the hooks are in.
        refused: Whether the program has refused to have code without the hooks compiled.
    """

    def __init__(self, place: Callable[[bool], None], shield: WatchShield) -> None:
        self.hooked = True
        self.refused = False
        self.settle = shield.around(self._settle, STEP)
        self._try = shield.around(self._try_other, STEP)
        self._place = place
        self._said = False
        self._existing: set[bool] = set()
        self._frames = dynamo.frames()

    def choose(self, *, hooked: bool) -> bool:
        """Return whether the hooks are in during the next step, given whether they should be."""
        self._note()
        if dynamo.has_compiled():
            follow_stance(self)
        self.hooked = self._possible(hooked)
        return self.hooked

    def try_other(self, has_code: Callable[[], bool]) -> bool:
        """Put the hooks in, or take them out, if there is code of the current frame for that.

        Returns whether there is.
        """
        before = self.hooked
        self._try(has_code)
        return self.hooked is not before

    def close(self) -> None:
        """End to follow the stance."""
        unfollow_stance(self)

    def _settle(self) -> None:
        self._note()
        possible = self._possible(self.hooked)
        if possible is not self.hooked:
            self._switch()

    def _try_other(self, has_code: Callable[[], bool]) -> None:
        self._switch()
        if has_code():
            self._existing = {self.hooked}
            self._limit()
        else:
            self._switch()

    def _switch(self) -> None:
        self.hooked = not self.hooked
        self._place(self.hooked)

    def _possible(self, hooked: bool) -> bool:
        """Return whether the hooks can be in, given whether they should be."""
        if not is_refusing() or self._existing != {not hooked}:
            return hooked
        self._limit()
        return not hooked

    def _limit(self) -> None:
        """Report, once, that there is only one variant."""
        (hooked,) = self._existing
        self.refused |= hooked
        if not self._said:
            self._said = True
            text = _STAYS if hooked else _IS_OUT
            say(text.format(stance=stance()))

    def _note(self) -> None:
        """Note which variant has been compiled since the last time."""
        frames = dynamo.frames()
        if frames < self._frames:  # the program has discarded all code
            self._existing.clear()
            self._frames = 0
        if frames > self._frames:
            self._existing.add(self.hooked)
        self._frames = frames


class CompiledSteps:
    """Decides whether hooks leave compiled code; see Note [Two variants].

    Args:
        session: The session of the hooks, which counts their operators.
        budget: Pays.
        costs: Knows what an operator costs.
        variants: The variants of the code.

    Attributes:
        two: Whether there is, or may be, code without the hooks by now.
        idle: Seconds that operators took in steps that are not measured.
        variants: The variants of the code.
    """

    def __init__(
        self, session: Owner, budget: Budget, costs: Costs, variants: CodeVariants
    ) -> None:
        self.two = False
        self.idle = 0.0
        self.variants = variants
        self._session = session
        self._budget = budget
        self._costs = costs
        self._before = self._compiled = dynamo.compile_seconds()
        self._operators = 0
        self._late = False

    def charge(self, *, measured: bool) -> float:
        """Charge what compiled code took in the steps that have ended.

        Returns what is part of a measured step.
        """
        if not dynamo.has_compiled():
            return 0.0
        compiled = dynamo.compile_seconds()
        operators = self._costs.operators(self._session.in_graph - self._operators)
        self._operators = self._session.in_graph

        is_out = not self.variants.hooked
        if compiled > self._compiled == self._before and is_out:
            # The program's first code is without the hooks.
            self._late = self.two = True
        if self.two and is_out is not self._late:
            self._budget.charge_compiled(compiled - self._compiled)
        self._compiled = compiled
        if measured:
            return operators
        self.idle += operators
        self._budget.charge_compiled(operators)
        return 0.0

    def keeps_hooks(self, *, measured: bool) -> bool:
        """Whether the hooks of measured steps are there in the next step, too."""
        stay = dynamo.has_compiled() and not measured and not self._may_leave()
        return self.variants.choose(hooked=measured or stay)

    def _may_leave(self) -> bool:
        if self.variants.refused:
            return False
        cost = self._compiled - self._before
        if not self.two and dynamo.may_compile_again():
            self.two = self.idle >= cost or self._budget.pays_for(cost, perf_counter())
        return self.two
