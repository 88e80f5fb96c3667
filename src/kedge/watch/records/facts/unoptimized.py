"""Parameters that are trained and in no optimizer, or in an optimizer and not trained.

# Note [Written by the program]
A target network gets gradients, unless its output is detached, and is in no optimizer; the program
copies the weights of another model into it. So some elements of each parameter that gets gradients
and is in no optimizer are kept from the first comparison on. One that has changed since is changed
by the program on purpose, and is not noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.by_identity import ByIdentity
from kedge.store.events import NotOptimizedEvent
from kedge.torch_internals import modes
from kedge.torch_internals.module_tables import modules_in, parameters_in
from kedge.torch_internals.tensors import may_alias
from kedge.torch_internals.torchscript import is_training
from kedge.watch.models.optimizers import Optimizers, params_of
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.roots import RootModule
from kedge.watch.records.samples import sample

_NAMED = 50
"""Most names in a note."""


class UnoptimizedParameters:
    """Compares the parameters of models and optimizers."""

    def __init__(self) -> None:
        self._notes: dict[int, NotOptimizedEvent] = {}
        self._called: list[tuple[weakref.ref[nn.Module], RootModule]] = []
        self._numbers: ByIdentity[Tensor, Tensor] = ByIdentity()

    def called_inside(self, module: nn.Module, root: RootModule) -> None:
        """Remember a module that is called while a root runs but is not part of it."""
        if len(self._called) == _NAMED:
            return
        if any(param.requires_grad for param in parameters_in(module).values()):
            self._called.append((weakref.ref(module), root))

    def notes(
        self, optimizers: Optimizers, roots: Iterable[RootModule], places: WatchedParameters
    ) -> list[NotOptimizedEvent]:
        """Return the notes at the end of a run."""
        self.compare(optimizers, roots, places, wait=True)
        return [
            note
            for note in self._notes.values()
            if note.unheld or note.replaced or note.outside or note.tensors or note.foreign
        ]

    def compare(
        self,
        optimizers: Optimizers,
        roots: Iterable[RootModule],
        places: WatchedParameters,
        *,
        wait: bool = False,
    ) -> None:
        """Compare the models and the optimizers as they are now."""
        living = optimizers.known()
        if not living:
            return
        held = {id(p): p for o in living.values() for p in params_of(o)}
        for root in roots:
            module = root.module()
            has_ended = root.optimizers and not root.optimizers & living.keys()
            if module is not None and (root.by_hand or not has_ended):
                self._notes[root.index] = self._not_held(root, module, held, places, wait=wait)
        foreign = sum(places.of(p) is None and p.grad is None for p in held.values())
        self._notes[-1] = NotOptimizedEvent(foreign=foreign)

    def _not_held(
        self,
        root: RootModule,
        module: nn.Module,
        held: Mapping[int, Tensor],
        places: WatchedParameters,
        *,
        wait: bool,
    ) -> NotOptimizedEvent:
        """Return a note on parameters that no optimizer holds.

        Of an untrained model it names only those with gradients.
        """
        own = parameters_in(module)
        here = {id(p) for p in own.values()}
        trained = {name: p for name, p in own.items() if p.requires_grad and not is_lazy(p)}
        own_work = {at.id for at in places.among(trained.values()) if at.by_hand}
        unheld = {n: p for n, p in trained.items() if id(p) not in held and id(p) not in own_work}

        # Another optimizer may hold what the model has now under such a name, or the name is gone.
        mine = (at for at in places.among(held.values()) if at.root is root)
        stale = {at.site.path for at in mine if at.id not in here}
        replaced = [label for name in unheld if (label := root.label(name)) in stale]

        graded = []
        for name, param in unheld.items():
            if param.grad is not None or any(at.times for at in places.among([param])):
                graded.append(name)
        written = [
            name
            for name in graded
            if root.label(name) not in stale and self._is_written(unheld[name], wait=wait)
        ]
        for name in written:
            graded.remove(name)
            del unheld[name]
        if not root.optimizers:
            unheld = {name: unheld[name] for name in graded}
        outside = self._outside(root, held.keys() | here)
        tensors = [root.label(name) for name in _plain_tensors(module, held)]
        return NotOptimizedEvent(
            root=root.index,
            training=module.training,
            unheld=tuple(root.label(n) for n in list(unheld)[:_NAMED]),
            unheld_elements=sum(p.numel() for p in unheld.values()),
            graded=tuple(root.label(n) for n in graded[:_NAMED]),
            replaced=tuple(replaced[:_NAMED]),
            outside=tuple(type(m).__name__ for m in outside),
            outside_fixed=not any(map(is_training, outside)),
            tensors=tuple(tensors[:_NAMED]),
            passes=max((at.times for at in places.among(unheld.values())), default=0),
        )

    def _is_written(self, param: Tensor, *, wait: bool) -> bool:
        """Whether the program has changed a parameter since this was asked first; see Note [Written by the program].

        Args:
            param: The parameter.
            wait: Whether to read it if it is on a device.
        """
        is_plain = type(param) is nn.Parameter and param.layout is torch.strided
        if not is_plain or not modes.has_data(param):
            return False
        before = self._numbers.get(param)
        if before is None:
            self._numbers[param] = sample(param).clone()
            return False
        return (param.is_cpu or wait) and not torch.equal(sample(param), before)

    def _outside(self, root: RootModule, known: Container[int]) -> list[nn.Module]:
        """Return modules that a root calls without holding them, if no optimizer uses gradients there."""
        found = []
        for ref, caller in self._called:
            module = ref()
            if caller is not root or module is None:
                continue
            params = parameters_in(module).values()
            if any(id(p) not in known and p.grad is not None for p in params):
                found.append(module)
        return found


def _plain_tensors(module: nn.Module, held: Container[int]) -> Iterator[str]:
    """Yield the names of a model's tensors that got a gradient and are in no optimizer.

    They are no parameters.
    """
    for path, part in modules_in(module).items():
        for name, value in vars(part).items():
            # Sharded training replaces parameters by views, for which even the next query fails.
            if type(value) is not Tensor or may_alias(value):
                continue
            is_graded = value.requires_grad and value.is_leaf and value.grad is not None
            if is_graded and id(value) not in held:
                yield f"{path}.{name}".lstrip(".")
