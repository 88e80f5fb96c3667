"""From a target and a selector to taps at their gates."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from kedge.errors import NoSiteMatched, NoSuchKind, SelectorError
from kedge.flow import Action, Preserving, Schedule
from kedge.hooks.firing.schedule import Passes
from kedge.hooks.firing.tap import Tap
from kedge.hooks.gates import compiled, modules
from kedge.hooks.gates.gradients import Station, attach_accumulated, attach_node, attach_tensor
from kedge.hooks.gates.modules import After, Before, Begin, End
from kedge.hooks.gates.saved import Saves
from kedge.hooks.operations.switch import Doors
from kedge.hooks.placing.installed import Mount
from kedge.sites.select import ModelLayout, Selector, SitePlace
from kedge.sites.site import NODE_KINDS, TENSOR_KINDS, Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.checkpoint import Segments
from kedge.torch_internals.hook_tables import after_accumulation, after_forward, before_forward, on_tensor
from kedge.torch_internals.module_tables import own_parameters

if TYPE_CHECKING:
    from kedge.hooks.session import Session

_PARAM_KINDS = {"param.grad": attach_tensor, "param.acc": attach_accumulated}
_TENSOR_KINDS = {"grad": attach_tensor, "acc": attach_accumulated}


class Target:
    """A model that a session hooks: its passes, and the gates that stand so far."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self.held: nn.Module | None = model
        self.model = weakref.ref(model)
        self.passes = Passes(session.clock, session.numbers, Segments())
        if session.clock.leader is None:
            session.clock.lead(self.passes, lambda: has_optimizer(self.model()))
        self.begin = Begin(self.passes)
        self.before: dict[int, Before] = {}
        self.after: dict[int, After] = {}
        self.stations: dict[tuple[int, str], Station] = {}
        self.saves: Saves | None = None
        self.ops: Doors | None = None
        #: What its modules are, where it may be gone in the end.
        self.kinds: dict[str, weakref.ref[type[nn.Module]]] = {}
        self.compiled = False
        session.mount(dynamo.DynamoHold())
        modules.attach(session, model, self.begin)
        modules.attach(session, model, End(self.begin))
        count_steps(session, model)

    def first_name(self, name: str) -> str | None:
        """The first of the names of what is registered under this one, if anything is."""
        model = self.model()
        if model is None:
            return None
        layout = ModelLayout(model)
        if name in layout.modules:
            return layout.first[id(layout.modules[name])]
        return layout.first_param[id(layout.params[name])] if name in layout.params else None

    def standing(self) -> dict[str, Any]:
        """What stands so far, to go back to it."""
        tables = {name: dict(getattr(self, name)) for name in ("before", "after", "stations")}
        return tables | {"saves": self.saves, "ops": self.ops, "doors": dict(self.ops.doors) if self.ops else {}}

    def restore(self, standing: dict[str, Any]) -> None:
        """Go back to what stood."""
        doors = standing.pop("doors")
        self.__dict__.update(standing)
        if self.ops is not None:
            self.ops.doors = doors

    def knows(self, place: SitePlace) -> bool:
        """Whether the place's module is hooked on a side already, so that code was compiled with hooks on it."""
        hooked = id(place.module) in self.before or id(place.module) in self.after
        return hooked or (self.ops is not None and id(place.module) in self.ops.doors)

    def release(self) -> None:
        """Let the model go when the session has ended."""
        self.held = None
        for gate in self.before.values():
            gate.params.clear()


class Spec(NamedTuple):
    """What is to be attached: the actions, their schedule, and the list that their taps go into."""

    actions: tuple[Action, ...]
    when: Schedule | None
    taps: list[Tap]

    def make(self, session: Session, site: Site) -> Iterator[Tap]:
        """Make a tap for each action, in order."""
        for action in self.actions:
            tap = Tap(session, site, action, self.when)
            session.taps.append(tap)
            self.taps.append(tap)
            yield tap


