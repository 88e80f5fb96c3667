"""Facts about a training besides its numbers: parameters in no optimizer, gradients not zeroed, active modes."""

from __future__ import annotations

import mmap
import resource
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kedge import native
from kedge.sites.leaves import own_part
from kedge.torch_internals.hook_tables import for_everything
from kedge.torch_internals.module_tables import own_children
from kedge.torch_internals.tensors import may_alias, version_of
from kedge.watch.models.backwards import BackwardPasses
from kedge.watch.models.optimizers import Optimizers, params_of
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.roots import RootModule

Note = Mapping[str, Any]
Kept = tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]
Modal = tuple[str, weakref.ref[nn.Module]]
_CHECKED = 8
"""Most gradients of an optimizer that are compared to learn whether they were zeroed."""
_SMALL = 1 << 16
"""Most elements of a tensor that is compared."""
_COMPARED, _COMPARED_EVERY = 4, 10
"""Most compared parameters of optimizers that have not stepped, and backward passes between two comparisons."""
_NAMED = 50
"""Most names in a note."""
_BUSY = 1.0
"""Seconds of processor time from which child processes are noted."""
_TOLD = ("unheld", "replaced", "outside", "tensors", "foreign")
_MODES = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
"""The modules that compute differently in training."""


class Facts:
    """Collects notes for the recording; see docs/recording.md for each kind."""

    def __init__(self) -> None:
        self._modes: dict[int, tuple[Any, ...]] = {}
        self._modals: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], list[Modal]]]
        self._modals = weakref.WeakKeyDictionary()
        self._left: dict[int, list[Kept]] = {}
        self._zeroed: set[int] = set()
        self._inside: dict[int, int] = {}
        self._passed = False
        self._unheld: dict[int, Note] = {}
        self._strays: list[tuple[weakref.ref[nn.Module], RootModule]] = []
        self._looks = self._optimizers = 0
        self._tables: list[Any] = []
        self._handles: list[RemovableHandle] = []
        self._unstepped = Unstepped()
        self._children = mmap.mmap(-1, 8)  # shared with child processes that are forked
        self._begun = 0.0

    def begin(self, *handles: RemovableHandle) -> None:
        """Note the state when watching begins: PyTorch's global hook tables, and the Kedge hooks that stay in them."""
        self._begun, self._handles = _child_seconds(), list(handles)
        self._tables = list(for_everything().values())

    def stepped_in_child(self) -> None:
        """Called in a forked child process when an optimizer steps there."""
        steps = int.from_bytes(self._children[:], "little") + 1
        self._children[:] = steps.to_bytes(8, "little")

    def count_backward(self, passes: int, unstepped: Iterable[Optimizer]) -> None:
        """Count a backward pass before any optimizer has stepped.

        Args:
            passes: How many backward passes there were.
            unstepped: Optimizers without a step whose parameters are compared from this pass on.
        """
        self._unstepped.add(unstepped)
        self._unstepped.compare(passes)

    def called_inside(self, module: nn.Module, root: RootModule) -> None:
        """Remember a module that is called while a root runs but is not part of it."""
        if len(self._strays) < _NAMED and any(p.requires_grad for p in module.parameters()):
            self._strays.append((weakref.ref(module), root))

    # -- in a measured step ------------------------------------------------------------------------

    def backward_began(self, step: int, roots: Iterable[RootModule], passes: BackwardPasses) -> list[Note]:
        """Return notes on the modes of trained models, and on gradients of the last step that are still there."""
        notes = self._mode_notes(step, roots)
        for key, left in list(self._left.items()):
            if not passes.reached_here(_params(left)):
                continue
            if not any(map(_is_left, left)):
                self._zeroed.add(key)
            if key in self._inside:  # its step has begun, and calls this from a closure
                notes += self._kept(step, key, self._inside.pop(key))
        self._passed = True
        return notes

    def backward_ended(self, passes: BackwardPasses) -> None:
        """Remember the current gradients: if a later pass finds them changed, they were zeroed in between."""
        for key, left in self._left.items():
            if key not in self._zeroed and passes.reached_here(_params(left)):
                self._left[key] = _gradients(_params(left))

    def before_step(self, step: int, optimizer: Optimizer, index: int) -> list[Note]:
        """Return a note if the gradients that an optimizer is about to use still include those of its last step."""
        if not self._passed:
            self._inside[id(optimizer)] = index
            return []
        return self._kept(step, id(optimizer), index)

    def _kept(self, step: int, key: int, index: int) -> list[Note]:
        left, zeroed = self._left.pop(key, None), key in self._zeroed
        self._zeroed.discard(key)
        if not left or zeroed:
            return []
        return [{"kind": "grads-kept", "step": step, "optimizer": index, "checked": len(left), "kept": len(left)}]

    def stepped(self, optimizer: Optimizer) -> None:
        """Remember some gradients of an optimizer that has just stepped."""
        self._left[id(optimizer)] = _gradients(params_of(optimizer))
        self._zeroed.discard(id(optimizer))
        self._inside.pop(id(optimizer), None)
        self._passed = False

    def forget_gradients(self) -> None:
        """Forget the gradients: the next step is not measured, so zeroing them would not be seen."""
        self._left.clear()
        self._zeroed.clear()
        self._inside.clear()

    def _mode_notes(self, step: int, roots: Iterable[RootModule]) -> list[Note]:
        notes: list[Note] = []
        for root in roots:
            module = root.module()
            if module is None or not root.optimizers:
                continue
            found = [(n, m) for n, m in self._modal(root, module) if getattr(m, "p", 1.0) > 0]
            evals, trains = ([n for n, m in found if m.training is mode][:_NAMED] for mode in (False, True))
            modes = (module.training, tuple(evals), tuple(trains))
            if self._modes.get(root.index) != modes:
                self._modes[root.index] = modes
                notes.append({
                    "kind": "modes", "step": step, "root": root.index, "training": module.training,
                    "eval": evals, "train": trains,
                })  # fmt: skip
        return notes

    def _modal(self, root: RootModule, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules of a root that compute differently in training; cached until modules come or go."""
        there, (before, known) = _ids_in(module), self._modals.get(module, ((), []))
        if there != before or any(ref() is None for _, ref in known):
            found = ((root.label(n), m) for n, m in module.named_modules() if isinstance(m, _MODES))
            known = [(name, weakref.ref(m)) for name, m in found]
            self._modals[module] = there, known
        return [(name, m) for name, ref in known if (m := ref()) is not None]

    def step_ended(self, optimizers: Optimizers, roots: Iterable[RootModule], places: WatchedParameters) -> None:
        """Compare models and optimizers: in the first steps, then ever more rarely, and when an optimizer is new."""
        if len(optimizers.entries) != self._optimizers:
            self._looks, self._optimizers = 0, len(optimizers.entries)
        self._looks += 1
        if self._looks < 4 or self._looks & (self._looks - 1) == 0:
            self._look_at_optimizers(optimizers, roots, places)

    def _look_at_optimizers(
        self, optimizers: Optimizers, roots: Iterable[RootModule], places: WatchedParameters
    ) -> None:
        living = optimizers.known()
        if not living:
            return
        held = {id(p): p for o in living.values() for p in params_of(o)}
        for root in roots:
            module = root.module()
            if module is not None and (not root.optimizers or root.optimizers & living.keys()):
                self._unheld[root.index] = self._not_held(root, module, held, places)
        foreign = sum(places.of(p) is None and p.grad is None for p in held.values())
        self._unheld[-1] = {"kind": "not-optimized", "root": None, "foreign": foreign}

    def _not_held(
        self, root: RootModule, module: nn.Module, held: Mapping[int, Tensor], places: WatchedParameters
    ) -> Note:
        """Return a note on parameters that no optimizer holds; of an untrained model, only on those with gradients."""
        own = dict(module.named_parameters())
        here = {id(p) for p in own.values()}
        unheld = {n: p for n, p in own.items() if p.requires_grad and id(p) not in held and not is_lazy(p)}
        graded = [n for n, p in unheld.items() if p.grad is not None or any(at.times for at in places.among([p]))]
        if not root.optimizers:
            unheld = {n: unheld[n] for n in graded}
        outside = self._outside(root, held.keys() | here)
        return {
            "kind": "not-optimized", "root": root.index, "training": module.training,
            "unheld": [root.label(n) for n in list(unheld)[:_NAMED]],
            "unheld_elements": sum(p.numel() for p in unheld.values()), "graded": [root.label(n) for n in graded[:_NAMED]],
            "replaced": [
                at.site.path
                for at in places
                if at.root is root and (p := at.param()) is not None and id(p) in held and id(p) not in here
            ][:_NAMED],
            "outside": [type(m).__name__ for m in outside], "outside_fixed": not any(m.training for m in outside),
            "tensors": [root.label(name) for name in _plain_tensors(module, held)][:_NAMED],
            "passes": max((at.times for at in places.among(unheld.values())), default=0),
        }  # fmt: skip

    def _outside(self, root: RootModule, known: Container[int]) -> list[nn.Module]:
        """Return the modules that a root calls without holding them, and whose gradients no optimizer uses."""
        modules = [m for ref, of in self._strays if of is root and (m := ref()) is not None]
        return [m for m in modules if any(id(p) not in known and p.grad is not None for p in m.parameters())]

    # -- at the end --------------------------------------------------------------------------------

    def at_end(self, optimizers: Optimizers, roots: Iterable[RootModule], places: WatchedParameters) -> list[Note]:
        """Return the notes that are known at the end of the run."""
        notes: list[Note] = []
        self._look_at_optimizers(optimizers, roots, places)
        if optimizers.entries:
            notes.append({"kind": "optimizers", "optimizers": [entry.describe() for entry in optimizers.entries]})
        elif self._unstepped.in_vain:
            notes.append({"kind": "not-optimized", "root": None, "in_vain": self._unstepped.in_vain})
        notes += [note for note in self._unheld.values() if any(note.get(name) for name in _TOLD)]
        steps, seconds = int.from_bytes(self._children[:], "little"), _child_seconds() - self._begun
        if steps or (seconds > _BUSY and not optimizers.entries):
            detail = {"steps": steps, "seconds": round(seconds, 1)}
            notes.append({"kind": "unseen", "what": "children", "detail": detail})
        if self._replaced():
            notes.append({"kind": "unseen", "what": "hook-tables", "detail": {}})
        return notes

    def _replaced(self) -> bool:
        now = {id(table) for table in for_everything().values()}
        gone = any(handle.id not in (handle.hooks_dict_ref() or {}) for handle in self._handles)
        return gone or any(id(table) not in now for table in self._tables)

    def unused(self, places: WatchedParameters) -> list[dict[str, Any]]:
        """Return the parameters of trained models that never had a gradient, in the form of the ledger."""
        cause = "no backward pass that was seen has reached it"
        remedy = "use it in the forward, or set requires_grad_(False)"
        return [
            {"site": f"{place.site}.grad", "fired": 0, "cause": cause, "remedy": remedy}
            for place in places.without_gradient()
            if place.root.optimizers
        ]


class Unstepped:
    """Copies of some parameters of optimizers that have not stepped: the program may change these parameters itself.

    Attributes:
        in_vain: After how many backward passes the parameters were still unchanged; 0 if they have changed.
    """

    def __init__(self) -> None:
        self.in_vain = 0
        self._before: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Add a few small parameters of some optimizers."""
        small = [p for optimizer in optimizers for p in params_of(optimizer) if p.numel() <= _SMALL][:_COMPARED]
        self._before += [(weakref.ref(p), own_part(p).detach().clone()) for p in small]

    def compare(self, passes: int) -> None:
        """Compare them after this many backward passes, every `_COMPARED_EVERY` passes."""
        if not self._before or passes % _COMPARED_EVERY:
            return
        alive = [(param, before) for ref, before in self._before if (param := ref()) is not None]
        if alive and all(torch.equal(own_part(param).detach(), before) for param, before in alive):
            self.in_vain = passes
        else:
            self._before, self.in_vain = [], 0


def _plain_tensors(module: nn.Module, held: Container[int]) -> Iterator[str]:
    """Yield the names of a model's tensors that got a gradient, are not parameters, and are in no optimizer."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            # Sharded training replaces parameters by views, for which even this query fails.
            leaf = type(value) is Tensor and not may_alias(value) and value.requires_grad and value.is_leaf
            if leaf and value.grad is not None and id(value) not in held:
                yield f"{path}.{name}".lstrip(".")


def _ids_in(module: nn.Module) -> tuple[int, ...]:
    """Return the ids of a module and of all modules in it; called in each measured step."""
    found, waiting = {id(module): None}, [module]
    while waiting:
        for child in own_children(waiting.pop()).values():
            if child is not None and id(child) not in found:
                found[id(child)] = None
                waiting.append(child)
    return tuple(found)


def _params(kept: Iterable[Kept]) -> list[Tensor]:
    return [param for ref, _, _ in kept if (param := ref()) is not None]


def _gradients(params: Iterable[Tensor]) -> list[Kept]:
    """Return some small gradients, each with its parameter and the version of its memory."""
    counted = ((p, g) for p in params if (g := p.grad) is not None and version_of(g) >= 0)
    small = ((p, g) for p, g in counted if g.is_cpu and g.numel() <= _SMALL and _is_some(g))
    return [(weakref.ref(p), weakref.ref(g), version_of(g)) for (p, g), _ in zip(small, range(_CHECKED), strict=False)]


def _is_some(grad: Tensor) -> bool:
    """Whether a gradient has a nonzero element."""
    squares, nonfinite = native.all_finite_and_norm([grad])
    return bool(squares or nonfinite) or bool(grad.any())


def _is_left(one: Kept) -> bool:
    """Whether a parameter still has the same gradient, unchanged."""
    param, grad = one[0](), one[1]()
    return param is not None and grad is not None and param.grad is grad and version_of(grad) == one[2]


def _child_seconds() -> float:
    """Return the processor time of child processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
