"""The outcomes of an offload: what became of each saved tensor, by module, printable as a table."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kedge.notebook import Printed

_MB = 1e6
_MOST = 24
"""The number of modules that are printed."""
_HEADINGS = "tensors     saved  resident      kept   rebuilt     moved  (MB per step)"
_NO_STEP = "no step: autograd saved nothing, as under torch.no_grad"
_COUNTS = ("small", "again", "unique", "stored", "freed", "failed", "recomputed")
_GROUPS = ("kept", "rebuilt", "moved")
_OWNED = ("parameter", "buffer", "input")
_WORDING = {
    "memory": "encoded in memory",
    "here": "there already",
    "unknown": "unknown kind",
    "checkpoint": "held by a checkpoint",
}


class Outcome(NamedTuple):
    """The outcome of one saved tensor that is not small.

    The engine decides it, and the account books it once.

    Attributes:
        group: Kept by reference, rebuilt, moved, or again: decided before, for the same storage.
        name: The reason why it is kept, the rule that rebuilds it, or the store that it was moved
            to.
        nbytes: Its bytes.
        storage: Its storage, counted once a step; None if the storage is not counted.
        number: The number of its storage.
        held: The holder of its bytes, which has to live as long as the tensor: an entry or a kept
            storage; None if the tensor stays in any case.
        chosen: Whether there was a choice, which the planner is notified of.
        extra: The bytes kept in memory to rebuild it.
        stored: The bytes written to the store for it.
        seconds: The seconds that this took.
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
    """A number of tensors, and their bytes."""

    __slots__ = ("bytes", "number")

    def __init__(self) -> None:
        self.number = self.bytes = 0

    def __repr__(self) -> str:
        """The number and the bytes as text."""
        return f"{self.number} of {self.bytes} bytes"

    def add(self, nbytes: int) -> None:
        """Count one more tensor."""
        self.number += 1
        self.bytes += nbytes

    def join(self, other: Count) -> None:
        """Add the counts of another."""
        self.number += other.number
        self.bytes += other.bytes


class RestoredBytes:
    """The bytes that were brought back.

    Attributes:
        reads: The number of reads, and their bytes.
        repeated: The repeated reads of bytes that had been brought back before.
        stalled: The seconds for which backward waited for them.
    """

    def __init__(self) -> None:
        self.reads = Count()
        self.repeated = Count()
        self.stalled = 0.0

    def add(self, nbytes: int, seconds: float, *, again: bool) -> None:
        """Count bytes that were brought back, and the seconds that this took.

        These include the reads of a recipe's inputs.
        """
        self.reads.add(nbytes)
        self.stalled += seconds
        if again:
            self.repeated.add(nbytes)

    def join(self, other: RestoredBytes) -> None:
        """Add the counts of another."""
        self.reads.join(other.reads)
        self.repeated.join(other.repeated)
        self.stalled += other.stalled


class Tally:
    """The saved tensors of a module or of all, by outcome.

    Attributes:
        small: Kept by reference because they are small.
        kept: Kept by reference, by reason: ``"parameter"``, ``"buffer"``, ``"input"``,
            ``"excluded"`` by the selector, ``"unknown"`` (sparse tensors and subclasses), ``"no
            rule"`` that rebuilds it and no store, ``"here"`` (already where the store would move
            it), ``"planned"``, ``"failed"``.
        rebuilt: Rebuilt instead of kept, by rule.
        moved: Moved, by store; ``"memory"``: encoded by a codec, and still in memory.
        again: Decided before, for a tensor on the same storage.
        unique: The distinct storages of all tensors that are not small, parameters, buffers and
            inputs among them.
        extra: The bytes kept in memory so that others can be rebuilt.
        stored: The bytes written to the store for `moved`: fewer with a codec.
        freed: The entries that no handle needs any more.
        restored: The bytes that were brought back.
        failed: The tensors that could not be moved.
        putting: The seconds for which forward waited for writes to the store.
        recomputed: The calls of a module named by ``recompute``, and the bytes that they saved and
            did not keep: each storage once a call, without parameters, buffers and inputs.
        repeats: How many of them backward ran again; a call may be run again more than once.
        repeating: The seconds that this took.
    """

    def __init__(self) -> None:
        self.small = Count()
        self.again = Count()
        self.unique = Count()
        self.stored = Count()
        self.freed = Count()
        self.failed = Count()
        self.restored = RestoredBytes()
        self.kept: defaultdict[str, Count] = defaultdict(Count)
        self.rebuilt: defaultdict[str, Count] = defaultdict(Count)
        self.moved: defaultdict[str, Count] = defaultdict(Count)
        self.recomputed = Count()
        self.extra = 0
        self.putting = 0.0
        self.repeats = 0
        self.repeating = 0.0

    @property
    def packs(self) -> int:
        """The number of tensors that autograd saved."""
        return sum(count.number for count in self._all())

    @property
    def naive(self) -> int:
        """The bytes of all saved tensors, each counted as often as it was saved."""
        return sum(count.bytes for count in self._all())

    @property
    def resident(self) -> int:
        """The saved bytes that belong to parameters, buffers and inputs, in memory in any case."""
        return sum(self.kept[why].bytes for why in _OWNED if why in self.kept)

    def book(self, outcome: Outcome) -> None:
        """Count the outcome of a saved tensor."""
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
        """Return the sum of `kept`, `rebuilt` or `moved`; small tensors count as kept."""
        total = Count()
        for count in list(getattr(self, group).values()):
            total.join(count)
        if group == "kept":
            total.join(self.small)
        return total

    def join(self, other: Tally) -> None:
        """Add the counts of another."""
        for name in _COUNTS:
            getattr(self, name).join(getattr(other, name))
        for name in _GROUPS:
            mine = getattr(self, name)
            for what, count in list(getattr(other, name).items()):
                mine[what].join(count)
        self.extra += other.extra
        self.putting += other.putting
        self.repeats += other.repeats
        self.repeating += other.repeating
        self.restored.join(other.restored)

    def _all(self) -> Iterator[Count]:
        yield from (self.small, self.again)
        for group in _GROUPS:
            yield from list(getattr(self, group).values())


