"""Parameters that are edited for one forward: what an action returns stands in their place.

# Note [Edited for a forward]
The forward works with the value that the actions have made of a parameter, and so does autograd: a
gradient passes through the edit to the parameter, as with `torch.func.functional_call`. For the
length of a call the value is where the module keeps the parameter, and then the parameter is again,
also if the call raises or is interrupted. The parameter itself never changes.

The call is the outermost one of a module that has the parameter inside: as a rule that of the
model. So whatever reads the parameter sees the edit: each module that shares it, and a module around
its own, such as attention, which reads the weights of its ``out_proj``. A sharded parameter is
gathered for the calls of its module, and edited for these.

An observer attached before an edit sees the value from before it: taps are numbered in the order of
their attachment.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from kedge.errors import CannotCompile, EditError
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec
from kedge.hooks.gates import compiled
from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.forward_calls import forward_call
from kedge.sites import leaves
from kedge.sites.select import SitePlace
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.hook_tables import before_forward, computed_by
from kedge.torch_internals.module_calls import shows_forward
from kedge.torch_internals.module_tables import (
    holds_parameters,
    is_replica,
    modules_in,
    own_children,
    own_parameters,
    parameter_of,
    put_parameter,
)
from kedge.torch_internals.own_work import own_work

_standing: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
"""By the id of a module and a name in it, the edits in force there: the number of each tap, and the value before it."""


def value_before(module: nn.Module, name: str, number: int, now: Tensor | None) -> Tensor | None:
    """Return the value of a parameter that the tap with a number sees.

    Args:
        module: The module.
        name: The parameter's name in it.
        number: The tap's number; edits attached later have a larger one.
        now: The value that the module has.
    """
    later = [(key, value) for key, value in _standing.get((id(module), name), ()) if key > number]
    if not later:
        return now
    return min(later, key=lambda edit: edit[0])[1]


class ParameterEdits(Gate):
    """The taps of one session on one parameter that may return a value.

    Attributes:
        holders: The modules that have the parameter, each with its path and the parameter's name
            there.
    """

    kinds = ("param",)

    def __init__(
        self, owner: Owner, passes: PassCounter, holders: list[tuple[str, nn.Module, str]]
    ) -> None:
        super().__init__(owner, passes, holders[0][0])
        self.holders = holders
        self._threads: set[int] = set()
        self._lock = threading.Lock()

    def is_in_force(self) -> bool:
        """Whether this thread is in a call for which the parameter is edited."""
        return threading.get_ident() in self._threads

    @contextmanager
    def in_force(self, called: nn.Module, path: str) -> Iterator[None]:
        """Edit the parameter for a block: the forward of a module in its model, or of a replica."""
        __tracebackhide__ = True
        thread = threading.get_ident()
        with self._lock:
            if self._threads and not is_replica(called):
                raise EditError(
                    f"{self._site}: another thread is in a forward of the same model, and would "
                    "work with this one's value; let each thread have a copy of the model, or "
                    "call it in one thread at a time"
                )
            self._threads.add(thread)
        try:
            with ExitStack() as stack:
                self._edit(called, path, stack)
                yield
        finally:
            self._threads.discard(thread)

    @property
    def _site(self) -> Any:
        return self.taps["param"][0].site

    def _edit(self, called: nn.Module, path: str, stack: ExitStack) -> None:
        __tracebackhide__ = True
        holders = [(held, name) for _, held, name in self.holders]
        if is_replica(called):
            holders = list(self._in_replica(called, path))
        first, name = holders[0]
        original = parameter_of(first, name)
        if original is None:
            return
        call, recompute = self.passes.count(self)
        self.called += 1
        self.seen.again += recompute
        event = self.passes.event(self._site, call, recompute)
        before: list[tuple[int, Tensor]] = []
        value = original
        with own_work():
            for tap in self.taps["param"]:
                before.append((tap.graph.key, value))
                value = fire((tap,), value, event)
        if value is original:
            return
        for held, name in holders:
            if parameter_of(held, name) is not original:
                continue  # the program has put another one there
            key = id(held), name
            seen = _standing.setdefault(key, [])
            stack.callback(_forget, key, before)
            seen.extend(before)
            stack.callback(put_parameter, held, name, original)
            put_parameter(held, name, value)

    def _in_replica(self, replica: nn.Module, path: str) -> Iterator[tuple[nn.Module, str]]:
        prefix = f"{path}." if path else ""
        for holder, _, name in self.holders:
            if f"{holder}.".startswith(prefix):
                yield replica.get_submodule(f"{holder}."[len(prefix) :].removesuffix(".")), name


def _forget(key: tuple[int, str], before: list[tuple[int, Tensor]]) -> None:
    """End the notes on the edits of one call."""
    seen = _standing[key]
    _standing[key] = [each for each in seen if not any(each is one for one in before)]
    if not _standing[key]:
        del _standing[key]


class EditsBegin(KedgeHook):
    """Forward-pre hook that puts edited parameters into the forward of a call, if none around it has done so.

    Attributes:
        edits: Those of the parameters inside the module.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.edits: list[ParameterEdits] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        live = [edits for edits in self.edits if edits.live]
        if not live:
            return
        if is_compiling():
            if not compiled.is_exported() or not all(_only_shows(edits) for edits in live):
                raise CannotCompile(
                    f'"{live[0]._site}" cannot be edited inside compiled code; run the model '
                    "uncompiled, or edit the :out of its module"
                )
            return
        begins = [edits for edits in live if not edits.is_in_force()]
        if len(begins) < len(live) and not in_backward():
            for edits in live:
                if edits.is_in_force():  # a checkpoint may call this module again
                    edits.passes.note_in_checkpoint(edits, 0)
        if not begins:
            return
        _refuse_computed(module, begins)
        running = forward_call(module, sys._getframe())
        if running is None:
            raise EditError(
                f"{live[0]._site}: forward-pre hooks run outside of a call of PyTorch's, so there "
                "is no forward to edit the parameter for"
            )
        running.blocks.append(partial(_all_in_force, begins, module, self.path))
        running.checks.append(partial(_refuse_unfinished, begins[0]))


