"""Forks of a program that are the ranks of one run, on the CPU or on the simulated device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.accelerator import process_group, sim


def run(world: int, device: str, work: Callable[[int], object]) -> list[int]:
    """Run work in each of so many ranks, in a folder of its own; returns what `os.wait` gives of each."""
    sys.stdout.flush()
    ranks = [os.fork() or _begin(rank, world, device, work) for rank in range(world)]
    return [os.waitpid(rank, 0)[1] for rank in ranks]


def load(device: str) -> str:
    """Load a device in this process; returns the name of its process group."""
    if device == "cpu":
        return "gloo"
    sim.load()
    process_group.register()
    return process_group.NAME


def _begin(rank: int, world: int, device: str, work: Callable[[int], object]) -> int:
    status = 1
    try:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT="29555"
        )
        group = load(device)
        if device != "cpu":
            torch.accelerator.set_device_index(rank % sim.DEVICES)
        dist.init_process_group(
            group, init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=world
        )
        work(rank)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type] # there is one
        sys.stdout.flush()
        os._exit(status)