@contextmanager
def all_or_nothing(session: Session, taps: list[Tap]) -> Iterator[None]:
    """Keep what is attached in the block if all of it is; else leave the session as it was before."""
    tables = [(t, t.standing()) for t in session.targets.values()]
    targets, passes, leader, outer = dict(session.targets), session.main_passes, session.clock.leader, session.cleanup
    session.cleanup = attached = ExitStack()
    try:
        yield
    except BaseException:
        attached.close()
        session._drop(taps)
        session.targets, session.main_passes, session.clock.leader = targets, passes, leader
        for target, standing in tables:
            target.restore(standing)
        raise
    finally:
        session.cleanup = outer
    outer.callback(attached.close)


def split(what: tuple[Any, ...]) -> tuple[Selector | None, tuple[Action, ...]]:
    """Tell the selector from the actions.

    Raises:
        SelectorError: If the text cannot be read.
        TypeError: If there is no action, or something that cannot be called.
    """
    first = what[0] if what else None
    selector = Selector(first) if isinstance(first, str) else first if isinstance(first, Selector) else None
    actions = what if selector is None else what[1:]
    if not actions:
        raise TypeError(
            'no action was given; hook(model, "layer4", kedge.record()) takes at least one after the selector'
        )
    for action in actions:
        if not callable(action) and not hasattr(action, "bind"):
            raise TypeError(f"{action!r} is not an action: it cannot be called; order: target, selector, actions")
    return selector, actions


def hook(session: Session, target: Any, selector: Selector | None, spec: Spec) -> None:
    """Attach taps to a target of any kind, adding them to the spec's list as they are made."""
    if isinstance(target, nn.Module):
        _hook_model(session, target, selector, spec)
    elif isinstance(target, (Node, GradientEdge)):
        _hook_node(session, target, selector, spec)
    elif isinstance(target, (Tensor, Mapping)):
        named = {"tensor": target} if isinstance(target, Tensor) else target
        if selector is not None and not any(_means(t, name) for t in selector.terms for name in named):
            raise NoSiteMatched(f'"{selector}" matches none of the tensors {", ".join(named)}')
        for name, tensor in named.items():
            _hook_tensor(session, name, tensor, selector, spec)
    else:
        raise NoSiteMatched(
            f"cannot hook a {type(target).__name__}; a target is a module, a tensor, a dict of named tensors or an autograd node"
        )


def _hook_model(session: Session, whole: nn.Module, selector: Selector | None, spec: Spec) -> None:
    model = dynamo.unwrap(whole)
    if selector is None:
        raise SelectorError(
            'a model needs a selector that says where: hook(model, "layer4", action); everything is "**:out"'
        )
    places = selector.on(model).places
    frozen = [p for p in places if p.param is not None and p.site.kind != "param" and not p.param.requires_grad]
    if places and len(frozen) == len(places):
        raise NoSuchKind(
            f'"{selector}": {_names(frozen)} requires no grad, so there is no gradient; call requires_grad_() first'
        )
    known = session.targets.get(id(model))
    if known is None:
        session.refresh()
        known = session.targets[id(model)] = Target(session, model)
        session.main_passes = session.main_passes or known.passes
    elif not all(known.knows(p) for p in places):
        session.refresh()
    known.compiled = known.compiled or dynamo.compiles(whole)
    for place in places:
        _place(session, known, place, spec)
    _preserve(session, known, spec)


