"""The ``:state`` sites: what an optimizer keeps of a parameter, such as Adam's ``exp_avg``.

# Note [After a step]
A site fires once an optimizer that holds the parameter has stepped, with each tensor of the state
that it then keeps of the parameter: the leaf is its name there. The hook runs before those that
count steps, so the values belong to the step that has just been taken, and before PyTorch's hooks
that the program has for all optimizers. What an action returns is written into the state, and the
next step works with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from kedge.flow import Event
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.gates.tensors import TensorGate
from kedge.hooks.placing.installed import InstalledHook
from kedge.sites import leaves
from kedge.sites.select import SitePlace
from kedge.sites.site import Site
from kedge.torch_internals import dynamo
from kedge.torch_internals.hook_tables import move_first
from kedge.torch_internals.own_work import own_work


class StateGate(TensorGate):
    """The taps of one session on what optimizers keep of one parameter.

    Attributes:
        held: How many steps were taken by optimizers that hold the parameter.
        others: How many were taken by others.
        names: The names of the tensors that were in the state.
    """

    def __init__(self, owner: Owner, name: str, param: Tensor, passes: PassCounter) -> None:
        super().__init__(owner, name, "state")
        self.param = param
        self.passes = passes
        self.held = 0
        self.others = 0
        self.names: dict[str, None] = {}
        self._last = (-1, -1)  # a forward pass, and how many steps have followed it

    def stepped(self, state: Any) -> None:
        """Fire with each tensor of the parameter's state, after a step; see Note [After a step]."""
        self.held += 1
        pass_ = self.passes.here.pass_
        before, steps = self._last
        self._last = pass_, steps + 1 if before == pass_ else 0
        for name, value in leaves.find(state):
            self.names[name] = None
            if not any(tap.on and tap.site.leaf in (None, name) for tap in self.taps):
                continue
            shown = value.detach()
            new = fire(self.taps, shown, self._event(name))
            if new is not shown:
                with torch.no_grad():
                    value.copy_(new)

    def _event(self, name: str) -> Event:
        clock = self.owner.clock
        here = self.passes.here
        pass_, call = self._last
        site = self.site.at(name)
        return Event(
            site,
            call,
            pass_,
            -1,
            clock.step,
            here.micro_batch,
            clock.rank,
            here.replica,
            recompute=False,
        )

    def why(self, tap: Tap) -> Cause | None:
        """Return the cause of a tap never firing."""
        if not self.held and not self.others:
            return Cause(
                "no optimizer has stepped while the hook was attached",
                "call optimizer.step() in the block",
            )
        if not self.held:
            return Cause(
                "no optimizer that stepped holds the parameter",
                "give it to an optimizer; after fully_shard, the parameter of that time",
            )
        if not self.names:
            return Cause(
                "its optimizer keeps nothing of it: it has no state, as SGD without momentum, or "
                "the parameter had no gradient",
                "see which parameters have a gradient",
            )
        leaf = tap.site.leaf
        if leaf is not None and leaf not in self.names:
            known = ", ".join(f"[{name}]" for name in self.names)
            return Cause(f"its optimizer keeps no tensor [{leaf}] of it", f"it has {known}")
        return None


class StateSites:
    """The gates of one session on the optimizers' state of the parameters of one model.

    Args:
        owner: The session.
        passes: Counts the model's forward passes.
    """

    def __init__(self, owner: Owner, passes: PassCounter) -> None:
        self.owner = owner
        self.passes = passes
        self.gates: dict[int, StateGate] = {}
        handle = register_optimizer_step_post_hook(self._stepped)
        move_first(handle)
        owner.installed.install(InstalledHook(handle))

    def place(self, place: SitePlace, spec: Spec) -> None:
        """Attach taps to what optimizers keep of a parameter."""
        param = place.param
        if param is None:
            return
        path = self.passes.label(place.site.path)
        gate = self.gates.get(id(param))
        if gate is None:
            gate = StateGate(self.owner, path, param, self.passes)
            self.owner.installed.enter(self.gates, id(param), gate)
        gate.attach(spec, Site(path, "state", place.site.leaf, place.site.call))

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook on the steps of all optimizers."""
        if is_compiling():
            dynamo.break_graph()
        with own_work():
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for key, gate in list(self.gates.items()):
                if key not in held:
                    gate.others += 1
                elif gate.param is not None:
                    gate.stepped(optimizer.state.get(gate.param, {}))


dynamo.untraced(StateSites._stepped)  # an optimizer's step may be compiled
