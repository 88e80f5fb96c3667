"""One forward whose values are taken: what is kept of each, when it is copied, and where the forward may end.

# Note [Values that are overwritten]
The forward may go on to work in place on a value that was taken. So the first forward of a signature copies
each, and compares their versions when it is over: what has changed is what later forwards copy at once. The
others are kept as they are, their versions are compared each time, and one that changed after all is an error.

# Note [The end of a forward]
Where a forward may end is learned, too: the first one of a signature runs to its end. Later ones end as soon as
all is there that was there in the first, in whichever order it comes. They cannot end so where a module that
was asked for without a call's number ran several times, for it might run once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kedge.errors import ExtractError, NoSuchKind, Overwritten, StopForward
from kedge.flow import Act, Event
from kedge.kept_tensor import KeptTensor
from kedge.sites import leaves
from kedge.sites.site import Site

Transform: TypeAlias = Callable[[Tensor], Any]
KINDS = ("out", "in", "param")


class ValueKey:
    """Which value: under which selector, at which site, in which call of the module. There is one object of each."""

    __slots__ = ("call", "number", "site")

    def __init__(self, number: int, site: Site, call: int) -> None:
        self.number, self.site, self.call = number, site, call


class ValueKeys(dict[tuple[int, Site, int], ValueKey]):
    """The keys of all values that there have been."""

    def __missing__(self, which: tuple[int, Site, int]) -> ValueKey:
        """Make one."""
        return self.setdefault(which, ValueKey(*which))


@dataclass(frozen=True)
class Wanted:
    """The values to take out of a model, and how to keep them.

    Attributes:
        texts: The selectors.
        transforms: What each one's values go through before they are kept.
        rename: New names.
        early_stop: Whether a forward ends when all is there.
        no_grad: Whether it runs without grad.
        device: Where values are kept; None for where they are.
        dtype: As what floating-point values are kept; None for what they are.
    """

    texts: tuple[str, ...]
    transforms: tuple[Transform | None, ...]
    rename: Mapping[str, str]
    early_stop: bool
    no_grad: bool
    device: torch.device | None
    dtype: torch.dtype | None

    @property
    def plain(self) -> bool:
        """Whether values are kept as they come."""
        return self.device is None and self.dtype is None and not any(self.transforms)

    def make(self, number: int, value: Tensor) -> Any:
        """Make of a value what is kept of it."""
        transform = self.transforms[number]
        made = value if transform is None else transform(value)
        if self.device is None and self.dtype is None:
            return made
        return leaves.put(made, {name: self._moved(leaf) for name, leaf in leaves.find(made)})

    def _moved(self, value: Tensor) -> Tensor:
        wanted = value.is_floating_point() or value.is_complex()
        return value.to(self.device or value.device, self.dtype if wanted and self.dtype else value.dtype)


class CapturedValue(KeptTensor):
    """A tensor that was taken.

    Attributes:
        copy: A copy from when it was taken, if it may turn out to be needed.
        graph: Whether it had a graph then.
    """

    __slots__ = ("copy", "graph")

    def __init__(self, value: Tensor, *, copied: bool, unknown: bool) -> None:
        super().__init__(value, copied=copied)
        self.copy = value.clone() if unknown and self.value is value else None
        self.graph = value.requires_grad

    @property
    def lost(self) -> bool:
        """Whether the program has worked in place on it, and there is no copy."""
        return self.copy is None and self.overwritten

    @property
    def as_taken(self) -> Tensor:
        """The tensor, or its copy if the program has worked in place on it."""
        return self.value if self.copy is None or not self.overwritten else self.copy

    @property
    def joined_graph(self) -> bool:
        """Whether it has got its graph only since, as what a reentrant checkpoint returns gets it behind its last module."""
        return self.value.requires_grad and not self.graph

    def lies_in(self, memory: Collection[int | None]) -> bool:
        """Whether it is kept in this memory."""
        return memory_of(self.value) in memory

    def settle(self) -> None:
        """Put the copy in its place, if there is one."""
        if self.copy is not None:
            self._replace(self.copy)
            self.copy = None


class TransformedValue:
    """The result of a transform: a tensor in memory of its own, or a structure of such tensors.

    It has the interface of `CapturedValue`; the program does not know its memory, so it is never overwritten.
    """

    __slots__ = ("as_taken",)
    overwritten = lost = joined_graph = False

    def __init__(self, value: Any) -> None:
        self.as_taken = value

    def lies_in(self, memory: Collection[int | None]) -> bool:
        """Whether it is kept in the program's own memory."""
        return False

    def settle(self) -> None:
        """Do nothing."""


Taken: TypeAlias = CapturedValue | TransformedValue


@dataclass(frozen=True)
class CapturePlan:
    """What is known of forwards of one signature since the first.

    Attributes:
        names: Each value's name, in the order of the result.
        copied: The values to copy at once.
        stops: Whether the forward may end when all of them are there.
    """

    names: Mapping[ValueKey, str]
    copied: frozenset[ValueKey]
    stops: bool


