"""The state of a module that a call of it reads and changes besides its inputs, for a second run of that call.

# Note [The state of a second run]
A second run must find what the first one found, and leave what it finds. So it gets the attributes
that the modules had when the call began: their values by reference, lists, dicts, sets and objects
by their content, and copies of those buffers that the call changes in place, such as the running statistics
of batch norm. Random generators are set back. Afterwards everything is put back as it was before
the second run. Copies are put in place of buffers: nothing is written to the buffers themselves,
which the graph may have saved.

Parameters and all other tensors are compared only: the second run reads them where they are. So is
the mode, since a module that was switched to evaluation in between computes something else.

# Note [Which buffers change]
That is known only at the end of a call, and not by versions: batch norm changes its statistics
without counting that. So the first call in each mode copies all buffers, and compares them with the
copies at its end. Later calls copy all buffers of those modules of which one has changed. Every
call whose output is compared copies all of them again. A buffer that is seen to change later, after
a call without a copy of it, is an error if that call has to be run again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import RecomputedWrong
from kedge.hooks.placing.concealed import KedgeHook
from kedge.offload.recompute import past
from kedge.torch_internals.hook_tables import after_forward, before_forward
from kedge.torch_internals.kernels import keeping_versions
from kedge.torch_internals.module_tables import (
    modules_in,
    own_buffers,
    own_children,
    own_parameters,
    put_back,
)
from kedge.torch_internals.random_state import RandomState
from kedge.torch_internals.tensors import have_same_bits, version_of
from kedge.torch_internals.torchscript import is_training

_OF_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has: its tables and its mode."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class ChangingTensors:
    """The modules whose buffers change in calls of one module, by its mode; see Note [Which buffers change]."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, ...], set[str]] = {}

    def knows(self, modes: tuple[bool, ...]) -> bool:
        """Whether there was a call in these modes."""
        return modes in self._known

    def may_change(self, modes: tuple[bool, ...], where: str) -> bool:
        """Whether a call in these modes may change buffers of a module inside, as far as known."""
        return modes not in self._known or where in self._known[modes]

    def learn(self, modes: tuple[bool, ...], changed: set[str]) -> None:
        """Note the modules whose buffers a call has changed."""
        self._known.setdefault(modes, set()).update(changed)


class ModuleState:
    """The state of a module and of all modules inside, as a call found it.

    See Note [The state of a second run].

    Args:
        module: The module.
        path: Its path, for errors.
        changing: What is known of its buffers.
        whole: Whether to copy all buffers, also those that have not changed so far.
    """

    def __init__(
        self, module: nn.Module, path: str, changing: ChangingTensors, *, whole: bool
    ) -> None:
        self._module = module
        self._path = path
        self._changing = changing
        self._inside = modules_in(module)
        self._modes = tuple(map(is_training, self._inside.values()))
        self._hooks = [_hooks_of(each) for each in self._inside.values()]
        self._own = self._present(held=False)
        self._random = RandomState()

        self._fixed: dict[str, FixedTensor] = {}
        self._copies: dict[int, Tensor] = {}
        self._late: str | None = None
        self._compares = whole or not changing.knows(self._modes)
        for where, own in self._own.items():
            for name, held in own.parameters.items():
                if isinstance(held, Tensor):
                    self._fixed[_joined(where, name)] = FixedTensor(held, where)
            may_change = whole or changing.may_change(self._modes, where)
            for name, held in own.tensors():
                self._fixed[_joined(where, name)] = FixedTensor(held, where)
                if may_change and _can_copy(held) and id(held) not in self._copies:
                    self._copies[id(held)] = held.detach().clone()

    def has(self, module: nn.Module) -> bool:
        """Whether a module is the one that is called, or inside it."""
        return any(each is module for each in self._inside.values())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the parameters, the buffers and the tensors among the attributes."""
        for fixed in self._fixed.values():
            yield fixed.tensor

    def end(self) -> None:
        """Note what the call has changed, at its end.

        Raises:
            RecomputedWrong: It has changed a parameter in place.
        """
        changed: set[str] = set()
        for name, fixed in self._fixed.items():
            copy = self._copies.get(id(fixed.tensor))
            if copy is None:
                is_changed = fixed.is_changed()
            elif self._compares:
                is_changed = fixed.is_changed() or not have_same_bits(copy, fixed.tensor)
            else:
                is_changed = True
            if not is_changed:
                continue
            if isinstance(fixed.tensor, nn.Parameter):
                raise RecomputedWrong(
                    f'recompute="{self._path}": the call of this module changed its parameter '
                    f'"{name}" in place, and would do so again when it is run again in backward; '
                    "leave this module out of recompute=, or change the parameter outside of it"
                )
            changed.add(fixed.where)
            if copy is None:
                self._late = name
                fixed.accept()

        for fixed in self._fixed.values():
            if fixed.where not in changed:
                self._copies.pop(id(fixed.tensor), None)
        self._changing.learn(self._modes, changed)

    def check(self) -> None:
        """Compare the state with the present one, before the second run.

        Raises:
            RecomputedWrong: Something changed in between that cannot be set back.
        """
        where = f'recompute="{self._path}"'
        present = modules_in(self._module)
        if list(map(id, present.values())) != list(map(id, self._inside.values())):
            raise RecomputedWrong(
                f"{where}: the modules inside were others in the forward; {_IN_BETWEEN}"
            )
        for (name, each), training in zip(present.items(), self._modes, strict=True):
            if is_training(each) is not training:
                mode = "training" if training else "evaluation"
                raise RecomputedWrong(
                    f'{where}: the module "{_joined(self._path, name)}" was in {mode} mode in the '
                    "forward, and is not when backward runs it again; "
                    "call backward() before you change the mode"
                )
        for (name, each), hooks in zip(present.items(), self._hooks, strict=True):
            found = _hooks_of(each)
            if len(found) != len(hooks) or not all(map(operator.is_, found, hooks)):
                raise RecomputedWrong(
                    f'{where}: the module "{_joined(self._path, name)}" had other forward hooks in '
                    f"the forward than now, when backward runs it again; {_IN_BETWEEN}"
                )
        if self._late is not None:
            raise RecomputedWrong(
                f'{where}: the call changed "{self._late}" in place, which no call in this mode '
                "had done before, so its former values were not copied; "
                "leave this module out of recompute=, or run this step again"
            )
        for name, fixed in self._fixed.items():
            if id(fixed.tensor) not in self._copies and fixed.is_changed():
                kind = "parameter" if isinstance(fixed.tensor, nn.Parameter) else "buffer"
                raise RecomputedWrong(
                    f'{where}: the {kind} "{name}" of this module was changed in place between '
                    f"forward and backward; {_IN_BETWEEN}"
                )

    def _present(self, *, held: bool) -> dict[str, OwnState]:
        """Return the present state of each module; see Note [Graphs of before] in `kedge.offload.recompute.past`."""
        notes = past.PastNotes(objects=past.OUTERMOST, held=held)
        return {where: OwnState(each, notes) for where, each in self._inside.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of the second run: the state is as the call found it, and put back at the end."""
        present = self._present(held=True)
        present_random = RandomState()
        copies = {number: copy.clone() for number, copy in self._copies.items()}
        try:
            for own in self._own.values():
                own.restore(copies)
            self._random.restore(present_random)
            yield
        finally:
            for own in present.values():
                own.restore({})
            present_random.restore(RandomState())


