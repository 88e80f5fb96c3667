"""The values taken from one forward: how each is kept, when it is copied, and where the forward may end.

# Note [Values that are overwritten]
A forward may change a captured value in place afterwards. So the first forward of a signature
copies every value and compares the tensors' versions at its end; later forwards copy the changed
ones at once. They keep the others by reference, compare versions each time, and raise an error if
one of these changed after all.

# Note [The end of a forward]
The first forward of a signature runs to its end. Later ones end as soon as they have every value
that the first one had, in any order. They run to their end if a module selected without a call
number ran several times, because it might run once more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kedge.errors import (
    ExtractError,
    NoSuchKind,
    NotRecorded,
    Overwritten,
    SelectorError,
    StopForward,
)
from kedge.features.dimensions import Arguments, Axes, Axis, Layout
from kedge.features.pooling import Pool
from kedge.flow import Act, Event
from kedge.kept_tensor import KeptTensor
from kedge.sites import leaves
from kedge.sites.language import single
from kedge.sites.site import Site, short
from kedge.torch_internals.storages import parts

Transform: TypeAlias = Callable[[Tensor], Any]
KINDS = ("out", "in", "param")


class ValueKey:
    """The identity of a value: its selector, its site, and the call of the module.

    Each key is a single object.
    """

    __slots__ = ("call", "number", "site")

    def __init__(self, number: int, site: Site, call: int) -> None:
        self.number, self.site, self.call = number, site, call


class ValueKeys(dict[tuple[int, Site, int], ValueKey]):
    """The keys of all values captured so far."""

    def __missing__(self, which: tuple[int, Site, int]) -> ValueKey:
        """Return a new key, stored for later calls."""
        return self.setdefault(which, ValueKey(*which))


@dataclass(frozen=True)
class Wanted:
    """The values to take out of a model, and how to keep them.

    Attributes:
        texts: The selectors.
        transforms: The transform of each selector's values; None if there is none.
        rename: New names.
        early_stop: Whether a forward may end once it has all values.
        no_grad: Whether the forward runs without grad.
        device: The device on which values are kept; None for their own.
        dtype: The dtype in which floating-point and complex values are kept; None for their own.
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
        """Whether values are kept unchanged."""
        return self.device is None and self.dtype is None and not any(self.transforms)

    def make(self, number: int, value: Tensor) -> Any:
        """Return the transformed and moved value to keep."""
        transform = self.transforms[number]
        made = value if transform is None else transform(value)
        return self.moved(made)

    def moved(self, made: Any) -> Any:
        """Return a value on the device and in the dtype in which values are kept."""
        if self.device is None and self.dtype is None:
            return made
        kept = {name: self._put(leaf) for name, leaf in leaves.find(made)}
        return leaves.put(made, kept)

    def _put(self, value: Tensor) -> Tensor:
        dtype = value.dtype
        if self.dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            dtype = self.dtype
        return value.to(self.device or value.device, dtype)


class CapturedValue(KeptTensor):
    """A captured tensor.

    Attributes:
        copy: A copy made at capture; None if none is needed.
        graph: Whether the tensor had a graph at capture.
    """

    __slots__ = ("copy", "graph")

    def __init__(self, value: Tensor, *, copied: bool, unknown: bool) -> None:
        super().__init__(value, copied=copied)
        self.copy = value.clone() if unknown and self.value is value else None
        self.graph = value.requires_grad

    @property
    def lost(self) -> bool:
        """Whether the program has changed the tensor in place and there is no copy."""
        return self.copy is None and self.overwritten

    @property
    def as_taken(self) -> Tensor:
        """The tensor, or its copy if the program has changed the tensor in place."""
        return self.value if self.copy is None or not self.overwritten else self.copy

    @property
    def joined_graph(self) -> bool:
        """Whether the tensor got its graph after capture, as outputs of a reentrant checkpoint do after its last module."""
        return self.value.requires_grad and not self.graph

    def lies_in(self, memory: Collection[int]) -> bool:
        """Whether the tensor's memory is among these addresses."""
        return not memory_of(self.value).isdisjoint(memory)

    def settle(self) -> None:
        """Replace the tensor by its copy, if there is one."""
        if self.copy is not None:
            self._replace(self.copy)
            self.copy = None