class ModuleAccount:
    """One module in the account: the current step, and all steps before it.

    Attributes:
        path: The path of the module; None outside of all modules.
        step: The current step.
        before: All steps before it.
        small: The small tensors of the current step, which have to be counted fast.
    """

    __slots__ = ("_account", "_lock", "before", "path", "small", "step")

    def __init__(self, account: OffloadAccount, path: str | None) -> None:
        self._account = account
        self.path = path
        # A reentrant lock: the last handle of an entry may be collected at any moment.
        self._lock = account.lock
        self.step = Tally()
        self.before = Tally()
        self.small = self.step.small

    def turn(self) -> None:
        """Begin a step: the current one is over."""
        over = self.step
        self.step = Tally()
        self.small = self.step.small
        self.before.join(over)

    def book(self, outcome: Outcome) -> None:
        """Count the outcome of a saved tensor; its storage only at its first occurrence in this step."""
        with self._lock:
            step = self.step
            storage = outcome.storage
            if storage is not None:
                seen = self._account.seen
                if outcome.number not in seen:
                    # The reference keeps the number from being reused.
                    seen[outcome.number] = StorageWeakRef(storage)
                    step.unique.add(storage.nbytes())
            step.book(outcome)

    def restored(self, nbytes: int, seconds: float, *, again: bool) -> None:
        """Count bytes that were brought back, and the seconds that this took; see `RestoredBytes`."""
        with self._lock:
            self.step.restored.add(nbytes, seconds, again=again)

    def recomputed(self, nbytes: int) -> None:
        """Count a call that kept nothing of these bytes, and can be run again."""
        with self._lock:
            self.step.recomputed.add(nbytes)

    def repeated(self, seconds: float) -> None:
        """Count a call that backward ran again, and the seconds that this took."""
        with self._lock:
            self.step.repeats += 1
            self.step.repeating += seconds

    def gone(self, nbytes: int) -> None:
        """Count an entry that was freed with its last handle."""
        with self._lock:
            self.step.freed.add(nbytes)


