"""The watched parameters: their recorded sites, and the gradients that were seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.hooks.placing.leaf_hooks import LeafHook
from kedge.sites.language import Term
from kedge.sites.leaves import own_part
from kedge.sites.site import Site
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.roots import RootModule
from kedge.watch.models.slots import OptimizerSlot, TensorSlot


@dataclass
class ParameterSites:
    """The state of one parameter, which is not held.

    Attributes:
        id: Its id.
        slot: Where it stands: in a module, or in an optimizer.
        site: Its recorded site.
        root: Its root.
        wanted: Whether it is measured.
        trainable: Whether it is expected to get a gradient.
        held: Where it stands in an optimizer that trains it; None without one.
        by_hand: Whether it was seen to change without one.
        hook: The hook that reports its gradients.
        order: How many parameters had a gradient before this one; None as long as it had none.
        first: Whether a pass reached it before all others.
        task: The last backward pass outside of skipped steps that reached it.
        thread: The thread in which its gradient arrived then.
        times: How many gradients arrived while the hook was installed.
        states: The parts of a selector that say what is measured of an optimizer's state of it.
    """

    id: int
    slot: TensorSlot
    site: Site
    root: RootModule
    wanted: bool
    trainable: bool
    held: OptimizerSlot | None = None
    by_hand: bool = False
    hook: LeafHook | None = None
    order: int | None = None
    first: bool = False
    task: int = -1
    thread: int = 0
    times: int = 0
    states: tuple[Term, ...] = ()

    def param(self) -> Tensor | None:
        """Return the parameter; None if it stands nowhere any longer."""
        param = self.slot()
        if param is None and self.held is not None:
            return self.held()
        return param

    def measures_state(self, name: str) -> bool:
        """Whether the tensor of a name in an optimizer's state of it is measured."""
        chosen = False
        for term in self.states:
            if term.leaf in (None, name):
                chosen = not term.excluded
        return chosen

    @property
    def is_hooked(self) -> bool:
        """Whether the hook is installed."""
        return self.hook is not None and self.hook.is_in_table

    def is_of(self, param: Tensor) -> bool:
        """Whether it is the state of this parameter, and not of a former one at its address."""
        if self.param() is param:
            return True
        return self.hook is not None and self.hook.was_put_on(param)

    def park(self) -> None:
        """Remove the hook until another is needed.

        The table of a tensor of no module stays, by which it is known.
        """
        if self.hook is None:
            return
        if isinstance(self.slot, OptimizerSlot):
            self.hook.remove(None)
        else:
            self.hook.remove(self.param())

    def unhook(self) -> None:
        """Remove the hook for good."""
        if self.hook is not None:
            self.hook.remove(self.param())


class WatchedParameters:
    """All watched parameters, each with its `ParameterSites`."""

    def __init__(self) -> None:
        self._places: dict[int, ParameterSites] = {}

    def unplaced(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return a module's parameters that are not watched yet and have a shape."""
        shaped = ((n, p) for n, p in parameters_in(module).items() if not is_lazy(p))
        return [(name, param) for name, param in shaped if self.of(param) is None]

    def put(
        self,
        named: Iterable[tuple[str, nn.Parameter, TensorSlot]],
        root: RootModule,
        wanted: Callable[[str], bool],
        states: Callable[[str], tuple[Term, ...]],
    ) -> None:
        """Add parameters of a root.

        Args:
            named: The parameters with their names in the root, and where they stand.
            root: The root.
            wanted: Whether the parameter with a recorded path is measured.
            states: Returns the parts of the selector for the optimizers' state of that parameter.
        """
        for name, param, slot in named:
            path = root.label(name)
            trainable = param.requires_grad and own_part(param) is param
            self._places[id(param)] = ParameterSites(
                id(param),
                slot,
                Site(path, "param"),
                root,
                wanted(path),
                trainable,
                states=states(path),
            )

    def of(self, param: Tensor) -> ParameterSites | None:
        """Return the entry of a parameter; None if it belongs to no root."""
        place = self._places.get(id(param))
        if place is None or not place.is_of(param):
            return None
        return place

    def hooked(self, param: Tensor) -> ParameterSites | None:
        """Return the entry of a parameter whose hook is just called: so it is the very one."""
        return self._places.get(id(param))

    def measured(self, param: nn.Parameter) -> ParameterSites | None:
        """Return the entry of a parameter; None if it is not measured."""
        place = self.of(param)
        if place is None or not place.wanted:
            return None
        return place

    def __iter__(self) -> Iterator[ParameterSites]:
        """Return all entries; those of deleted parameters stay until `forget_gone`."""
        return iter(list(self._places.values()))

    def among(self, params: Iterable[Tensor]) -> Iterator[ParameterSites]:
        """Yield the entries of some parameters, as far as they have one."""
        for param in params:
            place = self.of(param)
            if place is not None:
                yield place

    def by_root(self) -> list[list[ParameterSites]]:
        """Return the entries of each root's parameters."""
        found: dict[int, list[ParameterSites]] = {}
        for place in self:
            found.setdefault(place.root.index, []).append(place)
        return list(found.values())

    def without_gradient(self) -> Iterator[ParameterSites]:
        """Yield the measured parameters that never had a gradient, even if they are deleted."""
        for place in self:
            if not place.wanted or place.order is not None:
                continue
            param = place.param()
            if param is None:
                needs_one = place.trainable
            else:
                needs_one = param.requires_grad and param.grad is None
            if needs_one:
                yield place

    def forget(self, root: RootModule) -> None:
        """Drop the entries of a root's parameters, and remove their hooks."""
        for key, place in list(self._places.items()):
            if place.root is root:
                del self._places[key]
                place.unhook()

    def forget_gone(self) -> None:
        """Drop the entries of parameters that no longer exist."""
        places = self._places.items()
        self._places = {key: place for key, place in places if place.param() is not None}

    def clear(self) -> None:
        """Drop all entries; their hooks have been removed."""
        self._places = {}