class TransformedValue:
    """The result of a transform: a tensor in memory of its own, or a structure of such tensors.

    It has the interface of `CapturedValue`; the program does not know its memory, so it is never
    overwritten.
    """

    __slots__ = ("as_taken",)
    overwritten = lost = joined_graph = False

    def __init__(self, value: Any) -> None:
        self.as_taken = value

    def lies_in(self, memory: Collection[int]) -> bool:
        """Return False: the memory is not the program's."""
        return False

    def settle(self) -> None:
        """No-op: there is no copy."""


class UnpooledValue(TransformedValue):
    """A copy of a value, to be pooled when its forward has shown what its dimensions are.

    Attributes:
        axes: The value's dimensions; later operations of the forward may find out what they are.
    """

    __slots__ = ("axes",)

    def __init__(self, value: Tensor, axes: list[Axis]) -> None:
        super().__init__(value.clone())
        self.axes = axes


Taken: TypeAlias = CapturedValue | TransformedValue


@dataclass(frozen=True)
class CapturePlan:
    """The facts about forwards of one signature that the first one taught.

    Attributes:
        names: Each value's name, in the order of the result.
        copied: The values to copy at once.
        stops: Whether a forward may end once it has all values.
    """

    names: Mapping[ValueKey, str]
    copied: frozenset[ValueKey]
    stops: bool


class PoolingOfCall:
    """What is known about the dimensions of values in one forward.

    Args:
        given: The forward's arguments.
        layouts: The layout of each value whose dimensions an earlier forward of the same structure
            has shown.
        axes: The dimensions in this forward, if they are followed in it; else None.

    Attributes:
        described: What was done with the values that this forward has shown how to pool.
    """

    def __init__(
        self, given: Arguments, layouts: dict[ValueKey, Layout | None], axes: Axes | None
    ) -> None:
        self.given, self.layouts, self.axes = given, layouts, axes
        self.described: dict[ValueKey, str] = {}
        self.seen: dict[ValueKey, tuple[tuple[int, ...], list[Axis]]] = {}

    def see(self, key: ValueKey, value: Tensor) -> None:
        """Note the dimensions of a value, if they are followed."""
        if self.axes is not None and not value.is_nested:
            self.seen[key] = tuple(value.shape), self.axes.of(value)

    def learn(self, transforms: Sequence[Transform | None]) -> None:
        """Note the layouts of the values of a forward that was followed to its end."""
        for key, (_, axes) in self.seen.items():
            transform = transforms[key.number]
            channel = transform.channels if isinstance(transform, Pool) else None
            self.layouts[key] = Layout.of(axes, channel)

    def pooled(self, key: ValueKey, transform: Pool, value: Tensor) -> Tensor:
        """Return a value pooled as its layout says."""
        layout = transform.layout(value, self.layouts.get(key), short(key.site))
        return transform.pool(value, layout, self.given, short(key.site))


