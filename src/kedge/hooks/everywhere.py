"""Hooks on every model that is called in a session: `everywhere`.

# Note [Which model]
A global forward-pre hook finds a model at its first call (see Note [First calls] in
`kedge.hooks.roots`), and attaches to it what `everywhere` was given, as to a model that the user
names. A part of a model that was called before the model itself has been hooked as a model of its
own, and stays so: a hook that has one of its sites does not attach to it again. A module that is
called inside an active call of another one which holds it belongs to that one: the session may have
begun during the call, or the module may be a new part. When a model is gone, the next of its class
has its name, and continues its counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from kedge.by_identity import ByIdentity
from kedge.errors import NoSiteMatched, NoSuchKind
from kedge.flow import Bindable, as_act
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.contract import Refusing
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.placing.installed import HooksTogether, InstalledHook
from kedge.hooks.placing.module_calls import running
from kedge.hooks.placing.own_warnings import IgnoredOfGlobalHooks
from kedge.hooks.placing.strict_export import spare_export
from kedge.hooks.roots import HookedRoot, SeenModules, free_name, new_hooks, unwrapped
from kedge.hooks.target import HookedModel
from kedge.short_text import listed
from kedge.sites.language import Term
from kedge.sites.nearest import kind_of_no_model
from kedge.sites.select import ModelLayout, Selector, SitePlace
from kedge.sites.site import NODE_KINDS, TENSOR_KINDS, Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import before_forward
from kedge.torch_internals.module_tables import modules_in, named_modules, own_children
from kedge.torch_internals.torchscript import class_name, takes_hooks

_SHOWN = 5


class Everywhere:
    """The class of `everywhere`, the target that stands for every module of every model called in the session."""

    def __repr__(self) -> str:
        """The name that users write."""
        return "kedge.everywhere"


everywhere = Everywhere()
"""The target that stands for every module of every model called in the session."""


class SitePattern(Site):
    """A pattern that has matched no module so far; its path is the pattern's text."""

    def __str__(self) -> str:
        """The text."""
        return self.path


class RootOwner(Owner, Protocol):
    """The session of a finder.

    Attributes:
        taps: Every tap of the session.
        targets: The hooked models.
    """

    taps: list[Tap]
    targets: dict[int, HookedModel]

    def drop(self, taps: list[Tap]) -> None:
        """Remove taps before the session ends."""


@dataclass(eq=False)
class HookEverywhere:
    """One hook on every model.

    Attributes:
        selector: Selects modules in each model.
        spec: The actions, and all taps so far.
        missing: The terms that have matched in no model, each with the last message about it.
        attached: The sites of each module that the hook has, whichever model it found them in.
    """

    selector: Selector
    spec: Spec
    missing: dict[Term, str] = field(default_factory=dict)
    attached: ByIdentity[nn.Module, set[Site]] = field(default_factory=ByIdentity)

    def places(self, model: nn.Module) -> tuple[SitePlace, ...]:
        """Return the selected places of a model; none if it has no such module."""
        layout = ModelLayout(model)
        terms = []
        for term in self.selector.terms:
            try:
                layout.find(term)
            except (NoSiteMatched, NoSuchKind) as error:
                self._note((term,), str(error))
            else:
                terms.append(term)
        if all(term.excluded for term in terms):
            return ()
        try:
            places = Selector(", ".join(map(str, terms))).on(model).places
        except NoSiteMatched as error:  # its exclusions remove everything
            self._note(terms, str(error))
            return ()
        for term in terms:
            self.missing.pop(term, None)
        return places

    def lacks(self, place: SitePlace) -> bool:
        """Whether the hook is not attached yet to a place, under any name of it."""
        return _unnamed(place) not in self.attached.get(place.module, ())

    def have(self, places: Iterable[SitePlace]) -> None:
        """Note that the hook is attached to these places."""
        for place in places:
            self.attached.setdefault(place.module, set()).add(_unnamed(place))

    def _note(self, terms: Iterable[Term], why: str) -> None:
        self.missing.update((term, why) for term in terms if term in self.missing)

    def postpone(self) -> None:
        """Note that a model has parameters without a shape, which its first forward gives them."""
        why = "its parameters had no shape before its first forward; call it again"
        for term in self.selector.terms:
            if not term.excluded:
                self.missing.setdefault(term, why)


def _unnamed(place: SitePlace) -> Site:
    """Return the site of a place without the path of its module."""
    if place.param is None:
        return replace(place.site, path="")
    return replace(place.site, path=place.site.path.rpartition(".")[2])


