"""The bill of one forward: ``kedge.saved(model)(x)``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.errors import NoSuchKind
from kedge.hooks.placing.module_calls import ModuleCalls
from kedge.hooks.saved.keeper import keep
from kedge.offload.bill.bill import Bill, bill_of
from kedge.offload.bill.bill_keeper import LEAST, BillKeeper, Origins
from kedge.offload.bill.storage_numbers import StorageNumbers
from kedge.offload.rebuild import find
from kedge.sites import leaves
from kedge.sites.select import ModelLayout, runs
from kedge.torch_internals import dynamo
from kedge.torch_internals.kernels import keeping_versions
from kedge.torch_internals.module_tables import own_buffers, put_back


def saved(
    model: nn.Module, *, loss: Callable[[Any], Any] | None = None, backward: bool = False, min_bytes: int = LEAST
) -> Callable[..., Bill]:
    """A function that returns the bill of what autograd saves in one call of a model: ``print(kedge.saved(model)(x))``.

    The function calls the model once, as ``model(x)`` would, with gradients on, and keeps neither the output nor the graph.
    It restores random numbers, buffers such as BatchNorm's running statistics, and ``.grad``; a counter that a forward
    keeps in a plain attribute counts on. The model's own hooks run.

    Args:
        model: The model.
        loss: Called with the output, returns the loss; the bill then includes the tensors that the loss saves.
        backward: Whether to run the backward pass too, for `Bill.timeline`: from the loss, or else from all outputs.
            The gradients are dropped. Only with it does the bill know the peak, and the holders at the peak.
        min_bytes: The bytes of the smallest storage that counts as movable.

    Returns:
        A function that takes the model's arguments and returns the `Bill` of the tensors held at the end of the forward.

    Raises:
        NoSuchKind: The model is not a `torch.nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise NoSuchKind(
            "kedge.saved takes a torch.nn.Module, whose modules are the rows of the bill, not a "
            f"{type(model).__name__}; give the model, and the code after it as loss="
        )

    def bill_of_call(*args: Any, **kwargs: Any) -> Bill:
        return _BillOfCall(model, min_bytes).bill(lambda: model(*args, **kwargs), loss, backward=backward)

    return bill_of_call


class _BillOfCall:
    """One recording of one model."""

    def __init__(self, model: nn.Module, least: int) -> None:
        self.model, self.storages = model, StorageNumbers()
        self.spans = ModuleCalls(self.storages.of)
        self.keeper = BillKeeper(lambda: self.spans.innermost, self.storages, find, least, lambda: self.spans.around)

    def bill(self, call: Callable[[], Any], loss: Callable[[Any], Any] | None, *, backward: bool) -> Bill:
        """Return the bill of one call of the model."""
        before = self._owned()
        with _as_before(self.model), torch.inference_mode(mode=False), torch.enable_grad():
            made = self._forward(call, loss)
            self.keeper.walk(made)
            moment = len(self.keeper.timeline)
            parameters, buffers = (mine | now for mine, now in zip(before, self._owned(), strict=True))
            if backward:
                _back(made, self.model)
            del made
        origins = Origins(parameters, buffers, frozenset(self.spans.entered))
        return bill_of(self.keeper, self.spans.given, origins, moment)

    def _forward(self, call: Callable[[], Any], loss: Callable[[Any], Any] | None) -> list[Tensor]:
        model = dynamo.unwrap(self.model)
        layout = ModelLayout(model)
        paths = [p for p, m in layout.modules.items() if layout.first[id(m)] == p and runs(m)]
        with ExitStack() as stack:
            stack.callback(self.spans.close)
            self.spans.add(model, paths, str)
            keep(stack, self.model, self.keeper, ambient=True)
            output = call()
            if loss is not None:
                output = loss(output)
        return [tensor for _, tensor in leaves.find(output)]

    def _owned(self) -> tuple[frozenset[int], frozenset[int]]:
        return self.storages.of_all(self.model.parameters()), self.storages.of_all(self.model.buffers())


def _back(made: list[Tensor], model: nn.Module) -> None:
    """Run the backward pass, and drop the gradients."""
    roots = [tensor for tensor in made if tensor.requires_grad]
    wanted = [param for param in model.parameters() if param.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Context that restores random number generators and buffers at its end."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - models draw from it, not Kedge
    buffers = [(module, dict(own_buffers(module))) for module in model.modules()]
    values = {id(b): (b, b.detach().clone()) for _, own in buffers for b in own.values() if b is not None}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for module, own in buffers:
            put_back(module, own)
        for buffer, value in values.values():
            with torch.no_grad(), keeping_versions((buffer,)):
                buffer.copy_(value)