class ForwardCapture:
    """One active forward, and the values taken from it.

    Attributes:
        over: Whether the capture has ended.
        others: The threads that ran before this forward began, and so do not belong to it.
    """

    def __init__(
        self, wanted: Wanted, plan: CapturePlan | None, pooling: PoolingOfCall | None = None
    ) -> None:
        self.wanted = wanted
        self.plan = plan
        self.pooling = pooling
        self.over = False
        self.plain = wanted.plain
        self.count = -1
        if plan is not None and plan.stops:
            self.count = len(plan.names)
        self.values: dict[ValueKey, Taken] = {}
        self.replicas: dict[threading.Thread, dict[ValueKey, Taken]] = {}
        self.others = frozenset(threading.enumerate())

    def take(self, key: ValueKey, value: Tensor, event: Event) -> None:
        """Store a value.

        Raises:
            StopForward: If it is the last one wanted and the plan allows an early end.
        """
        self.values[key] = self.keep(key, value)
        if (
            len(self.values) == self.count
            and self.plan is not None
            and self.values.keys() == self.plan.names.keys()
        ):
            self.over = True
            raise StopForward("every requested value is captured")

    def copies(self, key: ValueKey) -> bool:
        """Whether the plan says to copy a value at once."""
        return self.plan is not None and key in self.plan.copied

    def keep(self, key: ValueKey, value: Tensor) -> Taken:
        """Return a value, kept as the plan says; see Note [Values that are overwritten]."""
        if self.pooling is not None:
            self.pooling.see(key, value)
            transform = self.wanted.transforms[key.number]
            if isinstance(transform, Pool):
                return self._pooled(key, transform, value, self.pooling)
        made = value if self.plain else self.wanted.make(key.number, value)
        transformed = made is not value
        if not isinstance(made, Tensor):
            apart = {name: _apart(leaf, value) for name, leaf in leaves.find(made)}
            return TransformedValue(leaves.put(made, apart))
        if self.wanted.no_grad and made.requires_grad:
            made = made.detach()
        if transformed and not _shares(made, value):
            return TransformedValue(made)
        if transformed and is_composite(value):
            # Its parts do not count the changes that it undergoes.
            return TransformedValue(made.clone())
        return CapturedValue(made, copied=self.copies(key), unknown=self.plan is None)

    def _pooled(
        self, key: ValueKey, transform: Pool, value: Tensor, pooling: PoolingOfCall
    ) -> Taken:
        if self.wanted.no_grad:
            value = value.detach()
        if pooling.axes is not None:
            return UnpooledValue(value, pooling.axes.of(value))
        made = self.wanted.moved(pooling.pooled(key, transform, value))
        return TransformedValue(_apart(made, value))

    def replica(self, thread: threading.Thread) -> Replica:
        """Return the object that takes the values of a thread started by this forward."""
        for known in threading.enumerate():  # in the order of their start
            if known not in self.others:
                self.replicas.setdefault(known, {})
        return Replica(self, self.replicas[thread])

    def joined(self) -> dict[ValueKey, Taken]:
        """Return the values of all threads, with those of replicas joined along their first dimension."""
        parts: dict[ValueKey, list[Taken]] = {}
        for values in (self.values, *self.replicas.values()):
            for key, took in values.items():
                parts.setdefault(key, []).append(took)
        joined: dict[ValueKey, Taken] = {}
        for key, tooks in parts.items():
            joined[key] = tooks[0] if len(tooks) == 1 else _join(tooks)
        return joined


class Replica:
    """The capture in one thread on behalf of a forward in another."""

    def __init__(self, call: ForwardCapture, values: dict[ValueKey, Taken]) -> None:
        self.call, self.values = call, values

    @property
    def over(self) -> bool:
        """Whether the capture has ended."""
        return self.call.over

    def take(self, key: ValueKey, value: Tensor, event: Event) -> None:
        """Store a value."""
        call = self.call
        transform = call.wanted.transforms[key.number]
        if call.pooling is not None and isinstance(transform, Pool):
            raise ExtractError(
                "the model ran in several threads, and the dimensions of its values "
                "are followed in one; give a function of your own as the transform"
            )
        self.values[key] = call.keep(key, value)


class Nowhere:
    """The state inside a transform: nothing is captured, because its operations are not part of the forward."""

    over = True


def _shares(a: Tensor, b: Tensor) -> bool:
    one, other = memory_of(a), memory_of(b)
    return not (one and other) or not one.isdisjoint(other)


def memory_of(value: Tensor) -> frozenset[int]:
    """Return the addresses of a tensor's storages: several for a sparse or a nested one; none if they are not accessible."""
    try:
        return frozenset(part.untyped_storage().data_ptr() for part in parts(value))
    except (NotImplementedError, RuntimeError):  # a third-party tensor type
        return frozenset()


def is_composite(value: Tensor) -> bool:
    """Whether a tensor consists of others, as sparse and jagged ones do."""
    inner = parts(value)
    return len(inner) != 1 or inner[0] is not value


def _apart(value: Tensor, source: Tensor) -> Tensor:
    return value.clone() if value is source or _shares(value, source) else value


def _join(tooks: list[Taken]) -> TransformedValue:
    """Return the parts of one value joined on the device of the first."""
    values = [took.as_taken for took in tooks]
    are_tensors = all(isinstance(value, Tensor) for value in values)
    if not are_tensors or any(took.lost for took in tooks):
        raise ExtractError(
            "the model ran in several threads, and their values cannot be joined: they "
            "are not tensors, or were overwritten; let the transform return a tensor "
            "with the samples along its first dimension"
        )
    moved = [value.to(values[0].device) for value in values]
    together = torch.cat(moved) if moved[0].dim() else torch.stack(moved)
    return TransformedValue(together)


class CaptureOnThread(threading.local):
    """The forward whose values the running thread captures."""

    call: Any = None


