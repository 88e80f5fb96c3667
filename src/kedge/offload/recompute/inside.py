"""A module and those inside, as a call finds them: their tables, attributes, modes and hooks.

# Note [As before]
Nearly always a call finds the modules as the one before did, and its second run finds them so, too.
That is seen in one pass over all their tables, a microsecond for each module: they have the same
objects under the same names. It is no proof where an attribute is a list, a dict or an object,
which may have other content; such modules are noted for each call, with that content.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from kedge import native
from kedge.hooks.placing.concealed import hooks_of_program
from kedge.offload.recompute import past
from kedge.torch_internals.hook_tables import after_forward, before_forward
from kedge.torch_internals.module_tables import (
    is_replica,
    modules_in,
    own_buffers,
    own_children,
    own_parameters,
    put_back,
)
from kedge.torch_internals.tensors import version_of
from kedge.torch_internals.torchscript import is_training

_OF_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has: its tables and its mode."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_LASTING = (
    *(bool, int, float, complex, str, bytes, type, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.Size),
)


class PlacedTensor(NamedTuple):
    """A parameter, a buffer or another tensor of a module.

    Attributes:
        name: Its name within the module that is called.
        where: The path of the module that has it.
        tensor: The tensor.
        is_parameter: Whether it is a parameter of the module.
    """

    name: str
    where: str
    tensor: Tensor
    is_parameter: bool


class ModulesInside:
    """A module and those inside, as they were when this was made.

    Args:
        module: The module.

    Attributes:
        modules: They, by their paths within the module.
        modes: Whether each was in training mode.
        hooks: The forward hooks of each that are not Kedge's.
        own: The state of each.
        tensors: Their tensors: of each module first the parameters.
        ids: The ids of the modules.
        is_kept: Whether `is_as_before` can tell that they have not changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = modules_in(module)
        each = self.modules.values()
        self.modes = tuple(map(is_training, each))
        self.hooks = [hooks_of(one) for one in each]
        # See Note [Graphs of before] in `kedge.offload.recompute.past`.
        notes = past.PastNotes(objects=past.OUTERMOST, held=False)
        self.own = {where: OwnState(one, notes) for where, one in self.modules.items()}

        self.tensors: list[PlacedTensor] = []
        for where, own in self.own.items():
            for name, held in own.parameters.items():
                if isinstance(held, Tensor):
                    self.tensors.append(PlacedTensor(joined(where, name), where, held, True))
            for name, held in own.tensors():
                self.tensors.append(PlacedTensor(joined(where, name), where, held, False))
        self.ids = frozenset(map(id, each))
        self._contents = [held.tensor for held in self.tensors]
        self._plain = list(filter(is_plain, self._contents))

        tables = _tables(each)
        # A table that is made anew at each look shows no later change.
        lasting = all(map(operator.is_, tables, _tables(each)))
        self.is_kept = lasting and all(own.told for own in self.own.values())
        if self.is_kept:  # else it could hold a graph
            self._kinds = list(map(type, each))
            self._tables = tables
            # As a plain dict has them: those of hooks have an order and `values` of their own.
            self._names = list(chain.from_iterable(map(dict.keys, tables)))
            self._held = list(chain.from_iterable(map(dict.values, tables)))

    def is_of(self, module: nn.Module) -> bool:
        """Whether a module is the one around the others."""
        return self.modules[""] is module

    def marks(self) -> list[int]:
        """Return what changes when a tensor is written to, or given other memory.

        The versions of all tensors, and the addresses of those that have one.
        """
        return [*map(version_of, self._contents), *map(Tensor.data_ptr, self._plain)]

    def written(self, before: list[int]) -> set[str]:
        """Return the names of the tensors whose marks have changed."""
        now = self.marks()
        if now == before:  # nearly always
            return set()
        names = [held.name for held in self.tensors]
        names += [held.name for held in self.tensors if is_plain(held.tensor)]
        marks = zip(names, now, before, strict=True)
        return {name for name, mark, former in marks if mark != former}

    def is_as_before(self) -> bool:
        """Whether all modules are sure to be as they were; see Note [As before]."""
        if not self.is_kept or not native.same_entries(self._tables, self._names, self._held):
            return False
        return list(map(type, self.modules.values())) == self._kinds


