"""One call of a module that is to be recomputed, and its second run.

# Note [Guards]
A module that computes something else when it is run again gives a gradient of another forward, and
nothing fails. So before the second run the module's state is compared; see `ModuleState`. PyTorch
compares number, shapes and dtypes of the recomputed tensors. And in the first two forwards, and
then in one of some hundred, the output of the second run is compared with that of the first by
digests (Note [Digest] in `kedge.offload.held.raw_bytes`).

# Note [Where a second run ends]
It stops as soon as it has recomputed all that is needed. If its output is to be compared, it goes
on to the place where the checkpoint ended in the forward: before the hooks of the program on the
module's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError

from kedge.errors import KedgeError, RecomputedWrong
from kedge.offload.engine.policy import PlannedCall
from kedge.offload.held.raw_bytes import Digest, digest, is_comparable, plain
from kedge.offload.outcomes import ModuleAccount
from kedge.offload.recompute.inputs import CallInputs
from kedge.offload.recompute.state import EarlierCalls, ModuleState
from kedge.sites import leaves
from kedge.torch_internals.checkpoint import Stopped
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.own_work import own_work
from kedge.torch_internals.random_state import RandomState
from kedge.torch_internals.storages import identity_of

_KINDS = (Tensor, nn.Parameter, nn.Buffer)
_CHANGED = "modified by an inplace operation"
"""Of autograd's error for a saved tensor that was changed in place."""


class RecomputedCall:
    """One call of a module.

    Attributes:
        module: The module.
        path: Its path.
        row: Its row of the account.
        proven: Whether the output of the second run is compared.

    Args:
        inputs: The inputs.
        earlier: What earlier calls of the module tell.
        random: The states of Python's and NumPy's generators.
        again: A context in which the next call of the module is the second run of this one.
        planned: What was planned for it.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        inputs: CallInputs,
        earlier: EarlierCalls,
        random: RandomState,
        row: ModuleAccount,
        again: Callable[[RecomputedCall], AbstractContextManager[None]],
        planned: PlannedCall | None = None,
        *,
        proven: bool,
    ) -> None:
        self.module = module
        self.path = path
        self.proven = proven
        self._inputs = inputs
        self.row = row
        self._again = again
        self._planned = planned
        self._state = ModuleState(module, path, earlier, random, whole=proven)
        self._output: list[Digest | None] | None = None
        self._seen: dict[int, StorageWeakRef] = {}
        self._nbytes = 0
        own = _storages(self._state.tensors())
        given = _storages(inputs.tensors)
        self._resident = own.keys() | given.keys()
        self._given = sum(nbytes for number, nbytes in given.items() if number not in own)

    def is_around(self, module: nn.Module) -> bool:
        """Whether a module is the called one, or inside it."""
        return self._state.has(module)

    def devices_beside(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return an empty tensor on each device of the module on which none of its inputs is.

        PyTorch sets back the random generators of the devices of a checkpoint's inputs.
        """
        known = {tensor.device for tensor in tensors} | {torch.device("cpu"), torch.device("meta")}
        others = {tensor.device for tensor in self._state.tensors()} - known
        return [torch.empty(0, device=device) for device in others]

    def see(self, value: Tensor) -> None:
        """Called with each tensor that the call saves, and that is not kept."""
        if type(value) not in _KINDS or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        number = identity_of(storage)
        if number not in self._seen and number not in self._resident:
            # The reference keeps the number from being reused.
            self._seen[number] = StorageWeakRef(storage)
            self._nbytes += storage.nbytes()

    def end(self, output: Any, *, raised: bool) -> None:
        """Called when the call has ended.

        Raises:
            RecomputedWrong: The call cannot be run again.
        """
        self._seen = {}
        self._resident = set()
        if self._planned is not None:
            self._planned.end(self._nbytes, self._given)
        if raised:
            return
        if not in_backward():  # else it is a part of another second run
            self.row.recomputed(self._nbytes)
        self._inputs.end()
        self._state.end()
        if self.proven:
            self._output = _digests(output)

    def run(self, *tensors: Any) -> None:
        """Run the call again, given the tensors among its inputs."""
        with own_work():
            self._state.check()
        around: AbstractContextManager[None] = nullcontext()
        if self._planned is not None:
            around = self._planned.second_run()
        with (
            around,
            self._inputs.put_together(tensors) as (args, kwargs),
            self._again(self),
            self._state.in_place(),
        ):
            try:
                self.module(*args, **kwargs)
            except Exception as error:
                if not isinstance(error, (Stopped, KedgeError)):
                    error.add_note(
                        f'kedge.offload(recompute="{self.path}") ran this '
                        f"{type(self.module).__name__} again in backward, where it raised this; "
                        "if the forward did not, it depends on something that has changed since"
                    )
                raise

    def compare(self, output: Any) -> None:
        """Compare the output of the second run; see Note [Guards].

        Raises:
            RecomputedWrong: It differs.
        """
        if self._output is None:
            return
        found = _digests(output)
        alike = len(found) == len(self._output)
        for one, other in zip(self._output, found, strict=False):
            if one is None or other is None:
                continue
            alike = alike and all(map(torch.equal, one, other))
        if not alike:
            raise RecomputedWrong(
                f'recompute="{self.path}": this {type(self.module).__name__} gave another output '
                "when backward ran it again, so the gradient would be of another forward; "
                "it depends on something that is neither a parameter, a buffer, an attribute nor "
                "a random generator that Kedge sets back; leave it out of recompute="
            )

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise in place of PyTorch's, which does not name the module."""
        if isinstance(error, KedgeError):
            return error
        where = f'recompute="{self.path}"'
        if isinstance(error, CheckpointError):
            return RecomputedWrong(
                f"{where}: this {type(self.module).__name__} saved other tensors when backward "
                "ran it again, so its forward depends on something that has changed in between; "
                f"leave it out of recompute=. PyTorch says: {error}"
            )
        if _CHANGED not in str(error):
            return error
        name = self._inputs.changed()
        what = "an input" if name is None else f'the input "{name}"'
        return RecomputedWrong(
            f"{where}: {what} of this {type(self.module).__name__} was changed in place after the "
            "call had begun, by itself or later, so the call cannot be run again; "
            "change a copy instead, or leave the module out of recompute=; "
            "tensors that are moved, as with to=kedge.Disk(), may be changed"
        )

    def written(self) -> RuntimeError:
        """Return the error to raise for a tensor that the call changes in place after an operation has saved it."""
        return RecomputedWrong(
            f'recompute="{self.path}": the call of this {type(self.module).__name__} saves a tensor '
            "for its backward, and changes it in place later, so the gradient would be wrong; "
            "change a copy instead, or leave the module out of recompute="
        )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of some tensors, by its number."""
    found = {}
    for tensor in tensors:
        if type(tensor) in _KINDS and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[identity_of(storage)] = storage.nbytes()
    return found


def _digests(output: Any) -> list[Digest | None]:
    found: list[Digest | None] = []
    with torch.no_grad():
        for _, value in leaves.find(output):
            known = None
            strided = type(value) in _KINDS and value.layout is torch.strided
            if strided and is_comparable(value.device) and not value.is_quantized:
                known = digest(plain(value).contiguous(), alone=True)
            found.append(known)
    return found
