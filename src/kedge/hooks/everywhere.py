"""Hooks on every model that is called in a session: `everywhere`.

# Note [First calls]
A global forward-pre hook finds a model when it is called for the first time, and attaches to it what `everywhere` was
given, as to a model that the user names. PyTorch has collected the hooks of that call before, so the finder runs those
forward-pre hooks itself that it has just registered. A part of a model that was called before the model itself has
been hooked as a model of its own, and stays so.

# Note [Models that come and go]
Nothing here keeps a model alive. When one is gone, the next of its class has its name, and continues its counts.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from kedge.errors import NoSiteMatched, NoSuchKind
from kedge.flow import Bindable, as_act
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.placing.installed import InstalledHook
from kedge.hooks.placing.module_calls import given_to
from kedge.hooks.placing.own_warnings import IgnoredOfGlobalHooks
from kedge.hooks.placing.roots import SeenModules, free_name
from kedge.hooks.target import HookedModel
from kedge.sites.language import Term
from kedge.sites.select import ModelLayout, Selector, SitePlace
from kedge.sites.site import NODE_KINDS, TENSOR_KINDS, Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import before_forward

_SHOWN = 5


class Everywhere:
    """The target that stands for every module of every model called in the session; `everywhere` is the only one."""

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
    """

    selector: Selector
    spec: Spec
    missing: dict[Term, str] = field(default_factory=dict)

    def places(self, model: nn.Module) -> tuple[SitePlace, ...]:
        """Return the selected places of a model; none if it has no such module."""
        layout, terms = ModelLayout(model), []
        for term in self.selector.terms:
            try:
                layout.find(term)
            except (NoSiteMatched, NoSuchKind) as error:
                if term in self.missing:
                    self.missing[term] = str(error)
            else:
                self.missing.pop(term, None)
                terms.append(term)
        if all(term.excluded for term in terms):
            return ()
        try:
            return Selector(", ".join(map(str, terms))).on(model).places
        except NoSiteMatched:  # its exclusions remove everything
            return ()

    def postpone(self) -> None:
        """Note that a model has parameters without a shape, which its first forward gives them."""
        for term in self.selector.terms:
            if not term.excluded:
                self.missing.setdefault(term, "its parameters had no shape before its first forward; call it again")


class FoundRoot:
    """A model that was called in the session.

    Attributes:
        name: The first part of its sites' paths.
        target: The hooked model.
        others: The ids of its modules that had been hooked as models before.
        hooks: The hooks attached to it.
        taps: Their taps on it.
        undo: Removes all of it.
    """

    def __init__(self, model: nn.Module, name: str, others: frozenset[int]) -> None:
        self._model, self.name, self.others = weakref.ref(model), name, others
        self.target: HookedModel | None = None
        self.hooks: list[HookEverywhere] = []
        self.taps: list[Tap] = []
        self.undo = ExitStack()

    def module(self) -> nn.Module | None:
        """Return the model, if it still exists."""
        return self._model()

    def release(self) -> None:
        """Remove what a model has left that no longer exists."""
        self.undo.close()
        if self.target is not None:
            self.target.release()


