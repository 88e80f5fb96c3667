"""The action that keeps values: `record`."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from kedge.actions.naming import check_kept, meant, names_of
from kedge.calls.arguments import called_as
from kedge.calls.not_a_block import NotABlock
from kedge.errors import NotRecorded, Overwritten, SeveralRecorded
from kedge.flow import Act, Event, Record, Schedule
from kedge.kept_tensor import KeptTensor
from kedge.notebook import Table
from kedge.sites.language import single
from kedge.sites.leaves import shape_of, storage_of, untransformed
from kedge.sites.names import kind_meant
from kedge.sites.site import Site, short
from kedge.torch_internals.modes import is_batched

_PRUNE = 1_000
_ADOPTED = frozenset({"param.grad", "param.acc", "grad", "acc", "state"})
"""Gradients whose memory autograd uses for ``.grad``, and what optimizers keep.

The next backward or step, clipping and zeroing overwrite it.
"""


_arrivals = itertools.count()


class RecordedTensor(KeptTensor):
    """One recorded tensor, its event, and its number in the order in which all recorded tensors came."""

    __slots__ = ("arrival", "event")

    def __init__(self, event: Event, value: Tensor, *, copied: bool) -> None:
        super().__init__(value, copied=copied)
        self.event = event
        self.arrival = next(_arrivals)

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            Overwritten: If the program changed its memory after it was recorded.
        """
        if self.overwritten:
            raise Overwritten(
                f"{name_of(self.event)} was recorded, but the program then changed the tensor "
                "in place, so its value is gone; record(copy=True) keeps a copy"
            )
        return self.value


class RecordedPass(NamedTuple):
    """The number of a value's forward (for a gradient: of its backward), and its thread."""

    number: int
    replica: str


class NewestPasses:
    """The newest passes of one model of which a recorder has values.

    A mapping has the values of the newest pass, as Note [The newest pass] defines it. A gradient is
    old if both are: its backward, and its forward. So two losses of one forward may be
    differentiated one after the other, and one backward may go through several forwards.

    Attributes:
        passes: The model's pass counter.
        forward: The newest forward pass with values, by thread.
        backward: The newest backward pass with gradients.
    """

    def __init__(self, passes: PassesOfModel) -> None:
        self.passes = passes
        self.forward: dict[str, int] = {}
        self.backward = -1

    def note(self, event: Event, *, gradient: bool) -> None:
        """Count the pass of a new value."""
        if gradient:
            self.backward = max(self.backward, event.backward)
            self.passes.differentiate(event)
        elif event.pass_ > self.forward.get(event.replica, -1):
            self.forward[event.replica] = event.pass_

    def is_old(
        self,
        event: Event,
        *,
        gradient: bool,
        due: Callable[[int], bool],
    ) -> bool:
        """Whether the pass of a value is over and a newer one was to be recorded.

        Args:
            event: The event of the value.
            gradient: Whether it is a gradient.
            due: Whether the site was to be recorded in a step.
        """
        end = self.passes.end_of(event)
        if end is None:
            return False
        if gradient:
            return event.backward < self.backward and event.pass_ < end.differentiated
        return due(end.step) or end.pass_ <= self.forward.get(event.replica, -1)