class FoundRoot(HookedRoot):
    """A root that was called in the session.

    Attributes:
        name: The first part of its sites' paths.
        earlier: The roots that were found before and have modules of this one.
        taps: All taps on it.
    """

    owner: RootOwner

    def __init__(
        self, owner: RootOwner, model: nn.Module, name: str, earlier: Sequence[FoundRoot]
    ) -> None:
        super().__init__(owner, model, name)
        self.name = name
        self.earlier = earlier
        self._hooks: list[HookEverywhere] = []
        self.taps: list[Tap] = []
        owner.targets[id(self)] = self.target

    def attach(
        self, hook: HookEverywhere, model: nn.Module, new: Collection[int], past: FoundRoot | None
    ) -> bool:
        """Attach a hook, with all its taps or none; to the new modules alone, if the model had it before.

        Args:
            hook: The hook.
            model: The model.
            new: The ids of its modules that were not there before.
            past: The model that had the name before.

        Returns:
            Whether the hook is attached; if not, the next call tries again.
        """
        known = hook in self._hooks
        places = [place for place in hook.places(model) if hook.lacks(place)]
        if known:
            places = [place for place in places if id(place.module) in new]
        params = (place.param for place in places if place.param is not None)
        if any(map(is_lazy, params)):
            hook.postpone()
            return False

        own = hook.spec._replace(step=self.owner.clock.step, taps=[])
        if places:
            with self.attaching():
                self.owner.installed.on_failure(self.owner.drop, own.taps)
                self.target.attach(places, own, model)
            hook.have(places)
        if not known:
            self._hooks.append(hook)
        if past is not None:
            self._continue(own.taps, past, hook)
        for taps in (self.taps, hook.spec.taps, self.owner.taps):
            taps.extend(own.taps)
        return True

    def _continue(self, taps: list[Tap], past: FoundRoot, hook: HookEverywhere) -> None:
        """Continue the counts of a model that is gone; see Note [Which model]."""
        of_hook = {id(tap) for tap in hook.spec.taps}
        earlier = [tap for tap in past.taps if id(tap) in of_hook]
        before = {(tap.site, id(tap.action)): tap for tap in earlier}

        done = set()
        for tap in taps:
            old = before.get((tap.site, id(tap.action)))
            if old is None:
                continue
            tap.fired = old.fired
            tap.edited = old.edited
            tap.failed = old.failed
            tap.on = tap.on and old.failed != "off"
            done.add(id(old))
        for known in (past.taps, hook.spec.taps, self.owner.taps):
            known[:] = [tap for tap in known if id(tap) not in done]

    def follow(self, past: FoundRoot | None) -> None:
        """Keep what is left of an earlier model with this name.

        Called when this one is gone.
        """
        self.release()
        clock = self.owner.clock
        if clock.leader is self.target.passes:
            clock.leader = None  # the passes of the next model are the steps
        if past is not None:
            self.taps += past.taps
            self.owner.targets.pop(id(past), None)