class RootFinder:
    """Global forward-pre hook that attaches hooks to each model at its first call; see Note [First calls]."""

    def __init__(self, owner: RootOwner) -> None:
        self.owner = owner
        self._hooks: list[HookEverywhere] = []
        self._roots: list[FoundRoot] = []
        self._gone: dict[str, FoundRoot] = {}
        self._seen = SeenModules()
        self._called: dict[str, None] = {}
        self._scripted: dict[str, None] = {}
        self._busy = False
        self._lock = threading.RLock()
        installed = owner.installed
        installed.install(dynamo.DynamoHold())
        installed.install(IgnoredOfGlobalHooks())
        installed.cleanup.callback(self._close)
        installed.install(InstalledHook(register_module_forward_pre_hook(self)))

    def add(self, selector: Selector, spec: Spec) -> None:
        """Attach a hook to every model, at its next call.

        Raises:
            NoSuchKind: If the selector names a kind that no model has.
            ActionArity: If an action cannot be called with (value) or (value, event).
        """
        for term in selector.terms:
            if term.kind in TENSOR_KINDS + NODE_KINDS:
                raise NoSuchKind(f'"{term}": :{term.kind} belongs to tensors and nodes; hook(tensor, ...) takes them')
        for action in spec.actions:
            if not isinstance(action, Bindable):
                as_act(action)
        self._hooks.append(HookEverywhere(selector, spec, {t: "" for t in selector.terms if not t.excluded}))
        self.owner.installed.on_failure(self.forget, spec.taps)
        for root in self._roots:
            if (model := root.module()) is not None:
                self._seen.discard(model)

    def forget(self, taps: list[Tap]) -> None:
        """Attach the hook of these taps to no further model."""
        self._hooks = [hook for hook in self._hooks if hook.spec.taps is not taps]

    def unmatched(self, taps: Iterable[Tap] | None) -> list[tuple[Site, Cause]]:
        """Return the patterns that matched no module, with causes: of the hook with these taps, or of all."""
        found: list[tuple[Site, Cause]] = []
        for hook in self._hooks:
            for term, why in hook.missing.items() if taps is None or taps is hook.spec.taps else ():
                found.append((SitePattern(str(term), term.kind or "out", op=term.op), self._cause(why)))
        return found

    def _cause(self, why: str) -> Cause:
        if not self._called and self._scripted:
            return Cause(
                f"only scripted modules were called, which run without Python: {', '.join(self._scripted)}",
                "hook before scripting",
            )
        if not self._called:
            return Cause(
                "no model was called",
                "call one inside the block, as model(x): model.forward(x) calls no hook, nor does code compiled as a whole",
            )
        names = list(self._called)
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return Cause(
            f"no model that was called has it: {shown}", f"of the last one: {why}" if why else "call the model again"
        )

    def __call__(self, module: nn.Module, args: Any) -> Any:
        """The global forward-pre hook."""
        if torch.compiler.is_compiling() or not self._hooks or (module in self._seen and not self._busy):
            return None
        with self._lock:  # for which a thread waits that calls a model while another attaches the hooks to it
            model = self._seen.candidate(module)
            if model is None:
                if isinstance(module, torch.jit.ScriptModule):
                    self._scripted[type(module).__name__] = None
                return None
            known, self._busy = set(before_forward(model)), True
            try:
                root = self._root(model, compiled=dynamo.compiles(module))
                for hook in [hook for hook in self._hooks if hook not in root.hooks]:
                    if self._attach(hook, root, model):
                        root.hooks.append(hook)
                    else:
                        self._seen.discard(model)
            finally:
                self._busy = False
        return self._begin(module, args, known, root, sys._getframe(1)) if model is module else None

    def _root(self, model: nn.Module, *, compiled: bool) -> FoundRoot:
        """Return the root of a model; a new one for a new model."""
        self._release_gone()
        found = next((root for root in self._roots if root.module() is model), None)
        if found is not None:
            return found
        others = frozenset(id(m) for m in model.modules() if m is not model and m in self._seen)
        name = free_name(type(model).__name__, {root.name for root in self._roots})
        root = FoundRoot(model, name, others)
        self._seen.add(model.modules())
        self._called[name] = None
        installed = self.owner.installed
        outer, installed.cleanup = installed.cleanup, root.undo
        try:
            with installed.attaching():
                target = root.target = HookedModel(self.owner, model, name)
        finally:
            installed.cleanup = outer
        target.kinds = {n: weakref.ref(type(m)) for n, m in model.named_modules(remove_duplicate=False)}
        target.held, target.compiled = None, compiled
        self.owner.targets[id(root)] = target
        self._roots.append(root)
        return root

    def _attach(self, hook: HookEverywhere, root: FoundRoot, model: nn.Module) -> bool:
        """Attach one hook to one model, with all its taps or none; returns whether the next call needs no other try."""
        owner, target = self.owner, root.target
        places = [place for place in hook.places(model) if id(place.module) not in root.others]
        if target is None or not places:
            return True
        if any(place.param is not None and is_lazy(place.param) for place in places):
            hook.postpone()
            return False
        own = hook.spec._replace(step=owner.clock.step, taps=[])
        installed = owner.installed
        outer, installed.cleanup = installed.cleanup, root.undo
        try:
            with installed.attaching():
                installed.on_failure(owner.drop, own.taps)
                target.attach(places, own, model)
        finally:
            installed.cleanup = outer
        if (past := self._gone.get(root.name)) is not None:
            self._continue(own.taps, past, hook)
        root.taps += own.taps
        hook.spec.taps.extend(own.taps)
        owner.taps.extend(own.taps)
        return True

    def _continue(self, taps: list[Tap], past: FoundRoot, hook: HookEverywhere) -> None:
        """Continue the counts of a model that is gone; see Note [Models that come and go]."""
        before = {(tap.site, id(tap.action)): tap for tap in past.taps if tap in hook.spec.taps}
        for tap in taps:
            old = before.get((tap.site, id(tap.action)))
            if old is not None:
                tap.fired, tap.edited, tap.failed = old.fired, old.edited, old.failed
                tap.on = tap.on and not old.failed
                for known in (past.taps, hook.spec.taps, self.owner.taps):
                    known.remove(old)

    def _begin(self, module: nn.Module, args: Any, known: set[int], root: FoundRoot, frame: FrameType) -> Any:
        """Run the forward-pre hooks that are new, in PyTorch's way; returns the arguments by position if they changed."""
        given, by_name = args, (given_to(module) or (args, {}))[1]
        kwargs = by_name
        for hook in [hook for key, hook in before_forward(module).items() if key not in known]:
            if len(inspect.signature(hook).parameters) > 2:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            else:
                hook(module, args)
        if root.target is not None and root.target.passes.here.inside:
            root.target.passes.here.frame = frame  # as if it had called the hooks, for a model that calls itself
        if kwargs is not by_name:  # PyTorch's own dict for this call, which a global hook cannot return
            by_name.clear()
            by_name.update(kwargs)
        return None if args is given else args

    def _release_gone(self) -> None:
        """Release the models that no longer exist, and their names."""
        gone = [root for root in self._roots if root.module() is None]
        clock = self.owner.clock
        for root in gone:
            root.release()
            older, self._gone[root.name] = self._gone.get(root.name), root
            if older is not None:
                root.taps += older.taps
                self.owner.targets.pop(id(older), None)
            if root.target is not None and clock.leader is root.target.passes:
                clock.leader = None  # the passes of the next model are the steps
        if gone:
            self._roots = [root for root in self._roots if root not in gone]
            self._seen.forget_gone()

    def _close(self) -> None:
        for root in self._roots:
            root.undo.close()


untraced(RootFinder.__call__)
