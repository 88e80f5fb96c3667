"""Attaching actions to the sites of a target and a selector, all of them or none."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from kedge.calls.arguments import described, not_a_model
from kedge.errors import (
    ActionArity,
    ActionDisabled,
    EditNotRepeated,
    NoSiteMatched,
    NoSuchKind,
    Recompiled,
    SelectorError,
    WrongCall,
    warn,
)
from kedge.flow import Action, Schedule
from kedge.hooks.everywhere import Everywhere, RootFinder, everywhere
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.owner import Fired
from kedge.hooks.firing.schedule import StepClock, is_schedule, rank
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.gates.block_saves import BlockSaves, ThisBlock, is_of_block, this_block
from kedge.hooks.gates.tensors import means, place_node, place_tensor
from kedge.hooks.gates.variables import name_of_argument
from kedge.hooks.open_sessions import warn_of_repeated
from kedge.hooks.operations.outside import OutsideSwitch, function_of, is_outside
from kedge.hooks.placing.concealed import is_hooked
from kedge.hooks.placing.installed import InstalledHooks
from kedge.hooks.target import HookedModel
from kedge.short_text import counted, listed
from kedge.sites.nearest import remedy_at
from kedge.sites.select import Selector, SitePlace, selects
from kedge.sites.site import TENSOR_KINDS, Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.compiled_entries import set_aside
from kedge.torch_internals.module_tables import (
    modules_in,
    named_modules,
    own_children,
    parameters_in,
)

_ACTIONS = ("add", "clamp", "error_if", "measure", "record", "replace", "scale", "zero")
MOST_FIRINGS = 2_000
"""The firings that a session keeps for its timeline."""


class Attachments:
    """All that one session has attached; the `Owner` of its taps and gates.

    Attributes:
        on_error: The effect of an action's failure: "raise" it, or "warn" and disable the action.
        clock: Counts the steps and the backward passes.
        taps: Every tap, in the order in which they were attached.
        targets: The hooked models, by their ids.
        finder: Finds the models for hooks on `everywhere`; None without such a hook.
        block: The keeper of all saved tensors of this thread; None until ``:saved`` is hooked
            without a model.
        outside: The operations outside of modules, by their function; None for the program's own
            code.
        installed: The hooks in PyTorch's tables.
        fired: The last 2,000 firings, in their order.
        ended: Whether the session is over.
        explaining: What `explaining_many` has found about its models; None outside of it.
        in_graph: How many operators of its hooks compiled code has run.
        measuring: Seconds that its hooks have taken to measure values.
        while_hooked: The time for which it can say that a module was never called, in words.
    """

    while_hooked = "while the hook was attached"

    def __init__(self, on_error: str) -> None:
        if on_error not in ("raise", "warn"):
            raise WrongCall(f'on_error={on_error!r}: use "raise" or "warn"')
        self.on_error = on_error
        self.clock = StepClock(rank())
        self.taps: list[Tap] = []
        self.targets: dict[int, HookedModel] = {}
        self.finder: RootFinder | None = None
        self.block: BlockSaves | None = None
        self.outside: dict[Any, OutsideSwitch] = {}
        self.installed = InstalledHooks()
        self.fired: deque[Fired] | None = deque(maxlen=MOST_FIRINGS)
        self.ended = False
        self.explaining: dict[int, Any] | None = None
        self.in_graph = 0
        self.measuring = 0.0
        self.clock.on_step.append(self._retime)

    def __repr__(self) -> str:
        """The number of its hooks, and whether they are in place."""
        if self.ended:
            return "<kedge.session: ended>"
        sites = {str(tap.site) for tap in self.taps}
        actions = counted(len(self.taps), "action")
        return f"<kedge.session: {actions} at {counted(len(sites), 'site')}>"

    def complain(self, warning: ActionDisabled) -> None:
        """Warn that an action was switched off."""
        warn(warning)

    def refresh(self, *models: nn.Module) -> None:
        """Have models compile again, with the hooks, at their next calls.

        Without models, everything.
        """
        refresh(*models)

    def refresh_hooked(self) -> None:
        """Have the hooked models compile again, after code was compiled while the hooks were out."""
        if self.finder is not None:
            self.refresh()
            return
        alive = (target.model() for target in self.targets.values())
        models = [model for model in alive if model is not None]
        if models:
            self.refresh(*models)

    def attach(self, target: Any, what: tuple[Any, ...], when: Schedule | None) -> Spec:
        """Attach taps to a target of any kind, all of them or none.

        Returns the `Spec` with the taps.
        """
        _check_order(target, what)
        if when is not None and not callable(when):
            raise WrongCall(
                f"when={described(when)} is not a schedule; use "
                "when=kedge.every(10) or when=kedge.at(0, 10)"
            )
        if isinstance(target, (str, list, Selector)):  # a selector without a model
            what = (target, *what)
            target = _without_model(target)
        selector, actions = _split(what)
        spec = Spec(actions, when, self.clock.step, [])
        with self.installed.attaching():
            self.installed.on_failure(self.drop, spec.taps)
            if isinstance(target, nn.Module):
                self._attach_model(target, selector, spec)
            elif isinstance(target, Everywhere):
                self._attach_everywhere(selector, spec)
            elif isinstance(target, ThisBlock) and selector is not None:
                self._attach_block(selector, spec)
            elif isinstance(target, OutsideModules) or function_of(target) is not None:
                self._attach_outside(function_of(target), selector, spec)
            elif isinstance(target, (Node, GradientEdge)):
                place_node(self, target, selector, spec)
            elif isinstance(target, Tensor):
                name = name_of_argument("hook", "target", target)
                self._attach_tensors({name: target}, selector, spec)
            elif isinstance(target, Mapping):
                self._attach_tensors(target, selector, spec)
            else:
                advice = ""
                if selects(target) and not isinstance(target, type):
                    advice = "; selectors without a model are a text or a list of texts"
                raise NoSiteMatched(
                    f"cannot hook {not_a_model(target)}; a target is a module, "
                    "kedge.everywhere, a tensor, a dict of named "
                    f"tensors, an autograd node or a Python function{advice}"
                )
            warn_of_repeated(self, target, spec.taps)
        self.taps.extend(spec.taps)
        return spec

    def _attach_model(self, whole: nn.Module, selector: Selector | None, spec: Spec) -> None:
        model = dynamo.unwrap(whole)
        selector = _of_model(selector)
        places = selector.on(model).places
        _check_grads(selector, places)
        _check_scripted(selector, places, model)
        target = self._target(model, places)
        target.compiled = target.compiled or dynamo.compiles(whole)
        target.attach(places, spec, model)

    def _target(self, model: nn.Module, places: tuple[SitePlace, ...]) -> HookedModel:
        """Return the `HookedModel` of a model.

        Code that was compiled without these places compiles again.
        """
        known = self.targets.get(id(model))
        if known is None:
            self.refresh(model)
            self.installed.on_failure(setattr, self.clock, "leader", self.clock.leader)
            known = HookedModel(self, model)
            self.installed.enter(self.targets, id(model), known)
        elif not all(map(known.knows, places)):
            self.refresh(model)
        return known

    def _attach_everywhere(self, selector: Selector | None, spec: Spec) -> None:
        if self.finder is None:
            self.refresh()
            self.installed.on_failure(setattr, self, "finder", None)
            self.finder = RootFinder(self)
        self.finder.add(_of_model(selector), spec)

    def module_of(self, gate: Any) -> nn.Module | None:
        """Return the module of a gate.

        None for a tensor or node, and if the model no longer exists.
        """
        found = (target.module_of(gate) for target in self.targets.values())
        return next((module for module in found if module is not None), None)

    def unmatched(self, taps: Iterable[Tap]) -> list[tuple[Site, Cause]]:
        """Return the patterns that matched no module of any model.

        They are those of the hook with these taps, or of all hooks.
        """
        if self.finder is None:
            return []
        if taps is self.taps:
            return self.finder.unmatched(None)
        return self.finder.unmatched(taps)

    def _attach_block(self, selector: Selector, spec: Spec) -> None:
        if self.block is None:
            self.installed.on_failure(setattr, self, "block", None)
            self.block = BlockSaves(self)
        self.block.place(selector, spec)

    def _attach_outside(self, function: Any, selector: Selector | None, spec: Spec) -> None:
        if selector is None:
            raise SelectorError(
                'a function needs a selector of its operations: hook(function, "/relu", action); '
                '"/*" selects all'
            )
        key = None if function is None else (id(getattr(function, "__self__", None)), function)
        switch = self.outside.get(key)
        if switch is None:
            switch = OutsideSwitch(self, function)
            self.installed.enter(self.outside, key, switch)
        switch.place(selector, spec)

    def _attach_tensors(
        self, named: Mapping[str, Any], selector: Selector | None, spec: Spec
    ) -> None:
        if selector is not None:
            meant = (means(term, name) for term in selector.terms for name in named)
            if not any(meant):
                names = ", ".join(named)
                advice = ""
                if str(selector) in TENSOR_KINDS:
                    advice = f'; a kind follows a colon: ":{selector}"'
                raise NoSiteMatched(f'"{selector}" matches none of the tensors {names}{advice}')
        for name, tensor in named.items():
            place_tensor(self, name, tensor, selector, spec)

    def drop(self, taps: list[Tap]) -> None:
        """Remove taps before the session ends."""
        warn_of_unrepeated(taps)
        note_removal(taps)
        if self.finder is not None:
            self.finder.forget(taps)
        for tap in taps:
            tap.on = False
            tap.when = None
            if tap.gate is not None:
                tap.gate.drop(tap)
            if tap in self.taps:
                self.taps.remove(tap)

    def remove(self) -> None:
        """Remove everything for good."""
        self.ended = True
        for tap in self.taps:
            tap.on = False
        self.installed.clear()
        for target in self.targets.values():
            target.release()

    def _retime(self, ended: int) -> None:
        """Switch taps on and off for the next step.

        Only changed ones, since most schedules keep their value.
        """
        scheduled = [(tap, tap.when) for tap in self.taps if tap.when is not None]
        due = {when: when(self.clock.step) for when in {when for _, when in scheduled}}
        changed = [tap for tap, when in scheduled if tap.on is not due[when]]
        for tap in changed:
            tap.on = not tap.on
        for gate in {id(tap.gate): tap.gate for tap in changed}.values():
            gate.retime()


def note_removal(taps: Iterable[Tap]) -> None:
    """Note what had passed when taps were removed before their block ended, which may be why they did not fire."""
    for tap in taps:
        if tap.gate is not None and tap.until is None:
            tap.until = tap.gate.counts()


def warn_of_unrepeated(taps: Iterable[Tap]) -> None:
    """Warn of edits that end between the forward and the backward of a checkpoint: its recompute will lack them."""
    awaited = [tap for tap in taps if tap.gate is not None and tap.is_awaited]
    if awaited:
        more = f" and at {len(awaited) - 1} more sites" if len(awaited) > 1 else ""
        warn(
            EditNotRepeated(
                f"the edit {awaited[0].label} at {awaited[0].site}{more} was removed "
                "between a checkpoint's forward and its backward: it will be "
                "missing when the checkpoint recomputes its forward, and the "
                "gradients will belong to other values. Remove it after backward()"
            )
        )


def refresh(*models: nn.Module) -> None:
    """Have models compile again, with the hooks, at their next calls; warns if there is code that was compiled before.

    Args:
        models: The models that are hooked. Without any, all compiled code is discarded.
    """
    if models:
        compiled = False
        for model in models:
            compiled |= set_aside(model, is_hooked)
        what = "the code of this model"
    else:
        compiled = dynamo.refresh()
        what = "Kedge discarded all compiled code, and it"
    if compiled:
        warn(
            Recompiled(
                "hooks were attached after torch.compile had compiled code, which "
                f"does not check for new hooks: {what} compiles again, with the "
                "hooks, at its next call. Hook first to compile once"
            )
        )


def _check_order(target: Any, what: tuple[Any, ...]) -> None:
    """Refuse a path and then the model that has it: a module is a valid action, so this would hook every model with it."""
    if (
        isinstance(target, str)
        and what
        and isinstance(what[0], nn.Module)
        and target in named_modules(what[0])
    ):
        raise WrongCall(f'the model comes before the selector: hook(model, "{target}", action)')

    if isinstance(target, nn.Sequential) and len(what) > 1 and isinstance(what[0], int):
        inside = [*own_children(target)]
        if -len(inside) <= what[0] < len(inside):
            raise WrongCall(
                f"{what[0]} is not a selector; a path is a text: "
                f'hook(model, "{inside[what[0]]}", action)'
            )

    several = isinstance(target, (list, tuple))
    if several and any(isinstance(one, nn.Module) for one in target):
        raise WrongCall(f"cannot hook {not_a_model(target)}")

    if (
        isinstance(target, nn.Module)
        and len(what) > 1
        and isinstance(what[0], (nn.Module, nn.Parameter))
    ):
        paths = {id(module): path for path, module in modules_in(target).items()}
        for name, param in parameters_in(target).items():
            paths[id(param)] = name
        path = paths.get(id(what[0]), "layer4")
        if isinstance(what[0], nn.Parameter):
            path += ":param.grad"
        raise WrongCall(
            f"{described(what[0])} is not a selector; name it by its path: "
            f'hook(model, "{path}", action)'
        )


def _split(what: tuple[Any, ...]) -> tuple[Selector | None, tuple[Action, ...]]:
    """Return the selector, None without one, and the actions.

    Raises:
        SelectorError: If the selector's text cannot be parsed.
        WrongCall: If there is no action, or one that cannot be called.
        ActionArity: If it is a function that makes actions.
    """
    selector = None
    actions = what
    if what and selects(what[0]):
        selector = what[0] if isinstance(what[0], Selector) else Selector(what[0])
        actions = what[1:]

    if not actions:
        advice = ""
        if what and isinstance(what[0], Mapping):
            advice = "; not in a dict, but in a session, with a hook for each selector"
        raise WrongCall(
            'no action given; hook(model, "layer4", kedge.record()) takes at least '
            f"one after the selector{advice}"
        )
    for action in actions:
        if is_schedule(action):
            raise WrongCall(
                f"{action!r} is a schedule and not an action; pass it as when=kedge.{action!r}"
            )
        if not callable(action) and not hasattr(action, "bind"):
            advice = ""
            if isinstance(action, str) and action in _ACTIONS:
                advice = f"; did you mean kedge.{action}(...)?"
            elif isinstance(action, (int, float)):
                advice = (
                    f'; a path is a text: "{action}"; to put a number in the place of a value, '
                    f"use kedge.replace({action})"
                )
            elif isinstance(action, Tensor):
                advice = "; to put it in the place of a value, use kedge.replace(tensor)"
            raise WrongCall(
                f"{described(action)} is not an action: it cannot be called; the "
                f"order is target, selector, actions{advice}"
            )
        if not inspect.isfunction(action):
            continue
        ours = str(action.__module__).startswith("kedge.actions.")  # None: made without a name
        condition = action.__annotations__.get("return") == "bool"  # of `error_if`
        if ours and not condition:
            raise ActionArity(
                f"kedge.{action.__name__} makes actions and is not one: call it, "
                f"as in kedge.{action.__name__}(...)"
            )
    return selector, actions


class OutsideModules:
    """The target of hooks on the program's own operations."""