class StateToPutBack:
    """The attributes of a module and of all modules inside, to be put back after calls of it.

    Counters, caches and lists get their former content, buffers and other tensors without a graph
    their former values, in their own memory.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        notes = past.PastNotes(objects=past.OUTERMOST, held=True)
        self._own = [OwnState(each, notes) for each in modules_in(module).values()]
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        for own in self._own:
            for _, held in own.tensors():
                if _can_copy(held) and id(held) not in self._values:
                    self._values[id(held)] = held, held.detach().clone()

    def put_back(self) -> None:
        """Put everything back as it was."""
        for own in self._own:
            own.restore({})
        for held, before in self._values.values():
            if held.grad_fn is not None:  # it was written to with what has a graph
                held.detach_()
            if not have_same_bits(held, before):
                # A graph of before the calls may have saved it.
                with torch.no_grad(), keeping_versions((held,)):
                    held.copy_(before)


_IN_BETWEEN = (
    "a second run would compute another forward, and the gradient would be of that one; "
    "call backward() before the change, or leave this module out of recompute="
)


class FixedTensor:
    """A tensor that has to be the same when the call is run again.

    Attributes:
        tensor: The tensor.
        where: The path of the module that has it, within the module that is run again.
    """

    __slots__ = ("_address", "_version", "tensor", "where")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.tensor = tensor
        self.where = where
        self._version = version_of(tensor)
        self._address = _address(tensor)

    def is_changed(self) -> bool:
        """Whether it was written to since, or given other memory."""
        return self._version != version_of(self.tensor) or self._address != _address(self.tensor)

    def accept(self) -> None:
        """Take the present content as the right one: the call itself has changed it."""
        self._version = version_of(self.tensor)
        self._address = _address(self.tensor)


class OwnState:
    """The state of one module without those inside: its tables, and all other attributes.

    Args:
        module: The module.
        notes: Notes its lists, dicts and objects.

    Attributes:
        parameters: Its parameters, by name.
    """

    __slots__ = (
        "_attributes",
        "_buffers",
        "_children",
        "_generators",
        "_module",
        "_type",
        "parameters",
    )

    def __init__(self, module: nn.Module, notes: past.PastNotes) -> None:
        self._module = module
        self._type = type(module)
        self._children = dict(own_children(module))
        self.parameters = dict(own_parameters(module))
        self._buffers = dict(own_buffers(module))
        self._attributes: dict[str, Any] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for name, value in vars(module).items():
            if name in _OF_MODULE:
                continue
            self._attributes[name] = notes.note(value)
            if isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers and the tensors among the attributes, with their names."""
        for table in (self._buffers, self._attributes):
            for name, held in table.items():
                if isinstance(held, Tensor):
                    yield name, held
                elif isinstance(held, past.PastTensor):
                    yield name, held.alias

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


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward hooks of a module that are not Kedge's."""
    found: list[Any] = []
    for table in (before_forward(module), after_forward(module)):
        if table:
            # By `items`, as PyTorch reads it: `values` of a table with hooks of Kedge's is a copy.
            found += [hook for _, hook in table.items() if not isinstance(hook, KedgeHook)]
    return found


def _can_copy(value: Tensor) -> bool:
    """Whether a copy can stand for a tensor: it has no graph, and its type is a plain one."""
    if type(value) not in _PLAIN or value.layout is not torch.strided:
        return False
    return not value.requires_grad and not value.is_meta


def _address(value: Tensor) -> int:
    if type(value) not in _PLAIN or value.layout is not torch.strided:
        return 0
    return value.data_ptr()


def _joined(path: str, name: str) -> str:
    if not path or not name:
        return path or name
    return f"{path}.{name}"
