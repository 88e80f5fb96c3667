"""One kept step, run again where the program stands: as it was, and with something different.

# Note [The same step]
Which statements of the program begin late enough, and which state of the random numbers was that
before them, is seen by trying: those that give the kept loss, to the bit. If none do, the step is
run all the same, and it is said that it is another one, and what it lacks. Between the backward
pass and the optimizer's step a program may change its gradients, as by clipping. That is not run
again; whether there was such a thing is seen if the pass after this one was kept, too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.errors import KedgeError
from kedge.replaying.program_again import ProgramAtPass
from kedge.replaying.put_back import KeptState, put_generators_back
from kedge.replaying.what_if import WhatIf
from kedge.repro.step.bad_operation import operation_of
from kedge.repro.step.program_lines import RanAgain, StatementsAgain
from kedge.repro.step.rows import Batch
from kedge.sites import leaves
from kedge.store.events import ProducerEvent
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.tensors import have_same_bits
from kedge.watch.kept.program_state import tensors_with_data


class CannotReplay(KedgeError):
    """The kept step cannot run again."""


@dataclass(frozen=True)
class StepOutcome:
    """What a step has come to.

    Attributes:
        loss: The loss; that of all tensors which the pass began at, without a scaler's factor.
        gradient: The norm of all gradients.
        loss_after: The loss of the same batch and random numbers after the optimizer's step; None
            if there was none.
        error: What ended it; None if nothing did.
    """

    loss: float | None = None
    gradient: float | None = None
    loss_after: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Replayed:
    """A kept step that ran again.

    Attributes:
        recorded: The loss in the recording.
        again: The step as it was.
        is_same: Whether its loss has the same bits.
        other: The step with something different; None if nothing is.
        lacking: What was kept and is not in the program, or the other way round, in words.
        stepped: The classes of the optimizers that step in it.
        leads_on: Whether the step leads to the parameters of the next kept pass; None if there is
            none.
        origin: The operation that made the loss or a gradient not finite; None if none did.
        needs_closure: Whether an optimizer was not stepped, because it calls the loss itself.
    """

    recorded: float
    again: StepOutcome
    is_same: bool
    other: StepOutcome | None
    lacking: Sequence[str]
    stepped: Sequence[str]
    leads_on: bool | None
    origin: ProducerEvent | None
    needs_closure: bool = False


@dataclass(frozen=True)
class _Start:
    """Where a step begins: its statements, the values that they take, and the random numbers before."""

    statements: StatementsAgain
    values: Mapping[str, Any]
    random_numbers: Mapping[str, Tensor]


Watching = Callable[[], AbstractContextManager[object]]


class StepReplay:
    """Runs a kept step again.

    Args:
        state: The state of the step, and the program's models.
        reached: The program at the backward pass.
        following: The kept pass after it, with its models' tensors; None if there is none.
    """

    def __init__(
        self,
        state: KeptState,
        reached: ProgramAtPass,
        following: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._state = state
        self._kept = state.kept
        self._reached = reached
        self._following = following
        stepped = [n for n, each in self._kept.optimizers.items() if each.stepped]
        self._stepping = [
            optimizer
            for name, optimizer in state.optimizers.items()
            if name in stepped or not stepped
        ]

    @property
    def needs_closure(self) -> bool:
        """Whether an optimizer calls the program's loss itself, as LBFGS does: then none steps."""
        return any(_needs_closure(each) for each in self._stepping)

    def run(self, what_if: WhatIf, watching: Watching = nullcontext) -> Replayed:
        """Run the step as it was, and then with something different.

        Args:
            what_if: What is different.
            watching: Returns the context in which the last one of these runs.

        Raises:
            CannotReplay: None of the statements comes to the backward pass.
        """
        start, is_same = self._start()
        if is_same and self._state.gradients:
            self._tell_apart_first_gradient(start)
        is_different = bool(str(what_if))
        around = nullcontext if is_different else watching
        again = self._outcome(start, WhatIf(), around)
        leads_on = None
        if is_same and again.error is None:
            leads_on = self._leads_on()
        origin = None
        if again.error is None and not self._is_finite(again):
            origin = self._origin(start)
        other = None
        if is_different:
            other = self._outcome(start, what_if, watching)
        lacking = [*self._state.lacking]
        if not is_same:
            left_out = [name.rpartition(".")[2] for name in self._kept.inputs.left_out]
            carried = sorted(start.statements.taken & start.statements.bound)
            lacking += [f"the variable {name}" for name in dict.fromkeys([*left_out, *carried])]
        return Replayed(
            _value(self._kept.losses) / self._kept.scale,
            again,
            is_same,
            other,
            lacking,
            [type(each).__name__ for each in self._stepping],
            leads_on,
            origin,
            self.needs_closure,
        )

    def _start(self) -> tuple[_Start, bool]:
        """Return where the step begins, and whether its loss is the kept one, to the bit."""
        first = None
        errors = []
        for given in self._reached.tries:
            statements = _without_graphs(given)
            random_numbers = self._kept.random_numbers or [{}]
            for states in random_numbers:
                start = _Start(statements, {}, states)
                try:
                    start, ran = self._ran(start)
                except Exception as error:  # noqa: BLE001 - of the program's lines, with values of another step
                    errors.append(error)
                    continue
                if ran is None or not any(loss.requires_grad for loss in ran.losses):
                    continue
                if _are_same(ran.losses, self._kept.losses):
                    return start, True
                first = first or start
        if first is not None:
            return first, False
        why = "none of them comes to the backward pass"
        if errors:
            # With few statements, a variable that others would give a value to is missing.
            found = [each for each in errors if not isinstance(each, NameError)] or errors
            why = f"{type(found[0]).__name__}: {found[0]}"
        raise CannotReplay(f"the lines of the step cannot run again: {why}")

    def _ran(self, start: _Start) -> tuple[_Start, RanAgain | None]:
        """Put everything back, and run the statements up to the backward pass."""
        self._state.put_back()
        values = self._kept.inputs.values_for(start.statements)
        start = replace(start, values=values)
        put_generators_back(start.random_numbers, self._kept.python_numbers)
        return start, start.statements.run(values)

    def _tell_apart_first_gradient(self, start: _Start) -> None:
        """Take the pass's own gradient off the one that had arrived when the gradients were kept.

        They are kept when the first gradient of the pass has just arrived; see
        Note [What is kept of a step] in `kedge.watch.kept.step_keeper`.
        """
        _, ran = self._ran(start)
        if ran is None:
            return
        arrived: list[str] = []
        handles = []
        for name, param in self._state.trained().items():
            param.grad = None
            note = partial(_append, arrived, name)
            handles.append(param.register_post_accumulate_grad_hook(note))
        self._reached.backward(ran.losses, ran.gradients)
        for handle in handles:
            handle.remove()
        if not arrived:
            return
        first = arrived[0]
        own = self._state.trained()[first].grad
        kept = self._state.gradients.pop(first, None)
        if own is None or kept is None:
            return
        before = kept - own.cpu()
        if not before.is_sparse:
            # The pass's own infinity comes again; from itself it would leave a NaN.
            before = before.where(before.isfinite(), 0)
        if before.any():
            self._state.gradients[first] = before

    # -- one step -----------------------------------------------------------------------

    def _outcome(self, start: _Start, what_if: WhatIf, watching: Watching) -> StepOutcome:
        try:
            return self._computed(start, what_if, watching)
        except Exception as error:  # noqa: BLE001 - of the program's lines; it is the result
            return StepOutcome(error=f"{type(error).__name__}: {error}")

    def _computed(self, start: _Start, what_if: WhatIf, watching: Watching) -> StepOutcome:
        self._state.put_back()
        values = self._changed(start, what_if)
        with watching():
            ran = self._forward(start, values, what_if)
            if ran is None:
                return StepOutcome(error="the lines did not come to the backward pass")
            loss = _value(ran.losses) / self._kept.scale
            self._reached.backward(ran.losses, ran.gradients)
            gradient = self._gradient_norm()
            self._step(what_if)
        if not self._stepping or self.needs_closure:
            return StepOutcome(loss, gradient)
        after = self._forward(start, values, what_if)
        loss_after = None
        if after is not None:
            loss_after = _value(after.losses) / self._kept.scale
        return StepOutcome(loss, gradient, loss_after)

    def _changed(self, start: _Start, what_if: WhatIf) -> dict[str, Any]:
        """Return the values that the statements take; in float64 the models become that, too."""
        values = {**self._kept.inputs.values_for(start.statements)}
        if what_if.without_rows:
            values |= self._without_rows(start.statements, values, what_if.without_rows)
        if what_if.double:
            self._state.widen()
            for name, value in values.items():
                wide = {at: t.double() for at, t in leaves.find(value) if t.is_floating_point()}
                values[name] = leaves.put(value, wide)
        if what_if.rate is not None:
            for optimizer in self._stepping:
                for group in optimizer.param_groups:
                    group["lr"] = what_if.rate
        return values

    def _without_rows(
        self, statements: StatementsAgain, values: Mapping[str, Any], rows: Sequence[int]
    ) -> dict[str, Any]:
        batch = Batch.of(replace(statements, names={**statements.names, **values}))
        if batch is None:
            raise CannotReplay("the lines of the step take no batch: nothing has rows")
        if max(rows) >= batch.length:
            raise CannotReplay(
                f"the batch has {batch.length} rows, from 0 to {batch.length - 1}; "
                f"there is no row {max(rows)}"
            )
        if set(rows) >= set(range(batch.length)):
            raise CannotReplay(f"none of the {batch.length} rows of the batch would be left")
        return batch.only([row for row in range(batch.length) if row not in rows])

    def _forward(
        self, start: _Start, values: Mapping[str, Any], what_if: WhatIf
    ) -> RanAgain | None:
        put_generators_back(start.random_numbers, self._kept.python_numbers)
        if what_if.seed is not None:
            torch.manual_seed(what_if.seed)
        with what_if.precision(self._device()):
            return start.statements.run(values)

    def _step(self, what_if: WhatIf) -> None:
        params = list(self._state.trained().values())
        if self._kept.scale != 1.0:
            for param in params:
                if param.grad is not None:
                    param.grad /= self._kept.scale
        if what_if.clip is not None:
            torch.nn.utils.clip_grad_norm_(params, what_if.clip)
        if not self.needs_closure:
            for optimizer in self._stepping:
                optimizer.step()

    def _gradient_norm(self) -> float:
        gradients = (param.grad for param in self._state.trained().values())
        squares = [float(each.double().square().sum()) for each in gradients if each is not None]
        return math.sqrt(math.fsum(squares)) / self._kept.scale

    def _device(self) -> str:
        return next((p.device.type for p in self._state.trained().values()), "cpu")

    # -- what was seen -------------------------------------------------------------------

    def _leads_on(self) -> bool | None:
        """Whether the models now have the parameters and buffers of the next kept pass."""
        steps = any(each.stepped for each in self._kept.optimizers.values())
        is_summed = any(each.is_sparse for each in self._state.gradients.values())
        if self.needs_closure or is_summed:
            return None  # a sparse gradient is kept summed, which rounds in another order
        if not (self._following and self._state.models and steps):
            return None
        for name, model in self._state.models.items():
            following = self._following.get(name, {})
            own = tensors_with_data(model)
            params = {at for at, value in own.items() if isinstance(value, nn.Parameter)}
            pairs = [(own[at].detach().cpu(), following[at]) for at in params & following.keys()]
            if not all(have_same_bits(*pair) for pair in pairs):
                return False
        return True

    @staticmethod
    def _is_finite(outcome: StepOutcome) -> bool:
        numbers = (outcome.loss, outcome.gradient)
        return all(number is None or math.isfinite(number) for number in numbers)

    def _origin(self, start: _Start) -> ProducerEvent | None:
        """Return the operation that made the loss, or a gradient, not finite."""
        self._state.put_back()
        values = self._kept.inputs.values_for(start.statements)
        put_generators_back(start.random_numbers, self._kept.python_numbers)
        statements = replace(start.statements, names={**start.statements.names, **values})
        paths = {
            module: path
            for model in self._state.models.values()
            for path, module in modules_in(model).items()
        }
        return operation_of(statements, paths)


def _value(losses: Sequence[Tensor]) -> float:
    return math.fsum(float(loss.detach().double().sum()) for loss in losses)


def _are_same(losses: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether losses have the bits of kept ones."""
    pairs = zip(losses, others, strict=False)
    same = [have_same_bits(one.detach().cpu(), other) for one, other in pairs]
    return len(losses) == len(others) and all(same)


def _without_graphs(statements: StatementsAgain) -> StatementsAgain:
    """Return statements that cannot take what the program has computed from parameters: that was another step."""
    names = {
        name: value
        for name, value in statements.names.items()
        if isinstance(value, nn.Module) or all(t.grad_fn is None for _, t in leaves.find(value))
    }
    return replace(statements, names=names)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer cannot step without a function that computes the loss."""
    given = inspect.signature(optimizer.step).parameters.get("closure")
    return given is not None and given.default is inspect.Parameter.empty


def _append(arrived: list[str], name: str, _: Tensor) -> None:
    arrived.append(name)
