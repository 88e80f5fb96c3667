"""The calls of modules, kept while their step lasts: their inputs, and the gradients of their outputs.

# Note [Kept without a copy]
The inputs of a call are kept as aliases, each with the version that its memory had then. A module
that works in place overwrites its own input; so does an addition in place right after it. The
version shows this, and an overwritten input is never used as the original. Once a module was seen
to work in place, its inputs are copied.

# Note [Kept as long as its graph]
The hooks on the gradients of a call's outputs hold the call, and the graph holds the hooks: when
the program drops the graph without a backward, the call goes with it. After a backward has passed
through it, a call releases its tensors at once, as autograd does.

# Note [Gathered parameters]
Under ``fully_shard`` the parameters of a module are whole on this rank only while it runs, forward
or backward: its own hooks gather them, and free them again. So a call of such a module ends before
those hooks, and sums that are not read yet are read then, and again in the backward, as soon as
gradients have reached the call's inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.sites import leaves
from kedge.sites.spread import gathers
from kedge.torch_internals import accelerators
from kedge.torch_internals.module_tables import own_buffers, own_parameters
from kedge.torch_internals.tensors import version_of

#: Most bytes of the buffers of a module that are copied before each call in training.
CHEAP = 1 << 20


class HeldTensor(NamedTuple):
    """An alias or copy of a tensor, with the version of its memory.

    See Note [Kept without a copy].
    """

    tensor: Tensor
    version: int
    graded: bool

    @property
    def intact(self) -> bool:
        """Whether its memory is unchanged."""
        return version_of(self.tensor) == self.version


def held(tensor: Tensor, *, copy: bool = False) -> HeldTensor:
    """Return an alias or copy of a tensor with its current version."""
    kept = tensor.detach()
    if copy:
        kept = kept.clone()
    return HeldTensor(kept, version_of(kept), tensor.requires_grad)


class Surroundings(NamedTuple):
    """The modes that a call's result depends on: autocast by device, and grad mode."""

    autocast: dict[str, torch.dtype]
    grad: bool

    @classmethod
    def now(cls) -> Surroundings:
        """Return the current modes."""
        return cls(accelerators.autocast(), torch.is_grad_enabled())


class CallState:
    """What the result of a call depends on, as it was when the call began.

    Attributes:
        args: The arguments, by position and by name, with aliases in place of their tensors; None
            for a call that had begun before it was hooked.
        inputs: Those aliases by name, each with its version.
        buffers: Copies of the buffers of the module and of the modules inside.
        versions: The versions of the module's own parameters.
        random: The state of the random number generators, by device.
        surroundings: Autocast and grad mode.
    """

    def __init__(self, module: nn.Module) -> None:
        self.args: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self.inputs: dict[str, HeldTensor] = {}
        self.buffers: dict[tuple[int, str], Tensor] = {}
        self.versions: dict[str, int] = {}
        for name, param in own_parameters(module).items():
            if param is not None:
                self.versions[name] = version_of(param)
        self.random: dict[str, Tensor] = {}
        self.surroundings = Surroundings.now()

    def take(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, copy: bool = False
    ) -> list[tuple[str, Tensor]]:
        """Keep the arguments; returns their tensors by name."""
        found = [*leaves.find(args, "args"), *leaves.find(kwargs, "kwargs")]
        self.inputs = {name: held(tensor, copy=copy) for name, tensor in found}
        aliases = {name: kept.tensor for name, kept in self.inputs.items()}
        self.args = leaves.put(args, aliases, "args"), leaves.put(kwargs, aliases, "kwargs")
        self.random = self.random or accelerators.generator_states()
        return found

    def release(self) -> None:
        """Release every tensor."""
        self.args = None
        self.inputs = {}
        self.buffers = {}
        self.random = {}

    @property
    def inputs_intact(self) -> bool:
        """Whether no input was overwritten."""
        return all(kept.intact for kept in self.inputs.values())


class CallGradients:
    """The gradients that pass through a call in a backward.

    Attributes:
        arrived: The gradients of the outputs that have arrived, by the output's name.
        finite: Whether they were all finite.
        awaited: Names of the inputs and parameters whose gradients have not arrived yet.
        by_edge: Whether the call's own share in the gradients of its inputs is checked, not the
            gradients themselves.
    """

    def __init__(self) -> None:
        self.arrived: dict[str, HeldTensor] = {}
        self.finite = True
        self.awaited: set[str] = set()
        self.by_edge = False

    @property
    def entered_finite(self) -> bool:
        """Whether gradients have entered the call's backward, all finite."""
        return bool(self.arrived) and self.finite

    @property
    def complete(self) -> bool:
        """Whether the backward has passed through the call."""
        return bool(self.arrived) and not self.awaited


class RecordedCall:
    """One call of one module.

    Attributes:
        module: The module.
        label: Its path in the recording.
        outer: The watched call that it was made in, if any.
        began: Whether it was active already when its module was hooked.
        gathers: Whether its parameters are whole only while it runs; see Note [Gathered
            parameters].
        state: The arguments, and all else that its result depends on.
        gradients: Those that pass through it in the backward.
    """

    def __init__(
        self,
        module: nn.Module,
        label: str,
        outer: RecordedCall | None,
    ) -> None:
        self.module = module
        self.label = label
        self.outer = outer
        self.began = False
        self.gathers = gathers(module)
        self.state = CallState(module)
        self.gradients = CallGradients()
        self._copy_buffers()

    def outside(self) -> Iterator[RecordedCall]:
        """Yield the calls around this one, the nearest first."""
        call = self.outer
        while call is not None:
            yield call
            call = call.outer

    def release(self) -> None:
        """Release every tensor."""
        self.state.release()
        self.gradients.arrived = {}

    def _copy_buffers(self) -> None:
        """Copy the module's own buffers if that is cheap.

        Batch normalization changes them without a sign. Those of a lazy module have no values
        before its first call.
        """
        if not self.module.training:
            return
        own = {}
        size = 0
        for name, buffer in own_buffers(self.module).items():
            if buffer is not None and not is_lazy(buffer):
                own[name] = buffer
                size += buffer.nbytes
        if size > CHEAP:
            return
        for name, buffer in own.items():
            copy = buffer.detach().clone()
            for call in (self, *self.outside()):
                call.state.buffers.setdefault((id(self.module), name), copy)


class WatchedModule:
    """A module whose calls are checked.

    It holds those of its calls that still exist weakly, the newest last.

    Attributes:
        label: Its path in the recording.
        overwrites: Whether it was seen to change its inputs in place.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.overwrites = False
        self._calls: list[weakref.ref[RecordedCall]] = []

    def add(self, call: RecordedCall) -> None:
        """Add a call, and drop calls that no longer exist."""
        self._calls = [ref for ref in self._calls if ref() is not None]
        self._calls.append(weakref.ref(call))

    def __iter__(self) -> Iterator[RecordedCall]:
        """Yield the calls that still exist, the newest first."""
        for ref in reversed(self._calls):
            call = ref()
            if call is not None:
                yield call
