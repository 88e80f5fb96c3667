"""Facts about a training that its numbers do not show: what no optimizer holds, what was not zeroed, which modes are on."""

from __future__ import annotations

import mmap
import resource
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_tables
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_tables

from kedge.watch.backwards import BackwardPasses
from kedge.watch.optimizers import Optimizers, params_of
from kedge.watch.roots import Root
from kedge.watch.seen import Places

Note = Mapping[str, Any]
_CHECKED = 8
"""How many gradients are looked at for whether they were zeroed."""
_SMALL = 1 << 16
_NAMED = 50
"""How many names a note holds."""
_BUSY = 1.0
"""Seconds of processor time from which child processes are worth a word."""
_MODES = (_BatchNorm, nn.modules.instancenorm._InstanceNorm, _DropoutNd)


class Facts:
    """Collects notes for the recording; see docs/recording.md for each kind."""

    def __init__(self) -> None:
        self._modes: dict[int, tuple[Any, ...]] = {}
        self._left: dict[int, list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]]] = {}
        self._unheld: dict[int, Note] = {}
        self._batches: set[str] = set()
        self._tables: list[tuple[Any, int]] = []
        self._children = mmap.mmap(-1, 8)  # shared with child processes that are forked
        self._begun = 0.0

    def begin(self) -> None:
        """Note what there is when watching begins."""
        self._begun = _child_seconds()
        tables = [t for m in (module_tables, optimizer_tables) for n, t in vars(m).items() if _is_table(n, t)]
        self._tables = [(table, len(table)) for table in tables if table]

    def stepped_in_child(self) -> None:
        """Called in a forked child process when an optimizer steps there."""
        steps = int.from_bytes(self._children[:], "little") + 1
        self._children[:] = steps.to_bytes(8, "little")

    # -- in a measured step ------------------------------------------------------------------------

    def backward_began(self, step: int, roots: Iterable[Root], optimizers: Optimizers) -> list[Note]:
        """Look at the modes of trained models, and for gradients of the last step that are still there."""
        return [*self._kept(step, optimizers), *self._mode_notes(step, roots)]

    def stepped(self, optimizer: Optimizer) -> None:
        """Remember some gradients of an optimizer that has just stepped."""
        held = (p for p in params_of(optimizer) if p.grad is not None and p.grad.is_cpu and p.numel() <= _SMALL)
        some = [p for p, _ in zip(held, range(_CHECKED), strict=False)]
        self._left[id(optimizer)] = [(weakref.ref(p), weakref.ref(p.grad), p.grad._version) for p in some]  # type: ignore[arg-type, union-attr]

    def _kept(self, step: int, optimizers: Optimizers) -> list[Note]:
        notes: list[Note] = []
        for entry in optimizers.entries:
            optimizer = entry.optimizer()
            left = self._left.pop(id(optimizer), None) if optimizer is not None else None
            if not left:
                continue
            kept = 0
            for ref, old, version in left:
                param, grad = ref(), old()
                same = param is not None and grad is not None and param.grad is grad and grad._version == version
                kept += same and grad is not None and bool(grad.any())
            if kept:
                notes.append(
                    {"kind": "grads-kept", "step": step, "optimizer": entry.index, "checked": len(left), "kept": kept}
                )
        return notes

    def _mode_notes(self, step: int, roots: Iterable[Root]) -> list[Note]:
        notes: list[Note] = []
        for root in roots:
            module = root.module()
            if module is None or not root.optimizers:
                continue
            found = [(root.label(n), m) for n, m in module.named_modules() if isinstance(m, _MODES)]
            evals, trains = ([n for n, m in found if m.training is mode][:_NAMED] for mode in (False, True))
            modes = (module.training, tuple(evals), tuple(trains))
            if self._modes.get(root.index) != modes:
                self._modes[root.index] = modes
                notes.append({
                    "kind": "modes", "step": step, "root": root.index, "training": module.training,
                    "eval": evals, "train": trains,
                })  # fmt: skip
        return notes

    def step_ended(
        self, step: int, optimizers: Optimizers, roots: Iterable[Root], places: Places, passes: BackwardPasses
    ) -> list[Note]:
        """Look, after ever more steps, at which parameters no optimizer holds."""
        if optimizers.entries and (step < 3 or step & (step - 1) == 0):
            held = {id(p): (e, p) for e in optimizers.entries if (o := e.optimizer()) is not None for p in params_of(o)}
            for root in roots:
                module = root.module()
                if module is not None and root.optimizers:
                    self._look_at_held(root, module, held, places, passes)
            foreign = sum(places.of(p) is None and p.grad is None for _, p in held.values())
            self._unheld[-1] = {"kind": "not-optimized", "root": None, "foreign": foreign}
        return []

    def _look_at_held(
        self, root: Root, module: nn.Module, held: Mapping[int, Any], places: Places, passes: BackwardPasses
    ) -> None:
        own = dict(module.named_parameters())
        unheld = {n: p for n, p in own.items() if p.requires_grad and id(p) not in held}
        graded = [n for n, p in unheld.items() if p.grad is not None or passes.has_arrived(p)]
        replaced = [
            site.path
            for p, site, of in places
            if of is root and id(p) in held and not any(p is mine for mine in own.values())
        ]
        self._unheld[root.index] = {
            "kind": "not-optimized", "root": root.index, "unheld": [root.label(n) for n in list(unheld)[:_NAMED]],
            "unheld_elements": sum(p.numel() for p in unheld.values()), "graded": [root.label(n) for n in graded[:_NAMED]],
            "replaced": replaced[:_NAMED],
        }  # fmt: skip

    # -- at the end --------------------------------------------------------------------------------

    def at_end(
        self, optimizers: Optimizers, roots: Iterable[Root], places: Places, arrived: Callable[[Tensor], bool]
    ) -> list[Note]:
        """Return what is known in the end."""
        notes: list[Note] = []
        if optimizers.entries:
            notes.append({"kind": "optimizers", "optimizers": [entry.describe() for entry in optimizers.entries]})
        notes += [note for note in self._unheld.values() if any(note.get(n) for n in ("unheld", "replaced", "foreign"))]
        steps, seconds = int.from_bytes(self._children[:], "little"), _child_seconds() - self._begun
        if steps or (seconds > _BUSY and not optimizers.entries):
            detail = {"steps": steps, "seconds": round(seconds, 1)}
            notes.append({"kind": "unseen", "what": "children", "detail": detail})
        if any(len(table) < size for table, size in self._tables) or self._replaced():
            notes.append({"kind": "unseen", "what": "hook-tables", "detail": {}})
        return notes

    def _replaced(self) -> bool:
        now = {id(t) for m in (module_tables, optimizer_tables) for n, t in vars(m).items() if _is_table(n, t)}
        return any(id(table) not in now for table, _ in self._tables)

    def unused(self, places: Places, arrived: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
        """Return the parameters of trained models that never had a gradient, as the ledger has them."""
        cause = "no backward pass that was seen has reached it"
        remedy = "use it in the forward, or set requires_grad_(False)"
        return [
            {"site": f"{site}.grad", "fired": 0, "cause": cause, "remedy": remedy}
            for param, site, root in places
            if root.optimizers and param.requires_grad and param.grad is None and not arrived(param)
        ]


def _is_table(name: str, table: Any) -> bool:
    return name.startswith("_global_") and "hooks" in name and isinstance(table, dict)


def _child_seconds() -> float:
    """The processor time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
