"""What a watch works with: the roots of a program, what measures them, and where that is written."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from kedge.flow import Act, Sink
from kedge.hooks import dynamo
from kedge.hooks.schedule import Passes
from kedge.sites.site import Site

_SAMPLE = 1024
_EXACT_ZERO = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.RReLU)
_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d)


KEEPS_FINITE = frozenset(
    {
        *("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Tanh", "Sigmoid", "Hardsigmoid", "Softmax", "Embedding"),
        *("Identity", "Flatten", "Unflatten", "ZeroPad2d", "Dropout", "Dropout1d", "Dropout2d"),
        *("MaxPool1d", "MaxPool2d", "MaxPool3d", "AdaptiveMaxPool2d"),
        *("AvgPool1d", "AvgPool2d", "AvgPool3d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d"),
    }
)
"""Modules that make finite values of finite ones."""


class Gauge(Protocol):
    """What measures: the action that `kedge.measure` makes."""

    sink: Any
    level: int
    muted: bool
    seats: dict[Site, Any]
    channel_dims: dict[str, int | None]
    events: int
    seconds: float

    def bind(self, site: Site) -> Act:
        """Return what measures the values of one site."""

    def add(self, sites: list[Site], step: int, tensors: list[Tensor]) -> None:
        """Measure the norms of many tensors at once."""

    def spoiled(self) -> bool:
        """Whether something measured in this step is not finite."""

    def flush(self) -> None:
        """End the step."""

    def finish(self) -> None:
        """Pass on everything."""


class Log(Sink, Protocol):
    """Where a watched run is written."""

    def sites(self, sites: list[dict[str, Any]], roots: list[dict[str, Any]]) -> None:
        """Take the list of sites, whenever it has grown."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Take a note."""


@dataclass
class Root:
    """A root module: its name, what its sites' paths begin with, and what is where in it."""

    module: weakref.ref[nn.Module]
    index: int
    name: str
    prefix: str
    parameters: int
    types: dict[str, str]
    passes: Passes

    def label(self, path: str) -> str:
        """The path under which one of its sites is recorded."""
        return ".".join(p for p in (self.prefix, path) if p)

    def entry(self) -> dict[str, Any]:
        """What the recording says of it."""
        return {"name": self.name, "prefix": self.prefix, "parameters": self.parameters}


class Prefixed:
    """The meter, as one root's sites see it: their recorded paths begin with the root's prefix."""

    observes = True
    recomputes = False

    def __init__(self, meter: Gauge, root: Root) -> None:
        self.meter, self.root = meter, root

    def __repr__(self) -> str:
        """As the meter."""
        return repr(self.meter)

    def bind(self, site: Site) -> Act:
        """Return what measures one site of this root."""
        return self.meter.bind(replace(site, path=self.root.label(site.path)))


@dataclass(frozen=True)
class Summary:
    """What came out of watching.

    Attributes:
        sites: How many sites fired.
        steps: How many steps the program took.
        sampled: How many of them were measured in full.
        seconds: Wall-clock seconds from the first watched call to the end.
        watching: Seconds of them that Kedge measured itself to take.
    """

    sites: int
    steps: int
    sampled: int
    seconds: float
    watching: float


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside what compiles or replicates it."""
    module = dynamo.unwrap(module)
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return unwrapped(module.module) if isinstance(module, parallel) else module


def is_replica(module: nn.Module) -> bool:
    """Whether `DataParallel` made it for one call, of a model that is hooked itself."""
    return bool(getattr(module, "_is_replica", False))


def channel_dims(model: nn.Module, modules: Mapping[str, nn.Module], root: Root) -> dict[str, int | None]:
    """Where the channels of a three-dimensional value are: second in convolutional models, else last."""
    first = any(isinstance(m, _CHANNELS_FIRST) for m in model.modules())
    return {root.label(n): 1 if first else -1 for n, m in modules.items() if isinstance(m, _EXACT_ZERO)}


def sample(param: Tensor) -> Tensor:
    """Up to 1,024 elements of a parameter, evenly spread and always the same."""
    flat = param.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLE))]


def entry_of(seat: Any, roots: Sequence[Root]) -> dict[str, Any]:
    """What the recording says of a site; see docs/recording.md."""
    path, kind = seat.site.path, seat.site.kind
    root = max((r for r in roots if _inside(path, r.prefix)), key=lambda r: len(r.prefix))
    of_param = kind.startswith("param") or kind == "update"
    owner = path.rpartition(".")[0] if of_param else path
    inner = owner[len(root.prefix) :].lstrip(".") if root.prefix else owner
    return {
        "id": seat.id, "site": str(seat.site), "path": path, "kind": kind, "type": root.types.get(inner, ""),
        "root": root.index, "shape": list(seat.shape), "dtype": seat.dtype, "channels": seat.channels,
        "from": list(seat.sources), "owner": owner, "node": seat.node,
    }  # fmt: skip


def _inside(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(prefix + ".")
