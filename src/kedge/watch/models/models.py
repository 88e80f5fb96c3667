"""The watched models that the program calls, and their parameters.

# Note [Roots]
A root is a module that is called while no other watched one runs. A global forward-pre hook finds
it at its first call and hooks it before its forward runs, so that a model handed to `torch.compile`
is hooked before it is compiled. Note [Names of roots] in `kedge.watch.models.naming` says how the
names of its sites begin. As long as an optimizer holds parameters of no root, every step looks for
new roots; see `kedge.watch.training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kedge.actions.measure.meter import Meter
from kedge.hooks.roots import SeenModules
from kedge.sites.leaves import own_part
from kedge.sites.select import runs
from kedge.torch_internals.module_tables import modules_in, named_modules, parameters_in
from kedge.torch_internals.source_lines import module_tree
from kedge.torch_internals.torchscript import called_by_torchscript, class_name
from kedge.watch.models.backwards import BackwardHandler, BackwardPasses, Reached, Taken
from kedge.watch.models.naming import RootNames
from kedge.watch.models.outside import OperationsOutside
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.parked_hooks import WatchSession
from kedge.watch.models.roots import RootModule, WantedSites, free_prefix, next_of
from kedge.watch.models.slots import ParameterSlot, TensorSlot, holder
from kedge.watch.models.variables import names_in_frames

_OF_PARAMETERS = ("param", "param.grad")
"""The kinds that are measured together; the updates of optimizers belong to them."""
_EXACT_ZERO = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.RReLU)
_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d)


class Models:
    """The roots and their parameters; see Note [Roots].

    Args:
        session: Holds the hooks.
        meter: Measures.
        wanted: Decides which sites are measured.
        places: Receives the parameters.
        handler: Is told of backward passes.

    Attributes:
        passes: The backward passes, which hook the parameters.
        holding: Set to a list to keep the roots alive to the end.
        names: Names the roots.
        outside: The operations outside of all roots.
    """

    def __init__(
        self,
        session: WatchSession,
        meter: Meter,
        wanted: WantedSites,
        places: WatchedParameters,
        handler: BackwardHandler,
    ) -> None:
        self.session = session
        self.meter = meter
        self.wanted = wanted
        self.places = places
        self.roots: list[RootModule] = []
        self.known = SeenModules()
        self.passes = BackwardPasses(places, handler)
        self.holding: list[nn.Module] | None = None
        self.names = RootNames()
        self.outside = OperationsOutside(session, meter, wanted.outside)
        self._lazy: list[RootModule] = []

    def candidate(self, module: nn.Module) -> nn.Module | None:
        """Add a module at its first call; returns the module that may be a root, None without one."""
        return self.known.candidate(module)

    def running(self) -> RootModule | None:
        """Return the root whose forward is active in this thread."""
        return next((root for root in self.roots if root.hooks.is_running), None)

    def watch(self, module: nn.Module) -> RootModule:
        """Make a module a root, and hook it."""
        named = modules_in(module)
        silent = called_by_torchscript(named_modules(module))
        fresh = {}
        for name, inner in named.items():
            is_fresh = inner is module or inner not in self.known
            if is_fresh and id(inner) not in silent:
                fresh[name] = inner
        self.known.add(named.values())
        types = {name: class_name(inner) for name, inner in fresh.items()}

        self.release_gone()
        root = next_of(self.roots, types)
        if root is None:
            root = self.names.root(module, types, self.roots)
        try:
            self._attach(module, root, fresh)
        except Exception:
            self._give_up(root)
            raise
        if any(map(is_lazy, parameters_in(module).values())):
            self._lazy.append(root)
        if self.holding is not None:
            self.holding.append(module)
        return root

    def _attach(self, module: nn.Module, root: RootModule, fresh: Mapping[str, nn.Module]) -> None:
        with root.hooks.attaching(self.session, module, root.prefix):
            root.parameters = _numbers_in(module)
            root.modules = module_tree(module, root.label)
            if not root.hooks.follows:
                self.roots.append(root)
            self._hook(module, root, fresh)

    def _give_up(self, root: RootModule) -> None:
        """Remove what is attached to a model that cannot be watched."""
        root.hooks.abandon(self.session)
        self.places.forget(root)
        if not root.hooks.follows and root in self.roots:
            self.roots.remove(root)

    def _hook(self, module: nn.Module, root: RootModule, fresh: Mapping[str, nn.Module]) -> None:
        sites, wanted = self.meter.sites, self.wanted
        wanted.meet(module, root)
        sites.channel_dims.update(_channel_dims(module, fresh, root))
        for name, inner in fresh.items():
            saturation = _SATURATING.get(type(inner))
            if saturation is not None:
                sites.saturates(root.label(name), *saturation(inner))

        running = {name: inner for name, inner in fresh.items() if runs(inner)}
        for kind in ("out", "in", "out.grad"):
            chosen = {n: m for n, m in running.items() if wanted.wants(root.label(n), m, (kind,))}
            self.session.hook_each(module, chosen, kind, self.meter)
        params = parameters_in(module).values()
        if any(own_part(param) is not param for param in params):
            self.session.hook_each(module, {"": module}, "out.grad", Reached(self.passes))
        elif params:
            self.session.hook_each(module, {"": module}, "out.grad", Taken(self.passes))
        self._place_parameters(module, root)

    def _place_parameters(self, module: nn.Module, root: RootModule) -> None:
        fresh = self.places.unplaced(module)
        inside = modules_in(module)
        named = [(n, p, ParameterSlot(*holder(inside, n), p)) for n, p in fresh]
        self._put(named, root, module)
        # Hooks on a parameter that is spread over several processes do not fire: its gradient is
        # read at the optimizer.
        self.passes.listen(param for _, param in fresh if own_part(param) is param)

    def _put(
        self,
        named: Iterable[tuple[str, nn.Parameter, TensorSlot]],
        root: RootModule,
        module: nn.Module,
    ) -> None:
        self.places.put(
            named,
            root,
            lambda path: self.wanted.wants(path, module, _OF_PARAMETERS),
            lambda path: self.wanted.states(path, module),
        )

    def watch_tensors(
        self, tensors: Sequence[nn.Parameter], slots: Mapping[int, TensorSlot]
    ) -> None:
        """Make a root of tensors that belong to no module.

        Args:
            tensors: The tensors.
            slots: Where each stands, by its identity.
        """
        prefix = ""
        if not all(root.prefix for root in self.roots):
            prefix = free_prefix("tensors", self.roots)
        elements = sum(param.numel() for param in tensors)
        root = RootModule(len(self.roots), prefix, {"": "tensors"}, parameters=elements)
        self.roots.append(root)

        variables = names_in_frames(tensors)
        named = []
        for number, param in enumerate(tensors):
            name = variables.get(id(param), f"param{number}")
            root.tops.add(name.partition(".")[0])
            named.append((name, param, slots[id(param)]))
        self._put(named, root, nn.Module())
        self.passes.listen(tensors)

    def forget_tensors(self) -> None:
        """Forget roots of tensors that no optimizer holds, before a module is watched, which has plain names then."""
        for root in [root for root in self.roots if not root.modules and not root.optimizers]:
            for place in list(self.places):
                if place.root is root:
                    place.unhook()
            self.places.forget(root)
            self.roots.remove(root)

    def find_parameters(self, *, lazy_only: bool = False) -> None:
        """Watch parameters that came later.

        They come from a first forward, or after `torch.func` had swapped them out.
        """
        for root in self._lazy if lazy_only else self.roots:
            module = root.module()
            if module is None:
                continue
            if root in self._lazy:  # a first forward has changed the classes of its modules
                root.modules = module_tree(module, root.label)
                root.parameters = _numbers_in(module)
                for name, inner in modules_in(module).items():
                    if name in root.types:
                        root.types[name] = type(inner).__name__
            self._place_parameters(module, root)
        # Parameters still without a shape are found again when an optimizer holds them.
        self._lazy = []

    def release_gone(self) -> None:
        """Release roots whose modules no longer exist, before others reuse their addresses."""
        if [root for root in self.roots if root.release(self.session)]:
            self.places.forget_gone()

    def release(self) -> None:
        """Drop what is kept of each parameter, at the end of the watch.

        Each root drops its own with its hooks.
        """
        self.places.clear()

    def in_training(self) -> bool:
        """Whether a root is in training mode."""
        modules = (root.module() for root in self.roots)
        return any(module.training for module in modules if module is not None)


def _channel_dims(
    model: nn.Module, modules: Mapping[str, nn.Module], root: RootModule
) -> dict[str, int | None]:
    """Return the channel dimension of three-dimensional values: 1 in convolutional models, else -1."""
    dim = -1
    if any(isinstance(m, _CHANNELS_FIRST) for m in modules_in(model).values()):
        dim = 1
    zeroing = (name for name, m in modules.items() if isinstance(m, _EXACT_ZERO))
    return {root.label(name): dim for name in zeroing}


def _dim_of(softmax: nn.Softmax) -> int:
    if softmax.dim is None:
        return -1
    return softmax.dim


_SATURATING: dict[type[nn.Module], Callable[[Any], tuple[str, tuple[float, ...]]]] = {
    nn.Tanh: lambda m: ("tanh", ()),
    nn.Sigmoid: lambda m: ("sigmoid", ()),
    nn.Softsign: lambda m: ("softsign", ()),
    nn.Softmax: lambda m: ("softmax", (_dim_of(m),)),
    nn.Hardtanh: lambda m: ("between", (m.min_val, m.max_val)),
    nn.Hardsigmoid: lambda m: ("between", (0.0, 1.0)),
    nn.ReLU6: lambda m: ("between", (-math.inf, 6.0)),
}


def _numbers_in(module: nn.Module) -> int:
    """Return how many numbers the parameters of a module have; lazy ones have none yet."""
    params = parameters_in(module).values()
    return sum(param.numel() for param in params if not is_lazy(param))
