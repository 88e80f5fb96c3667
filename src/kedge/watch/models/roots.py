"""The watched models of a program, the interface of the meter that measures them, and that of the sink."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from torch import Tensor, nn

from kedge.flow import Act, Sink
from kedge.hooks.firing.contract import Measure
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Tap
from kedge.hooks.session import Session
from kedge.hooks.target import HookedModel
from kedge.hooks.unfired import explain
from kedge.sites.select import Selector
from kedge.sites.site import Site
from kedge.torch_internals import dynamo

_EXACT_ZERO = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.RReLU)
_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d)


_ALIKE = 8
"""Most roots with parameters and one structure that are kept apart; a program may make one for each step."""


class WatchMeter(Protocol):
    """The action that measures: `kedge.measure`."""

    sink: Any
    level: int
    muted: bool
    draws: bool
    seats: dict[Site, Any]
    channel_dims: dict[str, int | None]
    events: int
    wires: int
    seconds: float
    device_seconds: float
    lock: Any

    def bind(self, site: Site) -> Act:
        """Return a function that measures the values of one site."""

    def bind_value(self, site: Site) -> Measure | None:
        """Return a function that measures values of one site without events, if there is one."""

    def saturates(self, path: str, how: str, numbers: Sequence[float]) -> None:
        """Note how the activation at a path saturates."""

    def seat(self, site: Site, value: Tensor) -> Any:
        """Return the entry of a site."""

    def total_seat(self, site: Site, size: int) -> Any:
        """Return the entry of a site that sums up many tensors."""

    def observe_all(self, seats: Sequence[Any], values: Sequence[Tensor], step: int) -> None:
        """Measure one value of each of many sites."""

    def add_squares(self, seats: Sequence[Any], step: int, counts: Sequence[int], squares: Sequence[float]) -> None:
        """Add known sums of squares, one for each site."""

    def drop(self, seats: Sequence[Any] | None = None) -> None:
        """Forget the measurements of this step, at some sites or at all."""

    def spoiled(self) -> bool:
        """Whether a measurement of this step is not finite."""

    def flush(self, *, finite: bool = False) -> None:
        """End the step.

        Args:
            finite: Whether all of the step was finite and not measured.
        """

    def finish(self) -> None:
        """Pass on the rest."""


class StepSink(Sink, Protocol):
    """The sink of a watched run."""

    def sites(self, sites: list[dict[str, Any]], roots: list[dict[str, Any]]) -> None:
        """Receive the list of sites, whenever it has grown."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Receive one event."""


