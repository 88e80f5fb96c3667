"""``--dump``: keeps the call that made the first non-finite value, so that it can be run again alone.

# Note [What a dump costs]
The sum of every module's inputs and outputs is computed when they pass, and that of the gradients of both and of the
parameters. On a CPU each sum is read at once; on a GPU several together, and each reading waits for the device. Inputs
are held until the backward has passed: a step takes as much more memory as the activations that autograd does not keep.

# Note [When it is decided]
A suspect is copied as soon as it is seen, before anything can overwrite its inputs. Whether it matters is known when
the optimizer is about to step: by then the gradients are final, and the parameters not changed yet. The repro is
written as soon as the recording's folder exists.

# Note [Which step]
These hooks run in every step, also in skipped steps, which the watcher does not follow. So they ask for the number of
the step when they need it. See Note [Three kinds of steps] in `kedge.watch.steps.kind`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kedge.hooks.firing.schedule import rank
from kedge.hooks.placing.module_calls import CallTracker, OpenCalls, given_to, is_repeated
from kedge.repro.calls import RecordedCall, WatchedModule, held, random_state
from kedge.repro.finiteness import Bad, FinitenessCheck, PendingChecks, bad
from kedge.repro.input_edges import CallEdges
from kedge.repro.listeners import GradientCheck, InputEdgeListener
from kedge.repro.package import CallPackage, TooLarge
from kedge.repro.suspects import FirstBadSearch, SuspectCall
from kedge.sites import leaves
from kedge.stderr import Shield
from kedge.torch_internals import modes
from kedge.torch_internals.autograd_nodes import numbers_operations
from kedge.torch_internals.dynamo import has_compiled
from kedge.torch_internals.hook_tables import hook_gradient
from kedge.torch_internals.module_tables import own_parameters

LIMIT = 1 << 30
_PRUNE = 4096


class EventLog(Protocol):
    """The recording, as far as `FirstBadCall` writes to it."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Write one event."""


class UnderWay(NamedTuple):
    """An active call; `way` is None if it had begun before it was hooked, so that its place in the graph is unknown."""

    watched: WatchedModule
    call: RecordedCall
    way: CallEdges | None


