"""The forwards behind features: hooks registered only while needed, and a plan learned for each kind of forward."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import (
    ActionError,
    ExtractError,
    InTrainingMode,
    NeverFiredWarning,
    NotRecorded,
    SelectorError,
    warn,
)
from kedge.features.capture import (
    NOWHERE,
    CaptureAction,
    CaptureOnThread,
    CapturePlan,
    ForwardCapture,
    PoolingOfCall,
    TransformedValue,
    UnpooledValue,
    ValueKey,
    ValueKeys,
    Wanted,
    check,
    memory_of,
    name_all,
    named_apart,
    renamed,
    settled,
)
from kedge.features.dimensions import Arguments, Layout
from kedge.features.following import followed
from kedge.features.pooling import Pool
from kedge.flow import Event
from kedge.hooks.session import Session
from kedge.sites import leaves
from kedge.sites.language import single
from kedge.sites.modal import shown_training
from kedge.sites.site import Site, short
from kedge.torch_internals.dynamo import compiles, untraced
from kedge.torch_internals.module_tables import modules_in, own_buffers, own_parameters
from kedge.torch_internals.torchscript import is_training

_PLANS = 256
_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})


class FeatureForward:
    """Capture of values from the forwards of one model.

    Its hooks are in PyTorch's tables only during a forward or inside `held`.

    Attributes:
        follows: Whether to follow the dimensions of values in the first forward of each structure.
        layouts: For each structure of arguments, the layouts of the values.
        inspect: Called with the name and the layout of each value that is not pooled, and the
            arguments of its forward.
        described: What was done with pooled values, by name.
    """

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        self.root = model
        self.wanted = wanted
        self.here = CaptureOnThread()
        self.modules = list(modules_in(model).values())
        self.compiled = any(map(compiles, self.modules))
        if self.compiled and not wanted.no_grad:
            raise ExtractError(
                "the model is compiled, and compiled code returns values without their "
                "graph; extract from the uncompiled model, or with no_grad=True"
            )
        self.follows = any(isinstance(transform, Pool) for transform in wanted.transforms)
        self.layouts: dict[Hashable, dict[ValueKey, Layout | None]] = {}
        self.described: dict[str, str] = {}
        self.inspect: Callable[[str, Layout, Arguments], None] | None = None
        self.plans: OrderedDict[Hashable, CapturePlan] = OrderedDict()
        self.under_way: list[ForwardCapture] = []
        self._lock = threading.RLock()
        self._warned = False
        self._warned_of_training = False
        self._holders = 0
        self.session = Session()
        try:
            keys = ValueKeys()
            self.hooks = []
            for number, text in enumerate(wanted.texts):
                action = CaptureAction(number, keys, self.here, self._adopt)
                self.hooks.append(self.session.hook(model, text, action))
            check(wanted.texts, wanted.rename, list(map(_sites_of, self.hooks)))
        except BaseException:
            self.session.end(quiet=True)
            raise
        self.session.pause()

    def run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Call the model and return the values by name; see Note [The end of a forward]."""
        __tracebackhide__ = True
        kind = self._kind(args, kwargs)
        plan = self.plans.get(kind)
        if plan is None and (self.wanted.no_grad or not torch.is_grad_enabled()):
            self.warn_of_training()
        with ExitStack() as stack:
            pooling = None
            if self.follows:
                given = Arguments.of(model, args, kwargs)
                layouts = self.layouts.setdefault((given.structure, kind[2:]), {})
                axes = None
                if not (layouts or self.compiled):
                    axes = stack.enter_context(followed(model, given))
                pooling = PoolingOfCall(given, layouts, axes)
            call = ForwardCapture(self.wanted, plan, pooling)
            stack.enter_context(self._standing(call))
            if self.wanted.no_grad:
                stack.enter_context(torch.no_grad())
            try:
                model(*args, **kwargs)
            except Exception:
                # Our StopForward, or the program's error about it: the capture is complete.
                if not call.over:
                    raise

        if pooling is not None and pooling.axes is not None:
            pooling.learn(self.wanted.transforms)
            for key, (shape, _) in pooling.seen.items():
                transform = self.wanted.transforms[key.number]
                took = call.values.get(key)
                if isinstance(transform, Pool) and isinstance(took, UnpooledValue):
                    value, given = took.as_taken, pooling.given
                    layout = transform.layout(value, pooling.layouts[key], short(key.site))
                    pooling.described[key] = transform.described(shape, layout, given)
                    made = self.wanted.moved(pooling.pooled(key, transform, value))
                    call.values[key] = TransformedValue(made)

        values = call.joined() if call.replicas else call.values
        names = {} if call.plan is None else call.plan.names
        if call.plan is None or values.keys() != names.keys():
            named = name_all(self.wanted.texts, values, self.why)
            names = renamed(named, self.wanted.rename)
            self._warn_of_silent_sites()
            self._learn(kind, call, names, (args, kwargs))
        if pooling is not None:
            for key, name in names.items():
                known = pooling.layouts.get(key)
                is_pooled = isinstance(self.wanted.transforms[key.number], Pool)
                if known is not None and not is_pooled and self.inspect is not None:
                    self.inspect(name, known, pooling.given)
                if key in pooling.described:
                    self.described.setdefault(name, pooling.described[key])
        return settled(values, names)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context that keeps the hooks registered between calls, because registering them costs as much as a small batch."""
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                self._rest()

    def _rest(self) -> None:
        if not self.under_way and not self._holders:
            self.session.pause()

    @contextmanager
    def collecting(self, collected: Collected) -> Iterator[None]:
        """Context that captures the values of every forward in the block."""
        with self._standing(Collector(self.wanted, collected)):
            yield

    def warn_of_training(self) -> None:
        """Warn once if dropout or normalization computes as in training, so that features are not those of the model in use."""
        if self._warned_of_training:
            return
        names = shown_training(self.root)
        if names:
            self._warned_of_training = True
            warn(
                InTrainingMode(
                    f"the model is in training mode ({names}): dropout removes values "
                    "at random, and batch normalization uses the statistics of each "
                    "batch and changes its running statistics, so the features are not "
                    "those of the model in use. Call model.eval() first"
                )
            )

    def why(self, number: int) -> str:
        """Return the reason why a selector has no value."""
        for entry in self.hooks[number].ledger():
            if entry.cause:
                return f"{entry.cause.why}; {entry.cause.remedy}"
        return (
            "it fired in other forwards; this one took another path, or ran it in an older thread"
        )

    @contextmanager
    def _standing(self, call: ForwardCapture) -> Iterator[None]:
        """Context that keeps the hooks registered until the last active forward ends."""
        outer = self.here.call
        try:
            with self._lock:
                self.under_way.append(call)
                self.session.resume(eager=not self.compiled)
            self.here.call = call
            yield
        finally:
            self.here.call = outer
            call.over = True
            with self._lock:
                self.under_way = [other for other in self.under_way if other is not call]
                self._rest()

    def _adopt(self) -> Any:
        """Return the capture for this thread: of the active forward that began before the thread; None if there is none."""
        if self.here.call is NOWHERE:
            return NOWHERE
        thread = threading.current_thread()
        mine = [call for call in self.under_way if thread not in call.others]
        if len(mine) > 1:
            raise ActionError(
                "several calls of these features run at once, and this thread, which "
                "one of them started, could belong to any; call the features one after "
                "the other"
            )
        if mine:
            self.here.call = mine[0].replica(thread)
        return self.here.call

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
        """Return the signature that two forwards must share to use one plan."""
        modes = bytes(map(is_training, self.modules))
        named = tuple((name, _shape(value)) for name, value in kwargs.items())
        return tuple(map(_shape, args)), named, modes, torch.is_grad_enabled()

    def _warn_of_silent_sites(self) -> None:
        """Warn once, after the first complete forward, about sites of a pattern that never fired."""
        if self._warned:
            return
        self._warned = True
        for hooked in self.hooks:
            silent = hooked.ledger().silent()
            if silent:
                warn(NeverFiredWarning(silent))

    def _learn(
        self, kind: Hashable, call: ForwardCapture, names: Mapping[ValueKey, str], given: Any
    ) -> None:
        """Note what a forward teaches about later ones of its kind; see Note [Values that are overwritten]."""
        owned: set[int] = set()
        for module in self.modules:
            for table in (own_parameters(module), own_buffers(module)):
                for tensor in table.values():
                    if tensor is not None:
                        owned |= memory_of(tensor)
        for _, tensor in leaves.find(given):
            owned |= memory_of(tensor)
        copied = set() if call.plan is None else set(call.plan.copied)
        late = False
        for key, took in call.values.items():
            late = late or took.joined_graph
            if took.overwritten or took.lies_in(owned):
                copied.add(key)
                took.settle()

        stops = self.wanted.early_stop and not (
            self.compiled or late or call.replicas or self._unending(names)
        )
        self.plans[kind] = CapturePlan(names, frozenset(copied), stops)
        while len(self.plans) > _PLANS:
            self.plans.popitem(last=False)

    def _unending(self, names: Mapping[ValueKey, str]) -> bool:
        """Whether an early end is unsafe: a module might run again, or is sharded and holds gathered parameters to its end."""
        for key in names:
            if key.call and not _has_call(self.wanted.texts[key.number]):
                return True
        kinds: set[str] = set()
        for module in self.modules:
            kinds |= {kind.__name__ for kind in type(module).__mro__}
        return not _SHARDED.isdisjoint(kinds)


def _sites_of(hooked: Any) -> list[Site]:
    return [tap.site for tap in hooked.taps]


def _has_call(text: str) -> bool:
    try:
        return single(text).call is not None
    except SelectorError:
        return False


def _shape(value: Any) -> Hashable:
    """Return the part of an argument that a plan may depend on: shapes and types, without the tensors' numbers."""
    if isinstance(value, Tensor):
        if value.is_nested:  # its lengths differ from batch to batch, or cannot be read
            return (value.dim(), value.size(0)), value.dtype
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    if isinstance(value, Mapping):
        return tuple((str(name), _shape(inner)) for name, inner in value.items())
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return type(value).__qualname__


