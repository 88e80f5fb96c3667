"""Keeps steps of a run, so that they can run again later: a bad one, and the last ones where that is asked for.

# Note [What is kept of a step]
At a backward pass the parameters and the optimizers are as they were when its forward pass began, and the
variables of the program have the batch: see Note [What lines take] in `kedge.repro.kept.step_inputs`.
What the forward pass changes has to be copied before it: random numbers, buffers, and attributes (see
Note [Attributes that move] in `kedge.repro.kept.moving_attributes`). Where the last steps are kept, a
hook does so before each pass. A bad step is known when it is too late, so those attributes are
copied after every step, which takes microseconds; its buffers are those after its forward pass, and its
random numbers those of PyTorch after the step before. A tensor that has not changed since the last
kept pass is not copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kedge.files.atomic_write import new_folder
from kedge.repro.kept.kept_pass import KeptModel, KeptOptimizer, KeptPass
from kedge.repro.kept.moving_attributes import MovingAttributes, Values, put_attributes_back
from kedge.repro.kept.sources import write_sources
from kedge.repro.kept.step_inputs import LinesTaken
from kedge.repro.package import copy_on_cpu
from kedge.sites import leaves
from kedge.stderr import Shield
from kedge.store.events import KeptStepEvent
from kedge.torch_internals import dynamo
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.module_tables import buffers_in, modules_in, parameters_in
from kedge.torch_internals.random_numbers import RandomNumbers
from kedge.torch_internals.torchscript import is_training
from kedge.watch.kept.program_state import ProgramState, named_models
from kedge.watch.models.backward_start import BackwardStart, frame_below, taken_for
from kedge.watch.models.models import Models
from kedge.watch.models.optimizers import Optimizers

MOST_BAD = 2
"""Most bad steps of a run that are kept without being asked for."""
_LARGEST_BAD = 128 * 2**20
"""Most bytes of the tensors of one that is."""


@dataclass
class _Before:
    """What a forward pass changes, copied before it.

    Attributes:
        attributes: Plain attributes of modules that change from step to step.
        buffers: Buffers, by the identity of each; only where the last steps are kept.
        random_numbers: All random numbers; likewise.
    """

    attributes: Values
    buffers: dict[int, Tensor] = field(default_factory=dict)
    random_numbers: RandomNumbers | None = None


@dataclass
class _Held:
    """A pass that is kept, in memory.

    Attributes:
        kept: The pass, as if no optimizer had stepped after it.
        state: The models and optimizers.
        files: The names of the optimizers' files, by the identity of each.
        stepped: Those of the optimizers that have stepped after it.
    """

    kept: KeptPass
    state: ProgramState
    files: dict[int, str]
    stepped: set[str] = field(default_factory=set)

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.kept.step

    def write(self, recording: Path) -> KeptStepEvent:
        """Write it to a folder of the recording."""
        optimizers = {
            name: replace(each, stepped=name in self.stepped)
            for name, each in self.kept.optimizers.items()
        }
        with new_folder(recording / self.kept.folder) as place:
            self.state.write(place)
            replace(self.kept, optimizers=optimizers).write(place)
        return KeptStepEvent(step=self.step, folder=self.kept.folder)


class StepKeeper:
    """Keeps steps of a run; see Note [What is kept of a step].

    Args:
        models: The watched models.
        optimizers: The optimizers.
        after_last: Returns the state of PyTorch's random numbers after the last step; None if it
            is not known.

    Attributes:
        last: How many of the last steps are kept.
        bad: How many bad ones may yet be kept.
        place: Returns the recording; None as long as there is none.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Optimizers,
        after_last: Callable[[], Tensor | None],
    ) -> None:
        self.last = 0
        self.bad = 0
        self.place: Callable[[], Path | None] = _nowhere
        self._keeping = Shield("keeping a step", "the program goes on, and no more are kept")
        self._models = models
        self._optimizers = optimizers
        self._after_last = after_last
        self._lines = LinesTaken()
        self._attributes = MovingAttributes()
        self._before: _Before | None = None
        self._is_passed = True
        self._after_pass: tuple[int, dict[str, Tensor]] = (-1, {})
        self._held: list[_Held] = []
        self._wanted: list[_Held] = []

    def install(self) -> Iterator[RemovableHandle]:
        """Yield the handle of a hook on all modules, if the last steps are kept: it runs in every step."""
        if self.last:
            yield register_module_forward_pre_hook(self._module_called)

    def _module_called(self, module: nn.Module, _: Any) -> None:
        """Called before every call of a module; copies what the forward pass of a model will change."""
        if torch.compiler.is_compiling() or not (self._is_passed and torch.is_grad_enabled()):
            return
        if any(root.module() is module for root in self._models.roots):
            self._is_passed = False
            self._before = self._keeping(self._copied_before, learns=True)

    def passed(self) -> None:
        """Note that a backward pass has begun: the next forward pass is of another one."""
        self._is_passed = True

    def backward_began(self, at: BackwardStart, step: int, scale: Tensor | None) -> None:
        """Keep a pass that begins, if the last steps are kept.

        Args:
            at: The pass.
            step: The step.
            scale: What a `GradScaler` has multiplied the losses by; None without one.
        """
        if not self.last:
            return
        self._held = [each for each in self._held if each.step > step - self.last]
        held = self._keeping(self._copied, at, step, scale, began=True, is_bad=False)
        if held is not None:
            self._held.append(held)

    def keep_bad(self, at: BackwardStart, step: int, scale: Tensor | None, *, began: bool) -> None:
        """Keep a pass with a bad loss, or with bad gradients, if it is small.

        Args:
            at: The pass.
            step: The step.
            scale: As above.
            began: Whether it begins, so that its own gradients are not there yet.
        """
        if self.bad <= 0 or any(each.step == step for each in self._wanted):
            return
        held: _Held | None = None
        if self._held and self._held[-1].step == step:
            last = self._held.pop()
            held = replace(last, kept=replace(last.kept, is_bad=True))
        elif bool(at.tensors) and self._keeping(self._is_small):
            held = self._keeping(self._copied, at, step, scale, began=began, is_bad=True)
        if held is not None:
            self.bad -= 1
            self._wanted.append(held)

    def stepped(self, optimizer: Optimizer, *, measured: bool) -> None:
        """Note that an optimizer has stepped after the last pass, and copy what the next forward pass may change.

        Args:
            optimizer: The optimizer.
            measured: Whether the step is a measured one, with time to learn which attributes change.
        """
        self.passed()
        for held in (*self._held[-1:], *self._wanted[-1:]):
            name = held.files.get(id(optimizer))
            if name is not None:
                held.stepped.add(name)
        if self.bad > 0 and not self.last and (measured or self._attributes.have_moved):
            self._before = self._keeping(self._copied_before, learns=measured)

    def put_attributes_back(self) -> None:
        """Give the modules the attributes that they had before the current step; only for a copy of the process."""
        if self._before is not None:
            for name, module in named_models(self._models.roots):
                put_attributes_back(module, self._before.attributes.get(name, {}))

    def write(self, *, at_end: bool = False) -> list[KeptStepEvent]:
        """Write the bad steps, or at the end the last ones, too; returns an event for each pass.

        Nothing is written as long as there is no recording.
        """
        recording = self.place()
        if recording is None or not (self._wanted or (at_end and self._held)):
            return []
        return self._keeping(self._write, recording, at_end=at_end) or []

    def _write(self, recording: Path, *, at_end: bool) -> list[KeptStepEvent]:
        wanted, self._wanted = self._wanted, []
        if at_end:
            wanted += self._held
            self._held = []
        write_sources(recording)
        return [held.write(recording) for held in wanted]

    # -- copying ------------------------------------------------------------------------

    def _copied_before(self, *, learns: bool) -> _Before:
        if learns:
            self._attributes.learn(named_models(self._models.roots))
        attributes = self._attributes.values()
        if not self.last:
            return _Before(attributes)
        buffers = {
            id(value): copy_on_cpu(value)
            for _, module in named_models(self._models.roots)
            for value in buffers_in(module).values()
        }
        return _Before(attributes, buffers, RandomNumbers())

    def _copied(
        self, at: BackwardStart, step: int, scale: Tensor | None, *, began: bool, is_bad: bool
    ) -> _Held | None:
        """Return a pass with copies of all that it needs; None if its lines cannot run again."""
        frame = frame_below(at.frame)
        if (
            frame is None or taken_for()
        ):  # `torch.autograd.grad` is no pass that is waited for later
            return None
        inputs = self._lines.inputs_of(frame)
        if inputs is None:
            return None

        known = self._known_optimizers()
        earlier = None
        if self._held:
            earlier = self._held[-1].state
        state = ProgramState.now(self._models.roots, known, earlier)
        names = dict(zip(known, state.optimizers, strict=True))
        optimizers = {
            names[index]: KeptOptimizer(
                type(optimizer).__name__, stepped=False, entries=state.optimizers[names[index]][0]
            )
            for index, optimizer in known.items()
        }

        before = self._before or _Before({})
        state = state.with_buffers(self._models.roots, before.buffers)
        generators = [*self._between_steps(step)]
        python_numbers = None
        if before.random_numbers is not None:
            generators.insert(0, before.random_numbers.generators)
            python_numbers = before.random_numbers.entries()
        gradients = None
        if began:
            gradients = self._gradients()
        factor = 1.0
        if scale is not None:
            factor = float(scale)

        kept = KeptPass(
            step,
            sum(each.step == step for each in (*self._wanted, *self._held)),
            is_bad,
            inputs,
            [copy_on_cpu(loss) for loss in at.tensors],
            factor,
            self._modes(state, before.attributes),
            optimizers,
            gradients,
            generators,
            python_numbers,
        )
        return _Held(kept, state, {id(each): names[index] for index, each in known.items()})

    def _between_steps(self, step: int) -> Iterator[Mapping[str, Tensor]]:
        """Yield the random numbers that were there before the lines of a pass, which may draw some before they call a model.

        They are those after the pass before it in this step, or those after the last step.
        """
        at, after_pass = self._after_pass
        if self.last:
            self._after_pass = step, generator_states()
        if at == step:
            yield after_pass
        after_last = self._after_last()
        if after_last is not None:
            yield {"cpu": after_last}

    def _known_optimizers(self) -> dict[int, Optimizer]:
        """Return the optimizers that train, also those that have not stepped yet."""
        known = list(self._optimizers.known().values())
        if self._optimizers.leading is None:
            known += self._optimizers.waiting()
        return dict(enumerate({id(each): each for each in known}.values()))

    def _modes(self, state: ProgramState, attributes: Values) -> dict[str, KeptModel]:
        modes = {}
        for name, module in named_models(self._models.roots):
            if name in state.models:
                inside = modules_in(module).items()
                modes[name] = KeptModel(
                    type(module).__name__,
                    [path for path, each in inside if not is_training(each)],
                    [at for at, p in parameters_in(module).items() if not p.requires_grad],
                    attributes.get(name, {}),
                )
        return modes

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients in the models that are not zero when a pass has just begun.

        That is known when its first gradient has arrived, which is there, too.
        """
        return {
            f"{name}.{at}": _gradient_on_cpu(param.grad)
            for name, module in named_models(self._models.roots)
            for at, param in parameters_in(module).items()
            if param.grad is not None and bool(param.grad.any())
        }

    def _is_small(self) -> bool:
        """Whether all tensors are in the CPU's memory, and few enough to be kept without being asked for."""
        size = 0
        for _, module in named_models(self._models.roots):
            for value in (*parameters_in(module).values(), *buffers_in(module).values()):
                if not value.is_cpu:
                    return False
                size += value.nbytes
        for optimizer in self._known_optimizers().values():
            found = leaves.find(list(optimizer.state.values()))
            size += sum(value.nbytes for _, value in found)
        return size <= _LARGEST_BAD


def _gradient_on_cpu(gradient: Tensor) -> Tensor:
    """Return a copy of a gradient; one of an embedding may be sparse."""
    if gradient.is_sparse:
        return gradient.detach().to("cpu", copy=True).coalesce()
    return copy_on_cpu(gradient)


def _nowhere() -> None:
    """There is no recording."""


# Of a module that is compiled in place it is no part of the compiled code.
dynamo.untraced(StepKeeper._module_called)