class FirstBadCall:
    """Keeps the first call of a run that made a non-finite value; see Note [What a dump costs].

    Args:
        folder: The folder of the recording, which may not exist yet.
        log: Receives the events.
        step: Returns the number of the active step; see Note [Which step].
        rerun: Returns the operations that made the value, given the folder of the repro.
        limit: Most bytes that the tensors of a repro may take.

    Attributes:
        shield: Reports the first failure; off as soon as the search is over.
        looks: The checks that are not read yet.
        written: The folder of the repro; None as long as there is none.
    """

    def __init__(
        self,
        folder: Path,
        log: EventLog,
        step: Callable[[], int],
        *,
        rerun: Callable[[Path], list[dict[str, Any]]] | None = None,
        limit: int = LIMIT,
    ) -> None:
        self.folder, self.log, self.step, self.rerun, self.limit = folder, log, step, rerun, limit
        self.shield = Shield("--dump", "it is off from here on, and the program goes on", on_failure=self._stop)
        self.written: Path | None = None
        self._numbers = itertools.count()
        self._known: weakref.WeakKeyDictionary[nn.Module, WatchedModule] = weakref.WeakKeyDictionary()
        self._calls = self._tracker()
        self._alive: weakref.WeakSet[RecordedCall] = weakref.WeakSet()
        self.looks = PendingChecks(self._report, self._let_go)
        self._passed: list[RecordedCall] = []
        self._handles: list[Any] = []
        self._parcels: dict[int, CallPackage] = {}
        self._ready: CallPackage | None = None
        self._reached = False
        self._why: tuple[int, str] | None = None
        self._search = FirstBadSearch(self._keep, self.step)
        self._undo = ExitStack()
        self._ahead = register_optimizer_step_pre_hook(self._before_update)

    # -- called by the watcher ---------------------------------------------------------------------

    def watch(self, module: nn.Module, label: Callable[[str], str], *, begun: bool = False) -> None:
        """Hook a root and all modules in it.

        Args:
            module: The root.
            label: Returns the path in the recording for a path in the module.
            begun: Whether its first call is active already, so that PyTorch does not run the new hooks for it.
        """
        if self.shield.off:
            return
        for path, inner in module.named_modules():
            if inner in self._known or isinstance(inner, torch.jit.ScriptModule):
                continue
            watched = self._known[inner] = WatchedModule(label(path))
            self._attach(inner, watched, is_root=inner is module)
        if begun:
            call = RecordedCall(module, label(""), next(self._numbers), None)
            call.began, call.random = True, random_state(())
            self._calls.open.add(module, UnderWay(self._known[module], call, None))

    def step_ended(self, suspicious: bool) -> None:
        """Decide on the suspects if no PyTorch optimizer has triggered the decision, and write the chosen one.

        Args:
            suspicious: Whether the watcher saw a non-finite value in the step.
        """
        self.shield(self._settle, suspicious)
        self._end_step()

    def close(self) -> None:
        """Write the rest and remove every hook. To be called when the recording is complete."""
        self.shield(self._settle, True)
        self._end_step()
        if self._ready is not None:
            self._ready = None
            self._tell("nothing was dumped: there is no recording to put it in")
        elif self._why is not None:
            self._tell(f"nothing was dumped: {self._why[1]}", self._why[0])
        elif not self.shield.off and has_compiled():
            self._tell("nothing was dumped: what runs in compiled code cannot be kept; run without torch.compile")
        self._stop()
        self._ahead.remove()

    def run_again(self) -> None:
        """Run the kept call once more to name its operations. To be called after the watcher has ended."""
        made = self.rerun(self.written) if self.rerun is not None and self.written is not None else []
        if made and self.written is not None:
            self.log.event({"kind": "operation", "folder": self.written.name, "operations": made})

    # -- module calls ------------------------------------------------------------------------------

    def _tracker(self) -> CallTracker[WatchedModule, UnderWay]:
        return CallTracker(self._entered, self._left, skip=_is_left_out, shield=self.shield)

    def _attach(self, module: nn.Module, watched: WatchedModule, *, is_root: bool) -> None:
        self._calls.follow(module, watched, outermost=is_root)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.requires_grad and not is_lazy(param):
                hook = GradientCheck(self.shield, partial(self._gradient_of_parameter, watched, name))
                self._undo.callback(param.register_hook(hook).remove)

    def _entered(self, calls: OpenCalls[UnderWay], watched: WatchedModule, module: nn.Module, given: Any) -> UnderWay:
        """Record a call that begins."""
        outer = calls.notes[-1].call if calls.notes else None
        call = RecordedCall(module, watched.label, next(self._numbers), outer)
        found = call.take(*given, copy=watched.overwrites or getattr(module, "inplace", False) is True)
        way = CallEdges(tensor for _, tensor in found)
        self._begin(watched, call, found)
        return UnderWay(watched, call, way)

    def _left(self, calls: OpenCalls[UnderWay], ended: UnderWay, output: Any) -> None:
        """Check the values that a call has returned."""
        watched, call = ended.watched, ended.call
        if call.began and call.args is None:
            self._begin(watched, call, call.take(*(given_to(call.module) or ((), {}))))
        self._split(calls, ended, output)
        watched.overwrites = watched.overwrites or not all(kept.intact for kept in call.inputs.values())
        for name, tensor in leaves.find(output):
            self.looks.look("out", (call,), tensor)
            self._listen(tensor, partial(self._gradient_of_output, call, name))
        if call.began:
            self._pack_late(call)
        if not calls.modules:
            self.looks.read()

    def _split(self, calls: OpenCalls[UnderWay], ended: UnderWay, output: Any) -> None:
        """Hook each share that a call adds to the gradients of its inputs."""
        way, call, returned = ended.way, ended.call, [tensor for _, tensor in leaves.find(output)]
        outer = calls.notes[-1].way if calls.notes else None
        if way is None:
            return
        if outer is not None:
            outer.step_over(way, returned)
        call.split = numbers_operations()
        takers = way.takers(returned) if call.split else ()
        self._handles += [
            n.register_hook(InputEdgeListener(self.shield, self.looks, call, place)) for n, place in takers
        ]

    def _begin(self, watched: WatchedModule, call: RecordedCall, found: Iterable[tuple[str, Tensor]]) -> None:
        self._alive.add(call)
        watched.add(call)
        call.awaited = {n for n, p in own_parameters(call.module).items() if p is not None and p.requires_grad}
        ref = weakref.ref(call)
        for name, tensor in found:
            self.looks.look("in", (call,), tensor)
            if self._listen(tensor, partial(self._gradient_of_input, ref, name)):
                call.awaited.add(name)

    # -- gradients ---------------------------------------------------------------------------------

    def _listen(self, tensor: Tensor, work: Callable[[Tensor], None]) -> bool:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return False
        self._handles.append(hook_gradient(tensor, GradientCheck(self.shield, work)))
        if len(self._handles) > _PRUNE:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
        return True

    def _gradient_of_output(self, call: RecordedCall, name: str, gradient: Tensor) -> None:
        call.grads[name] = held(gradient)
        self.looks.look("out.grad", (call,), gradient)

    def _gradient_of_input(self, ref: weakref.ref[RecordedCall], name: str, gradient: Tensor) -> None:
        call = ref()
        if call is not None:
            if not call.split:
                self.looks.look("in.grad", (call,), gradient)
            self._arrived(call, name)

    def _gradient_of_parameter(self, watched: WatchedModule, name: str, gradient: Tensor) -> None:
        calls = tuple(watched)
        self.looks.look("param.grad", calls, gradient)
        for call in calls:
            self._arrived(call, name)

    def _arrived(self, call: RecordedCall, name: str) -> None:
        """Release a call through which the backward has passed, once all sums are read."""
        call.awaited.discard(name)
        if not call.awaited and call.grads:
            self._passed.append(call)
            if not self.looks:
                self.looks.read()

    # -- deciding ----------------------------------------------------------------------------------

    def _let_go(self) -> None:
        for call in self._passed:
            call.release()
        self._passed.clear()

    def _report(self, look: FinitenessCheck, kind: Bad) -> None:
        if look.where in ("in", "out"):
            self._search.saw_value(look.where, look.calls[0], kind, look.value)
            return
        if look.where == "out.grad":
            look.calls[0].entered_finite = False
        self._search.saw_gradient(look.where, look.calls, kind, look.value, look.task)

    def _keep(self, suspect: SuspectCall) -> None:
        """Copy a suspect before anything changes; see Note [When it is decided]."""
        call = suspect.call
        if call is None or call.args is None:
            return
        parcel = CallPackage(suspect, suspect.step, self.limit)
        try:
            parcel.pack(call)
        except TooLarge:
            size = f"{self.limit / 2**30:.3g} GiB"
            suspect.why = (
                f"what {call.label or 'the model'} was given and its parameters take more than the limit of {size}"
            )
            return
        self._parcels = {k: p for k, p in self._parcels.items() if self._current(p.suspect)}
        self._parcels[id(suspect)] = parcel

    def _current(self, suspect: SuspectCall) -> bool:
        return suspect is self._search.backward or suspect in self._search.forward.values()

    def _pack_late(self, call: RecordedCall) -> None:
        for suspect in self._search.forward.values():
            if suspect.call is call and id(suspect) not in self._parcels and not suspect.why:
                self._keep(suspect)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.shield(self._settle, None, optimizer)

    def _settle(self, suspicious: bool | None, optimizer: Optimizer | None = None) -> None:
        """Decide on the suspects of a step; see Note [When it is decided]."""
        self.looks.read()
        if self._search.open:
            reached = bool(suspicious) if optimizer is None else _spoils(optimizer)
            chosen = self._search.choose(reached=reached)
            self._ready, self._reached = self._parcels.get(id(chosen)), reached
            if chosen is not None:
                self._why = None if self._ready is not None else self._why or (chosen.step, chosen.why)
            if self._ready is not None or (chosen is not None and reached and optimizer is not None):
                self._stop()  # one is enough; with non-finite parameters no later value is the first
                self._write()
                return
            self._search.restart(sound=not reached)
            self._parcels.clear()
        for call in [c for c in self._alive if c.grads]:
            call.release()
        self.looks.forget()

    def _stop(self) -> None:
        """End the search and remove the hooks.

        The pre-hook of optimizers stays until the step has ended: this method may run inside it, while PyTorch iterates
        over all such hooks.
        """
        self.shield.off = True
        self._calls.close()
        self._undo.close()
        for handle in self._handles:
            handle.remove()
        for call in list(self._alive):
            call.release()
        self._handles, self._passed, self._parcels = [], [], {}
        self.looks.forget()
        self._search = FirstBadSearch(self._keep, self.step)
        self._calls = self._tracker()  # forgets the active calls of all threads

    # -- writing -----------------------------------------------------------------------------------

    def _end_step(self) -> None:
        if self.shield.off:
            self._ahead.remove()
        self._write()

    def _write(self) -> None:
        parcel = self._ready
        if parcel is not None and (self.folder / "manifest.json").exists():
            self._ready = None
            Shield("writing the dump", "there is none")(self._write_to_disk, parcel)

    def _write_to_disk(self, parcel: CallPackage) -> None:
        name = f"dump-{parcel.step}" + (f"-{rank()}" if rank() else "")
        parcel.write(self.folder / name)
        self.written, suspect = self.folder / name, parcel.suspect
        module = suspect.call.label if suspect.call is not None else None
        told = {"step": parcel.step, "site": suspect.site, "folder": name, "module": module, "value": suspect.value}
        self.log.event({"kind": "dump", **told, "direction": suspect.direction, "reached": self._reached})

    def _tell(self, text: str, step: int | None = None) -> None:
        self.log.event({"kind": "note", "step": self.step() if step is None else step, "text": text})


def _is_left_out(module: nn.Module) -> bool:
    """Whether a call is skipped: it is repeated, or under `torch.func` or tracing, where values are not available."""
    return is_repeated(module) or modes.is_transforming() or modes.is_under_jit()


def _spoils(optimizer: Optimizer) -> bool:
    """Whether the step that an optimizer is about to make would write non-finite values into the parameters."""
    skipped = getattr(optimizer, "found_inf", None)  # set by GradScaler on an optimizer that skips by itself
    if isinstance(skipped, Tensor) and bool(skipped):
        return False
    params: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    grads = [p.grad for p in params if p.grad is not None and not p.grad.is_sparse]
    return any(bad(g) is not None for g in grads)
