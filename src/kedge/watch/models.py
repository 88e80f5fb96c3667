"""Who is watched: the models that the program calls, and the parameters that its optimizers hold.

# Note [Roots]
A root is a module that is called while no other watched one runs. It is found at its first call by a global
forward-pre hook and gets its hooks before its forward runs, so that a model handed to `torch.compile` is hooked before
it is compiled. The first root that an optimizer trains has the plain names - or, where there is no optimizer, the
first one that has parameters; those of others begin with their class name. As long as an optimizer holds parameters of
no root, new roots are looked for in every step; see `kedge.watch.training`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kedge.sites.leaves import own_part
from kedge.sites.select import Selector, runs
from kedge.torch_internals import dynamo
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.source_lines import module_tree
from kedge.watch.backwards import BackwardPasses, Reached
from kedge.watch.naming import names_in_frames, prefix_of
from kedge.watch.parked_hooks import WatchSession
from kedge.watch.roots import (
    Meter,
    Prefixed,
    Root,
    channel_dims,
    free_prefix,
    next_of,
    saturations,
    selected,
    unwrapped,
)
from kedge.watch.seen import Known, Places


class Models:
    """The roots and their parameters; see Note [Roots].

    Args:
        session: Has the hooks.
        meter: What measures.
        selector: Names what is measured.
        places: Takes in the parameters.

    Attributes:
        passes: The backward passes, which hook the parameters.
        holding: Set to a list to have it keep the roots alive to the end.
        names: Names of modules that may turn out to be roots, given by the model that holds them and is not called itself.
    """

    def __init__(self, session: WatchSession, meter: Meter, selector: Selector, places: Places) -> None:
        self.session, self.meter, self.selector, self.places = session, meter, selector, places
        self.roots: list[Root] = []
        self.known, self.passes = Known(), BackwardPasses()
        self.holding: list[nn.Module] | None = None
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._lazy: list[Root] = []

    def meet(self, module: nn.Module) -> nn.Module | None:
        """Take in a module that is called first; returns what may be a root: itself, the model inside of it, or None."""
        if module in self.known or self.known.is_aside(module) or in_backward():
            return None
        self.known.meet([module])
        inner = unwrapped(module)
        wrapped_late = inner is not module and inner in self.known
        captured = isinstance(module, torch.fx.GraphModule) and dynamo.has_compiled()  # a graph, not the user's module
        unhookable = isinstance(module, torch.jit.ScriptModule)
        return None if wrapped_late or captured or unhookable else inner

    def running(self) -> Root | None:
        """Return the root whose forward is under way in this thread."""
        return next((root for root in self.roots if root.is_running), None)

    def watch(self, module: nn.Module) -> Root:
        """Make a module a root, and hook it."""
        named = dict(module.named_modules())
        fresh = {
            name: m
            for name, m in named.items()
            if (m is module or m not in self.known) and not isinstance(m, torch.jit.ScriptModule)
        }
        self.known.meet(named.values())
        types = {n: type(m).__name__ for n, m in fresh.items()}
        self.release_gone()
        root = next_of(self.roots, types) or Root(len(self.roots), prefix_of(module, self.roots, self.names), types)
        with root.attaching(self.session, module) as target:
            root.parameters = sum(p.numel() for p in module.parameters() if not is_lazy(p))
            root.modules = module_tree(module, root.label)
            if not root.follows:
                self.roots.append(root)
            self._hook(module, root, fresh)
        if any(is_lazy(p) for p in module.parameters()):
            self._lazy.append(root)
        target.held = None  # the program's models live as long as the program wants
        if self.holding is not None:
            self.holding.append(module)
        return root

    def _hook(self, module: nn.Module, root: Root, fresh: Mapping[str, nn.Module]) -> None:
        action = Prefixed(self.meter, root)
        paths = [n for n, m in fresh.items() if runs(m) and selected(self.selector, root.label(n), m)]
        self.meter.channel_dims.update(channel_dims(module, fresh, root))
        for path, (how, numbers) in saturations(fresh, root).items():
            self.meter.saturates(path, how, numbers)
        for kind in ("out", "in", "out.grad"):
            self.session.hook_each(module, paths, kind, action)
        if any(own_part(param) is not param for param in module.parameters()):
            self.session.hook_each(module, [""], "out.grad", Reached(self.passes, root))
        self._place_parameters(module, root)

    def _place_parameters(self, module: nn.Module, root: Root) -> None:
        fresh = self.places.unplaced(module)
        self.places.put(fresh, root, lambda path: selected(self.selector, path, module))
        # Hooks on a parameter that is spread over several processes do not fire: its gradient is seen at the optimizer.
        self.passes.listen(param for _, param in fresh if own_part(param) is param)

    def watch_tensors(self, tensors: Sequence[nn.Parameter]) -> None:
        """Make a root of tensors that belong to no module."""
        prefix = "" if all(root.prefix for root in self.roots) else free_prefix("tensors", self.roots)
        root = Root(len(self.roots), prefix, {"": "tensors"}, sum(p.numel() for p in tensors))
        self.roots.append(root)
        named = zip(names_in_frames(tensors), tensors, strict=True)
        self.places.put(named, root, lambda path: selected(self.selector, path, nn.Module()))
        self.passes.listen(tensors)

    def find_parameters(self) -> None:
        """Watch the parameters that roots have by now: what came later, and what `torch.func` had put others in the place of."""
        self.release_gone()
        for root in self.roots:
            module = root.module()
            if module is not None:
                self._place_parameters(module, root)

    def finish_lazy(self) -> None:
        """Describe anew, and watch, what a first forward has given its shape."""
        waiting, self._lazy = self._lazy, []
        for root in waiting:
            module = root.module()
            if module is not None:
                root.modules = module_tree(module, root.label)
                root.types.update((n, type(m).__name__) for n, m in module.named_modules() if n in root.types)
                self._place_parameters(module, root)

    def release_gone(self) -> None:
        """Let go of roots that are gone, before others have their place in memory."""
        gone = [r for r in self.roots if r.release(self.session)]
        for met in (self.known, self.places, self.passes) if gone else ():
            met.forget_gone()

    def in_training(self) -> bool:
        """Whether a root is in training mode."""
        return any(module.training for root in self.roots if (module := root.module()) is not None)
