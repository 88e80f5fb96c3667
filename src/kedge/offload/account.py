"""What became of saved tensors: counted by module while it happens, printable as a table."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_MB = 1e6
_MOST = 24
"""How many modules are printed."""
_COUNTS = ("small", "again", "unique", "stored", "freed", "failed")
_GROUPS = ("kept", "rebuilt", "moved")
_OWNED = ("parameter", "buffer", "input")
_SAID = {
    "memory": "encoded in memory",
    "here": "there already",
    "unknown": "unknown kind",
    "checkpoint": "held by a checkpoint",
}


class Outcome(NamedTuple):
    """What became of one saved tensor that is not small: decided by the engine, and booked once.

    Attributes:
        group: Whether it is kept by reference, rebuilt or moved, or was decided on before.
        name: Why it is kept, by which rule it is rebuilt, or where it was moved to.
        nbytes: Its bytes.
        storage: Its storage, to be counted once a step; None where it is not looked at.
        number: The number of its storage.
        held: What holds its bytes, and so has to live as long as it: an entry or a kept storage; None if it stays in any case.
        chosen: Whether there was a choice, which a planner is informed of.
        extra: The bytes kept in memory to rebuild it.
        stored: The bytes put away for it.
        seconds: How long that took.
    """

    group: Literal["kept", "again", "rebuilt", "moved"]
    name: str
    nbytes: int
    storage: torch.UntypedStorage | None = None
    number: int = 0
    held: object = None
    chosen: bool = False
    extra: int = 0
    stored: int = 0
    seconds: float = 0.0


class Count:
    """How many, and how many bytes."""

    __slots__ = ("bytes", "number")

    def __init__(self) -> None:
        self.number = self.bytes = 0

    def __repr__(self) -> str:
        """As read."""
        return f"{self.number} of {self.bytes} bytes"

    def add(self, nbytes: int) -> None:
        """Count one more."""
        self.number += 1
        self.bytes += nbytes

    def join(self, other: Count) -> None:
        """Count what another has counted."""
        self.number += other.number
        self.bytes += other.bytes


class RestoredBytes:
    """What was brought back.

    Attributes:
        reads: How often, and how many bytes.
        repeated: What of that had been brought back before.
        stalled: The seconds for which backward waited for it.
    """

    def __init__(self) -> None:
        self.reads, self.repeated, self.stalled = Count(), Count(), 0.0

    def add(self, nbytes: int, seconds: float, *, again: bool) -> None:
        """Count bytes that were brought back, and how long that took with all that it needed."""
        self.reads.add(nbytes)
        self.stalled += seconds
        if again:
            self.repeated.add(nbytes)

    def join(self, other: RestoredBytes) -> None:
        """Count what another has counted."""
        self.reads.join(other.reads)
        self.repeated.join(other.repeated)
        self.stalled += other.stalled


class Tally:
    """What was saved and what became of it.

    Attributes:
        small: What is kept by reference because it is small.
        kept: What is kept by reference, by why: ``"parameter"``, ``"buffer"``, ``"input"``, ``"excluded"`` by the
            selector, ``"unknown"`` (sparse tensors and subclasses), ``"no rule"`` that rebuilds it and no store,
            ``"here"`` (it is where the store would move it), ``"planned"``, ``"failed"``.
        rebuilt: What is rebuilt instead of kept, by rule.
        moved: What was moved, by where to; ``"memory"`` is what a codec made smaller in its place.
        again: What was decided on already, for a tensor on the same storage.
        unique: The distinct storages of all that is not small; parameters, buffers and inputs are among them.
        extra: The bytes kept in memory so that others can be rebuilt.
        stored: What was put away for `moved`: fewer bytes, with a codec.
        freed: The entries that no handle needs any more.
        restored: What was brought back.
        failed: What could not be moved.
        putting: The seconds for which forward was held up by putting away.
    """

    def __init__(self) -> None:
        self.small, self.again, self.unique, self.stored = Count(), Count(), Count(), Count()
        self.freed, self.failed, self.restored = Count(), Count(), RestoredBytes()
        self.kept: defaultdict[str, Count] = defaultdict(Count)
        self.rebuilt: defaultdict[str, Count] = defaultdict(Count)
        self.moved: defaultdict[str, Count] = defaultdict(Count)
        self.extra = 0
        self.putting = 0.0

    @property
    def packs(self) -> int:
        """How many tensors autograd saved."""
        return sum(count.number for count in self._all())

    @property
    def naive(self) -> int:
        """Their bytes, each counted as often as it was saved."""
        return sum(count.bytes for count in self._all())

    @property
    def resident(self) -> int:
        """The bytes of that which are parameters', buffers' and inputs', in memory in any case."""
        return sum(self.kept[why].bytes for why in _OWNED if why in self.kept)

    def book(self, outcome: Outcome) -> None:
        """Count what became of a saved tensor."""
        if outcome.group == "again":
            self.again.add(outcome.nbytes)
            return
        counts: defaultdict[str, Count] = getattr(self, outcome.group)
        counts[outcome.name].add(outcome.nbytes)
        if outcome.group == "moved":
            self.stored.add(outcome.stored)
            self.putting += outcome.seconds
        elif outcome.group == "rebuilt":
            self.extra += outcome.extra
        elif outcome.name == "failed":
            self.failed.add(outcome.nbytes)

    def sum(self, group: str) -> Count:
        """Sum `kept`, `rebuilt` or `moved` up; what is small is kept."""
        total = Count()
        for count in list(getattr(self, group).values()):
            total.join(count)
        if group == "kept":
            total.join(self.small)
        return total

    def join(self, other: Tally) -> None:
        """Count what another has counted."""
        for name in _COUNTS:
            getattr(self, name).join(getattr(other, name))
        for name in _GROUPS:
            mine = getattr(self, name)
            for what, count in list(getattr(other, name).items()):
                mine[what].join(count)
        self.extra += other.extra
        self.putting += other.putting
        self.restored.join(other.restored)

    def _all(self) -> Iterator[Count]:
        yield from (self.small, self.again)
        for group in _GROUPS:
            yield from list(getattr(self, group).values())