class CaptureAction:
    """The action that passes the values of one selector to the active forward."""

    observes = True
    keeps = True

    def __init__(
        self, number: int, keys: ValueKeys, here: CaptureOnThread, adopt: Callable[[], Any]
    ) -> None:
        self.number = number
        self.keys = keys
        self.here = here
        self.adopt = adopt

    def __repr__(self) -> str:
        """Return the action as messages show it."""
        return "extract(...)"

    def bind(self, site: Site) -> Act:
        """Return the function that takes the values of one site.

        Raises:
            NoSuchKind: If values of the site's kind do not arise in a forward.
        """
        if site.kind not in KINDS:
            raise NoSuchKind(
                f'"{site}": extract takes values of the forward, and this is not one; '
                f'kedge.hook(model, "{site}", kedge.record()) records later values'
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


def settled(values: Mapping[ValueKey, Taken], names: Mapping[ValueKey, str]) -> dict[str, Any]:
    """Return the values by name, with copies in place of values that the program has overwritten.

    Raises:
        Overwritten: If the program has overwritten a value without a copy.
    """
    result = {}
    for key, name in names.items():
        took = values[key]
        if took.lost:
            raise Overwritten(
                f'"{name}" was captured, but this forward then changed the tensor in '
                "place, unlike "
                "an earlier one with arguments of the same shapes, so its value is "
                "lost; the transform lambda v: v.clone() copies it every time"
            )
        result[name] = took.as_taken
    return result


_SHOWN = 8


def name_all(
    texts: tuple[str, ...], keys: Iterable[ValueKey], why: Callable[[int], str]
) -> dict[ValueKey, str]:
    """Return the names of values: the selector if it has a single value, else site and call.

    Args:
        texts: The selectors.
        keys: The values, in the order of capture.
        why: A function from a selector's number to the reason why it has no value.

    Raises:
        NotRecorded: If a selector has no value.
    """
    by_text: dict[int, list[ValueKey]] = {number: [] for number in range(len(texts))}
    for key in keys:
        by_text[key.number].append(key)
    named: dict[ValueKey, str] = {}
    for number, found in by_text.items():
        if not found:
            raise NotRecorded(f'nothing was captured at "{texts[number]}": {why(number)}')
        named |= {found[0]: texts[number]} if len(found) == 1 else named_apart(found)
    return named


def named_apart(keys: list[ValueKey]) -> dict[ValueKey, str]:
    """Return the names of several values of one selector, with call numbers if a module ran several times."""
    calls = Counter(key.site for key in keys)
    named = {}
    for key in keys:
        site = key.site
        if calls[site] > 1:
            site = site.at(call=key.call)
        named[key] = short(site)
    return named


def renamed(named: Mapping[ValueKey, str], rename: Mapping[str, str]) -> dict[ValueKey, str]:
    """Return the names after renaming.

    Raises:
        ExtractError: If a name to change does not exist, or two values would get the same name.
    """
    unknown = [name for name in rename if name not in named.values()]
    if unknown:
        there = ", ".join(f'"{name}"' for name in list(named.values())[:_SHOWN])
        raise ExtractError(
            f'no value has the name "{unknown[0]}", to be called '
            f'"{rename[unknown[0]]}"; the names '
            f"are {there}"
        )
    names = {key: rename.get(name, name) for key, name in named.items()}
    _refuse_doubles(names.values())
    return names


def check(texts: tuple[str, ...], rename: Mapping[str, str], sites: list[list[Site]]) -> None:
    """Check names before the first forward, as far as possible.

    Raises:
        ExtractError: If a selector occurs twice, a name to change is impossible, or two values
            would get the same name.
    """
    _refuse_doubles(texts, "a selector is given twice")
    _refuse_doubles(rename.values())
    names: list[str] = []
    paths: set[str] = set()
    for text, matched in zip(texts, sites, strict=True):
        names += [text] if len(matched) == 1 else map(short, matched)
        paths |= {site.path for site in matched}
    _refuse_doubles([rename.get(name, name) for name in names])
    for name in rename:
        if name not in texts and not may_be(name, paths):
            shown = ", ".join(f'"{text}"' for text in texts[:_SHOWN])
            raise ExtractError(
                f'rename: no value can have the name "{name}"; the selectors are {shown}'
            )


def may_be(name: str, paths: Collection[str]) -> bool:
    """Whether a value of a module at one of these paths can have a name."""
    try:
        return single(name).literal in paths
    except SelectorError:
        return False


def _refuse_doubles(names: Iterable[str], what: str = "two values would have one name") -> None:
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise ExtractError(
            f'{what}: "{double[0]}"; rename={{...}} gives another, by selector or by site'
        )
