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
    SelectorError,
    warn,
)
from kedge.features.axes.arguments import Arguments
from kedge.features.axes.following import followed
from kedge.features.axes.layout import Layout
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
    memory_of,
    settled,
)
from kedge.features.collect import Collected, Collector
from kedge.features.pooling import Pool
from kedge.features.value_names import check, name_all, renamed
from kedge.hooks.session import Session
from kedge.sites import leaves
from kedge.sites.language import single
from kedge.sites.modal import shown_training
from kedge.sites.site import short
from kedge.torch_internals.dynamo import compiles, untraced
from kedge.torch_internals.module_tables import modules_in, own_buffers, own_parameters

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
        self.root, self.wanted, self.here = model, wanted, CaptureOnThread()
        self.modules = list(modules_in(model).values())
        self.compiled = any(map(compiles, self.modules))
        if self.compiled and not wanted.no_grad:
            raise ExtractError(
                "the model is compiled, and compiled code returns values without their graph; extract from the "
                "uncompiled model, or with no_grad=True"
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
            takers = (
                CaptureAction(number, keys, self.here, self._adopt)
                for number in range(len(wanted.texts))
            )
            self.hooks = [
                self.session.hook(model, text, take)
                for text, take in zip(wanted.texts, takers, strict=True)
            ]
            check(
                wanted.texts,
                wanted.rename,
                [[tap.site for tap in hooked.taps] for hooked in self.hooks],
            )
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
            except (
                Exception
            ):  # our StopForward, or the program's error about it: the capture is complete
                if not call.over:
                    raise
        if pooling is not None and pooling.axes is not None:
            self._pool(call, pooling)
        values = call.joined() if call.replicas else call.values
        if call.plan is not None and values.keys() == call.plan.names.keys():
            names = call.plan.names
        else:
            names = renamed(name_all(self.wanted.texts, values, self.why), self.wanted.rename)
            self._warn_of_silent_sites()
            self._learn(kind, call, names, (args, kwargs))
        if pooling is not None:
            if self.inspect is not None:
                for key, name in names.items():
                    if (layout := pooling.layouts.get(key)) and not isinstance(
                        self.wanted.transforms[key.number], Pool
                    ):
                        self.inspect(name, layout, pooling.given)
            self.described = {
                names[key]: text for key, text in pooling.described.items()
            } | self.described
        return settled(call, values, names)

    def _pool(self, call: ForwardCapture, pooling: PoolingOfCall) -> None:
        pooling.learn(self.wanted.transforms)
        for key, (shape, _) in pooling.seen.items():
            transform, took = self.wanted.transforms[key.number], call.values.get(key)
            if isinstance(transform, Pool) and isinstance(took, UnpooledValue):
                made = self.wanted.moved(pooling.pooled(key, transform, took.as_taken))
                layout = transform.layout(took.as_taken, pooling.layouts[key], short(key.site))
                pooling.described[key] = transform.described(shape, layout, pooling.given)
                call.values[key] = TransformedValue(made)

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
        names = "" if self._warned_of_training else shown_training(self.root)
        if names:
            self._warned_of_training = True
            warn(
                InTrainingMode(
                    f"the model is in training mode ({names}): dropout removes values at random, and batch normalization "
                    "uses the statistics of each batch and changes its running statistics, so the features are not those "
                    "of the model in use. Call model.eval() first"
                )
            )

    def why(self, number: int) -> str:
        """Return the reason why a selector has no value."""
        silent = [
            str(entry.cause.why) + "; " + entry.cause.remedy
            for entry in self.hooks[number].ledger()
            if entry.cause
        ]
        return (
            silent[0]
            if silent
            else "it fired in other forwards; this one took another path, or ran it in an older thread"
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
                "several calls of these features run at once, and this thread, which one of them started, could "
                "belong to any; call the features one after the other"
            )
        if mine:
            self.here.call = mine[0].replica(thread)
        return self.here.call

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
        """Return the signature that two forwards must share to use one plan."""
        modes = bytes([module.training for module in self.modules])
        named = tuple((name, _shape(value)) for name, value in kwargs.items())
        return tuple(map(_shape, args)), named, modes, torch.is_grad_enabled()

    def _warn_of_silent_sites(self) -> None:
        """Warn once, after the first complete forward, about sites of a pattern that never fired."""
        if not self._warned:
            self._warned = True
            for hooked in self.hooks:
                if silent := hooked.ledger().silent():
                    warn(NeverFiredWarning(silent))

    def _learn(
        self, kind: Hashable, call: ForwardCapture, names: Mapping[ValueKey, str], given: Any
    ) -> None:
        tensors = (
            *(tensor for module in self.modules for tensor in _own(module)),
            *(t for _, t in leaves.find(given)),
        )
        owned = {address for tensor in tensors for address in memory_of(tensor)}
        late = any(took.joined_graph for took in call.values.values())
        copied = {
            key for key, took in call.values.items() if took.overwritten or took.lies_in(owned)
        }
        for key in copied:
            call.values[key].settle()
        stops = self.wanted.early_stop and not (
            self.compiled or late or call.replicas or self._unending(names)
        )
        known = call.plan.copied if call.plan is not None else frozenset()
        self.plans[kind] = CapturePlan(names, known | copied, stops)
        while len(self.plans) > _PLANS:
            self.plans.popitem(last=False)

    def _unending(self, names: Mapping[ValueKey, str]) -> bool:
        """Whether an early end is unsafe: a module might run again, or is sharded and holds gathered parameters to its end."""
        numbered = {number for number, text in enumerate(self.wanted.texts) if _has_call(text)}
        again = any(key.call and key.number not in numbered for key in names)
        return again or any(map(_is_sharded, self.modules))


def _has_call(text: str) -> bool:
    try:
        return single(text).call is not None
    except SelectorError:
        return False


def _is_sharded(module: nn.Module) -> bool:
    return not _SHARDED.isdisjoint(kind.__name__ for kind in type(module).__mro__)


def _own(module: nn.Module) -> Iterator[Tensor]:
    for held in (*own_parameters(module).values(), *own_buffers(module).values()):
        if held is not None:
            yield held


def _shape(value: Any) -> Hashable:
    """Return the part of an argument that a plan may depend on: shapes and types, without the tensors' numbers."""
    if isinstance(
        value, Tensor
    ):  # the lengths in a nested tensor differ from batch to batch, or cannot be read
        return (value.dim(), value.size(0)) if value.is_nested else value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    if isinstance(value, Mapping):
        return tuple((str(name), _shape(inner)) for name, inner in value.items())
    return (
        value if isinstance(value, (bool, int, str)) or value is None else type(value).__qualname__
    )


untraced(FeatureForward.run, FeatureForward.collecting)
