"""An engine with a store in memory, which tells what was put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kedge.hooks.placing.module_calls import hear
from kedge.hooks.saved.keeper import keep
from kedge.offload.engine.engine import Engine
from kedge.offload.engine.policy import Policy


class Shelved:
    """Bytes in memory."""

    def __init__(self, shelf: Shelf, data: Tensor) -> None:
        self.nbytes = data.nbytes
        self._shelf, self._data = shelf, data.clone()
        self.freed = 0

    def get(self) -> Tensor:
        self._shelf.gets += 1
        if self._shelf.unreadable:
            raise OSError("the shelf cannot be read")
        assert not self.freed
        return self._data.clone()

    def prefetch(self) -> None:
        self._shelf.wants += 1

    def free(self) -> None:
        self.freed += 1
        self._shelf.freed += 1


class Shelf:
    """A store that copies what it is given."""

    name = "shelf"

    def __init__(self, *, full: type[BaseException] | None = None) -> None:
        self.slots: list[Shelved] = []
        self.gets = self.wants = self.freed = 0
        self.full, self.unreadable = full, False

    def takes(self, device: torch.device) -> bool:
        return True

    def put(self, data: Tensor) -> Shelved:
        assert data.dtype is torch.uint8
        assert data.dim() == 1
        assert data.is_contiguous()
        assert not data.requires_grad
        if self.full is not None:
            raise self.full("the shelf is full")
        self.slots.append(Shelved(self, data))
        return self.slots[-1]

    def close(self) -> None:
        """Nothing is held."""

    @property
    def sizes(self) -> list[int]:
        return [slot.nbytes for slot in self.slots]


@contextmanager
def engaged(
    model: nn.Module | None = None, shelf: Shelf | None = None, **policy: Any
) -> Iterator[Engine]:
    """Put an engine in force that takes tensors of any size."""
    model = nn.Identity() if model is None else model
    engine = Engine(Policy(**{"least": 0, "store": shelf} | policy), model)
    with ExitStack() as stack:
        hear(stack, model, engine.begin)
        keep(stack, model, engine, ambient=True)
        yield engine


class Save(torch.autograd.Function):
    """Saves a tensor, and gives its values away as a gradient."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None
