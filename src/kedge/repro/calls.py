"""The calls of modules, kept while their step lasts: what went in, and what came back in backward.

# Note [Kept without a copy]
What went into a call is kept as an alias, with the version that its memory had then. A module that
works in place overwrites its own input; so does an addition in place right after it. The version
tells, and what was overwritten is never given out for what it was. The inputs of a module that was
seen to work in place are copied from then on.

# Note [Kept as long as its graph]
A call is held by the hooks on the gradients of its outputs, and so by their graph: when the program
drops the graph without a backward, the call goes with it. A backward that has passed through it
lets go of its tensors at once, as autograd does.
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

#: Buffers of a module that take no more than this are copied before each call in training.
CHEAP = 1 << 20


class HeldTensor(NamedTuple):
    """A tensor as it was; see Note [Kept without a copy]."""

    tensor: Tensor
    version: int
    graded: bool

    @property
    def intact(self) -> bool:
        """Whether its memory was left as it was."""
        return version_of(self.tensor) == self.version


def held(tensor: Tensor, *, copy: bool = False) -> HeldTensor:
    """Keep a tensor as it is now."""
    kept = tensor.detach()
    kept = kept.clone() if copy else kept
    return HeldTensor(kept, version_of(kept), tensor.requires_grad)


class RecordedCall:
    """One call of one module.

    Attributes:
        began: Whether it was under way already when the module came to be watched.
        module: The module.
        label: Its path in the recording.
        number: Calls are numbered in the order in which they began.
        outer: The call that it was made in, if that is watched.
        training: The module's flag.
        args: The arguments, by position and by name, with aliases in place of their tensors; None for a call
            that had begun before it could be seen.
        inputs: Those tensors by name, as they were.
        buffers: Copies of the module's own buffers, and of those of the modules inside, as they were before.
        versions: The versions of the module's own parameters.
        random: The state of the random numbers, by device.
        surroundings: Autocast and grad mode.
        grads: The gradients of the outputs that have arrived, by the output's name.
        entered_finite: Whether they were all finite.
        split: Whether what it adds to the gradients of its inputs is looked at by itself.
        awaited: Gradients of inputs and parameters that have not come yet.
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
        """Give the calls around this one, the nearest first."""
        call = self.outer
        while call is not None:
            yield call
            call = call.outer

    def changed(self) -> list[str]:
        """List what was overwritten since: inputs, and parameters of the module's own."""
        params = own_parameters(self.module)
        late = [n for n, v in self.versions.items() if (p := params.get(n)) is not None and version_of(p) != v]
        return [n for n, kept in self.inputs.items() if not kept.intact] + late

    def release(self) -> None:
        """Let go of every tensor."""
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
    """What a call's result depends on besides its arguments: autocast by device, and grad mode."""

    autocast: dict[str, torch.dtype]
    grad: bool

    @classmethod
    def now(cls) -> Surroundings:
        """Read them."""
        devices = ("cpu", "cuda") if torch.is_autocast_enabled("cuda") else ("cpu",)
        return cls(
            {d: torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}, torch.is_grad_enabled()
        )


def random_state(tensors: Any) -> dict[str, Tensor]:
    """Read the state of the random numbers, on the CPU and on the devices of some tensors."""
    states = {"cpu": torch.get_rng_state()}
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


class WatchedModule:
    """A module whose calls are looked at, and those of them that are still held, weakly; the newest last.

    Attributes:
        label: Its path in the recording.
        overwrites: Whether it was seen to work in place on what it was given.
    """

    def __init__(self, label: str) -> None:
        self.label, self.overwrites = label, False
        self._calls: list[weakref.ref[RecordedCall]] = []

    def add(self, call: RecordedCall) -> None:
        """Add one, and forget those that are gone."""
        self._calls = [ref for ref in self._calls if ref() is not None]
        self._calls.append(weakref.ref(call))

    def __iter__(self) -> Iterator[RecordedCall]:
        """Give those that are there, the newest first."""
        for ref in reversed(self._calls):
            call = ref()
            if call is not None:
                yield call