class ModuleAccount:
    """One module in the account: the step under way, and all before it.

    Attributes:
        path: The module; None for what is saved outside of all modules.
        step: The step under way.
        before: All steps before it.
        small: Its small tensors, which have to be counted fast.
    """

    __slots__ = ("_account", "_lock", "before", "path", "small", "step")

    def __init__(self, account: OffloadAccount, path: str | None) -> None:
        self._account, self.path = account, path
        # Of the kind that its holder can take again: the last handle of an entry may go at any moment.
        self._lock = account.lock
        self.step, self.before = Tally(), Tally()
        self.small = self.step.small

    def turn(self) -> None:
        """Begin a step."""
        over, self.step = self.step, Tally()
        self.small = self.step.small
        self.before.join(over)

    def book(self, outcome: Outcome) -> None:
        """Count what became of a saved tensor; its storage only if it is the first time in this step."""
        with self._lock:
            step, storage = self.step, outcome.storage
            if storage is not None and outcome.number not in (seen := self._account.seen):
                seen[outcome.number] = StorageWeakRef(storage)  # which keeps the number from being given to another one
                step.unique.add(storage.nbytes())
            step.book(outcome)

    def restored(self, nbytes: int, seconds: float, *, again: bool) -> None:
        """Count bytes that were brought back, and how long that took with all that it needed."""
        with self._lock:
            self.step.restored.add(nbytes, seconds, again=again)

    def gone(self, nbytes: int) -> None:
        """Count an entry whose last handle is gone."""
        with self._lock:
            self.step.freed.add(nbytes)