def _names(places: list[SitePlace]) -> str:
    shown = ", ".join(p.site.path for p in places[:3])
    return shown + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def _place(session: Session, target: Target, place: SitePlace, spec: Spec) -> None:
    site = place.site
    if site.kind in _PARAM_KINDS:
        _place_param(session, target, place, spec)
        return
    if place.param is not None:
        _place_value(session, target, place.param, site, spec)
        return
    if site.kind == "saved":
        _place_saved(session, target, place, spec)
        return
    if site.op is not None:
        _place_op(session, target, place, spec)
        return
    gate: Before | After
    if site.kind in Before.kinds or site.kind == "in.share":
        gate = before = _before(session, target, place.module, site.path)
        site = replace(site, leaf=before.canonical(site.leaf))
    if site.kind in After.kinds:
        gate = after = _after(session, target, place.module, site.path)
        if site.kind == "in.share":
            before.share_with(after)
    for tap in spec.make(session, site):
        tap.key = compiled.register(tap)
        if site.is_gradient and not tap.observes:
            tap.edit = compiled.editing(tap.act, tap.key)
        gate.add(tap)


def _place_saved(session: Session, target: Target, place: SitePlace, spec: Spec) -> None:
    """Look at what autograd saves while a module is the innermost."""
    model = target.model()
    if target.saves is None and model is not None:
        target.saves = Saves(session, target.passes, model, compiled=target.compiled)
    if target.saves is not None:
        gate = target.saves.gate(place.site.path, place.module)
        for tap in spec.make(session, place.site):
            gate.add(tap)


def _place_op(session: Session, target: Target, place: SitePlace, spec: Spec) -> None:
    """Stand at the operations inside a module's own forward."""
    model = target.model()
    if target.ops is None and model is not None:
        target.ops = Doors(session, target.passes, model)
    if target.ops is not None:
        gate = target.ops.gate(place)
        for tap in spec.make(session, place.site):
            gate.add(tap)


def _place_value(session: Session, target: Target, param: nn.Parameter, site: Site, spec: Spec) -> None:
    """Stand before every module that holds a parameter; the first of them that is called fires."""
    for path, module in _holders(target.model(), param):
        before = _before(session, target, module, path)
        before.params[site.path] = next(n for n, p in own_parameters(module).items() if p is param), param
        for tap in spec.make(session, site):
            tap.key = compiled.register(tap)
            before.add(tap)


def _holders(model: nn.Module | None, param: nn.Parameter) -> list[tuple[str, nn.Module]]:
    """Every module that a parameter belongs to: tied weights have several."""
    modules = model.named_modules() if model is not None else ()
    return [(n, m) for n, m in modules if any(p is param for p in own_parameters(m).values())]


def _before(session: Session, target: Target, module: nn.Module, path: str) -> Before:
    gate = target.before.get(id(module))
    if gate is None or not gate.is_last(before_forward(module)):
        gate = target.before[id(module)] = Before(session, target.passes, path, module)
        modules.attach(session, module, gate)
    return gate


def _after(session: Session, target: Target, module: nn.Module, path: str) -> After:
    gate = target.after.get(id(module))
    if gate is None or not gate.is_last(after_forward(module)):
        gate = target.after[id(module)] = After(session, target.passes, path)
        modules.attach(session, module, gate)
    return gate


def _place_param(session: Session, target: Target, place: SitePlace, spec: Spec) -> None:
    if place.param is None:
        return
    if is_lazy(place.param):
        raise NoSuchKind(
            f'"{place.site}": this parameter has no shape before the first forward, and until then nothing can hook its '
            "gradient; call the model once before hooking"
        )
    key = (id(place.param), place.site.kind)
    station = target.stations.get(key)
    table = (after_accumulation if place.site.kind == "param.acc" else on_tensor)(place.param)
    if station is None or not station.is_last(table):
        station = target.stations[key] = Station(session, place.site.path, place.site.kind)
        station.param = place.param
        if place.param.requires_grad:
            station.handle = _PARAM_KINDS[place.site.kind](station, place.param)
            session.mount(Mount(station.handle))
    _add(session, station, place.site, spec)


def _add(session: Session, station: Station, site: Site, spec: Spec) -> None:
    for tap in spec.make(session, site):
        station.add(tap)


