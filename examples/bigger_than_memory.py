"""Train a network that does not fit: bare, bare within a memory limit, and within the same limit with Kedge.

    python examples/bigger_than_memory.py

Each is a process of its own. The limit holds for what training takes: it is set when PyTorch is
loaded and the network is built (`RLIMIT_DATA`, what `ulimit -d` sets; Linux). The bare run fails in
it; the one with Kedge ends with the losses of the run that had all the memory it wanted, bit for
bit. In all three, the allocator gives freed memory back (`GIVE_BACK`, for glibc).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import kedge

BATCH, SIZE, WIDTH, DEPTH, STEPS = 128, 32, 32, 12, 3
LIMIT_MB = 240
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}


class Network(nn.Module):
    """Twelve convolutions at full resolution, each with batch normalization and a ReLU; gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(*(block() for _ in range(DEPTH)))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(images)).mean((2, 3)))


def block() -> nn.Module:
    """Return one of its blocks."""
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())


class Memory:
    """Takes down every 2 ms how much memory the process has, in MB beyond what it had before, while a block runs."""

    def __init__(self, before: float) -> None:
        self.points: list[tuple[float, float]] = []
        self._before, self._done = before, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        begun = time.perf_counter()
        while not self._done.wait(0.002):
            self.points.append((time.perf_counter() - begun, resident() - self._before))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def resident() -> float:
    """Return how much memory the process has, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def limit_memory(more: int) -> None:
    """Let this process have only so many MB of data more than it has now."""
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        has = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (has + more * 1_000_000,) * 2)


def train(*, spare: bool, limit: int) -> dict[str, Any]:
    """Train for some steps; return the losses, the memory over the last step, and what Kedge did with saved tensors."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16)[:BATCH, None]
    images, labels = (
        functional.interpolate(images, size=(SIZE, SIZE)),
        torch.from_numpy(digits.target)[:BATCH],
    )
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    functional.cross_entropy(
        model(images[:8]), labels[:8]
    ).backward()  # what PyTorch loads on first use is loaded
    losses, saved = [], {}
    with contextlib.ExitStack() as stack:
        before = resident()
        if limit:
            limit_memory(limit)
        if spare:
            account = stack.enter_context(kedge.offload(model, to=kedge.Disk()))
        for step in range(STEPS):
            with Memory(before) if step == STEPS - 1 else contextlib.nullcontext() as memory:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        if spare:
            saved |= {
                what: account.step.sum(what).bytes / 1e6 for what in ("kept", "rebuilt", "moved")
            }
    return {"losses": losses, "memory": memory.points if memory else [], "saved": saved}


def run(title: str, *options: str) -> dict[str, Any] | None:
    """Train in a process of its own and say how it went; None if memory did not suffice."""
    print(f"{title}:", flush=True)
    command = [sys.executable, __file__, "--train", *options]
    environment = os.environ | GIVE_BACK
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - this very script
    if done.returncode:
        print("  it does not fit", flush=True)
        return None
    result: dict[str, Any] = json.loads(done.stdout)
    print(f"  {STEPS} steps, at most {max(memory for _, memory in result['memory']):,.0f} MB")
    if result["saved"]:
        print(
            "  of what autograd saves in a step:",
            ", ".join(f"{x:,.0f} MB {what}" for what, x in result["saved"].items()),
        )
    return result


def main() -> None:
    """Run the three, one after the other, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--save", help="a JSON file for the memory over a step")
    args = parser.parse_args()
    if args.train:
        try:
            print(json.dumps(train(spare=args.spare, limit=args.limit)))
        except (RuntimeError, MemoryError) as error:
            sys.exit(f"  {str(error).splitlines()[0]}")
        return
    limit = "--limit", str(LIMIT_MB)
    free = run("all the memory it wants, without Kedge")
    bare = run(f"{LIMIT_MB} MB, without Kedge", *limit)
    spare = run(f"{LIMIT_MB} MB, with Kedge", *limit, "--spare")
    if free is None or spare is None:
        sys.exit(1)
    same = spare["losses"] == free["losses"]
    print(f"  losses {'equal, bit for bit' if same else 'DIFFER'}:", *spare["losses"])
    if args.save:
        measured = {"limit": LIMIT_MB, "bare": free["memory"], "kedge": spare["memory"]}
        Path(args.save).write_text(json.dumps(measured), encoding="utf-8")
    sys.exit(0 if same and bare is None else 1)


if __name__ == "__main__":
    main()