class RootFinder:
    """Global forward-pre hook that attaches hooks to each model at its first call.

    See Note [Which model].
    """

    def __init__(self, owner: RootOwner) -> None:
        self.owner = owner
        self._hooks: list[HookEverywhere] = []
        self._roots: list[FoundRoot] = []
        self._gone: dict[str, FoundRoot] = {}
        self._again: dict[int, FoundRoot] = {}
        self._seen = SeenModules()
        self._called: dict[str, None] = {}
        self._scripted: dict[str, None] = {}
        self._busy = False
        self._lock = threading.RLock()
        installed = owner.installed
        installed.install(dynamo.DynamoHold())
        installed.install(IgnoredOfGlobalHooks())
        installed.cleanup.callback(self._close)
        handle = register_module_forward_pre_hook(self)
        finder = HooksTogether([(InstalledHook(handle), self)])
        installed.install(finder)
        installed.cleanup.callback(spare_export(finder))

    def add(self, selector: Selector, spec: Spec) -> None:
        """Attach a hook to every model, at its next call.

        Raises:
            NoSuchKind: If the selector names a kind that no model has.
            ActionArity: If an action cannot be called with (value) or (value, event).
        """
        for term in selector.terms:
            if term.kind in TENSOR_KINDS + NODE_KINDS:
                raise NoSuchKind(kind_of_no_model(term, (), "hook(tensor, ...) takes them"))
        for action in spec.actions:
            if not isinstance(action, Bindable):
                as_act(action)
        wanted = [term for term in selector.terms if not term.excluded]
        refusing: list[Any] = [one for one in spec.actions if isinstance(one, Refusing)]
        for action in refusing:
            for term in wanted:
                action.check(_pattern(term))

        self._hooks.append(HookEverywhere(selector, spec, dict.fromkeys(wanted, "")))
        self.owner.installed.on_failure(self.forget, spec.taps)
        self._again = {}
        for root in self._roots:
            model = root.module()
            if model is not None:
                self._again[id(model)] = root

    def forget(self, taps: list[Tap]) -> None:
        """Attach the hook of these taps to no further model."""
        self._hooks = [hook for hook in self._hooks if hook.spec.taps is not taps]

    def unmatched(self, taps: Iterable[Tap] | None) -> list[tuple[Site, Cause]]:
        """Return the patterns that matched no module, with causes.

        They are those of the hook with these taps, or of all hooks.
        """
        hooks = self._hooks
        if taps is not None:
            hooks = [hook for hook in hooks if hook.spec.taps is taps]
        return [
            (_pattern(term), self._cause(why))
            for hook in hooks
            for term, why in hook.missing.items()
        ]

    def _cause(self, why: str) -> Cause:
        if not self._called and self._scripted:
            scripted = ", ".join(self._scripted)
            return Cause(
                f"only scripted modules were called, which run without Python: {scripted}",
                "hook before scripting",
            )
        if not self._called:
            return Cause(
                "no model was called",
                "call one inside the block, as model(x): model.forward(x) calls no "
                "hook, nor does code compiled as a whole",
            )
        shown = listed(list(self._called), _SHOWN)
        remedy = f"of the last one: {why}" if why else "call the model again"
        return Cause(f"no model that was called has it: {shown}", remedy)

    def __call__(self, module: nn.Module, args: Any) -> Any:
        """The global forward-pre hook."""
        if torch.compiler.is_compiling() or not self._hooks:
            return None
        if module in self._seen and not (self._busy or self._again):
            return None
        # A thread waits that calls a model while another attaches the hooks to it.
        with self._lock:
            known = set(before_forward(module))
            self._busy = True
            try:
                root = self._find(module)
            finally:
                self._busy = False
        if root is None:
            return None
        return root.begin_call(module, args, new_hooks(module, known))

    def _find(self, module: nn.Module) -> FoundRoot | None:
        """Attach what is missing.

        Returns the root if the module is a part of it that may have new hooks.
        """
        if module in self._seen:
            root = self._again.get(id(module))
            if root is None or root.module() is not module:
                return None
            self._attach(root, module, ())
            return root

        model = self._seen.candidate(module)
        if model is None:
            if not takes_hooks(module):
                self._scripted[class_name(module)] = None
            return None

        self._seen.discard(model)
        whole = _holder(model)
        new = {id(m) for m in modules_in(whole).values() if m not in self._seen}
        self._release_gone()
        root = next((known for known in self._roots if known.module() is whole), None)
        if root is None:
            root = self._found(whole, new)
        target = root.target
        target.compiled = target.compiled or dynamo.compiles(module)
        target.kinds = {n: weakref.ref(type(m)) for n, m in named_modules(whole).items()}
        self._seen.add(modules_in(whole).values())
        self._attach(root, whole, new)
        return root if model is module else None

    def _found(self, model: nn.Module, new: Collection[int]) -> FoundRoot:
        name = free_name(class_name(model), {root.name for root in self._roots})
        known = {id(m) for m in modules_in(model).values()}.difference(new)
        earlier = []
        if known:
            for root in self._roots:
                other = root.module()
                if other is None:
                    continue
                if not known.isdisjoint(map(id, modules_in(other).values())):
                    earlier.append(root)

        root = FoundRoot(self.owner, model, name, earlier)
        self._called[name] = None
        self._roots.append(root)
        return root

    def _attach(self, root: FoundRoot, model: nn.Module, new: Collection[int]) -> None:
        """Attach all hooks that a root lacks, and all of its hooks to its new modules.

        A part that is a model of its own comes first: where a selector names it there, it has that
        name.
        """
        past = self._gone.get(root.name)
        self._again.pop(id(model), None)
        for part in root.earlier:
            own = part.module()
            if own is not None and id(own) in self._again:
                self._attach(part, own, ())
        attached = [root.attach(hook, model, new, past) for hook in list(self._hooks)]
        if not all(attached):
            self._again[id(model)] = root

    def _release_gone(self) -> None:
        """Release the models that no longer exist, and their names."""
        gone = [root for root in self._roots if root.module() is None]
        for root in gone:
            root.follow(self._gone.get(root.name))
            self._gone[root.name] = root
        if gone:
            self._roots = [root for root in self._roots if root not in gone]

    def _close(self) -> None:
        for root in self._roots:
            root.release()


def _holder(module: nn.Module) -> nn.Module:
    """Return the outermost module with an active call on this thread that holds a module.

    The module itself if there is none.
    """
    searched: set[int] = set()
    for call in running()[:-1]:  # the last is the call that begins
        outer = unwrapped(call)
        if _holds(outer, module, searched):
            return outer
    return module


def _holds(outer: nn.Module, module: nn.Module, searched: set[int]) -> bool:
    """Whether a module is another, or part of it.

    Adds the ids of all modules that it has searched, and searches none twice.
    """
    if outer is module:
        return True
    if id(outer) in searched:
        return False
    waiting = [outer]
    while waiting:
        for part in own_children(waiting.pop()).values():
            if part is module:
                return True
            if part is not None and id(part) not in searched:
                searched.add(id(part))
                waiting.append(part)
    return False


def _pattern(term: Term) -> SitePattern:
    return SitePattern(str(term), term.kind or "out", term.leaf, op=term.op)


untraced(RootFinder.__call__)
