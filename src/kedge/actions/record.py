"""The action that keeps values: `record`."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from kedge.actions.naming import check_kept, meant, names_of
from kedge.calls.arguments import called_as
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
_ADOPTED = frozenset({"param.grad", "param.acc", "grad", "acc"})
"""Gradients whose memory autograd uses for ``.grad``, which the next backward, clipping and zeroing overwrite."""


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
                f"{name_of(self.event)} was recorded, but the program then changed the tensor in place, so its value is gone; "
                "record(copy=True) keeps a copy"
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

    def is_old(self, event: Event, *, gradient: bool, due: Callable[[int], bool]) -> bool:
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
        self.site, self.keep = site, keep
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
            same = [
                b for b in list(self.batches) if b.replica == batch.replica
            ]  # other threads add to it
            for old in same[: -self.keep]:
                del self.batches[old]

    def latest(self) -> list[RecordedTensor]:
        """The values of the newest pass of each thread; none if the site has only values of older ones."""
        newest, gradient = self.newest, self.site.is_gradient
        last = self.last()
        if newest is None:
            return last
        return [
            kept for kept in last if not newest.is_old(kept.event, gradient=gradient, due=self.due)
        ]

    def last(self) -> list[RecordedTensor]:
        """The values of the newest pass of each thread that has any here."""
        last = {batch.replica: values for batch, values in list(self.batches.items())}
        return [kept for values in last.values() for kept in values]

    def due(self, step: int) -> bool:
        """Whether an action still records here, and does in a step."""
        return any(tap.is_attached and (tap.when is None or tap.when(step)) for tap in self.taps)

    def all(self) -> list[RecordedTensor]:
        """Every value, in order of arrival."""
        return [kept for values in list(self.batches.values()) for kept in values]


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


class Recorder:
    """The action that `record` returns: keeps values and returns them by name."""

    observes = True
    keeps = True

    def __init__(self, *, copy: bool, keep: int | None, recomputes: bool) -> None:
        self.copy, self.keep, self.recomputes = copy, keep, recomputes
        self.by_site: dict[Site, SiteRecords] = {}
        self._by_path: dict[str, list[SiteRecords]] = {}
        self._by_storage: dict[int, list[weakref.ref[RecordedTensor]]] = {}
        self._remembered, self._prune_at = 0, _PRUNE
        self._overwrites = False
        self._newest: dict[int, NewestPasses] = {}

    def __repr__(self) -> str:
        """The call that makes this action."""
        given = [
            ("copy", self.copy, False),
            ("keep", self.keep, 1),
            ("recomputes", self.recomputes, False),
        ]
        return f"record({', '.join(f'{name}={value}' for name, value, default in given if value != default)})"

    def bind(self, site: Site) -> Act:
        """Return the function that keeps the values of one site."""
        records = self.by_site.get(site)
        if records is None:
            records = self.by_site[site] = SiteRecords(site, self.keep)
            self._by_path.setdefault(site.path, []).append(records)
        copied = self.copy or site.kind in _ADOPTED

        def keep(value: Tensor, event: Event) -> None:
            # a transform's wrapper is invalid after the transform
            alias = (
                untransformed(value).detach()
                if is_batched(value)
                else untransformed(value.detach())
            )
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
            newest = self._newest[id(passes)] = NewestPasses(passes)
            passes.add_holder(weakref.WeakMethod(self._held_in))
        records.newest = newest

    def _held_in(self, storages: frozenset[int]) -> list[tuple[str, int]]:
        """Return the path and the pass of each newest value that is kept in one of these storages."""
        return [
            (kept.event.site.path, kept.event.pass_)
            for records in list(self.by_site.values())
            if not records.site.is_gradient
            for kept in records.last()
            if storage_of(kept.value) in storages
        ]

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
            alive = {
                k: [ref for ref in refs if ref() is not None]
                for k, refs in self._by_storage.items()
            }
            self._by_storage = {k: refs for k, refs in alive.items() if refs}
            self._remembered = sum(map(len, self._by_storage.values()))
            self._prune_at = 2 * self._remembered + _PRUNE

    def expect_overwrites(self, site: Site) -> None:
        """Copy the values of a site when they are recorded, because the forward overwrites them later."""
        self.by_site[site].overwritten = True

    def watch_overwrites(self) -> None:
        """Index kept values by storage from now on; called if the model has in-place modules or operations."""
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
        if not found:
            there = [
                f'"{name_of(k.event)}"'
                for k in self._find(
                    str(replace(single(name), leaf=None, call=None)), SiteRecords.latest
                )
            ]
            of_a_gradient = (
                single(name).leaf is not None and Site("", single(name).kind or "out").is_gradient
            )
            cause = f"the site has {', '.join(there[:8])}" if there else why(name)
            cause += f"; {why(name)}" if there and of_a_gradient else ""
            old = self._find(name, SiteRecords.last)
            if old and not there:
                raise NotRecorded(_only_older(name, old[-1]))
            raise NotRecorded(f'nothing was recorded under "{name}": {cause}')
        if len(found) > 1:
            raise SeveralRecorded(_several(name, found))
        return found[0].read()

    def records(self, name: str) -> list[Record]:
        """Return every kept record of a name, in order of arrival."""
        return [Record(kept.event, kept.read()) for kept in self._find(name, SiteRecords.all)]

    def names(self) -> list[str]:
        """Return the name of each value of the newest pass, in the order in which they came."""
        return list(self._named())

    def table(self, names: Collection[str] | None = None) -> Table:
        """Return a table of the values, of some names or of all: their shapes and types, and how many are kept."""
        named = self._named()
        rows, lost = [], []
        for name in named if names is None else names:
            first = named[name][0]
            dtype = str(first.value.dtype).removeprefix("torch.")
            rows.append(
                (name, list(shape_of(first.value)), dtype, len(self._find(name, SiteRecords.all)))
            )
            lost += [name] if first.overwritten else []
        gone = (
            f"overwritten by the program: {', '.join(lost)}; record(copy=True) keeps copies"
            if lost
            else ""
        )
        old = dict.fromkeys(
            short(s.site)
            for s in list(self.by_site.values())
            if names is None and s.batches and not s.latest()
        )
        older = f"only of older passes, which .records() returns: {', '.join(old)}" if old else ""
        note = "; ".join(filter(None, (gone, older))) if rows or old else "nothing is recorded yet"
        return Table(("site", "shape", "dtype", "kept"), rows, "mllr", note)

    def _repr_html_(self) -> str:
        """The table of the values, for a notebook."""
        return self.table().html()

    def _named(self) -> dict[str, list[RecordedTensor]]:
        kept = _once([s.latest() for s in list(self.by_site.values())])
        kept.sort(key=lambda k: k.arrival)
        named: dict[str, list[RecordedTensor]] = {}
        for name, one in zip(names_of(k.event for k in kept), kept, strict=True):
            named.setdefault(name, []).append(one)
        return named

    def _find(
        self, name: str, of: Callable[[SiteRecords], list[RecordedTensor]]
    ) -> list[RecordedTensor]:
        term = single(name)
        found = [s for s in self._by_path.get(term.literal or "", ()) if meant(term, s.site)]
        kind = kind_meant(term, {s.site.kind for s in found})
        kept = _once([of(s) for s in found if s.site.kind == kind])
        kept = [
            k for k in kept if term.names(k.event.site) and term.leaf in (None, k.event.site.leaf)
        ]
        return [k for k in kept if term.call is None or k.event.call == term.call]


def _once(sites: Iterable[list[RecordedTensor]]) -> list[RecordedTensor]:
    """Return the records of several sites; of an event at overlapping sites, as ``cell`` and ``cell#1``, only one."""
    seen: set[int] = set()
    kept: list[RecordedTensor] = []
    for records in sites:
        kept += [k for k in records if id(k.event) not in seen]
        seen.update(id(k.event) for k in records)
    return kept


