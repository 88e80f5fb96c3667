"""The rates of the link to a store and back, measured by sending bytes."""

from __future__ import annotations

import mmap
import time

import torch

from kedge.offload.plan.tables import Link
from kedge.offload.stores.cpu import CpuStore
from kedge.offload.stores.store import FULL, Store
from kedge.torch_internals.accelerators import synchronize

_NBYTES = 64 << 20
_LEAST = 1 << 20
_ROUNDS = 2
"""The first round also pays for memory or a file that grows."""


def measured(store: Store, device: torch.device) -> Link | None:
    """Return the rates of a store, the faster of two rounds with 64 MB there and back.

    Fewer bytes are sent if there is no room for these.

    Args:
        store: The store.
        device: The device that the bytes come from.

    Returns:
        The link with its rates; None if there is no room now.
    """
    nbytes = _NBYTES
    rates = _rates(store, device, nbytes)
    while rates is None and nbytes > _LEAST:
        nbytes //= 4
        rates = _rates(store, device, nbytes)
    if rates is None:
        return None

    write = max(write for write, _ in rates)
    read = max(read for _, read in rates)
    if isinstance(store, CpuStore):
        return Link(store.name, write, read, overlaps=True, window=store.window)
    return Link(store.name, write, read)


def _rates(
    store: Store,
    device: torch.device,
    nbytes: int,
) -> list[tuple[float, float]] | None:
    """Return the rates of each round with so many bytes; None if there is no room for them."""
    try:
        data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return [_round(store, data) for _ in range(_ROUNDS)]
    except FULL:
        return None


def _round(store: Store, data: torch.Tensor) -> tuple[float, float]:
    begun = _now(data.device)
    slot = store.put(data)
    put = _now(data.device)
    try:
        back = slot.get()
        if data.device.type == "cpu":
            back[:: mmap.PAGESIZE].amax()  # mapped pages arrive when they are read
        got = _now(data.device)
    finally:
        slot.free()
    return back.numel() / (put - begun), back.numel() / (got - put)


def _now(device: torch.device) -> float:
    """Return the time after the device has finished its queued work, in seconds."""
    synchronize(device)
    return time.perf_counter()
