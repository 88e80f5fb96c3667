"""Statistics instead of values: `measure`.

A value goes from `Meter` into the tables of the current step (`kedge.actions.measure.values`), at
the end of the step to the finished ones (`finished`), and from there to a sink, or to the steps
that are kept to be read (`results`).

# Note [Rows of leaves]
The tensors of one output or input mean different things: an LSTM's output and its cell state, a
query and a mask. So the row of ``rnn:out`` is that of the first, and each other one has a row under
its own name, ``rnn:out[1.0]`` or ``attn:in[key]``, also for gradients. The first is that of the
forward, in whichever order gradients arrive. There may be hundreds: those after the first few share
one row, ``[rest]``. The tensors of an optimizer's state all have rows under their own names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.finished import FinishedSteps
from kedge.actions.measure.host import HostTable
from kedge.actions.measure.results import KeptSteps, MeasuredValues
from kedge.actions.measure.site_table import MeasuredSite, SiteTable, role_of
from kedge.actions.measure.values import StepValues
from kedge.actions.naming import check_kept, each_operation
from kedge.calls.arguments import called_as, described
from kedge.calls.not_a_block import NotABlock
from kedge.errors import WrongCall
from kedge.flow import Act, Event
from kedge.native import What
from kedge.sites.site import Site
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals import device_graphs, modes

Measure = Callable[..., None]

_APART = frozenset({"out", "out.grad", "in", "in.grad", "state"})
"""The kinds of sites whose leaves have rows of their own."""
_MOST_LEAVES = 8
"""Most leaves of one value that have; further ones share the row `_REST`."""
_REST = "rest"


class Meter(NotABlock, MeasuredValues):
    """The action that `measure` returns: reduces values on their device, into one table a step.

    Attributes:
        draws: Whether elements are drawn from each value.
        sites: The sites that have fired.
        kept: The results, unless `finished` has another sink.
        finished: Passes on the steps that have ended.
        seconds: Seconds that it took to measure those that came with an event.
        lock: Held while a value goes the long way.
    """

    _instead = (
        "it is an action, for a hook: "
        'with kedge.hook(model, "**", kedge.measure()) as stats: model(images)'
    )
    observes = True

    def __init__(
        self, what: What = "full", *, keep: int | None = 1000, recomputes: bool = False
    ) -> None:
        self.what = what
        self.recomputes = recomputes
        host = HostTable()
        self._level = FULL
        self._muted = False
        self.draws = False
        self.sites = SiteTable(host.saturates)
        self.kept = KeptSteps(keep)
        self.finished = FinishedSteps(self.kept)
        self._values = StepValues(self.sites, host, self.finished.departures)
        self.seconds = 0.0
        self.lock = threading.RLock()
        self._events = 0
        self._makers: dict[tuple[str, bool], Callable[[Site], Measure]] = {}
        self._rows_of_leaves: dict[Site, dict[str, str]] = {}

    def __repr__(self) -> str:
        """The call that makes this action."""
        return f"measure({self.what!r})"

    @property
    def level(self) -> int:
        """`FULL`, `LIGHT` or 0: how much is measured of the next step's values."""
        return self._level

    @level.setter
    def level(self, level: int) -> None:
        self._level = level
        self._values.host.close_step()

    @property
    def muted(self) -> bool:
        """Whether forward values are not measured."""
        return self._muted

    @muted.setter
    def muted(self, muted: bool) -> None:
        self._muted = muted
        self._values.host.close_step()

    @property
    def events(self) -> int:
        """How many values came."""
        return self._events + self._values.host.measured

    def bind(self, site: Site) -> Act:
        """Return the function that measures a site's values, those of each operation separately."""
        if site.op is None:
            return self._timed(self._measure_at(site))
        return each_operation(site, lambda operation: self._timed(self._measure_at(operation)))

    def _timed(self, measure: Measure) -> Act:
        """Return the function that measures a value that comes with an event; the hooks time others themselves."""

        def act(value: Tensor, event: Event) -> None:
            start = perf_counter()
            measure(value, event.step, event.site.leaf or "")
            self.seconds += perf_counter() - start

        return act

    def bind_value(self, site: Site) -> Measure | None:
        """Return the function that measures values without an event.

        It is None for operations, which the event identifies.
        """
        if site.op is not None:
            return None
        return self._measure_at(site)

    def _measure_at(self, site: Site) -> Measure:
        kind = site.kind, site.leaf is None
        if kind not in self._makers:
            self._makers[kind] = self._maker(site)
        return self._makers[kind](site)

    def _maker(self, like: Site) -> Callable[[Site], Measure]:
        """Return what makes the functions of all sites of a kind, which share all that is its own.

        See Note [The short way] in `measurer.c`.
        """
        forward = not like.is_gradient
        role = role_of(like)
        values = self._values
        short_way = values.host.short_way
        apart = like.leaf is None and like.kind in _APART

        def at(site: Site) -> Measure:
            seat: MeasuredSite | None = None
            rows: dict[str, str] | None = None
            others: dict[str, Measure] = {}

            def measure(value: Tensor, step: int, leaf: str, done: int) -> int | None:
                nonlocal seat, rows
                level = self.level
                if not level or (self.muted if forward else level == LIGHT) or modes.is_under_jit():
                    return None
                if leaf and apart:
                    if rows is None:
                        rows = self._rows_of(site)
                    name = rows.get(leaf)
                    if name is None:
                        name = _row_of(leaf, rows)
                    if name:
                        if name not in others:
                            others[name] = self._measure_at(site.at(leaf=name))
                        others[name](value, step)
                        return None
                with self.lock:
                    values.host.close_step()
                    if step != values.step:
                        if not value.is_cpu and device_graphs.leaves_alone():
                            return None
                        self._begin(step)
                    if seat is None:
                        seat = values.observe_first(site, value)
                    elif done:
                        values.settle(seat, value, done, draws=values.draws)
                    else:
                        values.observe(seat, value)
                    self._open_step()
                self._events += 1
                if seat.is_special:
                    return None
                return seat.id

            return short_way(role, not forward, modes.is_under_jit, measure)

        return at

    def _open_step(self) -> None:
        """Let the values that come go the short way, as the level has it.

        Another thread may change that meanwhile, which closes the step; it needs no lock, which in
        a forked process a thread may hold that is not there.
        """
        values = self._values
        level = self._level
        muted = self._muted
        values.host.open_step(values.step, values.code, values.draws, not muted, level != LIGHT)
        if level != self._level or muted != self._muted:
            values.host.close_step()

    def note_leaf(self, site: Site) -> None:
        """Note, in the forward, that a leaf comes at a site, or will with a gradient.

        The first of all names the row.
        """
        if site.kind in _APART and site.leaf is not None:
            _row_of(site.leaf, self._rows_of(site))

    def _rows_of(self, site: Site) -> dict[str, str]:
        """Return the names of rows by leaf, of one side of a module; see Note [Rows of leaves]."""
        side = replace(site, kind=site.kind.removesuffix(".grad"), leaf=None)
        rows = self._rows_of_leaves.setdefault(side, {})
        if site.kind == "state":
            rows[""] = ""  # none of its tensors is the first
        return rows

    def observe_all(
        self, seats: Sequence[MeasuredSite], values: Sequence[Tensor], step: int
    ) -> None:
        """Measure one value for each of many sites that belong to no module.

        That is one native call where possible.
        """
        with self.lock:
            if step != self._values.step:
                self._begin(step)
            self._values.observe_all(seats, values)

    def add_squares(
        self,
        seats: Sequence[MeasuredSite],
        step: int,
        counts: Sequence[int],
        squares: Sequence[float | Tensor],
    ) -> None:
        """Add known sums of squares, one a site.

        Args:
            seats: The sites.
            step: The step.
            counts: How many numbers each sum is of.
            squares: The sums; one that is on a device is not read.
        """
        with self.lock:
            if step != self._values.step:
                self._begin(step)
            self._values.add_squares(seats, counts, squares)

    def _begin(self, step: int) -> None:
        if self._values.step >= 0 or self.finished:  # values of another step are left
            self.flush()
        what: What = "norm" if self.level == LIGHT else self.what
        self._values.begin(step, what, level=self.level, draws=self.draws)

    def spoiled(self) -> bool:
        """Whether this step has non-finite values.

        It is true on a GPU if the step has any values, because reading them would wait.
        """
        return self._values.spoiled()

    def withdraw(self, site: Site) -> None:
        """Discard this step's last measurement at a site, of a part of the value that comes."""
        with self.lock:
            seat = self.sites.seats.get(site)
            if seat is not None:
                self._values.withdraw(seat.id)

    def drop(self, seats: Sequence[MeasuredSite] | None = None) -> None:
        """Discard this step's measurements, at some sites or at all."""
        ids = None
        if seats is not None:
            ids = {seat.id for seat in seats}
        with self.lock:
            self._values.drop(ids)

    def flush(self, *, finite: bool = False) -> None:
        """End the step: start copying its tables to the host, and pass on those that have arrived.

        Args:
            finite: Whether all was finite in a step without measurements, so that non-finite values
                later are news.
        """
        with self.lock, reduce.plainly():
            self.finished.add(self._values.end(), finite=finite)

    def finish(self) -> None:
        """Pass everything on, waiting for the copies still in progress."""
        with self.lock:
            self.flush()
            self.finished.pass_on()


