"""The modules of a recording in the order of the data, for the alignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from kedge.rules.recorded.optimizers import unheld_parameters
from kedge.sites.site import escape
from kedge.store.recording import Recording, SiteInfo

#: Kinds of sites that fire in a forward pass; all others of a module come after it.
FORWARD = ("out", "in")
#: Kinds of sites with the shape of a parameter; an update has the shape of a sample of it.
OF_PARAMETER = ("param", "param.grad")


def flow(site: SiteInfo) -> str:
    """Return a site's kind without the leaf that its text may have."""
    return site.kind.partition("[")[0]


@dataclass(frozen=True, eq=False)
class RecordedModule:
    """One module with all its sites.

    Attributes:
        path: Its path, as it is recorded.
        sites: Its sites and those of its own parameters, in the order in which they first fired.
        leaf: Whether no other module of the recording is inside it.
        unheld: The names of its own trainable parameters that no optimizer held; they may have no
            sites.
        frozen: The number of elements of its own parameters that are not trained, which have no
            sites.
    """

    path: str
    sites: tuple[SiteInfo, ...]
    leaf: bool
    unheld: frozenset[str] = frozenset()
    frozen: int = 0

    @cached_property
    def type(self) -> str:
        """The name of its class."""
        return next((site.type for site in self.sites if site.type), "")

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """The parts of its path."""
        if not self.path:
            return ()
        return tuple(self.path.split("."))

    @cached_property
    def fires(self) -> bool:
        """Whether it was called in a forward pass."""
        return any(flow(site) in FORWARD for site in self.sites)

    @cached_property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The names and shapes of its own parameters, sorted."""
        own = {}
        for site in self.sites:
            if flow(site) in OF_PARAMETER:
                own[site.path.rpartition(".")[2]] = site.shape
        return tuple(sorted(own.items()))

    @cached_property
    def size(self) -> tuple[int, ...]:
        """The shape of its first output without the batch."""
        return next((site.shape[1:] for site in self.sites if flow(site) == "out"), ())

    def unlike(self, other: RecordedModule) -> list[str]:
        """Return the names of the parameters that another lacks or has in another shape, sorted.

        What one run did not record because no optimizer held it, or because it was frozen, is not
        lacking.
        """
        ones = dict(self.parameters)
        others = dict(other.parameters)
        unknown = (self.unheld - ones.keys()) | (other.unheld - others.keys())
        unknown |= self._may_hold(others.keys() - ones.keys(), others)
        unknown |= other._may_hold(ones.keys() - others.keys(), ones)
        known = sorted({*ones, *others} - unknown)
        return [name for name in known if ones.get(name) != others.get(name)]

    def _may_hold(self, names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Return those names, or none: whether it has as much that is frozen as all of them need."""
        if sum(prod(shapes[name]) for name in names) <= self.frozen:
            return names
        return set()

    @property
    def label(self) -> str:
        """Its name in text; the root has no path."""
        return escape(self.path) or f"({self.type or 'root'})"

    def part(self, site: SiteInfo) -> str:
        """Return a site's text without the path of the module: ``:out``, ``weight:param``."""
        if flow(site).startswith("param") or flow(site) in ("update", "state"):
            name = site.path.removeprefix(self.path).removeprefix(".")
            return f"{name}:{site.site.rpartition(':')[2]}"
        return site.site.removeprefix(escape(self.path))


def modules_of(recording: Recording) -> tuple[RecordedModule, ...]:
    """Return the modules of a recording, without the losses.

    Those that fire come first, in the order of the data.
    """
    own: dict[str, list[SiteInfo]] = {}
    for site in recording.sites:
        if flow(site) != "loss":
            own.setdefault(site.owner, []).append(site)

    holders = set()
    of_root = own.get("")
    for path, sites in own.items():
        holder, _, name = path.rpartition(".")
        while holder:
            holders.add(holder)
            holder = holder.rpartition(".")[0]
        if name and of_root and sites[0].root == of_root[0].root:
            holders.add("")

    unheld: dict[str, set[str]] = {}
    for parameter in unheld_parameters(recording):
        owner, _, name = parameter.rpartition(".")
        unheld.setdefault(owner, set()).add(name)
    frozen = {str(each["path"]): _frozen(each) for root in recording.roots for each in root.modules}
    modules = []
    for path, sites in own.items():
        lost = frozenset(unheld.get(path, ()))
        still = frozen.get(path, 0)
        modules.append(RecordedModule(path, tuple(sites), path not in holders, lost, still))
    return tuple(sorted(modules, key=_place))


def _frozen(module: Mapping[str, Any]) -> int:
    """Return how many elements of a module's own parameters are not trained; 0 if it is not known."""
    trained = module.get("trainable")
    if trained is None:
        return 0
    return int(module.get("parameters") or 0) - int(trained)


def _place(module: RecordedModule) -> tuple[bool, int]:
    sites = module.sites
    if module.fires:
        sites = tuple(site for site in sites if flow(site) in FORWARD)
    return not module.fires, min(site.id for site in sites)
