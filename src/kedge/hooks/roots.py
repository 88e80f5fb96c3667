"""What a watch works with: the roots of a program, what measures them, and where that is written."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from kedge.flow import Act, Sink
from kedge.hooks.schedule import Passes
from kedge.sites.site import Site


class Gauge(Protocol):
    """What measures: the action that `kedge.measure` makes."""

    sink: Any
    level: int
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
