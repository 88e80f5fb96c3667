"""``--dump``: keeps the call that made the first non-finite value, to be run again alone.

# Note [What a dump costs]
The sum of every module's inputs and outputs is computed when they pass, and that of the gradients
of both and of the parameters. On a CPU each sum is read at once; on a GPU several together, and
each reading waits for the device. Inputs are held until the backward has passed: a step takes as
much more memory as the activations that autograd does not keep.

# Note [When it is decided]
A suspect is copied as soon as it is seen, before anything can overwrite its inputs. Whether it
matters is known when the optimizer is about to step: by then the gradients are final, and the
parameters not changed yet. The dump is written as soon as the recording's folder exists.

# Note [Which step]
These hooks run in every step, also in skipped steps, which the watcher does not follow. So they ask
for the number of the step when they need it. See Note [Three kinds of steps] in
`kedge.watch.step`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kedge.hooks.firing.schedule import rank
from kedge.repro.call_hooks import CallHooks
from kedge.repro.calls import RecordedCall
from kedge.repro.finiteness import Bad, FinitenessCheck, PendingChecks, bad
from kedge.repro.package import CallPackage, SuspectPackages
from kedge.repro.suspects import FirstBadSearch, SuspectCall
from kedge.stderr import Shield
from kedge.store.events import BadOperation, DumpEvent, NoteEvent, OperationsEvent, RunEvent
from kedge.torch_internals.dynamo import has_compiled
from kedge.torch_internals.own_work import own_work

LIMIT = 1 << 30


class EventLog(Protocol):
    """The recording, as far as a dump writes to it."""

    def event(self, event: RunEvent) -> None:
        """Write one event."""


class FirstBadCall:
    """Keeps the first call of a run that made a non-finite value; see Note [What a dump costs].

    Args:
        place: Returns the folder of the recording; None as long as this process does not record
            into one.
        log: Receives the events.
        step: Returns the number of the active step; see Note [Which step].
        rerun: Returns the operations that made the value, given the folder of the dump.
        limit: Most bytes that the tensors of a dump may take.
    """

    def __init__(
        self,
        place: Callable[[], Path | None],
        log: EventLog,
        step: Callable[[], int],
        *,
        rerun: Callable[[Path], list[BadOperation]] | None = None,
        limit: int = LIMIT,
    ) -> None:
        self._log = log
        self._step = step
        self._shield = Shield(
            "--dump",
            "it is off from here on, and the program goes on",
            on_failure=self._stop,
        )
        self._checks = PendingChecks(self._report)
        self._hooks = CallHooks(self._checks, self._shield, self._keep_late)
        self._search = FirstBadSearch(self._keep, step)
        self._packages = SuspectPackages(limit)
        self._dump = DumpWriter(place, log, rerun)
        self._why: tuple[int, str] | None = None
        self._before_steps = register_optimizer_step_pre_hook(self._before_update)

    # -- called by the watcher ---------------------------------------------------------------------

    def watch(
        self,
        module: nn.Module,
        label: Callable[[str], str],
        *,
        begun: bool = False,
    ) -> None:
        """Hook a root and all modules in it.

        Args:
            module: The root.
            label: Returns the path in the recording for a path in the module.
            begun: Whether its first call is active already, so that PyTorch does not run the new
                hooks for it.
        """
        if self._shield.off:
            return
        self._hooks.add(module, label)
        if begun:
            self._hooks.join(module, label(""))

    def step_ended(self, suspicious: bool) -> None:
        """Decide on the suspects if no PyTorch optimizer has, and write the chosen one.

        Args:
            suspicious: Whether the watcher saw a non-finite value in the step.
        """
        self._shield(self._settle, suspicious)
        self._end_step()

    def close(self) -> None:
        """Write the rest and remove every hook. To be called when the recording is complete."""
        self._shield(self._settle, True)
        self._end_step()
        if self._dump.give_up():
            self._note("no dump was written: there is no recording")
        elif self._why is not None:
            step, why = self._why
            self._note(f"no dump was written: {why}", step)
        elif not self._shield.off and has_compiled():
            self._note(
                "no dump was written: calls in compiled code cannot be kept; run again with "
                "TORCH_COMPILE_DISABLE=1 in the environment, which switches torch.compile off"
            )
        self._stop()
        self._before_steps.remove()

    def run_again(self) -> None:
        """Run the kept call once more to name its operations.

        To be called after the watcher has ended.
        """
        self._dump.run_again()

    # -- suspects ----------------------------------------------------------------------------------

    def _report(self, check: FinitenessCheck, kind: Bad) -> None:
        """Take a value or gradient that is not finite."""
        if check.where in ("in", "out"):
            self._search.saw_value(check.where, check.calls[0], kind, check.value)
            return
        if check.where == "out.grad":
            check.calls[0].gradients.finite = False
        self._search.saw_gradient(check.where, check.calls, kind, check.value, check.task)

    def _keep(self, suspect: SuspectCall) -> None:
        """Copy a suspect before anything changes; see Note [When it is decided]."""
        self._packages.keep_only(self._search.suspects)
        self._packages.add(suspect)

    def _keep_late(self, call: RecordedCall) -> None:
        for suspect in self._search.forward.values():
            if suspect.call is call and self._packages.of(suspect) is None and not suspect.why:
                self._keep(suspect)

    # -- deciding ----------------------------------------------------------------------------------

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with own_work():
            self._shield(self._settle, None, optimizer)

    def _settle(
        self,
        suspicious: bool | None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Decide on the suspects of a step; see Note [When it is decided]."""
        self._checks.read()
        if self._search.open:
            reached = bool(suspicious)
            if optimizer is not None:
                reached = _spoils(optimizer)
            chosen = self._search.choose(reached=reached)
            package = None
            if chosen is not None:
                package = self._packages.of(chosen)
            if package is not None:
                self._dump.choose(package, reached=reached)
                self._why = None
            elif chosen is not None:
                self._why = self._why or (chosen.step, chosen.why)
            # One is enough; with non-finite parameters no later value is the first.
            if package is not None or (chosen is not None and reached and optimizer is not None):
                self._stop()
                self._dump.write()
                return
            self._search.restart(sound=not reached)
            self._packages.keep_only(())
        self._hooks.release_differentiated()
        self._checks.forget()

    def _stop(self) -> None:
        """End the search and remove the hooks.

        The pre-hook of optimizers stays until the step has ended: this method may run inside it,
        while PyTorch iterates over all such hooks.
        """
        self._shield.off = True
        self._hooks.close()
        self._packages.keep_only(())
        self._checks.forget()
        self._search.restart(sound=False)

    def _end_step(self) -> None:
        if self._shield.off:
            self._before_steps.remove()
        self._dump.write()

    def _note(self, text: str, step: int | None = None) -> None:
        if step is None:
            step = self._step()
        self._log.event(NoteEvent(step=step, text=text))


