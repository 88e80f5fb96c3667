"""The root modules of a watched program, and how their sites are named.

See Note [Roots] in `kedge.watch.models.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kedge.hooks.roots import free_name
from kedge.hooks.session import Session
from kedge.sites.filters import nearest, widened
from kedge.sites.language import Term
from kedge.sites.select import Selector, runs
from kedge.sites.spread import Spread
from kedge.torch_internals.module_tables import modules_in, parameters_in
from kedge.torch_internals.torchscript import class_name
from kedge.watch.models.root_hooks import RootHooks

_ALIKE = 8
"""Most roots with parameters and one structure that are kept apart.

A program may make one for each step.
"""


@dataclass
class RootModule:
    """A root module: the prefix of its recorded paths, and its modules.

    A program may build a new loss module for every call. Such a root without parameters continues
    the one before it; a root with parameters does so after many of the same structure.

    Attributes:
        index: Its number.
        prefix: The beginning of its recorded paths; empty for plain names.
        types: The class name of each module, by its path in the root.
        variable: The program's variable that holds it, if one does.
        tops: The names of its own modules and parameters.
        parameters: How many elements its parameters have.
        modules: The tree of its modules, as the recording lists it.
        hooks: The hooks on its module, which may be deleted.
        optimizers: The numbers of the optimizers that hold its parameters and have stepped; and its
            own, if the program changes them by hand.
        by_hand: Whether the program changes parameters of it without an optimizer.
        steps: How many steps they have made.
        averaged: The ranks over which its gradients are averaged; None if it is not in
            DistributedDataParallel.
    """

    index: int
    prefix: str
    types: dict[str, str]
    variable: str | None = None
    tops: set[str] = field(default_factory=set)
    parameters: int = 0
    modules: list[dict[str, Any]] = field(default_factory=list)
    hooks: RootHooks = field(default_factory=RootHooks)
    optimizers: set[int] = field(default_factory=set)
    by_hand: bool = False
    steps: int = 0
    averaged: Spread | None = None

    def module(self) -> nn.Module | None:
        """Return the module, if it still exists."""
        return self.hooks.module()

    def release(self, session: Session) -> bool:
        """Release everything kept for the module if the module no longer exists.

        Returns:
            Whether there was something to release.
        """
        if not self.hooks.are_orphaned:
            return False
        self.hooks.release(session)
        return True

    def label(self, path: str) -> str:
        """Return the recorded path for a path in the root."""
        return ".".join(p for p in (self.prefix, path) if p)

    def entry(self, *, is_one_of_several: bool) -> dict[str, Any]:
        """Return the entry of the root in the recording.

        Args:
            is_one_of_several: Whether more than one root is trained, so that also the one with
                plain names has the name of its variable.
        """
        name = self.types[""]
        if self.variable is not None and (self.prefix or is_one_of_several):
            name = self.prefix or self.variable
        return {
            "name": name,
            "type": self.types[""],
            "prefix": self.prefix,
            "trained": bool(self.optimizers),
            "by_hand": self.by_hand,
            "optimizers": sorted(self.optimizers),
            "steps": self.steps,
            "parameters": self.parameters,
            "modules": self.modules,
        }


class WantedSites:
    """The selector of a watch, on the models that the program calls.

    Args:
        selector: Names the measured sites; see Note [Words] in `kedge.sites.filters`.
        tell: Called at the end of the first step with each part of the selector that selects
            nothing.

    Attributes:
        outside: Its terms for operations outside of modules; None if they select none.
    """

    def __init__(self, selector: Selector, tell: Callable[[str], None]) -> None:
        of_models = [term for term in selector.terms if not term.is_outside]
        outside = [term for term in selector.terms if term.is_outside]
        self.outside: Selector | None = None
        if not all(term.excluded for term in outside):
            self.outside = Selector(", ".join(map(str, outside)))
        self._tell = tell
        self._given = self._terms = tuple(of_models)
        self._paths: dict[str, str] = {}
        included = (place for place, term in enumerate(self._given) if not term.excluded)
        self._idle = dict.fromkeys(included)

    def meet(self, module: nn.Module, root: RootModule) -> None:
        """Take a model's names into account, before its modules and parameters are asked for."""
        if not self._idle and self._terms == self._given:
            return  # no name changes what is selected
        for name, inner in modules_in(module).items():
            if runs(inner):
                self._paths[root.label(name)] = class_name(inner)
        for name, param in parameters_in(module).items():
            self._paths[root.label(name)] = type(param).__name__
        self._terms = widened(self._given, self._paths)

    def wants(self, path: str, module: nn.Module, kinds: tuple[str, ...]) -> bool:
        """Whether the selector names the module, or parameter, of a path, for values of some kinds."""
        types = tuple(c.__name__ for c in type(module).__mro__)
        is_named = False
        is_excluded = False
        for place, term in enumerate(self._terms):
            if term.kind in (None, *kinds) and term.matches(path, types):
                self._idle.pop(place, None)
                is_named = True
                is_excluded |= term.excluded
        return is_named and not is_excluded

    def states(self, path: str, module: nn.Module) -> tuple[Term, ...]:
        """Return the parts of the selector that say what is measured of the optimizers' state of a parameter.

        Only those with this kind do.
        """
        types = tuple(c.__name__ for c in type(module).__mro__)
        found = []
        for place, term in enumerate(self._terms):
            if term.kind == "state" and term.matches(path, types):
                self._idle.pop(place, None)
                found.append(term)
        return tuple(found)

    def check(self) -> None:
        """Report the parts of the selector that select nothing.

        Called at the end of each recorded step.
        """
        while self._idle and self._paths:
            place, _ = self._idle.popitem()
            term = self._given[place]
            hint = "kedge sites lists their names"
            near = nearest(self._terms[place], self._paths, self._paths.values())
            if near:
                hint = f"the nearest are {near}"
            self._tell(f'"{term}" selects nothing in the models of this program; {hint}')


def next_of(roots: Sequence[RootModule], types: Mapping[str, str]) -> RootModule | None:
    """Return the root that a module of these types continues; None if it is a new one.

    Deleted modules must have been released before.
    """
    alike = [root for root in roots if root.types == types]
    gone = [root for root in alike if root.hooks.hooked is None]
    return next((root for root in gone if not root.parameters or len(alike) >= _ALIKE), None)


@dataclass
class TakenNames:
    """The names that a new root cannot have.

    Attributes:
        roots: The other roots.
        rest: What follows the name: ``.0`` for ``nets.0``.
    """

    roots: Sequence[RootModule]
    rest: str = ""

    def __contains__(self, name: object) -> bool:
        """Whether a root's paths could not be told from another's."""
        prefix = f"{name}{self.rest}."
        for root in self.roots:
            if root.prefix:
                other = f"{root.prefix}."
                if prefix.startswith(other) or other.startswith(prefix):
                    return True
            elif name in root.tops or prefix == f"{root.variable}.":
                return True
        return False


def free_prefix(name: str, roots: Sequence[RootModule]) -> str:
    """Return a prefix that no root has: the name, with a number if it is taken, as in ``nets_2.0``."""
    first, dot, rest = name.partition(".")
    return free_name(first, TakenNames(roots, dot + rest)) + dot + rest