def name_of(event: Event) -> str:
    """Return the name that reads one recorded value."""
    return str(event.site.at(call=None if event.site.op and not event.call else event.call))


def _only_older(name: str, last: RecordedTensor) -> str:
    """Return the message for a site that has values of older passes alone."""
    event = last.event
    gradient = event.site.is_gradient
    what, number = ("backward", event.backward) if gradient else ("forward", event.pass_)
    return (
        f'nothing was recorded under "{name}" in the newest {what} pass: it was not reached there. Its last value is of '
        f'{what} pass {number}: .records("{name}")[-1].value'
    )


def _several(name: str, found: list[RecordedTensor]) -> str:
    names = list(dict.fromkeys(f'"{name_of(k.event)}"' for k in found))
    if len(names) == len(found):
        return f'"{name}" matches {len(found)} recorded values; read one of {", ".join(names[:8])}'
    threads = sorted({k.event.replica or "the main thread" for k in found})
    passes = sorted({k.event.pass_ for k in found})
    return (
        f'"{name}" matches {len(found)} recorded values, of passes {passes} in {", ".join(threads)}; '
        f'.records("{name}") returns them all with their events'
    )


@called_as('with kedge.hook(model, "layer4", kedge.record()) as acts: model(x)')
def record(*, copy: bool = False, keep: int | None = 1, recomputes: bool = False) -> Recorder:
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