class Collected(Mapping[str, list[Any]]):
    """The values of every pass by name, in the order of the passes, for `Features.collect`; it grows with each pass."""

    def __init__(self, wanted: Wanted, why: Callable[[int], str]) -> None:
        self._wanted, self._why = wanted, why
        self._passes: dict[int, dict[ValueKey, Any]] = {}

    def add(self, pass_: int, key: ValueKey, value: Any) -> None:
        """Add a value of a pass."""
        self._passes.setdefault(pass_, {})[key] = value

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values of a name, one per pass.

        Raises:
            NotRecorded: If there are none; the message says why.
        """
        names = self._names()
        found = [values[key] for key, values in self._each() if names[key] == name]
        if found:
            return found
        why = f"the names are {', '.join(self) or 'none yet'}"
        numbers = {key.number for key in names}
        for number, text in enumerate(self._wanted.texts):
            if name in (text, self._wanted.rename.get(text)):
                if number not in numbers:
                    why = self._why(number)
                break
        raise NotRecorded(f'nothing was collected under "{name}": {why}')

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(dict.fromkeys(self._names().values()))

    def __len__(self) -> int:
        """Return the number of names."""
        return len(set(self._names().values()))

    def __repr__(self) -> str:
        """Return the names, each with its number of values."""
        return f"Collected({', '.join(f'{name}: {len(self[name])}' for name in self)})"

    def _each(self) -> Iterator[tuple[ValueKey, dict[ValueKey, Any]]]:
        for values in list(self._passes.values()):
            for key in list(values):
                yield key, values

    def _names(self) -> dict[ValueKey, str]:
        keys = list(dict.fromkeys(key for key, _ in self._each()))
        names: dict[ValueKey, str] = {}
        for number, text in enumerate(self._wanted.texts):
            mine = [key for key in keys if key.number == number]
            names |= {mine[0]: text} if len(mine) == 1 else named_apart(mine)
        rename = self._wanted.rename
        return {key: rename.get(name, name) for key, name in names.items()}


class Collector(ForwardCapture):
    """The capture of every pass; each value is a copy, because the next pass may use the same memory."""

    def __init__(self, wanted: Wanted, collected: Collected) -> None:
        super().__init__(wanted, CapturePlan({}, frozenset(), stops=False))
        self.collected = collected

    def copies(self, key: ValueKey) -> bool:
        """Return True: every value is copied."""
        return True

    def take(self, key: ValueKey, value: Tensor, event: Event) -> None:
        """Store a value of the current pass."""
        self.collected.add(event.pass_, key, self.keep(key, value).as_taken)

    def replica(self, thread: Any) -> Any:
        """Raise ExtractError: passes of replicas are not those of the model."""
        raise ExtractError(
            "collect() does not join the features of a model's replicas; compute the "
            "features call by call"
        )


untraced(FeatureForward.run, FeatureForward.collecting)
