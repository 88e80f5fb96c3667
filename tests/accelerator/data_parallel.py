"""What `torch.nn.DataParallel` calls in C++, which PyTorch has in its CUDA build alone, and for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch


def provide() -> None:
    """Put these functions where `torch.nn.parallel.comm` looks for them."""
    torch._C._broadcast_coalesced = broadcast_coalesced
    torch._C._scatter = scatter
    torch._C._gather = gather


def on(index: int | None) -> torch.device:
    """Return the device of an index; -1 is the CPU."""
    return torch.device("cpu") if index == -1 else torch.device("sim", index)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], size: int
) -> list[list[torch.Tensor]]:
    """Copy tensors to each device; on their own they are themselves."""
    return [[t.to(on(index)) for t in tensors] for index in devices]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[Any] | None,
) -> list[torch.Tensor]:
    """Copy a part of a tensor to each device, each in its stream if there are streams."""
    parts = tensor.split(list(sizes), dim) if sizes is not None else tensor.chunk(len(devices), dim)
    copies = []
    for number, (part, index) in enumerate(zip(parts, devices, strict=False)):
        with (
            contextlib.nullcontext()
            if streams is None or streams[number] is None
            else streams[number]
        ):
            copies.append(part.contiguous().to(on(index), non_blocking=True))
    return copies


def gather(tensors: Sequence[torch.Tensor], dim: int, index: int | None) -> torch.Tensor:
    """Put tensors of several devices together on one."""
    return torch.cat([t.to(on(index)) for t in tensors], dim)
