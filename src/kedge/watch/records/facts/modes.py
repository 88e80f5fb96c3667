"""Training and evaluation mode of the trained models.

It is noted, too, for those of their modules that compute differently in each.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, TypeAlias

from torch import nn

from kedge.by_identity import ByIdentity
from kedge.frames import SourceLine
from kedge.sites.modal import MODAL, asks_for_mode, drops
from kedge.store.events import ModesEvent
from kedge.torch_internals.module_tables import modules_in, own_children
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.eval_calls import eval_calls

_NAMED = 50
"""Most names in a note."""

_Found: TypeAlias = tuple[tuple[int, ...], list[tuple[str, weakref.ref[nn.Module]]]]
"""The ids of a model's modules, and those that compute differently in training, with paths."""


class TrainingModes:
    """Notes the modes of trained models, whenever they have changed."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, ...]] = {}
        self._found: ByIdentity[nn.Module, _Found] = ByIdentity()

    def notes(
        self, step: int, roots: Iterable[RootModule], frame: FrameType | None
    ) -> list[ModesEvent]:
        """Return a note for each trained model whose modes are not those of its last note.

        Args:
            step: The step.
            roots: The roots.
            frame: The program's frame that called backward, if it is known.
        """
        notes = []
        for root in roots:
            module = root.module()
            if module is None or not root.optimizers:
                continue

            found = [(n, m) for n, m in self._modal(root, module) if _has_effect(m)]
            evals = tuple(n for n, m in found if m.training is False)[:_NAMED]
            trains = tuple(n for n, m in found if m.training is True)[:_NAMED]
            modes = (module.training, evals, trains)
            if self._noted.get(root.index) != modes:
                self._noted[root.index] = modes
                calls: tuple[SourceLine, ...] = ()
                if evals and not module.training:
                    calls = eval_calls(frame)
                note = ModesEvent(
                    step=step,
                    root=root.index,
                    training=module.training,
                    eval=evals,
                    train=trains,
                    eval_calls=calls,
                )
                notes.append(note)
        return notes

    def _modal(self, root: RootModule, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules of a root that compute differently in training; cached until modules come or go."""
        there = _ids_in(module)
        before, known = self._found.get(module, ((), []))
        if there != before or any(ref() is None for _, ref in known):
            inside = modules_in(module).items()
            modal = {root.label(n): m for n, m in inside if _is_modal(m)}
            known = [(path, weakref.ref(m)) for path, m in modal.items()]
            self._found[module] = (there, known)
        return [(path, m) for path, ref in known if (m := ref()) is not None]


def _is_modal(module: nn.Module) -> bool:
    return isinstance(module, MODAL) or asks_for_mode(type(module))


def _has_effect(module: nn.Module) -> bool:
    """Whether the mode of such a module matters: not that of a dropout of 0."""
    return not isinstance(module, MODAL) or drops(module)


def _ids_in(module: nn.Module) -> tuple[int, ...]:
    """Return the ids of a module and of all modules in it; called in each measured step."""
    found = {id(module): None}
    waiting = [module]
    while waiting:
        for child in own_children(waiting.pop()).values():
            if child is not None and id(child) not in found:
                found[id(child)] = None
                waiting.append(child)
    return tuple(found)
