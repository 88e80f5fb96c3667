"""Takes over a program at its second training step: its models, batch, loss and optimizers.

# Note [Taking over]
The program runs as it would until an optimizer is about to take its second step. What an iteration
consists of has been seen by then: which models were called with what, how the loss was computed from
their outputs, which loader was read, which optimizers step. The weights are put back to those before
the first step, the trials are made, and the report is printed. Then the process ends, without the
program's own end: what it would do after its training is not done.

Since the program does not go on, this replaces functions of PyTorch: `torch.autograd.backward`,
which names the losses before their graphs are freed, `DataLoader.__iter__` and `torch.save`.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from kedge.examination.examination import Examination, examined
from kedge.examination.gradients import Gradients, held_by
from kedge.examination.loss_facts import LossFacts, facts_of
from kedge.examination.model_inputs import ModelInputs
from kedge.examination.result import Result
from kedge.examination.state import TrainingState, state_bytes
from kedge.examination.step import ExaminedStep, SeenTraining
from kedge.examination.steps import trials_of_steps, without_steps
from kedge.examination.tape import Tape, TapeWriter
from kedge.examination.trials import parameters
from kedge.examination.written_files import WrittenFiles
from kedge.hooks.placing.module_calls import given_to, running
from kedge.hooks.roots import free_name, unwrapped
from kedge.short_text import listed
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_tables import parameters_in
from kedge.torch_internals.source_lines import source_of
from kedge.watch.models.backward_start import BackwardStart, programs_line
from kedge.watch.models.optimizers import living
from kedge.watch.records.loss_scaling import LossScaling

MOST_MODELS = 4
"""Most models of a step that are examined."""
MOST_BLIND_STEPS = 3
"""Steps without a backward pass before after which none is waited for."""


@dataclass
class _Call:
    """The call of a model before the first backward pass that came after one.

    Attributes:
        model: The model.
        inputs: Copies of its inputs.
        is_final: Whether a backward pass has come.
        later: Copies of its inputs in the last call after a step of an optimizer; None before.
    """

    model: nn.Module
    inputs: ModelInputs
    is_final: bool = False
    later: ModelInputs | None = None


class Capture:
    """Takes over the program that runs in this process; see Note [Taking over].

    Args:
        skip: Names of trials to leave out.
        phase: The number, from 1, of the optimizer with whose steps the examined training begins.
        taken: Called when the program is taken over, before the trials.
        failed: Called with an error of the examination itself; it does not return.
        done: Called with the examination when all is done; it does not return.
    """

    def __init__(
        self,
        skip: Collection[str],
        phase: int,
        taken: Callable[[], None],
        failed: Callable[[Exception], None],
        done: Callable[[Examination], None],
    ) -> None:
        self._skip = skip
        self._phase = phase
        self._met: list[weakref.ref[Optimizer]] = []
        self._taken = taken
        self._failed = failed
        self._done = done
        self._over = False
        self._calls: dict[int, _Call] = {}
        self._losses: list[LossFacts] = []
        self._tape: Tape | None = None
        self._writer = TapeWriter()
        self._stepped: list[Optimizer] = []
        self._state = TrainingState()
        self._loader: Any = None
        self._gradients = Gradients()
        self._files = WrittenFiles()
        self._keeps_gradients = False
        self._is_due = False
        self._has_stepped = False
        self._blind_steps = 0

    def begin(self) -> None:
        """Follow the program; PyTorch has just been imported."""
        reporting = self._reporting
        register_module_forward_pre_hook(reporting(self._module_called))
        register_module_forward_hook(reporting(self._module_returned))
        register_optimizer_step_pre_hook(reporting(self._about_to_step))
        register_optimizer_step_post_hook(reporting(self._stepped_once))
        about_to_differentiate = reporting(self._about_to_differentiate)
        self._files.install()

        plain_backward: Any = torch.autograd.backward
        plain_grad: Any = torch.autograd.grad
        plain_iter: Any = DataLoader.__iter__

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._over:
                self._gradients.note_begin(self._stepped)
                about_to_differentiate(tensors, sys._getframe())  # noqa: SLF001
            result = plain_backward(tensors, *args, **kwargs)
            if not self._over:
                self._gradients.note_end(self._losses)
            if self._is_due:
                self._take_over()
            return result

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = inputs
            if isinstance(inputs, Tensor):
                wanted = (inputs,)
            wanted = tuple(wanted)
            is_of_training = any(isinstance(each, nn.Parameter) for each in wanted)
            if is_of_training and not self._over:
                about_to_differentiate(outputs, sys._getframe())  # noqa: SLF001
            return plain_grad(outputs, wanted, *args, **kwargs)

        def iterate(loader: Any) -> Any:
            self._loader = loader
            return plain_iter(loader)

        torch.autograd.backward = backward
        torch.autograd.grad = grad
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def conclude(self, *, failed: bool) -> Examination | None:
        """Return the examination at the end of a program that took no second step.

        Args:
            failed: Whether an error ended the program.

        Returns:
            The examination; None if no backward pass was seen, or an error came before a step.
        """
        if not self._losses and not self._blind_steps:
            return None
        if failed and not self._stepped:
            return None
        return self._examination()

    # -- what the program does ------------------------------------------------------------

    def _reporting(self, notice: Callable[..., None]) -> Callable[..., None]:
        """Return a function that ends the examination if it fails itself, and not with an error of the program."""

        def notice_safely(*args: Any) -> None:
            try:
                notice(*args)
            except Exception as error:  # noqa: BLE001 - told, and the process ends
                self._failed(error)

        return notice_safely

    def _module_called(self, module: nn.Module, _: Any) -> None:
        if not self._is_root_call(module):
            return
        given = given_to(module)
        if not given or not _has_parameters(module):
            return
        self._writer.pause(module)
        model = unwrapped(module)
        known = self._calls.get(id(model))
        if known is not None and known.is_final:
            if self._has_stepped:
                known.later = ModelInputs.of_call(model, *given).apart()
            return
        if any(param.requires_grad for param in parameters_in(model).values()):
            self._calls[id(model)] = _Call(model, ModelInputs.of_call(model, *given).apart())

    def _module_returned(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._is_root_call(module) and _has_parameters(module):
            self._writer.add_model(module, given_to(module), output)

    def _is_root_call(self, module: nn.Module) -> bool:
        if self._over or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if in_backward():
            return False  # a checkpoint runs it again
        around = running()
        return len(around) == 1 and around[0] is module

    def _about_to_differentiate(self, tensors: Any, frame: FrameType) -> None:
        given = tensors
        if isinstance(tensors, Tensor):
            given = (tensors,)
        losses = tuple(each for each in given if isinstance(each, Tensor) and each.requires_grad)
        tape = self._writer.end()
        if not losses:
            return
        self._gradients.passes += 1
        if not self._stepped and self._gradients.is_long:
            self._take_over()

        line = programs_line(frame)
        where = ""
        if line is not None:
            where = str(source_of(line))
        self._losses.append(facts_of(losses, where, tape))
        for call in self._calls.values():
            call.is_final = True
        self._state.keep([call.model for call in self._calls.values()], ())
        if tape is not None and self._tape is None:
            scale = LossScaling().scale(BackwardStart(losses, None, line))
            tape.end_at(losses, scale)
            self._tape = tape
            if scale is not None:
                self._gradients.scale = float(scale)

    def _about_to_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._over:
            return
        if not any(each() is optimizer for each in self._met):
            self._met.append(weakref.ref(optimizer))
        if any(each() is optimizer for each in self._met[: self._phase - 1]):
            self._forget()
        elif any(each is optimizer for each in self._stepped):
            self._keeps_gradients = self._gradients.are_kept(optimizer)
            if in_backward():  # a hook of the program steps there
                self._is_due = True
            else:
                self._take_over()
        elif not self._losses:
            self._note_blind_step(optimizer)
        else:
            self._stepped.append(optimizer)
            self._state.keep((), [optimizer])
            self._gradients.note_step(optimizer, self._losses)

    def _stepped_once(self, *_: Any) -> None:
        self._has_stepped = bool(self._stepped)

    def _note_blind_step(self, optimizer: Optimizer) -> None:
        """Note a step without a backward pass before; optimizers of PyTorch only step by gradients."""
        is_plain = type(optimizer).__module__.startswith("torch.optim.")
        if is_plain and all(param.grad is None for param in held_by([optimizer])):
            self._blind_steps += 1
        if self._blind_steps == MOST_BLIND_STEPS:
            self._take_over()

    def _forget(self) -> None:
        """Forget what an earlier training of the program has shown."""
        self._calls.clear()
        self._losses.clear()
        self._tape = None
        self._gradients = Gradients()
        self._state = TrainingState()
        self._has_stepped = False

    # -- the examination ------------------------------------------------------------------

    def _take_over(self) -> None:
        self._taken()
        self._done(self._examination())

    def _examination(self) -> Examination:
        self._over = True
        self._writer.close()
        self._files.saves = False
        calls = list(self._calls.values())[:MOST_MODELS]
        gc.collect()  # optimizers of an earlier training are held by themselves alone
        frozen = {id(call.model): self._changed_frozen(call.model) for call in calls}
        blind_steps = 0
        if not self._losses:
            blind_steps = self._blind_steps
        training = SeenTraining(
            optimizers=tuple(self._stepped),
            idle=tuple(each for each in living() if all(each is not s for s in self._stepped)),
            gradients=self._gradients,
            moved=any(self._state.has_changed(p) for c in calls for p in c.model.parameters()),
            state_bytes=state_bytes(self._stepped),
            keeps_gradients=self._keeps_gradients,
            unmoved=tuple(p for p in self._gradients.pushed if not self._state.has_changed(p)),
            reached=frozenset(key for facts in self._losses for key in facts.reached),
            blind_steps=blind_steps,
        )
        self._state.restore()

        steps: list[ExaminedStep] = []
        for call in calls:
            step = ExaminedStep(
                free_name(type(call.model).__name__, [each.name for each in steps]),
                call.model,
                call.inputs,
                loss=self._loss_of(call.model),
                training=training,
                others=[other.model for other in calls if other is not call],
                batch_size=_batch_size(self._loader),
                data=getattr(self._loader, "dataset", None),
                changed_frozen=frozen[id(call.model)],
                later=call.later,
            )
            if self._tape is not None:
                step.whole = self._tape.loss
            steps.append(step)
        results = [result for step in steps for result in examined(step, self._skip)]
        if not steps and self._losses:
            results += parameters.without_models(training, self._losses)
        results += self._by_steps(steps)
        names = [step.name for step in steps]

        notes: tuple[str, ...] = ()
        written = self._files.named()
        if written:
            notes = (f"the program has written: {listed(written, 4)}",)
        return Examination(tuple(names), tuple(results), notes)

    def _by_steps(self, steps: Sequence[ExaminedStep]) -> Iterator[Result]:
        if self._tape is not None and len(self._stepped) == 1:
            tape = self._tape
            samples = next((s.samples.count for s in steps if s.samples is not None), None)
            return trials_of_steps(
                self._stepped, self._state, tape.loss, tape.value, samples, self._skip
            )
        why = "it was not seen how the loss is computed from the model's output"
        if not self._stepped:
            why = "no optimizer has stepped"
        elif len(self._stepped) > 1:
            why = "there are several optimizers, whose losses may pull against each other"
        return without_steps(why, self._skip)

    def _loss_of(self, model: nn.Module) -> LossFacts | None:
        """Return what is known of the losses that reach a model, as one."""
        own = set(map(id, parameters_in(model).values()))
        reaching = [facts for facts in self._losses if not own.isdisjoint(facts.reached)]
        if not reaching:
            return None
        reached = {key: leaf for facts in reaching for key, leaf in facts.reached.items()}
        return replace(reaching[0], reached=reached)

    def _changed_frozen(self, model: nn.Module) -> list[str]:
        """Return the frozen parameters of a model that its first step has changed."""
        named = parameters_in(model).items()
        return [n for n, p in named if not p.requires_grad and self._state.has_changed(p)]


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module is a model; one without parameters is part of the loss."""
    return next(module.parameters(), None) is not None


def _batch_size(loader: Any) -> int | None:
    """Return how many samples a data loader puts into a batch; None if it does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size
