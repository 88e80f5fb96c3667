"""The operations outside of modules that a watch records, such as the loss of a training loop.

# Note [Operations in measured steps]
What sees them costs time at each operation of the program's own code, and two empty hooks at each
call of a module. So it is there in measured steps, and out in all others, as the hooks of modules
are; see Note [Parked hooks] in `kedge.watch.models.parked_hooks`. An operation that only other
steps have is not seen.

# Note [Numbers in a step]
Operations of a name count from 0 at the first call of a model for training in each step; where no
model is called, at the beginning of the step. So neither what comes before the training nor an
evaluation in it changes the numbers. What was measured before the first such call is dropped: it
belongs to no step.
"""

from __future__ import annotations

from kedge.actions.measure.meter import Meter
from kedge.hooks.operations.outside import OutsideSwitch
from kedge.hooks.session import Session
from kedge.sites.select import Selector
from kedge.store.events import LedgerLine
from kedge.torch_internals.graph_task import in_backward
from kedge.watch.models.root_hooks import silent_entry
from kedge.watch.step import Step


class OperationsOutside:
    """The operations outside of modules of a watched program.

    Args:
        session: Holds their hooks.
        meter: Measures them.
        selector: Selects them; None for none.
    """

    def __init__(self, session: Session, meter: Meter, selector: Selector | None) -> None:
        self.session = session
        self.meter = meter
        self.selector = selector
        self._switch: OutsideSwitch | None = None
        self._calls_models = False
        self._counts_anew = True
        self._is_seen = True
        self._is_late = False

    def begin(self) -> None:
        """Hook them on this thread."""
        if self.selector is not None:
            self.session.hook(str(self.selector), self.meter)
            self._switch = self.session.outside[None]
            self._switch.operations.runs = "in measured steps the code outside of modules"

    @property
    def passed(self) -> int:
        """How many calls of PyTorch were passed on while operations were seen."""
        if self._switch is None:
            return 0
        return self._switch.mode.passed

    def begin_step(self, step: Step) -> None:
        """See them in a step that is measured, or keeps its hooks for the sake of compiled code."""
        if self._switch is None:
            return
        self._is_seen = step.hooked
        self._place(self._switch)
        self._counts_anew = True
        if not self._calls_models:
            self._switch.mode.end_pass()

    def _place(self, switch: OutsideSwitch) -> None:
        """Have operations seen or not: at the next pass of a model, too, if a backward pass keeps its modes."""
        self._is_late = in_backward()
        if self._is_seen:
            switch.back()
        else:
            switch.out()

    def pass_began(self) -> None:
        """Count from 0, if the pass of a model that begins is the first; see Note [Numbers in a step]."""
        if self._switch is None:
            return
        if self._is_late:
            self._place(self._switch)
        if self.meter.muted:
            self._counts_anew = True
        elif self._counts_anew:
            self._counts_anew = False
            self._switch.mode.end_pass()
            if not self._calls_models:
                self._calls_models = True
                seats = self.meter.sites.seats.values()
                self.meter.drop([seat for seat in seats if seat.site.op is not None])

    def silent(self) -> list[LedgerLine]:
        """Return an entry with the cause for each of them that never fired."""
        if self._switch is None:
            return []
        gates = {id(gate) for gate in self._switch.operations.gates}
        own = [tap for tap in self.session.taps if id(tap.gate) in gates]
        return [silent_entry(tap, self.session) for tap in own if not tap.fired]