def _refuse_computed(module: nn.Module, begins: Iterable[ParameterEdits]) -> None:
    """Refuse an edit that would begin after a weight was computed from the parameter.

    Raises:
        EditError: If a hook of `torch.nn.utils`, such as `weight_norm`, has computed one for the
            call that the edit begins with.
    """
    computed = next(filter(None, map(computed_by, before_forward(module).values())), None)
    if computed is None:
        return
    for edits in begins:
        if any(held is module for _, held, _ in edits.holders):
            raise EditError(
                f"{edits._site}: a forward-pre hook of torch.nn.utils has already computed "
                f'"{computed}" from it for this call; hook a model around this module, or use '
                "torch.nn.utils.parametrizations"
            )


def _refuse_unfinished(edits: ParameterEdits, output: Any) -> None:
    """Refuse the output of a forward that has not run yet.

    Raises:
        EditError: If it is a generator or a coroutine.
    """
    if not isinstance(output, (Generator, Coroutine, AsyncGenerator)):
        return
    kind = "an asynchronous generator"
    if not isinstance(output, AsyncGenerator):
        kind = "a generator" if isinstance(output, Generator) else "a coroutine"
        output.close()
    raise EditError(
        f"{edits._site}: the forward returns {kind}, which runs after the call, when the "
        "parameter is its own again; hook a module that it calls, or use "
        "torch.func.functional_call"
    )


def _only_shows(edits: ParameterEdits) -> bool:
    return all(tap.observes for tap in edits.taps["param"])


@contextmanager
def _all_in_force(edits: Iterable[ParameterEdits], module: nn.Module, path: str) -> Iterator[None]:
    """Edit several parameters for a block."""
    __tracebackhide__ = True
    with ExitStack() as stack:
        for each in edits:
            stack.enter_context(each.in_force(module, path))
        yield


class EditedParameters:
    """The edited parameters of one hooked model."""

    def __init__(self, owner: Owner, passes: PassCounter) -> None:
        self.owner = owner
        self.passes = passes
        self.gates: dict[int, ParameterEdits] = {}
        self._hooks: dict[int, EditsBegin] = {}

    def place(self, place: SitePlace, spec: Spec, model: nn.Module) -> None:
        """Attach taps to a parameter, for the calls of all modules that have it inside.

        Raises:
            EditError: If this PyTorch does not let a module keep an edited parameter.
        """
        param = place.param
        if param is None:
            return
        if not (shows_forward() and holds_parameters()):
            raise EditError(
                f"{place.site}: this PyTorch does not show the forward of a call, or where a "
                "module keeps its parameters, so they cannot be edited; edit a module's :out"
            )
        gate = self.gates.get(id(param))
        if gate is None:
            paths = modules_in(model)
            holders = [
                (path, module, name)
                for path, module in paths.items()
                for name, held in own_parameters(module).items()
                if held is param
            ]
            gate = ParameterEdits(self.owner, self.passes, holders)
            self.owner.installed.enter(self.gates, id(param), gate)
            around = {id(module) for _, module, _ in holders}
            if leaves.own_part(param) is param:
                around = _around(model, around)
            for path, module in paths.items():
                if id(module) in around:
                    self._hook(module, path).edits.append(gate)
        gate.attach(spec, place.site)

    def _hook(self, module: nn.Module, path: str) -> EditsBegin:
        hook = self._hooks.get(id(module))
        if hook is None:
            hook = EditsBegin(path)
            self.owner.installed.enter(self._hooks, id(module), hook)
            self.owner.installed.put_around(module, before=hook)
        return hook

    def release(self) -> None:
        """Drop the references to the model's modules."""
        for gate in self.gates.values():
            gate.holders = gate.holders[:0]


def _around(model: nn.Module, inside: set[int]) -> set[int]:
    """Return the ids of the modules of a model that are, or contain, one of these."""
    found: dict[int, bool] = {}

    def contains(module: nn.Module) -> bool:
        known = found.get(id(module))
        if known is not None:
            return known
        found[id(module)] = id(module) in inside  # a module may contain itself
        for child in own_children(module).values():
            if child is not None and contains(child):
                found[id(module)] = True
        return found[id(module)]

    contains(model)
    return {of for of, has in found.items() if has}


untraced(EditsBegin.__call__)
