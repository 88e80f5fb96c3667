"""The calls of modules, kept while their step lasts: their inputs, and the gradients of their outputs.

# Note [Kept without a copy]
The inputs of a call are kept as aliases, each with the version that its memory had then. A module that works in place
overwrites its own input; so does an addition in place right after it. The version shows this, and an overwritten input
is never used as the original. Once a module was seen to work in place, its inputs are copied.

# Note [Kept as long as its graph]
The hooks on the gradients of a call's outputs hold the call, and the graph holds the hooks: when the program drops the
graph without a backward, the call goes with it. After a backward has passed through it, a call releases its tensors at
once, as autograd does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.sites import leaves
from kedge.torch_internals.module_tables import own_buffers, own_parameters
from kedge.torch_internals.tensors import version_of

#: Most bytes of the buffers of a module that are copied before each call in training.
CHEAP = 1 << 20


class HeldTensor(NamedTuple):
    """An alias or copy of a tensor, with the version of its memory; see Note [Kept without a copy]."""

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
    kept = kept.clone() if copy else kept
    return HeldTensor(kept, version_of(kept), tensor.requires_grad)


class RecordedCall:
    """One call of one module.

    Attributes:
        began: Whether it was active already when its module was hooked.
        module: The module.
        label: Its path in the recording.
        number: Its number, in the order in which calls began.
        outer: The watched call that it was made in, if any.
        training: The module's flag.
        args: The arguments, by position and by name, with aliases in place of their tensors; None for a call
            that had begun before it was hooked.
        inputs: Those aliases by name, each with its version.
        buffers: Copies of the buffers of the module and of the modules inside, from before the call.
        versions: The versions of the module's own parameters.
        random: The state of the random number generators, by device.
        surroundings: Autocast and grad mode.
        grads: The gradients of the outputs that have arrived, by the output's name.
        entered_finite: Whether they were all finite.
        split: Whether its own share in the gradients of its inputs is checked separately.
        awaited: Names of the inputs and parameters whose gradients have not arrived yet.
    """

    def __init__(self, module: nn.Module, label: str, number: int, outer: RecordedCall | None) -> None:
        self.module, self.label, self.number, self.outer = module, label, number, outer
        self.training, self.began, self.split = module.training, False, False
        self.args: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self.inputs: dict[str, HeldTensor] = {}
        self.buffers: dict[tuple[int, str], Tensor] = {}
        self.versions = {name: version_of(p) for name, p in own_parameters(module).items() if p is not None}
        self.random: dict[str, Tensor] = {}
        self.surroundings = Surroundings.now()
        self.grads: dict[str, HeldTensor] = {}
        self.entered_finite = True
        self.awaited: set[str] = set()
        self._copy_buffers()

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, copy: bool = False) -> list[tuple[str, Tensor]]:
        """Keep the arguments; returns their tensors by name."""
        found = [*leaves.find(args, "args"), *leaves.find(kwargs, "kwargs")]
        self.inputs = {name: held(tensor, copy=copy) for name, tensor in found}
        aliases = {name: kept.tensor for name, kept in self.inputs.items()}
        self.args = leaves.put(args, aliases, "args"), leaves.put(kwargs, aliases, "kwargs")
        self.random = self.random or random_state(aliases.values())
        return found

    def outside(self) -> Iterator[RecordedCall]:
        """Yield the calls around this one, the nearest first."""
        call = self.outer
        while call is not None:
            yield call
            call = call.outer

    def changed(self) -> list[str]:
        """Return the names of overwritten inputs, and of the module's own overwritten parameters."""
        params = own_parameters(self.module)
        late = [n for n, v in self.versions.items() if (p := params.get(n)) is not None and version_of(p) != v]
        return [n for n, kept in self.inputs.items() if not kept.intact] + late

    def release(self) -> None:
        """Release every tensor."""
        self.args, self.inputs, self.buffers, self.random, self.grads = None, {}, {}, {}, {}

    def _copy_buffers(self) -> None:
        """Copy the module's own buffers if that is cheap: batch normalization changes them without a sign."""
        own = {n: b for n, b in own_buffers(self.module).items() if b is not None}
        if not (own and self.training) or sum(b.nbytes for b in own.values()) > CHEAP:
            return
        for name, buffer in own.items():
            copy = buffer.detach().clone()
            for call in (self, *self.outside()):
                call.buffers.setdefault((id(self.module), name), copy)


class Surroundings(NamedTuple):
    """The modes that a call's result depends on besides its arguments: autocast by device, and grad mode."""

    autocast: dict[str, torch.dtype]
    grad: bool

    @classmethod
    def now(cls) -> Surroundings:
        """Return the current modes."""
        devices = ("cpu", "cuda") if torch.is_autocast_enabled("cuda") else ("cpu",)
        return cls(
            {d: torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}, torch.is_grad_enabled()
        )


def random_state(tensors: Any) -> dict[str, Tensor]:
    """Return the state of the random number generators of the CPU and of the CUDA devices of some tensors."""
    states = {"cpu": torch.get_rng_state()}
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


class WatchedModule:
    """A module whose calls are checked, and those of its calls that still exist, held weakly; the newest last.

    Attributes:
        label: Its path in the recording.
        overwrites: Whether it was seen to change its inputs in place.
    """

    def __init__(self, label: str) -> None:
        self.label, self.overwrites = label, False
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