class OffloadAccount:
    """What became of what autograd saved; prints as a table.

    Attributes:
        rows: By module, in the order in which they first saved something.
        steps: How many steps are over: forward passes with their backward passes; see Note [Steps].
        checkpointed: How many calls of the selected modules ran in a checkpoint, which computes again what they save.
        dropped: Rules that were found wrong here and are not used, with why.
        plan: What a planner has decided on, and what it predicts; None if there is none.
        file: The disk store of the block under way, or of the last one, which says what it did; None if there is none.
        seen: The storages of the step under way.
        staying: The bytes that are kept by choice now, those of earlier steps among them.
    """

    def __init__(self) -> None:
        self.rows: dict[str | None, ModuleAccount] = {}
        self.lock = threading.RLock()
        self.steps = self.checkpointed = 0
        self.dropped: dict[str, str] = {}
        self.plan: object | None = None
        self.file: object | None = None
        self.seen: dict[int, StorageWeakRef] = {}
        self.staying = 0

    def stays(self, nbytes: int) -> None:
        """Count bytes that are kept by choice, or are so no longer."""
        with self.lock:
            self.staying += nbytes

    def row(self, path: str | None) -> ModuleAccount:
        """Return a module's row."""
        with self.lock:
            return self.rows.setdefault(path, ModuleAccount(self, path))

    def turn(self) -> None:
        """Begin a step."""
        with self.lock:
            self.steps += 1
            self.seen = {}
            for row in self.rows.values():
                row.turn()

    def module(self, path: str | None) -> Tally:
        """Return what one module saved, in all steps."""
        total = Tally()
        if path in self.rows:
            total.join(self.rows[path].before)
            total.join(self.rows[path].step)
        return total

    @property
    def step(self) -> Tally:
        """What was saved in the step under way, or the last one if no other has begun."""
        total = Tally()
        for row in list(self.rows.values()):
            total.join(row.step)
        return total

    @property
    def total(self) -> Tally:
        """What was saved in all steps."""
        total = Tally()
        for path in list(self.rows):
            total.join(self.module(path))
        return total

    def __str__(self) -> str:
        """One line a module, the sum, and what it came to: what a step had on average."""
        steps = self.steps + 1
        tallies = {_name(path): self.module(path) for path in list(self.rows)}
        largest = sorted(tallies, key=lambda name: tallies[name].resident - tallies[name].naive)[:_MOST]
        shown = [name for name in tallies if name in largest]
        width = max(map(len, [*shown, "module", "(999 more)"]))
        lines = [f"{'module':{width}}  tensors     saved  resident      kept   rebuilt     moved  (MB a step)"]
        lines += [f"{name:{width}}  {_figures([tallies[name]], steps)}" for name in shown]
        if rest := [tally for name, tally in tallies.items() if name not in shown]:
            lines.append(f"{f'({len(rest)} more)':{width}}  {_figures(rest, steps)}")
        lines += [f"{'all':{width}}  {_figures(tallies.values(), steps)}", "", *self._remarks(steps)]
        return "\n".join(lines)

    def _remarks(self, steps: int) -> Iterator[str]:
        total, mb = self.total, _MB * steps
        restored = total.restored
        yield f"{steps} step{'s' * (steps > 1)}; {_list('kept', total.kept | {'small': total.small}, mb)}"
        if total.rebuilt:
            yield f"{_list('rebuilt', total.rebuilt, mb)}; {total.extra / mb:.1f} MB kept for it"
        if total.moved:
            spent = total.putting * 1e3 / steps
            yield f"{_list('moved', total.moved, mb)}; {total.stored.bytes / mb:.1f} MB put away in {spent:.0f} ms"
        if restored.reads.number:
            yield (
                f"brought back {restored.reads.bytes / mb:.1f} MB in {restored.stalled * 1e3 / steps:.0f} ms, "
                f"{restored.repeated.bytes / mb:.1f} MB of it more than once; freed {total.freed.bytes / mb:.1f} MB"
            )
        if total.failed.number:
            failed = f"{total.failed.number} tensors of {total.failed.bytes / _MB:.1f} MB"
            yield f"{failed}, of all steps, could not be moved and were kept"
        if self.checkpointed:
            yield (
                f"{self.checkpointed / steps:.0f} module calls a step ran in a checkpoint, which computes again what they save: "
                "there is nothing to take, and its inputs count for the module that calls it"
            )
        if self.file is not None:
            yield str(self.file)
        if self.plan is not None:
            yield str(self.plan)
        for rule, why in self.dropped.items():
            yield f"rule {rule} is not used: {why}"


def _name(path: str | None) -> str:
    if path is None:
        return "(outside)"
    return path or "(the model itself)"


def _figures(tallies: Iterable[Tally], steps: int) -> str:
    tally = Tally()
    for each in tallies:
        tally.join(each)
    kept, rebuilt, moved = (tally.sum(group).bytes for group in _GROUPS)
    sums = (tally.naive, tally.resident, kept - tally.resident, rebuilt, moved)
    return f"{tally.packs / steps:7.0f}" + "".join(f"{size / _MB / steps:10.1f}" for size in sums)


def _list(what: str, counts: dict[str, Count], mb: float) -> str:
    most = sorted(counts.items(), key=lambda pair: -pair[1].bytes)
    parts = (f"{_SAID.get(name, name)} {count.bytes / mb:.1f} MB" for name, count in most if count.number)
    return f"{what}: {', '.join(parts) or 'nothing'}"
