"""Which process of a distributed run this is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

import torch.distributed


@dataclass(frozen=True)
class Rank:
    """One of several processes that share the work.

    Attributes:
        rank: Which one, counted from 0.
        world: How many there are.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Self:
        """Ask PyTorch, or else the environment that torchrun sets."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
            return cls(int(rank), int(world))
        return cls()

    def takes(self, number: int) -> bool:
        """Tell whether a block of this number is this process's part."""
        return number % self.world == self.rank