@dataclass
class RootModule:
    """A root module: the prefix of its recorded paths, and its modules.

    A program may build a new loss module for every call. Such a root without parameters continues the one before it; a
    root with parameters does so after many of the same structure.

    Attributes:
        index: Its number.
        prefix: The beginning of its recorded paths; empty for plain names.
        types: The class name of each module, by its path in the root.
        parameters: How many elements its parameters have.
        modules: The tree of its modules, as the recording lists it.
        follows: Whether its module continues an earlier one.
        target: The hooked model; None if there is no module, or no longer.
        past: The counter of the passes of the module before.
        heard: The sites that fired for earlier modules.
        silent: The sites that did not fire, of a deleted module.
        undo: Removes its hooks.
        optimizers: The numbers of the optimizers that hold its parameters and have stepped.
        steps: How many steps they have made.
    """

    index: int
    prefix: str
    types: dict[str, str]
    parameters: int = 0
    modules: list[dict[str, Any]] = field(default_factory=list)
    follows: bool = False
    target: HookedModel | None = None
    past: PassCounter | None = None
    heard: set[str] = field(default_factory=set)
    silent: list[dict[str, Any]] = field(default_factory=list)
    undo: ExitStack = field(default_factory=ExitStack)
    optimizers: set[int] = field(default_factory=set)
    steps: int = 0

    @property
    def passes(self) -> PassCounter | None:
        """The counter of its forward passes."""
        return None if self.target is None else self.target.passes

    @property
    def is_running(self) -> bool:
        """Whether its forward is active in this thread; known only while its own hooks are installed."""
        return self.target is not None and self.target.passes.here.inside

    def module(self) -> nn.Module | None:
        """Return the module, if it still exists."""
        return None if self.target is None else self.target.model()

    def release(self, session: Session) -> bool:
        """Release everything kept for the module if the module no longer exists.

        Returns:
            Whether there was something to release.
        """
        gone = self.target
        if gone is None or gone.model() is not None:
            return False
        mine = {id(t): t for t in session.taps if getattr(t.action, "root", None) is self}
        self.heard.update(str(t.site) for t in mine.values() if t.fired)
        self.silent = silences([self], mine.values(), session)
        self.past = gone.passes
        session.taps = [t for t in session.taps if id(t) not in mine]
        session.targets = {key: target for key, target in session.targets.items() if target is not gone}
        self.target = None
        self.undo.close()
        return True

    @contextmanager
    def attaching(self, session: Session, module: nn.Module) -> Iterator[HookedModel]:
        """Hook a module inside a ``with`` block, in place of the one before it."""
        outer, self.follows = session.mounts.cleanup, self.past is not None
        if not self.follows:
            outer.callback(self.undo.close)
        self.silent = []
        session.mounts.cleanup = self.undo
        try:
            self.target = session.targets[id(module)] = HookedModel(session, module)
            self.target.kinds = {name: weakref.ref(type(m)) for name, m in module.named_modules(remove_duplicate=False)}
            if self.follows and session.clock.leader is self.past:
                session.clock.leader = self.target.passes
            yield self.target
        finally:
            session.mounts.cleanup = outer

    def label(self, path: str) -> str:
        """Return the recorded path for a path in the root."""
        return ".".join(p for p in (self.prefix, path) if p)

    def entry(self) -> dict[str, Any]:
        """Return the entry of the root in the recording."""
        named = {"name": self.types[""], "prefix": self.prefix}
        trained = {"trained": bool(self.optimizers), "optimizers": sorted(self.optimizers), "steps": self.steps}
        return {**named, **trained, "parameters": self.parameters, "modules": self.modules}


class PrefixedMeter:
    """The meter for one root's sites: their recorded paths begin with the root's prefix."""

    observes = True
    recomputes = False

    def __init__(self, meter: WatchMeter, root: RootModule) -> None:
        self.meter, self.root = meter, root

    def __repr__(self) -> str:
        """Return the meter's text."""
        return repr(self.meter)

    def bind(self, site: Site) -> Act:
        """Return a function that measures one site of this root."""
        return self.meter.bind(replace(site, path=self.root.label(site.path)))

    def bind_value(self, site: Site) -> Measure | None:
        """Return a function that measures values of one site; see `kedge.hooks.firing.contract.Measuring`."""
        return self.meter.bind_value(replace(site, path=self.root.label(site.path)))


@dataclass(frozen=True)
class WatchSummary:
    """The figures of a watched run.

    Attributes:
        sites: How many sites fired.
        steps: How many steps the program made.
        sampled: How many of them were measured in full.
        seconds: Wall-clock seconds from the first watched call to the end.
        watching: Seconds of them that Kedge took, by its own measurement.
        levels: Steps of each kind: "measured", "guarded", "skipped".
        failed: Whether Kedge failed, so that the run was watched in part or not at all.
    """

    sites: int
    steps: int
    sampled: int
    seconds: float
    watching: float
    levels: dict[str, int]
    failed: bool = False


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside a compiling or replicating wrapper."""
    module = dynamo.unwrap(module)
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return unwrapped(module.module) if isinstance(module, parallel) else module


def selected(selector: Selector, path: str, module: nn.Module) -> bool:
    """Whether a selector names the module, or the parameter, with this recorded path."""
    types = tuple(c.__name__ for c in type(module).__mro__)
    wanted = any(t.matches(path, types) for t in selector.terms if not t.excluded)
    return wanted and not any(t.matches(path, types) for t in selector.terms if t.excluded)


def channel_dims(model: nn.Module, modules: Mapping[str, nn.Module], root: RootModule) -> dict[str, int | None]:
    """Return the channel dimension of three-dimensional values: 1 in convolutional models, else -1."""
    first = any(isinstance(m, _CHANNELS_FIRST) for m in model.modules())
    return {root.label(n): 1 if first else -1 for n, m in modules.items() if isinstance(m, _EXACT_ZERO)}


def saturations(modules: Mapping[str, nn.Module], root: RootModule) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Return how each activation among some modules saturates, by its recorded path."""
    return {root.label(n): _SATURATING[type(m)](m) for n, m in modules.items() if type(m) in _SATURATING}