class SiteRecords:
    """The kept values of one site: those of its last passes.

    Attributes:
        site: The site.
        keep: The number of passes to keep; None for all.
        batches: The values by pass.
        taps: The taps that record here.
        newest: The newest passes of the site's model; None for a tensor that belongs to none.
        overwritten: Whether the forward overwrites its values later, so that they are copied.
    """

    def __init__(self, site: Site, keep: int | None) -> None:
        self.site = site
        self.keep = keep
        self.batches: OrderedDict[RecordedPass, list[RecordedTensor]] = OrderedDict()
        self.taps: list[RecordingTap] = []
        self.overwritten = False
        self.newest: NewestPasses | None = None

    def put(self, kept: RecordedTensor) -> None:
        """Add a value; the first value of a new pass removes the oldest pass."""
        event = kept.event
        gradient = self.site.is_gradient
        if self.newest is not None:
            self.newest.note(event, gradient=gradient)
        batch = RecordedPass(event.backward if gradient else event.pass_, event.replica)
        values = self.batches.get(batch)
        if values is not None:
            values.append(kept)
            return
        self.batches[batch] = [kept]
        if self.keep is not None:
            everything = list(self.batches)  # other threads add to it
            same = [one for one in everything if one.replica == batch.replica]
            for old in same[: -self.keep]:
                del self.batches[old]

    def latest(self) -> list[RecordedTensor]:
        """The values of the newest pass of each thread.

        There are none if the site has only values of older ones.
        """
        newest = self.newest
        last = self.last()
        if newest is None:
            return last
        is_old = partial(newest.is_old, gradient=self.site.is_gradient, due=self.due)
        return [kept for kept in last if not is_old(kept.event)]

    def last(self) -> list[RecordedTensor]:
        """The values of the newest pass of each thread that has any here."""
        last = {batch.replica: values for batch, values in list(self.batches.items())}
        return list(itertools.chain(*last.values()))

    def due(self, step: int) -> bool:
        """Whether an action still records here, and does in a step."""
        return any(tap.is_attached and (tap.when is None or tap.when(step)) for tap in self.taps)

    def all(self) -> list[RecordedTensor]:
        """Every value, in order of arrival."""
        return list(itertools.chain(*self.batches.values()))


class PassThatEnds(Protocol):
    """A call by the program that ended values of an older one."""

    pass_: int
    step: int
    differentiated: int


class PassesOfModel(Protocol):
    """What counts the passes of a model."""

    def differentiate(self, event: Event) -> None:
        """Note that a gradient came."""

    def end_of(self, event: Event) -> PassThatEnds | None:
        """Return what ended a value of an older pass; None if the value is new."""

    def add_holder(
        self, holder: weakref.ref[Callable[[frozenset[int]], list[tuple[str, int]]]]
    ) -> None:
        """Ask for the path and the pass of the values that are kept in some storages."""


class RecordingTap(Protocol):
    """The tap of a recorder at one site."""

    site: Site
    when: Schedule | None

    @property
    def is_attached(self) -> bool:
        """Whether it can still fire."""