class ForwardCapture:
    """One active forward, and the values taken from it.

    Attributes:
        over: Whether nothing more is taken.
        others: The threads that were there before: what runs in them is not of this forward.
    """

    def __init__(self, wanted: Wanted, plan: CapturePlan | None) -> None:
        self.wanted, self.plan, self.over = wanted, plan, False
        self.plain, self.count = wanted.plain, len(plan.names) if plan is not None and plan.stops else -1
        self.values: dict[ValueKey, Taken] = {}
        self.replicas: dict[threading.Thread, dict[ValueKey, Taken]] = {}
        self.others = frozenset(threading.enumerate())

    def take(self, key: ValueKey, value: Tensor, event: Event) -> None:
        """Take a value.

        Raises:
            StopForward: If it was the last one wanted.
        """
        self.values[key] = self.keep(key, value)
        if len(self.values) == self.count and self.plan is not None and self.values.keys() == self.plan.names.keys():
            self.over = True
            raise StopForward("every value that was asked for is there")

    def copies(self, key: ValueKey) -> bool:
        """Whether a value is copied at once."""
        return self.plan is not None and key in self.plan.copied

    def keep(self, key: ValueKey, value: Tensor) -> Taken:
        """Keep a value as the plan says; see Note [Values that are overwritten]."""
        made = value if self.plain else self.wanted.make(key.number, value)
        if not isinstance(made, Tensor):
            return TransformedValue(leaves.put(made, {name: _apart(leaf, value) for name, leaf in leaves.find(made)}))
        if self.wanted.no_grad and made.requires_grad:
            made = made.detach()
        if made is not value and not _shares(made, value):
            return TransformedValue(made)
        return CapturedValue(made, copied=self.copies(key), unknown=self.plan is None)

    def replica(self, thread: threading.Thread) -> Replica:
        """Return what takes the values of a thread that this forward has started."""
        for known in threading.enumerate():  # in the order in which they were started
            if known not in self.others:
                self.replicas.setdefault(known, {})
        return Replica(self, self.replicas[thread])

    def joined(self) -> dict[ValueKey, Taken]:
        """The values of all threads, those of replicas along their first dimension."""
        parts: dict[ValueKey, list[Taken]] = {key: [took] for key, took in self.values.items()}
        for values in self.replicas.values():
            for key, took in values.items():
                parts.setdefault(key, []).append(took)
        return {key: tooks[0] if len(tooks) == 1 else _join(tooks) for key, tooks in parts.items()}


class Replica:
    """Takes the values of one thread for a forward of another."""

    def __init__(self, call: ForwardCapture, values: dict[ValueKey, Taken]) -> None:
        self.call, self.values = call, values

    @property
    def over(self) -> bool:
        """Whether nothing more is taken."""
        return self.call.over

    def take(self, key: ValueKey, value: Tensor, event: Event) -> None:
        """Take a value."""
        self.values[key] = self.call.keep(key, value)


class Nowhere:
    """Takes nothing: what runs inside a transform is not of the forward."""

    over = True


def _shares(a: Tensor, b: Tensor) -> bool:
    return memory_of(a) in (memory_of(b), None)


def memory_of(value: Tensor) -> int | None:
    """Return the address of a tensor's memory; None for a tensor without memory of the usual kind."""
    try:
        return value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of another's making
        return None


def _apart(value: Tensor, source: Tensor) -> Tensor:
    return value.clone() if value is source or _shares(value, source) else value


def _join(tooks: list[Taken]) -> TransformedValue:
    """Put the parts of one value together, on the device of the first."""
    values = [took.as_taken for took in tooks]
    if any(took.lost for took in tooks) or not all(isinstance(v, Tensor) for v in values):
        raise ExtractError(
            "the model ran in several threads, and their values cannot be joined: they are no tensors, or were overwritten; "
            "let the transform return a tensor with the samples along its first dimension"
        )
    moved = [value.to(values[0].device) for value in values]
    return TransformedValue(torch.cat(moved) if moved[0].dim() else torch.stack(moved))


class CaptureOnThread(threading.local):
    """The forward that the running thread takes values of."""

    call: Any = None


class CaptureAction:
    """The action that hands the values of one selector to the active forward."""

    observes = True
    keeps = True

    def __init__(self, number: int, keys: ValueKeys, here: CaptureOnThread, adopt: Callable[[], Any]) -> None:
        self.number, self.keys, self.here, self.adopt = number, keys, here, adopt

    def __repr__(self) -> str:
        """As messages show it."""
        return "extract(...)"

    def bind(self, site: Site) -> Act:
        """Return what takes the values of one site.

        Raises:
            NoSuchKind: If a forward has no such values.
        """
        if site.kind not in KINDS:
            raise NoSuchKind(
                f'"{site}": extract takes what a forward makes, and that is no forward value; '
                f'kedge.hook(model, "{site}", kedge.record()) keeps what comes later'
            )
        number, keys, here, adopt = self.number, self.keys, self.here, self.adopt
        last: list[ValueKey] = [ValueKey(number, site, -1)]

        def take(value: Tensor, event: Event) -> None:
            call = here.call
            if call is None or call.over:
                call = adopt()
                if call is None or call.over:
                    return
            key = last[0]
            if key.site is not event.site or key.call != event.call:
                key = last[0] = keys[number, event.site, event.call]
            here.call = NOWHERE
            try:
                call.take(key, value, event)
            finally:
                here.call = call

        return take


NOWHERE = Nowhere()


def settled(call: ForwardCapture, values: Mapping[ValueKey, Taken], names: Mapping[ValueKey, str]) -> dict[str, Any]:
    """Return the values by name, copies in place of those that the program has overwritten.

    Raises:
        Overwritten: If there is no copy of one.
    """
    result = {}
    for key, name in names.items():
        took = values[key]
        if took.lost:
            raise Overwritten(
                f'"{name}" was taken, but this forward then changed the tensor in place, which an earlier one with arguments of '
                "the same shapes did not, so its value is gone; as a transform, lambda v: v.clone() copies it every time"
            )
        result[name] = took.as_taken
    return result
