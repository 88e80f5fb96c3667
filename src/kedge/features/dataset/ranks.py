"""Which process of a distributed run this is."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed

#: How often, in seconds, the first rank looks whether the others are through.
_PACE = 0.1


@dataclass(frozen=True)
class SharingRank:
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
        """Whether a block of this number is this process's part."""
        return number % self.world == self.rank


def wait_for_others(rank: SharingRank) -> bool:
    """Wait at the first rank until all have come here, once in a process; the others note that they have, and go on.

    Under torchrun the ranks share a store that its agent keeps, and where one fails all are ended, so that nobody waits
    for ever. Other launchers have nothing like it.

    Args:
        rank: Which process this is.

    Returns:
        Whether that could be told; at the first rank all have come here then.
    """
    if rank.world == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    noted = [f"kedge/{attempt}/{number}" for number in range(rank.world)]
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(*place, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        store.set(noted[rank.rank], "through")
        while rank.rank == 0 and not store.check(noted):
            time.sleep(_PACE)
    except (KeyError, ValueError, RuntimeError):  # its environment, or its store, is not as this one knows it
        return False
    return True