class Recorder(NotABlock):
    """The action that `record` returns: keeps values and returns them by name."""

    _instead = (
        "it is an action, for a hook: "
        'with kedge.hook(model, "layer4", kedge.record()) as acts: model(images)'
    )
    observes = True
    keeps = True

    def __init__(self, *, copy: bool, keep: int | None, recomputes: bool) -> None:
        self.copy = copy
        self.keep = keep
        self.recomputes = recomputes
        self.by_site: dict[Site, SiteRecords] = {}
        self._by_path: dict[str, list[SiteRecords]] = {}
        self._by_storage: dict[int, list[weakref.ref[RecordedTensor]]] = {}
        self._remembered = 0
        self._prune_at = _PRUNE
        self._overwrites = False
        self._newest: dict[int, NewestPasses] = {}

    def __repr__(self) -> str:
        """The call that makes this action."""
        given = []
        if self.copy:
            given.append(f"copy={self.copy}")
        if self.keep != 1:
            given.append(f"keep={self.keep}")
        if self.recomputes:
            given.append(f"recomputes={self.recomputes}")
        return f"record({', '.join(given)})"

    def bind(self, site: Site) -> Act:
        """Return the function that keeps the values of one site."""
        records = self.by_site.get(site)
        if records is None:
            records = SiteRecords(site, self.keep)
            self.by_site[site] = records
            self._by_path.setdefault(site.path, []).append(records)
        copied = self.copy or site.kind in _ADOPTED

        def keep(value: Tensor, event: Event) -> None:
            # A transform's wrapper is invalid after the transform.
            if is_batched(value):
                alias = untransformed(value).detach()
            else:
                alias = untransformed(value.detach())
            kept = RecordedTensor(event, alias, copied=copied or records.overwritten)
            records.put(kept)
            if self._overwrites:
                self._remember(kept)

        return keep

    def follow(self, tap: RecordingTap, passes: PassesOfModel) -> None:
        """Compare the passes of a site's values with those of its model from now on."""
        records = self.by_site[tap.site]
        records.taps.append(tap)
        newest = self._newest.get(id(passes))
        if newest is None:
            newest = NewestPasses(passes)
            self._newest[id(passes)] = newest
            passes.add_holder(weakref.WeakMethod(self._held_in))
        records.newest = newest

    def _held_in(self, storages: frozenset[int]) -> list[tuple[str, int]]:
        """Return the path and the pass of each newest value that is kept in one of these storages."""
        found = []
        for records in list(self.by_site.values()):
            if records.site.is_gradient:
                continue
            here = [kept for kept in records.last() if storage_of(kept.value) in storages]
            found += [(kept.event.site.path, kept.event.pass_) for kept in here]
        return found

    def withdraw(self, site: Site) -> None:
        """Drop the newest value of a site, which was a part of the one that comes."""
        batches = self.by_site[site].batches
        newest = next(reversed(batches), None)
        if newest is not None:
            batches[newest].pop()
            if not batches[newest]:
                del batches[newest]

    def _remember(self, kept: RecordedTensor) -> None:
        """Index a kept value by its storage, with a weak reference, so that a dropped value is freed."""
        self._by_storage.setdefault(storage_of(kept.value), []).append(weakref.ref(kept))
        self._remembered += 1
        if self._remembered > self._prune_at:
            alive: dict[int, list[weakref.ref[RecordedTensor]]] = {}
            for storage, refs in self._by_storage.items():
                left = [ref for ref in refs if ref() is not None]
                if left:
                    alive[storage] = left
            self._by_storage = alive
            self._remembered = sum(map(len, self._by_storage.values()))
            self._prune_at = 2 * self._remembered + _PRUNE

    def expect_overwrites(self, site: Site) -> None:
        """Copy the values of a site when they are recorded, because the forward overwrites them later."""
        self.by_site[site].overwritten = True

    def watch_overwrites(self) -> None:
        """Index kept values by storage from now on, if the model works in place somewhere."""
        self._overwrites = True

    def preserve(self, storages: Iterable[int]) -> None:
        """Copy the kept values of some storages; called before a module works on them in place."""
        for storage in storages:
            for ref in self._by_storage.pop(storage, ()):
                kept = ref()
                if kept is not None:
                    kept.preserve()

    def read(self, name: str, why: Callable[[str], str]) -> Tensor:
        """Return the tensor of a name; see `kedge.hooks.handle.Hooked.__getitem__`."""
        found = self._find(name, SiteRecords.latest)
        if len(found) > 1:
            raise SeveralRecorded(_several(name, found))
        if found:
            return found[0].read()

        term = single(name)
        whole = str(replace(term, leaf=None, call=None))
        there = [f'"{name_of(kept.event)}"' for kept in self._find(whole, SiteRecords.latest)]
        if not there:
            old = self._find(name, SiteRecords.last)
            if old:
                raise NotRecorded(_only_older(name, old[-1]))
            raise NotRecorded(f'nothing was recorded under "{name}": {why(name)}')
        cause = f"the site has {', '.join(there[:8])}"
        if term.leaf is not None and Site("", term.kind or "out").is_gradient:
            cause += f"; {why(name)}"
        raise NotRecorded(f'nothing was recorded under "{name}": {cause}')

    def records(self, name: str) -> list[Record]:
        """Return every kept record of a name, in order of arrival."""
        return [Record(kept.event, kept.read()) for kept in self._find(name, SiteRecords.all)]

    def names(self) -> list[str]:
        """Return the name of each value of the newest pass, in the order in which they came."""
        return list(self._named())

    def table(self, names: Collection[str] | None = None) -> Table:
        """Return a table of the values, of some names or of all.

        It has their shapes and types, and how many are kept.
        """
        named = self._named()
        old: dict[str, None] = {}
        if names is None:
            names = named.keys()
            for records in list(self.by_site.values()):
                if records.batches and not records.latest():
                    old[short(records.site)] = None
        rows = []
        lost = []
        for name in names:
            first = named[name][0]
            shape = list(shape_of(first.value))
            dtype = str(first.value.dtype).removeprefix("torch.")
            rows.append((name, shape, dtype, len(self._find(name, SiteRecords.all))))
            if first.overwritten:
                lost.append(name)

        notes = []
        if lost:
            notes.append(
                f"overwritten by the program: {', '.join(lost)}; record(copy=True) keeps copies"
            )
        if old:
            notes.append(f"only of older passes, which .records() returns: {', '.join(old)}")
        elif not rows:
            notes.append("nothing is recorded yet")
        return Table(("site", "shape", "dtype", "kept"), rows, "mllr", "; ".join(notes))

    def _repr_html_(self) -> str:
        """The table of the values, for a notebook."""
        return self.table().html()

    def _named(self) -> dict[str, list[RecordedTensor]]:
        kept = _once([records.latest() for records in list(self.by_site.values())])
        kept.sort(key=lambda one: one.arrival)
        names = names_of(one.event for one in kept)
        named: dict[str, list[RecordedTensor]] = {}
        for name, one in zip(names, kept, strict=True):
            named.setdefault(name, []).append(one)
        return named

    def _find(
        self, name: str, of: Callable[[SiteRecords], list[RecordedTensor]]
    ) -> list[RecordedTensor]:
        term = single(name)
        at_path = self._by_path.get(term.literal or "", ())
        named = [records for records in at_path if meant(term, records.site)]
        kind = kind_meant(term, {records.site.kind for records in named})
        found = []
        for kept in _once([of(records) for records in named if records.site.kind == kind]):
            site = kept.event.site
            is_leaf = term.leaf in (None, site.leaf)
            is_call = term.call in (None, kept.event.call)
            if term.names(site) and is_leaf and is_call:
                found.append(kept)
        return found