class OwnState:
    """The state of one module without those inside: its tables, and all other attributes.

    Args:
        module: The module.
        notes: Notes its lists, dicts and objects.

    Attributes:
        parameters: Its parameters, by name.
        told: Whether each change of it shows as another object in its place, and nothing of it is
            better not held: no tensor has a graph, and the attributes are of kinds without content
            that changes, or that leads to tensors.
    """

    __slots__ = (
        "_attributes",
        "_buffers",
        "_children",
        "_generators",
        "_module",
        "_training",
        "_type",
        "parameters",
        "told",
    )

    def __init__(self, module: nn.Module, notes: past.PastNotes) -> None:
        self._module = module
        self._type = type(module)
        self._training = is_training(module)
        self._children = dict(own_children(module))
        self.parameters = dict(own_parameters(module))
        self._buffers = dict(own_buffers(module))
        placed = chain(self.parameters.values(), self._buffers.values())
        self.told = not is_replica(module) and not any(map(_has_graph, placed))
        self._attributes: dict[str, Any] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for name, value in vars(module).items():
            if name in _OF_MODULE:
                continue
            noted = self._attributes[name] = notes.note(value)
            if isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            self.told = self.told and noted is value and _is_lasting(value)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers and the tensors among the attributes, with their names."""
        for table in (self._buffers, self._attributes):
            for name, held in table.items():
                if isinstance(held, Tensor):
                    yield name, held
                elif isinstance(held, past.PastTensor):
                    yield name, held.alias

    def has_kind(self, module: nn.Module) -> bool:
        """Whether a module has the class of this one, which a lazy module replaces in its first call."""
        return type(module) is self._type or issubclass(self._type, LazyModuleMixin)

    def has_any(self, copies: Mapping[int, Tensor]) -> bool:
        """Whether a copy is to be put in place of one of its buffers, given the copies by the buffers' ids."""
        if not copies:
            return False
        return any(id(held) in copies for _, held in self.tensors())

    def restore(self, copies: Mapping[int, Tensor]) -> None:
        """Give the module this state again, with copies in place of some tensors, by their ids.

        A lazy module has become another one by its first call, and stays it.
        """
        module = self._module
        if type(module) is not self._type:
            return
        buffers = {name: copies.get(id(held), held) for name, held in self._buffers.items()}
        put_back(module, buffers)
        tables: tuple[tuple[Any, dict[str, Any]], ...] = (
            (own_parameters(module), self.parameters),
            (own_children(module), self._children),
        )
        for table, before in tables:
            if not past.are_same(dict(table), before):
                table.clear()
                table.update(before)

        if is_training(module) is not self._training:
            module.training = self._training
        own = vars(module)
        for name in own.keys() - self._attributes.keys() - _OF_MODULE:
            del own[name]
        for name, noted in self._attributes.items():
            held = past.put_back(noted, own.get(name))
            wanted = copies.get(id(held), held)
            if name not in own or own[name] is not wanted:
                own[name] = wanted
        for generator, state in self._generators:
            generator.set_state(state)


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _is_lasting(value: Any) -> bool:
    """Whether a value has no content that changes, and leads to no tensors that are not a module's."""
    if type(value) is tuple:
        return all(map(_is_lasting, value))
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not value.__defaults__ and not value.__kwdefaults__
    if isinstance(value, BuiltinFunctionType):
        return not isinstance(value.__self__, Tensor)
    return value is None or isinstance(value, _LASTING)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward hooks of a module that are not Kedge's."""
    found: list[Any] = []
    for table in (before_forward(module), after_forward(module)):
        if table:
            found += hooks_of_program(table)
    return found


def _tables(modules: Iterable[nn.Module]) -> list[Any]:
    found: list[Any] = []
    for module in modules:
        found += [
            vars(module),
            own_parameters(module),
            own_buffers(module),
            own_children(module),
            before_forward(module),
            after_forward(module),
        ]
    return found


def is_plain(value: Tensor) -> bool:
    """Whether a tensor is one of PyTorch's own types, with memory as a dense one has it."""
    return type(value) in _PLAIN and value.layout is torch.strided


def joined(path: str, name: str) -> str:
    """Return the name of something in a module, as seen from a module around it."""
    if not path or not name:
        return path or name
    return f"{path}.{name}"
