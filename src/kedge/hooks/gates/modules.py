"""Modules: one forward-pre and one forward hook for each hooked module of a session.

# Note [Two gates]
All taps of a session on one module belong to two gates: `InputGate` sees the inputs, `OutputGate`
the outputs. The gates also set the gradient hooks, on the tensors that pass, because a module's own
backward hooks change bits (Note [No full backward hooks]).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.compiler import is_compiling

from kedge.errors import CannotCompile
from kedge.flow import Preserving
from kedge.hooks.firing.cause import WITHOUT_GRAD, Cause
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.given_inputs import GivenInputs
from kedge.hooks.firing.measuring import measure_values
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec, Tap, observes
from kedge.hooks.firing.whole import ModuleGate
from kedge.hooks.gates import compiled
from kedge.hooks.gates.edited_parameters import EditedParameters, value_before
from kedge.hooks.gates.gradients import (
    InputShare,
    edges_into,
    is_rebuilt,
    listen_each,
    listen_share,
    measure_each,
)
from kedge.hooks.gates.skipped import apart, check_skipped, skip_forward
from kedge.sites import leaves
from kedge.sites.select import SitePlace
from kedge.sites.site import Site
from kedge.torch_internals.autograd_nodes import edge_of
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import after_forward, before_forward
from kedge.torch_internals.module_calls import has_raised
from kedge.torch_internals.module_tables import modules_in, own_parameter, own_parameters
from kedge.torch_internals.own_work import OwnWork, is_watched

_TOTAL = "hook :in.grad for the total"


class OutputGate(ModuleGate):
    """Forward hook that fires at a module's outputs: ``out``, ``out.grad`` and ``in.share``."""

    kinds = ("out", "out.grad", "in.share")
    measured = ("out", "out.grad")

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook."""
        __tracebackhide__ = True
        if not self.live:
            return None
        if is_compiling():
            return self._in_graph(output)
        if is_watched():
            with OwnWork():
                return self(module, args, output)
        call, recompute = self.passes.count(self)
        self.called += 1
        if recompute:
            self.seen.again += 1
        if output is None and has_raised(module):
            self.seen.raised += 1  # there is no value, and no hook of the user's runs
            return None
        if self.measures and not recompute:
            start = perf_counter()
            try:
                if isinstance(output, Tensor):
                    found = [("", output)]
                else:
                    found = self.look_through(leaves.find, output)
                if not found:
                    self.seen.empty = self.seen.empty or leaves.describe(output)
                elif self.taps["out"]:
                    for leaf, _ in found:
                        self.seen.leaves[leaf] = None
                    step = self.owner.clock.step
                    here = self.passes.here
                    of = ("out", call, here.pass_, -1, step, here.micro_batch, here.replica)
                    latest = self.owner.fired
                    measure_values(self.taps["out"], found, step, latest, self.event_at, of)
                if found and self.backward:
                    measure_each(self, "out.grad", found, call)
            except Exception as error:
                if not self.passes_over("measured", error):
                    raise
            self.owner.measuring += perf_counter() - start
            return None
        if self.plain and isinstance(output, Tensor):  # the common case, which must be fast
            new = fire(
                self.taps["out"], output, self.passes.event(self.site("out", ""), call, recompute)
            )
            if new is output:
                return None
            return new
        return self._structured(output, call, recompute)

    def _in_graph(self, output: Any) -> Any:
        """Put the taps into the graph; returns the output if it changed."""
        if _cannot_skip(self.taps["in.share"]):
            raise CannotCompile(
                f'"{self.path}:in.share" cannot be followed inside compiled code; '
                "run the model uncompiled"
            )
        taps = self.taps["out"]
        gradients = self.taps["out.grad"]
        new = {
            leaf: compiled.through(taps, gradients, leaf, tensor)
            for leaf, tensor in leaves.find(output)
        }
        return leaves.put(output, new)

    def _structured(self, output: Any, call: int, recompute: bool) -> Any:
        __tracebackhide__ = True
        found = self.look_through(leaves.find, output)
        if not found:
            self.seen.empty = self.seen.empty or leaves.describe(output)
            self.without_tensors("out", call, recompute)
            return None
        new: dict[str, Tensor] = {}
        if self.taps["out"]:
            through = self.through_whole if self.whole else self.through
            new = through("out", found, call, recompute)
            if new:
                found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found]
        if self.backward and self.taps["out.grad"]:
            listen_each(self, "out.grad", found, call, recompute)
        if self.backward and self.taps["in.share"]:
            self._share([tensor for _, tensor in found], call, recompute)
        if not new:
            return None
        return leaves.put(output, new)

    def _share(self, outputs: list[Tensor], call: int, recompute: bool) -> None:
        """Set hooks for the gradient that this call sends to each of its inputs.

        See Note [The share of one call].
        """
        edges = self.passes.here.notes.take_edges(self)
        if is_rebuilt(self) and not recompute:
            self.seen.rebuilt = True
            return
        if not edges:
            self.seen.no_share = Cause(
                "its value contains no tensor: its arguments hold no tensor", _TOTAL
            )
        elif not any(output.requires_grad for output in outputs):
            self.seen.no_share = Cause("its outputs require no grad", WITHOUT_GRAD)
            return
        for leaf, found in edges_into(outputs, edges).items():
            if not found:
                self.seen.no_share = Cause(
                    "no operation of the call lies between this input and the "
                    "outputs, or it needs no gradient",
                    _TOTAL,
                )
                continue
            origin = self.passes.event(self.site("in.share", leaf), call, recompute)
            listen_share(InputShare(self, origin, len(found)), found)


class InputGate(ModuleGate):
    """Forward-pre hook that fires at a module's inputs and parameters: ``in``, ``in.grad``, ``param``; prepares ``in.share``.

    Taps that skip the module are here, too, under the kind ``out``.
    """

    kinds = ("in", "in.grad", "param", "out")
    measured = ("in", "in.grad")

    def __init__(self, owner: Owner, passes: PassCounter, path: str, module: nn.Module) -> None:
        super().__init__(owner, passes, path)
        self.names = _positional_names(module)
        self.params: dict[str, tuple[str, nn.Parameter]] = {}
        self.sharing: list[OutputGate] = []
        self.preserving: list[Preserving] = []
        self.noting: list[Gate] = []

    def retime(self) -> None:
        """Update which taps are on.

        The gate stays on for what others need to know of each call.
        """
        super().retime()
        others = self.sharing or self.preserving or self.noting
        self.live = self.live or bool(others)
        self.measures = self.measures and not others

    def share_with(self, gate: OutputGate) -> None:
        """Record the inputs' gradient edges of each call for the module's `OutputGate`, which needs them for shares."""
        if gate not in self.sharing:
            self.sharing.append(gate)
        self.retime()

    def watch_overwrites(self, actions: Iterable[Preserving]) -> None:
        """Notify actions that keep values without a copy before the module overwrites these values."""
        self.preserving += [action for action in actions if action not in self.preserving]
        self.retime()

    def note_inputs_for(self, gate: Gate) -> None:
        """Note the inputs of each call for a gate whose actions may ask for them when the module has run."""
        if gate not in self.noting:
            self.noting.append(gate)
        self.retime()

    def canonical(self, leaf: str | None) -> str | None:
        """Return the name under which a leaf fires: its argument's name in place of a position."""
        if leaf is None:
            return None
        head, dot, rest = leaf.partition(".")
        if head.isdecimal() and int(head) < len(self.names):
            head = self.names[int(head)]
        return head + dot + rest

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Return every tensor among the arguments, by the argument's name."""
        found = []
        for i, value in enumerate(args):
            name = self.names[i] if i < len(self.names) else str(i)
            found += leaves.find(value, name)
        for name, value in kwargs.items():
            found += leaves.find(value, name)
        return found

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The forward-pre hook.

        Keyword arguments are missing if another thread removes it during the call.
        """
        __tracebackhide__ = True
        if not self.live:
            return None
        if kwargs is None:
            kwargs = {}
        if is_compiling():
            return self._in_graph(module, args, kwargs)
        if is_watched():
            with OwnWork():
                return self(module, args, kwargs)
        call, recompute = self.passes.count(self)
        self.called += 1
        if recompute:
            self.seen.again += 1
        if self.measures and not recompute:
            start = perf_counter()
            try:
                if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
                    found = [(self.names[0] if self.names else "0", args[0])]
                else:
                    found = self.look_through(self.find, args, kwargs)
                if not found:
                    self.seen.empty = self.seen.empty or "its arguments hold no tensor"
                elif self.taps["in"]:
                    for leaf, _ in found:
                        self.seen.leaves[leaf] = None
                    step = self.owner.clock.step
                    here = self.passes.here
                    of = ("in", call, here.pass_, -1, step, here.micro_batch, here.replica)
                    latest = self.owner.fired
                    measure_values(self.taps["in"], found, step, latest, self.event_at, of)
                if self.taps["in.grad"]:
                    measure_each(self, "in.grad", found, call)
            except Exception as error:
                if not self.passes_over("measured", error):
                    raise
            self.owner.measuring += perf_counter() - start
            return None
        if self.taps["out"]:
            skip_forward(self, module, call, recompute)
        return self._structured(module, args, kwargs, call, recompute)

    def _in_graph(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the taps into the graph; returns the arguments if they changed."""
        if any(_cannot_skip(gate.taps["in.share"]) for gate in self.sharing):
            raise CannotCompile(
                f'"{self.path}:in.share" cannot be followed inside compiled code; '
                "run the model uncompiled"
            )
        if any(tap.on for tap in self.taps["out"]):
            raise CannotCompile(
                f'"{self.path}:out" cannot be skipped inside compiled code, where its forward is '
                "part of a graph; run the model uncompiled, or put another module in its place "
                "before it is compiled"
            )
        if _cannot_skip(self.taps["in.grad"]):
            raise CannotCompile(
                f'"{self.path}:in.grad" cannot be followed inside compiled code; '
                'hook the ":out.grad" it comes from'
            )
        if not compiled.is_exported():
            for tap in self.taps["param"]:
                compiled.show(tap, self.held(module, tap))
        taps = self.taps["in"]
        if not taps:
            return None
        new = {
            leaf: compiled.through_forward(taps, leaf, tensor)
            for leaf, tensor in self.find(args, kwargs)
        }
        return self.replaced(args, kwargs, new)

    def _structured(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: int,
        recompute: bool,
    ) -> Any:
        __tracebackhide__ = True
        if self.taps["param"]:
            self._parameters(module, call, recompute)
        found = self.look_through(self.find, args, kwargs)
        if not found:
            self.seen.empty = self.seen.empty or "its arguments hold no tensor"
            self.without_tensors("in", call, recompute)
            return None
        new: dict[str, Tensor] = {}
        if self.taps["in"]:
            through = self.through_whole if self.whole else self.through
            new = through("in", found, call, recompute)
            if new:
                found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found]
        if self.taps["in.grad"]:
            listen_each(self, "in.grad", found, call, recompute)
        for gate in self.sharing:
            edges = {leaf: edge_of(tensor) for leaf, tensor in found}
            self.passes.here.notes.leave_edges(gate, edges)
        for asking in self.noting:
            if asking.live:
                copied = asking.overwrites or getattr(module, "inplace", False) is True
                inputs = GivenInputs((tensor for _, tensor in found), copied=copied)
                self.passes.here.notes.leave_inputs(asking, inputs)
        if self.preserving and getattr(module, "inplace", False):
            overwritten = [leaves.storage_of(tensor) for _, tensor in found]
            for action in self.preserving:
                action.preserve(overwritten)
        if not new:
            return None
        return self.replaced(args, kwargs, new)

    def _parameters(self, module: nn.Module, call: int, recompute: bool) -> None:
        for tap in self.taps["param"]:
            if tap.on and self.is_first(tap.site):
                value = self.held(module, tap)
                fire((tap,), value, self.passes.event(tap.site, call, recompute))

    def is_first(self, site: Site) -> bool:
        """Whether this gate's module is the first of a pass to show a parameter, which several may hold."""
        return self.passes.here.notes.is_first(site.path, self.path)

    def held(self, module: nn.Module, tap: Tap) -> Tensor:
        """Return the value of a parameter that a tap sees.

        `torch.func.functional_call`, for one, replaces it for a call, and so do edits.
        """
        name, param = self.params[tap.site.path]
        now = value_before(module, name, tap.graph.key, own_parameter(module, name))
        if now is None or now is param:
            return param.detach()
        if leaves.own_part(param) is not param:  # FSDP gathers shards
            return param.detach()
        return now.detach().clone()  # its memory may be released after the call

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Mapping[str, Tensor]
    ) -> Any:
        """Return the arguments with some of their tensors replaced."""
        changed = list(args)
        for i, value in enumerate(args):
            name = self.names[i] if i < len(self.names) else str(i)
            changed[i] = leaves.put(value, new, name)
        named = {name: leaves.put(value, new, name) for name, value in kwargs.items()}
        return tuple(changed), named