class OffloadAccount(Printed):
    """The outcome of all that autograd saved; prints as a table.

    Attributes:
        rows: The rows by module path, in the order in which the modules first saved something.
        steps: The number of completed steps: forward passes with their backward passes; see Note
            [Steps].
        checkpointed: The number of calls of selected modules that ran in a checkpoint, which
            recomputes what they save.
        dropped: Rules that gave a wrong result here and are not used, each with the reason.
        plan: The planner's decisions and predictions; false, and printed as the reason, as long as
            there is no plan yet; None without a limit.
        file: The disk store of the current block, or of the last one, which prints its own figures;
            None if there is none.
        seen: The storages of the current step, by number.
        staying: The bytes kept by choice now, those of earlier steps among them.
    """

    def __init__(self) -> None:
        self.rows: dict[str | None, ModuleAccount] = {}
        self.lock = threading.RLock()
        self.steps = 0
        self.checkpointed = 0
        self.dropped: dict[str, str] = {}
        self.plan: object | None = None
        self.file: object | None = None
        self.seen: dict[int, StorageWeakRef] = {}
        self.staying = 0

    def stays(self, nbytes: int) -> None:
        """Add bytes that are kept by choice; a negative number for bytes that are no longer kept."""
        with self.lock:
            self.staying += nbytes

    def row(self, path: str | None) -> ModuleAccount:
        """Return a module's row."""
        with self.lock:
            return self.rows.setdefault(path, ModuleAccount(self, path))

    def turn(self) -> None:
        """Begin a step: the current one is over."""
        with self.lock:
            self.steps += 1
            self.seen = {}
            for row in self.rows.values():
                row.turn()

    def module(self, path: str | None) -> Tally:
        """Return the sums of one module over all steps."""
        total = Tally()
        if path in self.rows:
            total.join(self.rows[path].before)
            total.join(self.rows[path].step)
        return total

    @property
    def step(self) -> Tally:
        """The sums of the current step, or of the last one if no other has begun."""
        total = Tally()
        for row in list(self.rows.values()):
            total.join(row.step)
        return total

    @property
    def total(self) -> Tally:
        """The sums of all steps."""
        total = Tally()
        for path in list(self.rows):
            total.join(self.module(path))
        return total

    def __str__(self) -> str:
        """A table of averages over steps: a line for each module, the sum, and remarks."""
        steps = self.steps + 1  # the current one too, or none if nothing was ever saved
        tallies = {_name(path): self.module(path) for path in list(self.rows)}

        def held(name: str) -> int:
            return tallies[name].naive - tallies[name].resident

        largest = sorted(tallies, key=held, reverse=True)[:_MOST]
        shown = [name for name in tallies if name in largest]
        rest = [tally for name, tally in tallies.items() if name not in shown]
        width = max(map(len, [*shown, "module", "(999 more)"]))

        lines = [f"{'module':{width}}  {_HEADINGS}"]
        lines += [f"{name:{width}}  {_figures([tallies[name]], steps)}" for name in shown]
        if rest:
            more = f"({len(rest)} more)"
            lines.append(f"{more:{width}}  {_figures(rest, steps)}")
        lines.append(f"{'all':{width}}  {_figures(tallies.values(), steps)}")
        lines.append("")
        lines += self._remarks(steps)
        return "\n".join(lines)

    def _remarks(self, steps: int) -> Iterator[str]:
        total = self.total
        mb = _MB * steps  # a sum divided by it is in MB per step
        counted = _NO_STEP
        if self.rows:
            counted = f"{steps} step{'s' * (steps > 1)}"
        yield f"{counted}; {_list('kept', total.kept | {'small': total.small}, mb)}"

        if total.rebuilt:
            rebuilt = _list("rebuilt", total.rebuilt, mb)
            yield f"{rebuilt}; {total.extra / mb:.1f} MB kept for that"
        if total.moved:
            moved = _list("moved", total.moved, mb)
            spent = total.putting * 1e3 / steps
            yield f"{moved}; {total.stored.bytes / mb:.1f} MB stored in {spent:.0f} ms"

        restored = total.restored
        if restored.reads.number:
            stalled = restored.stalled * 1e3 / steps
            yield (
                f"restored {restored.reads.bytes / mb:.1f} MB in {stalled:.0f} ms, "
                f"{restored.repeated.bytes / mb:.1f} MB of it more than once; "
                f"freed {total.freed.bytes / mb:.1f} MB"
            )
        if total.failed.number:
            failed = f"{total.failed.number} tensor{'s' * (total.failed.number > 1)}"
            size = f"{total.failed.bytes / _MB:.1f} MB"
            yield f"{failed} of {size} could not be moved, over all steps, and stayed in memory"
        if total.recomputed.number:
            calls = total.recomputed.number / steps
            spent = total.repeating * 1e3 / steps
            yield (
                f"recomputed {calls:.0f} module calls a step, {total.recomputed.bytes / mb:.1f} MB "
                f"of which were not kept; backward ran them again {total.repeats / steps:.0f} times "
                f"in {spent:.0f} ms"
            )
        if self.checkpointed:
            yield (
                f"{self.checkpointed / steps:.0f} module calls a step ran in a checkpoint, "
                "which recomputes the tensors they save: there is nothing to offload, "
                "and its inputs count for the module that calls it"
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

    text = f"{tally.packs / steps:7.0f}"
    for nbytes in sums:
        text += f"{nbytes / _MB / steps:10.1f}"
    return text


def _list(what: str, counts: dict[str, Count], mb: float) -> str:
    parts = []
    for name, count in sorted(counts.items(), key=lambda pair: -pair[1].bytes):
        if count.number:
            parts.append(f"{_WORDING.get(name, name)} {count.bytes / mb:.1f} MB")
    return f"{what}: {', '.join(parts) or 'nothing'}"