def _row_of(leaf: str, rows: dict[str, str]) -> str:
    """Return the name of the row of a leaf, which may be new; see Note [Rows of leaves]."""
    if leaf in rows:
        return rows[leaf]
    if len(rows) > _MOST_LEAVES:
        return _REST
    name = ""
    if rows:
        name = leaf
    rows[leaf] = name
    return name


@called_as('with kedge.hook(model, "layer4", kedge.measure()) as stats: model(x)')
def measure(
    what: What = "full",
    *,
    keep: int | None = 1000,
    recomputes: bool = False,
) -> Meter:
    """Measure statistics of the value in each step: an action for `kedge.hook`.

    There is one row of statistics for each site and step; several calls and passes of one step are
    merged. Of several tensors in an output or input, ``"lstm"`` is the first, and the others have
    their own names, such as ``"lstm[1.0]"``. Nothing waits for the device. ``stats["layer4"].rms``
    reads the newest step, ``stats.records("layer4")`` returns all steps, and ``print(stats)``
    prints a table of the newest step.

    Args:
        what: "full" for the count, sum, sum of squares, smallest and largest value, and the numbers
            of non-zero and non-finite elements; "norm" for the sum of squares; "finite" for the
            sum, which is finite if every element is.
        keep: The number of steps to keep; None for all.
        recomputes: Whether to measure values again when a checkpoint recomputes its forward.

    Returns:
        The action.

    Raises:
        WrongCall: If `what` is unknown, or `keep` is not a number, or below 1.

    Examples:
        >>> with kedge.hook(model, "**", kedge.measure()) as stats:
        ...     output = model(images)
        >>> stats["relu"].min
        0.0
    """
    if not isinstance(what, str) or what not in native.CODES:
        raise WrongCall(
            f"measure({described(what)}) is unknown; use 'full', 'norm' or 'finite'; the place comes "
            'before it, as in kedge.hook(model, "layer4", kedge.measure())'
        )
    check_kept("measure", keep)
    return Meter(what, keep=keep, recomputes=recomputes)
