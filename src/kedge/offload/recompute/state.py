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
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kedge.errors import RecomputedWrong
from kedge.offload.recompute import past
from kedge.offload.recompute.inside import (
    ModulesInside,
    OwnState,
    hooks_of,
    is_plain,
    joined,
)
from kedge.torch_internals.kernels import keeping_versions
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.random_state import RandomState
from kedge.torch_internals.tensors import have_same_bits
from kedge.torch_internals.torchscript import is_training


class EarlierCalls:
    """What earlier calls of a module tell of the next one.

    Which buffers change, by the modes of the modules: see Note [Which buffers change]. And the
    modules inside, most of which a call finds as the one before has found them.
    """

    def __init__(self) -> None:
        self._changed: dict[tuple[bool, ...], set[str]] = {}
        self._latest: ModulesInside | None = None

    def inside(self, module: nn.Module) -> ModulesInside:
        """Return the module and those inside as they are now."""
        latest = self._latest
        if latest is not None and latest.is_of(module) and latest.is_as_before():
            return latest
        found = ModulesInside(module)
        self._latest = None
        if found.is_kept:
            self._latest = found
        return found

    def changed(self, modes: tuple[bool, ...]) -> set[str] | None:
        """Return the modules whose buffers calls in these modes have changed; None before the first."""
        return self._changed.get(modes)

    def learn(self, modes: tuple[bool, ...], changed: set[str]) -> None:
        """Note the modules whose buffers a call has changed."""
        self._changed.setdefault(modes, set()).update(changed)


class ModuleState:
    """The state of a module and of all modules inside, as a call found it.

    See Note [The state of a second run].

    Args:
        module: The module.
        path: Its path, for errors.
        earlier: What its earlier calls tell.
        random: The states of Python's and NumPy's generators.
        whole: Whether to copy all buffers, also those that have not changed so far.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        earlier: EarlierCalls,
        random: RandomState,
        *,
        whole: bool,
    ) -> None:
        self._module = module
        self._path = path
        self._earlier = earlier
        self._random = random
        self._inside = inside = earlier.inside(module)
        self._is_as_before = True

        self._marks = inside.marks()
        self._copies: dict[int, Tensor] = {}
        self._late: str | None = None
        changed = earlier.changed(inside.modes)
        self._compares = whole or changed is None
        for held in inside.tensors:
            if held.is_parameter or id(held.tensor) in self._copies or not _can_copy(held.tensor):
                continue
            if whole or changed is None or held.where in changed:
                self._copies[id(held.tensor)] = held.tensor.detach().clone()

    def has(self, module: nn.Module) -> bool:
        """Whether a module is the one that is called, or inside it."""
        return id(module) in self._inside.ids

    def tensors(self) -> Iterator[Tensor]:
        """Yield the parameters, the buffers and the tensors among the attributes."""
        for held in self._inside.tensors:
            yield held.tensor

    def end(self) -> None:
        """Note what the call has changed, at its end.

        Raises:
            RecomputedWrong: It has changed a parameter in place.
        """
        inside = self._inside
        written = inside.written(self._marks)
        changed: set[str] = set()
        for held in inside.tensors if written or self._copies else ():
            copy = self._copies.get(id(held.tensor))
            if copy is None or self._compares:
                is_changed = held.name in written
                if copy is not None and not is_changed:
                    is_changed = not have_same_bits(copy, held.tensor)
                if not is_changed:
                    continue
            if held.is_parameter:
                raise RecomputedWrong(
                    f'recompute="{self._path}": the call of this module changed its parameter '
                    f'"{held.name}" in place, and would do so again when it is run again in '
                    "backward; leave this module out of recompute=, "
                    "or change the parameter outside of it"
                )
            changed.add(held.where)
            if copy is None:
                self._late = held.name
        if written:  # from now on the present content is the right one
            self._marks = inside.marks()

        for held in inside.tensors if self._copies else ():
            if held.where not in changed:
                self._copies.pop(id(held.tensor), None)
        self._earlier.learn(inside.modes, changed)

    def check(self) -> None:
        """Compare the state with the present one, before the second run.

        Raises:
            RecomputedWrong: Something changed in between that cannot be set back.
        """
        where = f'recompute="{self._path}"'
        self._is_as_before = self._inside.is_as_before()
        if not self._is_as_before:
            self._check_modules(where)
        if self._late is not None:
            raise RecomputedWrong(
                f'{where}: the call changed "{self._late}" in place, which no call in this mode '
                "had done before, so its former values were not copied; "
                "leave this module out of recompute=, or run this step again"
            )
        written = self._inside.written(self._marks)
        for held in self._inside.tensors if written else ():
            if held.name in written and id(held.tensor) not in self._copies:
                kind = "parameter" if held.is_parameter else "buffer"
                raise RecomputedWrong(
                    f'{where}: the {kind} "{held.name}" of this module was changed in place '
                    f"between forward and backward; {_IN_BETWEEN}"
                )

    def _check_modules(self, where: str) -> None:
        inside = self._inside
        present = modules_in(self._module)
        if list(map(id, present.values())) != list(map(id, inside.modules.values())):
            raise RecomputedWrong(
                f"{where}: the modules inside were others in the forward; {_IN_BETWEEN}"
            )
        for (name, each), own in zip(present.items(), inside.own.values(), strict=True):
            if not own.has_kind(each):
                raise RecomputedWrong(
                    f'{where}: the module "{joined(self._path, name)}" was of another class in the '
                    f"forward than now, when backward runs it again; {_IN_BETWEEN}"
                )
        for (name, each), training in zip(present.items(), inside.modes, strict=True):
            if is_training(each) is not training:
                mode = "training" if training else "evaluation"
                raise RecomputedWrong(
                    f'{where}: the module "{joined(self._path, name)}" was in {mode} mode in the '
                    "forward, and is not when backward runs it again; "
                    "call backward() before you change the mode"
                )
        for (name, each), hooks in zip(present.items(), inside.hooks, strict=True):
            found = hooks_of(each)
            if len(found) != len(hooks) or not all(map(operator.is_, found, hooks)):
                raise RecomputedWrong(
                    f'{where}: the module "{joined(self._path, name)}" had other forward hooks in '
                    f"the forward than now, when backward runs it again; {_IN_BETWEEN}"
                )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of the second run, after `check`: the state is as the call found it, and put back at the end."""
        inside = self._inside
        is_as_before = self._is_as_before
        present = [own for own in inside.own.values() if own.has_any(self._copies)]
        if not is_as_before:
            notes = past.PastNotes(objects=past.OUTERMOST, held=True)
            present = [OwnState(each, notes) for each in inside.modules.values()]
        present_random = RandomState(self._random)
        copies = {number: copy.clone() for number, copy in self._copies.items()}
        try:
            for own in present if is_as_before else inside.own.values():
                own.restore(copies)
            self._random.restore(present_random)
            yield
        finally:
            for own in present:
                own.restore({})
            if is_as_before and not inside.is_as_before():
                for own in inside.own.values():
                    own.restore({})
            present_random.restore(RandomState(present_random))


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


def _can_copy(value: Tensor) -> bool:
    """Whether a copy can stand for a tensor: it has no graph, and its type is a plain one."""
    return is_plain(value) and not value.requires_grad and not value.is_meta
