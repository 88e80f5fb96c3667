"""The cost of watching: measuring and writing are timed, PyTorch's calls of hooks are estimated from a calibration."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from kedge.actions.measure.meter import Meter

_PER_EVENT, _PER_STEP, _PER_OPERATOR, _PER_OPERATION = 8.0, 30.0, 30.0, 4.0
"""What is not timed, in calls of an empty module hook: for one measured value, what PyTorch takes to call
the hook, and the hook to begin; for one step, what counting takes with cold caches; in compiled code,
what one operator takes; for one operation outside of modules, what a mode takes to pass it on. Measured
with models of 60 to 400 modules (convolutions, attention, LSTM cells): 4 to 25 a value, since the code of
hooks finds its caches cold.
"""


class Costs:
    """Adds up the cost of watching. As a ``with`` block it times the block; blocks may be nested.

    Args:
        meter: The meter, which times itself, on devices too.
        in_hooks: Returns the seconds that hooks have taken to measure values.
        others: Returns the seconds timed elsewhere.
    """

    def __init__(
        self,
        meter: Meter,
        in_hooks: Callable[[], float] = lambda: 0.0,
        others: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.meter, self.in_hooks, self.others = meter, in_hooks, others
        self._began, self._unit = perf_counter(), 0.0
        self._timed = self._block_began = 0.0
        self._depth = 0
        self._charged = self._charged_on_device = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._block_began = self._now()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._timed += self._now() - self._block_began

    def end_interrupted(self) -> None:
        """End a block that an interrupt has left open, without its time; to be called outside of all blocks."""
        self._depth = 0

    def _now(self) -> float:
        """Return the time, without that of measuring."""
        return perf_counter() - self.measuring

    @property
    def measuring(self) -> float:
        """Seconds that measuring values has taken, without what PyTorch takes to call the hooks."""
        return self.meter.seconds + self.in_hooks()

    @property
    def timed(self) -> float:
        """Seconds of all blocks so far, an active one included."""
        return self._timed + (self._now() - self._block_began if self._depth else 0.0)

    def begin(self) -> None:
        """Calibrate."""
        self._unit = _unit()

    @property
    def passed(self) -> float:
        """Seconds since the watcher was made."""
        return perf_counter() - self._began

    @property
    def per_step(self) -> float:
        """Seconds that counting a step takes."""
        return _PER_STEP * self._unit

    def operators(self, count: int) -> float:
        """Return the seconds that compiled code takes to run a number of Kedge's operators."""
        return _PER_OPERATOR * count * self._unit

    def operations(self, count: int) -> float:
        """Return the seconds that passing on a number of operations outside of modules takes."""
        return _PER_OPERATION * count * self._unit

    @property
    def uncharged(self) -> float:
        """Seconds that are not charged yet, without those of counting steps."""
        called = _PER_EVENT * self.meter.events * self._unit
        return self.timed + self.others() + self.measuring + called - self._charged

    def charge(self) -> float:
        """Return the seconds since the last call."""
        seconds = self.uncharged
        self._charged += seconds
        return seconds

    def charge_device(self) -> float:
        """Return the seconds that measuring took on devices since the last call; they are known later."""
        before, self._charged_on_device = (
            self._charged_on_device,
            self.meter.finished.device_seconds,
        )
        return self._charged_on_device - before


def _unit() -> float:
    """Return an estimate of the seconds that PyTorch takes to call a module hook: some 20 calls of a Python function.

    No module is called for it, as the program may have hooks on all of them.
    """
    rounds = []
    for _ in range(5):
        start = perf_counter()
        for _ in range(50):
            _nothing()
        rounds.append((perf_counter() - start) / 50)
    return 20 * min(rounds)


def _nothing() -> None:
    """Empty function to time."""
