"""A training that continues until it is told to stop, and reports how far it has come."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from tests.hook_tables import global_tables


class Training:
    """A small training with a seed of its own; its digest is that of all losses."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.steps, self.digest = 0, hashlib.sha256()

    def step(self, between=lambda: None):
        """Make one step; ``between`` is called when the backward pass is over."""
        inputs, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        between()
        self.optimizer.step()
        self.steps += 1
        self.digest.update(loss.detach().numpy().tobytes())


def digest_of(steps):
    """Return the digest of so many steps that nobody watches."""
    training = Training()
    for _ in range(steps):
        training.step()
    return training.digest.hexdigest()


def state():
    """Return what an attached watch may not leave behind: threads, open files, hooks for all modules and optimizers."""
    hooks = sum(map(len, global_tables().values()))
    return {
        "threads": threading.active_count(),
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "hooks": hooks,
    }


def main(folder, sleep):
    """Train until the file ``stop`` is there, or sleep that long first, and print the digest and what is left behind."""
    training, folder = Training(), Path(folder)
    for _ in range(3):
        training.step()
    before = state()
    (folder / "writing").write_text(str(os.getpid()))
    (folder / "writing").rename(folder / "pid")
    time.sleep(float(sleep))
    while not (folder / "stop").exists():
        training.step()
        time.sleep(0.003)
    own = [
        len(table)
        for m in training.model.modules()
        for name, table in vars(m).items()
        if name.endswith("hooks")
    ]
    own += [len(p._post_accumulate_grad_hooks or ()) for p in training.model.parameters()]
    told = {"steps": training.steps, "digest": training.digest.hexdigest()}
    sys.stdout.write(json.dumps({**told, "before": before, "after": state(), "own": sum(own)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