_outside_modules = OutsideModules()


def _without_model(selector: str | list[str] | Selector) -> Any:
    """Return the target of a selector that stands alone."""
    if is_of_block(selector):
        return this_block
    if is_outside(selector if isinstance(selector, Selector) else Selector(selector)):
        return _outside_modules
    return everywhere


def _of_model(selector: Selector | None) -> Selector:
    if selector is None:
        raise SelectorError(
            'a model needs a selector: hook(model, "layer4", action); "**:out" selects everything, '
            '":out" its own output'
        )
    return selector


def _check_grads(selector: Selector, places: tuple[SitePlace, ...]) -> None:
    params = [(p, p.param) for p in places if p.site.kind not in ("param", "state")]
    frozen = [p for p, param in params if param is not None and not param.requires_grad]
    if places and len(frozen) == len(places):
        names = listed([p.site.path for p in frozen], 3)
        raise NoSuchKind(
            f'"{selector}": {names} requires no grad, so there is no gradient; call '
            "requires_grad_() first"
        )


def _check_scripted(selector: Selector, places: tuple[SitePlace, ...], model: nn.Module) -> None:
    """Refuse sites that TorchScript keeps from firing: those asked for by name, and a pattern of no others."""
    silent = [place for place in places if place.silent]
    named = [str(place.site) for place in silent if not place.many]
    if len(silent) < len(places) and not named:
        return
    if not silent:
        return
    remedy = remedy_at(silent[0].site.path, model)
    if len(silent) == len(places):
        raise NoSuchKind(
            f'"{selector}" selects only what TorchScript runs, without Python and so without '
            f"hooks; {remedy}"
        )
    if named:
        raise NoSuchKind(
            f'"{selector}" names what TorchScript runs, without Python and so without hooks: '
            f"{listed(named, 3)}; leave it out, or {remedy}"
        )
