"""Decides whether the hooks of measured steps leave compiled code in the other steps.

# Note [Two variants]
Dynamo compiles a model with the hooks that it finds, and checks for them at each call. So code that was compiled with the hooks
of measured steps compiles once more when they are out for the first time. Then there are two variants of it, and the kind of a
step decides which one runs, without compiling: the hooked code in measured steps, the program's own code in all others.

The first variant costs nothing besides, because the program's code has to be compiled in any case; so the first steps are
measured as those of any model. The second one takes the seconds that the first one took. It comes when the budget pays for
them. Until then the hooks stay, and their operators run in every step without measuring, which costs a little in each. When that
has added up to what the second variant costs, it comes, too: whatever the length of the run, both together take at
most twice the time that the better of the two would have taken.

The hooks stay for good where compiling again would fail, or where all processes must compile together: in a program that sets
`torch.compiler.set_stance`, `error_on_recompile` or `enable_compiler_collectives`, or limits of its own.
"""

from __future__ import annotations

from time import perf_counter

from kedge.hooks.firing.owner import Owner
from kedge.torch_internals import dynamo
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.costs import Costs


class CompiledSteps:
    """Decides whether hooks leave compiled code; see Note [Two variants].

    Args:
        session: The session of the hooks, which counts their operators.
        budget: Pays.
        costs: Knows what an operator costs.

    Attributes:
        two: Whether there is, or may be, code without the hooks by now.
        idle: Seconds that operators took in steps that are not measured.
    """

    def __init__(self, session: Owner, budget: Budget, costs: Costs) -> None:
        self.two, self.idle = False, 0.0
        self._session, self._budget, self._costs = session, budget, costs
        self._before = self._compiled = dynamo.compile_seconds()
        self._operators = 0
        self._out = self._late = False

    def charge(self, *, measured: bool) -> float:
        """Charge what compiled code took in the steps that have ended; returns what is part of a measured step."""
        if not dynamo.has_compiled():
            return 0.0
        compiled, operators = dynamo.compile_seconds(), self._costs.operators(self._session.in_graph - self._operators)
        if compiled > self._compiled == self._before and self._out:  # the program's first code is without the hooks
            self._late = self.two = True
        second = compiled - self._compiled if self.two and self._out is not self._late else 0.0
        self._operators, self._compiled = self._session.in_graph, compiled
        self._budget.charge_compiled(second)
        if measured:
            return operators
        self.idle += operators
        self._budget.charge_compiled(operators)
        return 0.0

    def keeps_hooks(self, *, measured: bool) -> bool:
        """Whether the hooks of measured steps are there in the next step, too."""
        stay = measured or (dynamo.has_compiled() and not self._may_leave())
        self._out = not stay
        return stay

    def _may_leave(self) -> bool:
        cost = self._compiled - self._before
        if not self.two and dynamo.may_compile_again():
            self.two = self.idle >= cost or self._budget.pays_for(cost, perf_counter())
        return self.two
