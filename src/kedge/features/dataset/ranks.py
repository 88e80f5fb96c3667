"""The rank of this process in a distributed run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed

#: Seconds between two checks of the first rank whether the others have finished.
_PACE = 0.1


@dataclass(frozen=True)
class SharingRank:
    """One of several processes that share the work.

    Attributes:
        rank: The number of this process, from 0.
        world: The number of processes.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Self:
        """Return the rank from PyTorch, or else from the environment variables of torchrun; 0 of 1 without either."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
            return cls(int(rank), int(world))
        return cls()

    def takes(self, number: int) -> bool:
        """Whether the block with this number belongs to this process."""
        return number % self.world == self.rank


def wait_for_others(rank: SharingRank) -> bool:
    """At the first rank, wait until all ranks have called this; the others only record their call. Once per process.

    Under torchrun the ranks share a store in its agent, which ends all ranks if one fails, so the
    wait cannot last for ever. Other launchers have no such store.

    Args:
        rank: The rank of this process.

    Returns:
        Whether the ranks could communicate; if so, at the first rank all have called this.
    """
    if rank.world == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    attempt = (
        f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    )
    noted = [f"kedge/{attempt}/{number}" for number in range(rank.world)]
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(*place, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        store.set(noted[rank.rank], "through")
        while rank.rank == 0 and not store.check(noted):
            time.sleep(_PACE)
    except (KeyError, ValueError, RuntimeError):  # an unknown environment or store
        return False
    return True