def _once(sites: Iterable[list[RecordedTensor]]) -> list[RecordedTensor]:
    """Return the records of several sites.

    Of an event at overlapping sites, as ``cell`` and ``cell#1``, only one is returned.
    """
    seen: set[int] = set()
    kept: list[RecordedTensor] = []
    for records in sites:
        kept += [one for one in records if id(one.event) not in seen]
        seen.update(id(one.event) for one in records)
    return kept


def name_of(event: Event) -> str:
    """Return the name that reads one recorded value."""
    call: int | None = event.call
    if event.site.op and not call:
        call = None
    return str(event.site.at(call=call))


def _only_older(name: str, last: RecordedTensor) -> str:
    """Return the message for a site that has values of older passes alone."""
    event = last.event
    what, number = "forward", event.pass_
    if event.site.is_gradient:
        what, number = "backward", event.backward
    return (
        f'nothing was recorded under "{name}" in the newest {what} pass: '
        f"it was not reached there. Its last value is of {what} pass {number}: "
        f'.records("{name}")[-1].value'
    )


def _several(name: str, found: list[RecordedTensor]) -> str:
    events = [kept.event for kept in found]
    names = list(dict.fromkeys(f'"{name_of(event)}"' for event in events))
    if len(names) == len(found):
        return f'"{name}" matches {len(found)} recorded values; read one of {", ".join(names[:8])}'
    threads = sorted({event.replica or "the main thread" for event in events})
    passes = sorted({event.pass_ for event in events})
    return (
        f'"{name}" matches {len(found)} recorded values, of passes {passes} '
        f'in {", ".join(threads)}; .records("{name}") returns them all with their events'
    )


@called_as('with kedge.hook(model, "layer4", kedge.record()) as acts: model(x)')
def record(
    *,
    copy: bool = False,
    keep: int | None = 1,
    recomputes: bool = False,
) -> Recorder:
    """Record the value, to read it from the handle: an action for `kedge.hook`.

    ``acts["layer4"]`` is the tensor of the newest pass, and ``dict(acts)`` has all recorded tensors
    by name. They are detached, but not copied. Kedge copies a value before an in-place module
    overwrites it, and always copies gradients of parameters and tensors, because autograd reuses
    their memory for ``.grad``. If anything else overwrites a value, reading it raises
    `Overwritten`.

    Args:
        copy: Whether to copy each value at once, for programs that overwrite tensors.
        keep: The number of forward passes (for gradients: backward passes) whose values are kept;
            None for all.
        recomputes: Whether to record values again when a checkpoint recomputes its forward.

    Returns:
        The action.

    Raises:
        WrongCall: If `keep` is not a number, or below 1.

    Examples:
        >>> with kedge.hook(model, "relu, fc", kedge.record()) as acts:
        ...     output = model(images)
        >>> acts["fc"].shape
        torch.Size([8, 3])
    """
    check_kept("record", keep)
    return Recorder(copy=copy, keep=keep, recomputes=recomputes)