class DumpWriter:
    """Writes the chosen call into the recording, as soon as this process writes to one.

    Args:
        place: Returns the folder of the recording; None as long as this process does not record
            into one.
        log: Receives the events.
        rerun: Returns the operations that made the value, given the folder of the dump.
    """

    def __init__(
        self,
        place: Callable[[], Path | None],
        log: EventLog,
        rerun: Callable[[Path], list[BadOperation]] | None = None,
    ) -> None:
        self._place = place
        self._log = log
        self._rerun = rerun
        self._chosen: tuple[CallPackage, bool] | None = None
        self._written: Path | None = None

    def choose(self, package: CallPackage, *, reached: bool) -> None:
        """Take the call to write.

        Args:
            package: The packed call.
            reached: Whether the optimizer was about to get non-finite gradients.
        """
        self._chosen = package, reached

    def write(self) -> None:
        """Write the chosen call, if there is one and the recording exists."""
        chosen = self._chosen
        if chosen is None:
            return
        folder = self._place()
        if folder is None:
            return
        self._chosen = None
        Shield("writing the dump", "there is none")(self._write, folder, *chosen)

    def give_up(self) -> bool:
        """Drop a chosen call that could not be written; returns whether there was one."""
        chosen = self._chosen
        self._chosen = None
        return chosen is not None

    def run_again(self) -> None:
        """Run the written call once more to name its operations."""
        if self._rerun is None or self._written is None:
            return
        made = self._rerun(self._written)
        if made:
            self._log.event(OperationsEvent(folder=self._written.name, operations=tuple(made)))

    def _write(self, folder: Path, package: CallPackage, reached: bool) -> None:
        name = f"dump-{package.step}"
        if rank():
            name += f"-{rank()}"
        package.write(folder / name)
        self._written = folder / name
        suspect = package.suspect
        module = None
        if suspect.call is not None:
            module = suspect.call.label
        self._log.event(
            DumpEvent(
                step=package.step,
                site=suspect.site,
                folder=name,
                module=module,
                value=suspect.value,
                direction=suspect.direction,
                reached=reached,
            )
        )


def _spoils(optimizer: Optimizer) -> bool:
    """Whether an optimizer is about to write non-finite values into the parameters."""
    # GradScaler sets this on an optimizer that skips by itself.
    skipped = getattr(optimizer, "found_inf", None)
    if isinstance(skipped, Tensor) and bool(skipped):
        return False
    for group in optimizer.param_groups:
        for param in group["params"]:
            gradient = param.grad
            if gradient is not None and not gradient.is_sparse and bad(gradient) is not None:
                return True
    return False