def _cannot_skip(taps: Iterable[Tap]) -> bool:
    """Whether some of the taps are needed in a graph: an exported one has the edits only."""
    return any(not (tap.observes and compiled.is_exported()) for tap in taps)


def _positional_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that a module's forward takes by position."""
    forward = module.forward
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):  # of one module alone
        return _names_of(forward)
    names = _of_functions.get(function)
    if names is None:
        names = _of_functions[function] = _names_of(forward)
    return names


_of_functions: WeakKeyDictionary[FunctionType, tuple[str, ...]] = WeakKeyDictionary()
"""The names by the method of a class: a model has thousands of modules of a few classes."""


def _names_of(forward: Any) -> tuple[str, ...]:
    try:
        params = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a compiled or scripted forward has no signature
        return ()
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return tuple(param.name for param in params if param.kind in by_position)


@dataclass
class ModuleGates:
    """The gates of one session on the modules of one model.

    Attributes:
        before: The newest `InputGate` of each module, by the module's id.
        after: The newest `OutputGate`.
    """

    owner: Owner
    passes: PassCounter
    before: dict[int, InputGate] = field(default_factory=dict)
    after: dict[int, OutputGate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin without edited parameters."""
        self.edited = EditedParameters(self.owner, self.passes)

    def place(self, place: SitePlace, spec: Spec) -> None:
        """Attach taps to the inputs or outputs of a module, or to their gradients."""
        site = place.site
        module = place.module
        skipping, others = apart(spec)
        if skipping is not None:
            check_skipped(module, site, skipping.actions)
            self._before(module, site.path).attach(skipping, site)
        if others is None:
            return
        spec = others
        gate: InputGate | OutputGate
        if site.kind.startswith("in"):
            gate = before = self._before(module, site.path)
            if site.leaf is not None:
                site = replace(site, leaf=before.canonical(site.leaf))
        if site.kind in OutputGate.kinds:
            gate = after = self._after(module, site.path)
            if site.kind == "in.share":
                before.share_with(after)
        for tap in gate.attach(spec, site):
            if site.is_gradient and not tap.observes:
                tap.graph.edit = compiled.identity(tap.act, tap.graph.key)

    def place_value(self, place: SitePlace, spec: Spec, model: nn.Module) -> None:
        """Attach taps to every module that holds a parameter, several for tied weights.

        The first one called fires. Actions that may return a value are elsewhere; see Note [Edited
        for a forward].
        """
        param = place.param
        if param is None:
            return
        observing = tuple(action for action in spec.actions if observes(action))
        if len(observing) < len(spec.actions):
            editing = tuple(action for action in spec.actions if not observes(action))
            self.edited.place(place, spec._replace(actions=editing), model)
            spec = spec._replace(actions=observing)
        if not observing:
            return
        for path, module in modules_in(model).items():
            own = own_parameters(module)
            name = next((name for name, held in own.items() if held is param), None)
            if name is not None:
                before = self._before(module, path)
                for tap in before.attach(spec, place.site):
                    before.params[tap.site.path] = name, param

    def watch_overwrites(self, actions: Sequence[Preserving], model: nn.Module) -> bool:
        """Attach to every in-place module, for actions that keep values.

        Returns whether there is one.
        """
        found = False
        for name, module in modules_in(model).items():
            if getattr(module, "inplace", False) is True:
                self._before(module, name).watch_overwrites(actions)
                found = True
        return found

    def note_inputs(self, module: nn.Module, path: str, gate: Gate) -> None:
        """Note the inputs of a module's calls for a gate.

        See Note [Inputs as they were].
        """
        self._before(module, path).note_inputs_for(gate)

    def knows(self, module: nn.Module) -> bool:
        """Whether a module has a gate."""
        return id(module) in self.before or id(module) in self.after

    def release(self) -> None:
        """Drop the references to the model's parameters."""
        for gate in self.before.values():
            gate.params.clear()
        self.edited.release()

    def _before(self, module: nn.Module, path: str) -> InputGate:
        gate = self.before.get(id(module))
        if gate is None or not gate.is_last(before_forward(module)):
            gate = InputGate(self.owner, self.passes, path, module)
            self.owner.installed.enter(self.before, id(module), gate)
            self.owner.installed.put_around(module, before=gate, with_kwargs=True)
        return gate

    def _after(self, module: nn.Module, path: str) -> OutputGate:
        gate = self.after.get(id(module))
        if gate is None or not gate.is_last(after_forward(module)):
            gate = OutputGate(self.owner, self.passes, path)
            self.owner.installed.enter(self.after, id(module), gate)
            self.owner.installed.put_around(module, behind=gate)
        return gate


untraced(InputGate.__call__, OutputGate.__call__)
