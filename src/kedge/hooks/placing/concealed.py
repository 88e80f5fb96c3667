"""Removal of Kedge's hooks from copies, pickles and scripts of a hooked module.

# Note [Tables without Kedge's hooks]
Whatever copies, pickles or scripts a module does so with its ``__dict__``, of which the hook tables
are a part. Nothing is added to the ``__dict__``: a program that copies it makes a module of its
own, to which a method in it would not belong. Instead, each table with hooks of Kedge's has
attributes, as an `OrderedDict` may: ``__reduce_ex__``, which pickle and deepcopy look up on the
table itself; ``copy``; and ``values``, by which `torch.jit.script` finds hooks to compile and
functions of `torch.ao` find hooks to move to another module. They give what the program has put
into the table. PyTorch calls hooks by ``items``. The table remains the same object, so the
program's handles keep working, before and after.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, ValuesView
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.torch_internals.hook_tables import after_forward, before_forward

_ATTRIBUTES = frozenset({"__reduce_ex__", "copy", "values"})
"""The names of a table's attributes, which are methods of `HiddenEntries`."""
_lock = threading.Lock()


class KedgeHook:
    """A Kedge hook on a module.

    In a copy of its table that a program makes in some other way, it does nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that does nothing, so that a copied model is not hooked."""
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form of a function that does nothing: a pickled model loads without Kedge."""
        return getattr, (contextlib.nullcontext(), "__exit__")


_nothing = contextlib.nullcontext().__exit__


class HiddenEntries:
    """The entries of Kedge's in one table, whose attributes are methods of this; see Note [Tables without Kedge's hooks].

    Attributes:
        keys: The keys of the entries; a few, in a tuple, which Python's garbage collector leaves
            alone.
    """

    __slots__ = ("_table", "keys")

    def __init__(self, table: OrderedDict[int, Any]) -> None:
        self._table = weakref.ref(table)
        self.keys: tuple[int, ...] = ()

    def reduce(self, protocol: Any) -> Any:
        """The table's ``__reduce_ex__``: reduce a table with the program's entries alone."""
        return self.copy().__reduce_ex__(protocol)

    def copy(self) -> OrderedDict[int, Any]:
        """The table's ``copy``: return a table with the program's entries alone."""
        table: Any = self._table()
        entries = list(table.items())  # at once: another thread may change the table
        twin: OrderedDict[int, Any] = type(table)(
            (key, held) for key, held in entries if key not in self.keys
        )
        for name, held in vars(table).items():
            if name not in _ATTRIBUTES:
                vars(twin)[name] = held
        return twin

    def values(self) -> ValuesView[Any]:
        """The table's ``values``: return the program's hooks."""
        return self.copy().values()


def conceal(handle: RemovableHandle) -> None:
    """Conceal a hook on a module, until `reveal`."""
    key = handle.id
    with _lock:
        for table in _tables(handle):
            if key not in table:
                continue  # as a rule the hook has only one of its two flags
            hidden = _hidden_in(table)
            if hidden is None:
                hidden = HiddenEntries(table)
                vars(table).update(
                    {
                        "__reduce_ex__": hidden.reduce,
                        "copy": hidden.copy,
                        "values": hidden.values,
                    }
                )
            if key not in hidden.keys:
                hidden.keys += (key,)


def reveal(handle: RemovableHandle) -> None:
    """Stop concealing a hook; a table without hooks of Kedge's is as it was."""
    with _lock:
        for table in _tables(handle):
            hidden = _hidden_in(table)
            if hidden is None:
                continue
            hidden.keys = tuple(known for known in hidden.keys if known != handle.id)
            if not hidden.keys:
                for name in _ATTRIBUTES:
                    vars(table).pop(name, None)


def _tables(handle: RemovableHandle) -> Iterator[Any]:
    """Yield each table of a hook and of its flags that still exists."""
    for known in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        table = known()
        if hasattr(table, "__dict__"):
            yield table


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of Kedge's at present."""
    tables = (before_forward(module), after_forward(module))
    for table in tables:
        hidden = _hidden_in(table)
        if hidden and any(key in table for key in hidden.keys):
            return True
    return False


def hooks_of_program(table: Mapping[int, Any]) -> list[Any]:
    """Return the hooks in a table that are not Kedge's."""
    hidden = _hidden_in(table)
    if hidden is None:
        return list(table.values())
    if all(key in hidden.keys for key in table):  # nearly always
        return []
    return list(hidden.values())


def _hidden_in(table: Any) -> HiddenEntries | None:
    method = getattr(table, "__dict__", {}).get("copy")
    hidden = getattr(method, "__self__", None)
    return hidden if isinstance(hidden, HiddenEntries) else None