def _preserve(session: Session, target: Target, spec: Spec) -> None:
    """Stand before every module that works in place, if something recorded could be overwritten."""
    keeping: list[Any] = [action for action in spec.actions if isinstance(action, Preserving)]
    if not keeping or target.held is None:
        return
    working_in_place = [(n, m) for n, m in target.held.named_modules() if getattr(m, "inplace", False) is True]
    for name, module in working_in_place:
        _before(session, target, module, name).watch_overwrites(keeping)
    doors = [door for door in target.ops.doors.values() if door.gates] if target.ops is not None else []
    for door in doors:
        door.watch_overwrites(keeping)
    if working_in_place or doors:
        for action in keeping:
            action.watch_overwrites()


def _means(term: Any, name: str) -> bool:
    return not term.path or term.matches(name, ())


def _kinds(
    selector: Selector | None, name: str, allowed: tuple[str, ...], default: str
) -> list[tuple[str, str | None]]:
    """The kinds that a selector asks of a target that is not a model."""
    if selector is None:
        return [(default, None)]
    wanted = [t for t in selector.terms if _means(t, name)]
    for term in wanted:
        if (term.kind or default) not in allowed:
            raise NoSuchKind(f'"{term}": {name} has no :{term.kind}; it has {", ".join(":" + k for k in allowed)}')
    return [(t.kind or default, t.leaf) for t in wanted]


def _hook_tensor(session: Session, name: str, tensor: Tensor, selector: Selector | None, spec: Spec) -> None:
    if not isinstance(tensor, Tensor):
        raise NoSiteMatched(f'"{name}" is a {type(tensor).__name__}; a dict given as target holds tensors by name')
    for kind, _ in _kinds(selector, name, TENSOR_KINDS, "grad"):
        if not tensor.requires_grad:
            raise NoSuchKind(
                f'"{name}" does not require grad, so it has no gradient to hook; call requires_grad_() on it first'
            )
        if kind == "acc" and not tensor.is_leaf:
            raise NoSuchKind(
                f'"{name}:acc" asks for .grad after accumulation, but {name} is not a leaf: it was made by '
                f'{tensor.grad_fn.name() if tensor.grad_fn else "an operation"} and accumulates nothing; use "{name}:grad"'
            )
        station = Station(session, name, kind)
        session.mount(Mount(_TENSOR_KINDS[kind](station, tensor)))
        _add(session, station, Site(name, kind), spec)


def _hook_node(session: Session, target: Any, selector: Selector | None, spec: Spec) -> None:
    node, number = (target.node, str(target.output_nr)) if isinstance(target, GradientEdge) else (target, None)
    name = re.sub(r"^torch::autograd::", "", node.name())
    for kind, leaf in _kinds(selector, name, NODE_KINDS, "pre"):
        station = Station(session, name, kind)
        session.mount(Mount(attach_node(station, node)))
        _add(session, station, Site(name, kind, leaf or (number if kind == "pre" else None)), spec)


def has_optimizer(model: nn.Module | None) -> bool:
    """Tell whether an optimizer exists that holds one of a model's parameters; looks through all objects."""
    held = {id(p) for p in model.parameters()} if model is not None else set()
    optimizers = (o for o in gc.get_objects() if issubclass(type(o), Optimizer))  # isinstance would ask odd objects
    groups = (group for o in optimizers for group in getattr(o, "param_groups", ()))  # one whose making failed has none
    return bool(held) and any(id(p) in held for group in groups for p in group["params"])


def count_steps(session: Session, model: nn.Module) -> None:
    """Let a session count the steps of the optimizer that holds this model's parameters."""
    held, whose, clock = {id(p) for p in model.parameters()}, id(model), session.clock
    if not held or not clock.by_models:
        return

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if clock.optimizer is None and any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            clock.optimizer = id(optimizer), whose
        if clock.optimizer == (id(optimizer), whose):
            clock.optimized()

    session.mount(Mount(register_optimizer_step_post_hook(stepped)))
