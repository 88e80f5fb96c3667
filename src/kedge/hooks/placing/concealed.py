"""Removal of Kedge's hooks from copies, pickles and scripts of a hooked module."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from kedge.hooks.placing.stand_in import original
from kedge.torch_internals.hook_tables import FLAGS, FORWARD
from kedge.torch_internals.torchscript import twin_of

_CONCEALING = ("__reduce_ex__", "__deepcopy__", "__prepare_scriptable__")


class KedgeHook:
    """A Kedge hook on a module, absent from copies and pickles of the module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that does nothing, so that a copied model is not hooked."""
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form of a function that does nothing: a pickled model loads without Kedge."""
        return getattr, (contextlib.nullcontext(), "__exit__")


_nothing = contextlib.nullcontext().__exit__


class PickleWithoutHooks:
    """Pickles, copies and scripts a hooked module as if it were not hooked.

    Pickling and copying look up ``__reduce_ex__`` on the instance, where this object is while the module has hooks.
    `torch.jit.script` would compile the hooks, and calls ``__prepare_scriptable__`` first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.users = 0

    def copy(self, memo: dict[int, Any]) -> Any:
        """The ``__deepcopy__`` for classes that have their own."""
        module: Any = self.module()
        twin = type(module).__deepcopy__(module, memo)
        if isinstance(twin, nn.Module):
            twin.__dict__ = unhooked(twin.__dict__)
        return twin

    def __call__(self, protocol: Any) -> Any:
        """The ``__reduce_ex__``."""
        module: Any = self.module()
        kind: Any = type(module)
        reduced = list(kind.__reduce_ex__(module, protocol))
        if len(reduced) > 2 and isinstance(reduced[2], dict):
            reduced[2] = unhooked(reduced[2])
        return tuple(reduced)

    def script(self) -> Any:
        """The ``__prepare_scriptable__``."""
        module: Any = self.module()
        twin, own = twin_of(module, unhooked), getattr(type(module), "__prepare_scriptable__", None)
        return twin if own is None else own(twin)


def unhooked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's ``__dict__`` without anything that Kedge put there."""
    clean = dict(state)
    for name in _CONCEALING:
        clean.pop(name, None)
    ours = set()
    for table in FORWARD:
        if table in clean:
            ours |= {i for i, hook in clean[table].items() if hook is _nothing or isinstance(hook, KedgeHook)}
            clean[table] = type(clean[table])((i, h) for i, h in clean[table].items() if i not in ours)
    for table in FLAGS:
        if table in clean:
            clean[table] = type(clean[table])((i, flag) for i, flag in clean[table].items() if i not in ours)
    return clean


def conceal(module: nn.Module) -> Callable[[], None]:
    """Remove every `KedgeHook` from copies and pickles of a module; returns the undo."""
    return ConcealedHooks(module).remove


class ConcealedHooks:
    """Conceals the Kedge hooks of a module, until `remove`."""

    __slots__ = ("_concealed", "_copies", "_lies", "_module")

    def __init__(self, module: nn.Module) -> None:
        module = original(module)  # a stand-in shares its `__dict__`, and pickles itself
        self._module, self._lies = weakref.ref(module), False
        self._concealed = PickleWithoutHooks(module)
        self._copies = hasattr(type(module), "__deepcopy__")
        self.back()

    def back(self) -> None:
        """Conceal the module's hooks; several users share one `PickleWithoutHooks`."""
        module = self._module()
        if module is None or self._lies:
            return
        own = module.__dict__
        concealed = self._concealed = own.setdefault("__reduce_ex__", self._concealed)
        concealed.users += 1
        self._lies = True
        own["__prepare_scriptable__"] = concealed.script
        if self._copies:
            own["__deepcopy__"] = concealed.copy

    def out(self) -> None:
        """Stop concealing the hooks; the last user removes the `PickleWithoutHooks`."""
        if not self._lies:
            return
        self._lies = False
        self._concealed.users -= 1
        module = self._module()
        if module is not None and not self._concealed.users:
            for name in _CONCEALING:
                module.__dict__.pop(name, None)

    def remove(self) -> None:
        """Stop concealing the hooks."""
        self.out()
