"""What a watch has met: modules that are not new roots, and parameters that are recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from kedge.hooks.calls import is_replica
from kedge.sites.leaves import own_part
from kedge.sites.site import Site
from kedge.watch.roots import Root


class Known:
    """Modules that have been called, or are part of a root; held weakly."""

    def __init__(self) -> None:
        self._met: dict[int, weakref.ref[nn.Module]] = {}
        self._aside: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __contains__(self, module: nn.Module) -> bool:
        known = self._met.get(id(module))
        return known is not None and known() is module

    def meet(self, modules: Iterable[nn.Module]) -> None:
        """Take these in."""
        self._met.update((id(module), weakref.ref(module)) for module in modules)

    def forget_gone(self) -> None:
        """Forget those that do not exist any more."""
        self._met = {key: known for key, known in self._met.items() if known() is not None}

    def is_aside(self, module: nn.Module) -> bool:
        """Whether it is never a root.

        It may be a replica; or compute a parameter, when PyTorch calls it as the module that will have it is made.
        """
        if isinstance(module, ParametrizationList):
            self._aside.update(module.modules())
        return module in self._aside or is_replica(module)


class Place(NamedTuple):
    """Where a parameter is recorded.

    Attributes:
        wanted: Whether it is measured.
        trainable: Whether a gradient of it is expected.
    """

    param: weakref.ref[nn.Parameter]
    site: Site
    root: Root
    wanted: bool
    trainable: bool


class Places:
    """Where parameters are recorded; they are held weakly."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}

    def unplaced(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """List a module's parameters that are not watched yet, and have a shape by now."""
        return [(n, p) for n, p in module.named_parameters() if not is_lazy(p) and self.of(p) is None]

    def put(self, named: Iterable[tuple[str, nn.Parameter]], root: Root, wanted: Callable[[str], bool]) -> None:
        """Take in parameters of a root.

        Args:
            named: The parameters by their names in the root.
            root: The root.
            wanted: Whether a parameter with a path is measured.
        """
        for name, param in named:
            path = root.label(name)
            trainable = param.requires_grad and own_part(param) is param
            self._places[id(param)] = Place(weakref.ref(param), Site(path, "param"), root, wanted(path), trainable)

    def of(self, param: nn.Parameter) -> Place | None:
        """Return the place of a parameter; None where it belongs to no root."""
        place = self._places.get(id(param))
        return place if place is not None and place.param() is param else None

    def measured(self, param: nn.Parameter) -> Place | None:
        """Return the place of a parameter; None where it is not measured."""
        place = self.of(param)
        return place if place is not None and place.wanted else None

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Place]]:
        """Every parameter that still exists."""
        for place in list(self._places.values()):
            param = place.param()
            if param is not None:
                yield param, place

    def by_root(self) -> Iterable[list[nn.Parameter]]:
        """The parameters of each root."""
        found: dict[int, list[nn.Parameter]] = {}
        for param, place in self:
            found.setdefault(place.root.index, []).append(param)
        return found.values()

    def without_gradient(self, arrived: Callable[[int], bool]) -> Iterator[Place]:
        """Yield the measured parameters without a gradient, those that went with a function that has returned too.

        Args:
            arrived: Whether a gradient was seen of the parameter with an id.
        """
        for key, place in self._places.items():
            param = place.param()
            needs = place.trainable if param is None else param.requires_grad and param.grad is None
            if place.wanted and needs and not arrived(key):
                yield place

    def forget_gone(self) -> None:
        """Forget those that do not exist any more."""
        self._places = {key: place for key, place in self._places.items() if place.param() is not None}
