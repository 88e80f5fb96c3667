"""A model that a session hooks: its pass counter, and the gates of each kind of site."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from kedge.flow import Following, Preserving
from kedge.hooks.firing.given_inputs import may_ask
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.gates.modules import ModuleGates
from kedge.hooks.gates.optimizer_state import StateSites
from kedge.hooks.gates.passes import follow
from kedge.hooks.gates.saved import SavedSites
from kedge.hooks.gates.tensors import ParameterGates
from kedge.hooks.operations.switch import ModeSwitches
from kedge.hooks.overwritten import is_overwritten, overwrites_arguments
from kedge.sites.select import ModelLayout, SitePlace
from kedge.torch_internals import dynamo
from kedge.torch_internals.corners import lacks
from kedge.torch_internals.module_tables import module_at, modules_in


class HookedModel:
    """A model that a session hooks.

    Args:
        owner: The session.
        model: The model.
        prefix: The first part of its sites' paths.

    Attributes:
        held: The model, until the session ends.
        passes: Counts its forward passes.
        modules: The gates on its modules.
        parameters: The gates on its parameters.
        states: The gates on what optimizers keep of its parameters; None until a ``:state`` site is
            hooked.
        saves: The keeper of its saved tensors; None until a ``:saved`` site is hooked.
        ops: The switches of its operations; None until an operation is hooked.
        stood: The modules with sites, by path: the program may put others in their place.
        kinds: The classes of its modules by path, for a session that may outlive the model.
        compiled: Whether it is called as compiled code.
    """

    def __init__(self, owner: Owner, model: nn.Module, prefix: str = "") -> None:
        self.owner = owner
        self.held: nn.Module | None = model
        self.model = weakref.ref(model)
        self.begin = follow(owner, model, prefix)
        self.passes = self.begin.passes
        self.modules = ModuleGates(owner, self.passes)
        self.parameters = ParameterGates(owner, self.passes)
        self.states: StateSites | None = None
        self.saves: SavedSites | None = None
        self.ops: ModeSwitches | None = None
        self.stood: dict[str, weakref.ref[nn.Module]] = {}
        self.kinds: dict[str, weakref.ref[type[nn.Module]]] = {}
        self.compiled = False
        owner.installed.install(dynamo.DynamoHold())

    def attach(self, places: Iterable[SitePlace], spec: Spec, model: nn.Module) -> None:
        """Attach taps to sites of the model.

        Actions that keep values copy them before they are overwritten.
        """
        actions = spec.actions
        following: list[Any] = [one for one in actions if isinstance(one, Following)]
        if lacks("graph_task"):  # a recompute would count as a newer pass, which has no values
            following = []
        if following:
            paths = {id(module): path for path, module in modules_in(model).items()}
            self.passes.note_program_calls(paths)

        keeping: list[Any] = [one for one in actions if isinstance(one, Preserving)]
        for place in places:
            before = len(spec.taps)
            self._place(place, spec, model)
            made = spec.taps[before:]
            if keeping and _is_overwritten(place, model):
                for tap in made:
                    keeper: Any = tap.action
                    if any(keeper is action for action in keeping):
                        keeper.expect_overwrites(tap.site)
            self._note_inputs(place, made)
            for tap in made:
                own: Any = tap.action
                if any(own is action for action in following):
                    own.follow(tap, self.passes)
            path = place.site.path
            if place.param is not None:
                path = path.rpartition(".")[0]
            self.stood.setdefault(path, weakref.ref(place.module))
        if keeping:
            self._watch_overwrites(keeping, model)

    def _place(self, place: SitePlace, spec: Spec, model: nn.Module) -> None:
        """Attach taps to one site, by the gates of its kind."""
        site = place.site
        if site.kind == "state":
            if self.states is None:
                self.owner.installed.on_failure(setattr, self, "states", None)
                self.states = StateSites(self.owner, self.passes)
            self.states.place(place, spec)
        elif site.kind in ("param.grad", "param.acc"):
            named = replace(place.site, path=self.passes.label(place.site.path))
            self.parameters.place(replace(place, site=named), spec)
        elif place.param is not None:
            self.modules.place_value(place, spec, model)
        elif site.kind == "saved":
            if self.saves is None:
                self.owner.installed.on_failure(setattr, self, "saves", None)
                compiled = self.compiled
                self.saves = SavedSites(self.owner, self.passes, model, compiled=compiled)
            self.saves.place(place, spec)
        elif site.op is not None:
            if self.ops is None:
                self.owner.installed.on_failure(setattr, self, "ops", None)
                self.ops = ModeSwitches(self.owner, self.passes, model)
            self.ops.place(place, spec)
        else:
            self.modules.place(place, spec)

    def _note_inputs(self, place: SitePlace, made: Sequence[Tap]) -> None:
        """Note the inputs of a module for actions that may ask for them after it has begun to work on them."""
        asking = [tap for tap in made if tap.takes_event and may_ask(tap.action)]
        for gate in {tap.gate for tap in asking}:
            if place.site.kind in ("out", "saved") or place.site.op is not None:
                self.modules.note_inputs(place.module, place.site.path, gate)

    def _watch_overwrites(self, actions: Sequence[Preserving], model: nn.Module) -> None:
        """Hook in-place modules and operations, for actions that keep values without a copy."""
        in_modules = self.modules.watch_overwrites(actions, model)
        in_operations = self.ops is not None and self.ops.watch_overwrites(actions)
        if in_modules or in_operations:
            for action in actions:
                action.watch_overwrites()

    def first_name(self, name: str) -> str | None:
        """Return the first name of the module or parameter with this name.

        None if there is none.
        """
        model = self.model()
        if model is None:
            return None
        layout = ModelLayout(model)
        name = self._own_path(name)
        if name in layout.modules:
            return self.passes.label(layout.first[id(layout.modules[name])])
        if name in layout.params:
            return self.passes.label(layout.first_param[id(layout.params[name])])
        return None

    def module_of(self, gate: Any) -> nn.Module | None:
        """Return the module of a gate, the owner of a parameter's.

        None if the gate is not the model's.
        """
        model = self.model()
        if model is None:
            return None
        param = getattr(gate, "param", None)
        if getattr(gate, "passes", None) is self.passes:
            path = gate.path
        elif param is not None and self._has(gate, param):
            path = self._own_path(gate.site.path).rpartition(".")[0]
        else:
            return None
        return module_at(model, path)

    def _has(self, gate: Any, param: nn.Parameter) -> bool:
        """Whether a gate is one of this model's on a parameter."""
        if self.states is not None and self.states.gates.get(id(param)) is gate:
            return True
        return (id(param), gate.site.kind) in self.parameters.gates

    def _own_path(self, path: str) -> str:
        """Return the path in the model for the path of a site."""
        prefix = self.passes.prefix
        if not prefix:
            return path
        return path.removeprefix(prefix).removeprefix(".")

    def knows(self, place: SitePlace) -> bool:
        """Whether the place's module is hooked already, so that code was compiled with hooks on it."""
        return self.modules.knows(place.module) or (
            self.ops is not None and self.ops.knows(place.module)
        )

    def release(self) -> None:
        """Drop the references to the model when the session has ended."""
        self.held = None
        here = self.passes.here
        here.frame = None  # of a call that this ended in
        here.calls.clear()  # they hold the gates, which hold this
        self.modules.release()


def _is_overwritten(place: SitePlace, model: nn.Module) -> bool:
    """Whether the source of a forward shows that it overwrites a site's value.

    See Note [Overwritten later].
    """
    site = place.site
    if place.param is not None or site.op is not None:
        return False
    if site.kind == "out":
        return is_overwritten(model, site.path)
    return site.kind == "in" and overwrites_arguments(place.module)