_SATURATING: dict[type[nn.Module], Callable[[Any], tuple[str, tuple[float, ...]]]] = {
    nn.Tanh: lambda m: ("tanh", ()),
    nn.Sigmoid: lambda m: ("sigmoid", ()),
    nn.Softsign: lambda m: ("softsign", ()),
    nn.Softmax: lambda m: ("softmax", (-1 if m.dim is None else m.dim,)),
    nn.Hardtanh: lambda m: ("between", (m.min_val, m.max_val)),
    nn.Hardsigmoid: lambda m: ("between", (0.0, 1.0)),
    nn.ReLU6: lambda m: ("between", (-math.inf, 6.0)),
}


def entry_of(seat: Any, roots: Sequence[RootModule], sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a site in the recording; see docs/recording.md."""
    path, kind = seat.site.path, seat.site.kind
    entry = {
        "id": seat.id, "site": str(seat.site), "path": path, "kind": kind, "type": "", "root": -1,
        "shape": list(seat.shape), "dtype": seat.dtype, "channels": seat.channels, "from": list(seat.sources),
        "owner": "", "node": seat.node, "source": None,
    }  # fmt: skip
    if kind == "loss":
        return {**entry, "site": path, **sources.get(path, {})}
    root = max((r for r in roots if inside(path, r.prefix)), key=lambda r: len(r.prefix))
    of_param = kind.startswith("param") or kind == "update"
    owner = path.rpartition(".")[0] if of_param else path
    inner = owner[len(root.prefix) :].lstrip(".") if root.prefix else owner
    source = None if of_param else sources.get(path)
    return {**entry, "type": root.types.get(inner, ""), "root": root.index, "owner": owner, "source": source}


def silences(roots: Iterable[RootModule], taps: Iterable[Tap], session: Session) -> list[dict[str, Any]]:
    """Return an entry with the cause for each site that never fired, including sites of deleted modules."""
    silent = [t for t in taps if t.site.kind == "out" and not t.fired]
    here = [t for t in silent if str(t.site) not in cast("PrefixedMeter", t.action).root.heard]
    return [*(silence for root in roots for silence in root.silent), *(silence_of(tap, session) for tap in here)]


def silence_of(tap: Tap, session: Session) -> dict[str, Any]:
    """Return the recorded path of a site that never fired, with the cause and the remedy."""
    action, cause = cast("PrefixedMeter", tap.action), explain(tap, session)
    site = replace(tap.site, path=action.root.label(tap.site.path))
    return {"site": str(site), "fired": 0, "cause": cause.why, "remedy": cause.remedy}


def next_of(roots: Sequence[RootModule], types: Mapping[str, str]) -> RootModule | None:
    """Return the root that a module of these types continues; None if it is a new one.

    Deleted modules must have been released before.
    """
    alike = [root for root in roots if root.types == types]
    gone = [root for root in alike if root.target is None]
    return next((root for root in gone if not root.parameters or len(alike) >= _ALIKE), None)


def free_prefix(name: str, roots: Sequence[RootModule]) -> str:
    """Return a prefix made of a class's name that no root has."""
    taken = {root.prefix for root in roots}
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    return next(p for p in itertools.chain([name], numbered) if p not in taken)


def inside(path: str, prefix: str) -> bool:
    """Whether a site's path belongs to a root with this prefix."""
    return not prefix or path == prefix or path.startswith(prefix + ".")
