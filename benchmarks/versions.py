"""What hooks cost in two versions of Kedge: the same cases in two processes, in turns of a few ms.

Each version is a process of its own that has its hooks in place; a round gives each of them one
turn, in shuffled order, and times it by the processor's time of its thread. A machine that is
shared runs at half its speed for seconds at a time: ratios of neighbours and the best rounds hardly
see that. The native code of the other version must have been built into its `src`.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before/src [--rounds 150] [--only CASE,...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

HERE = Path(__file__).parents[1] / "src"
MODULES = 50
Turn = Callable[[], object]
Case = Callable[[], Iterator[Turn]]


class Fresh(nn.Module):
    """Returns a new tensor, so that what is measured was not measured already."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a view of the input."""
        return x.view_as(x)


class Gelus(nn.Module):
    """Operations inside of one forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply them, one after the other."""
        for _ in range(MODULES):
            x = F.gelu(x)
        return x


def passing(model: nn.Module, *hook: Any, graph: bool = False) -> Iterator[Turn]:
    """Yield a turn of three forward passes of a hooked model, with a backward if there is a graph."""
    import kedge  # noqa: PLC0415 - each process loads its own

    x = torch.randn(8, 8, requires_grad=graph)

    def turn() -> None:
        for _ in range(3):
            out = model(x)
            if graph:
                out.sum().backward()

    with kedge.hook(model, *hook):
        yield turn


def fresh() -> nn.Module:
    """Return many modules that compute nothing."""
    return nn.Sequential(*(Fresh() for _ in range(MODULES)))


def linears() -> nn.Module:
    """Return many small layers."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(MODULES)))


def record() -> Iterator[Turn]:
    """Keep outputs."""
    import kedge  # noqa: PLC0415

    yield from passing(fresh(), "*", kedge.record())


def measure() -> Iterator[Turn]:
    """Measure outputs."""
    import kedge  # noqa: PLC0415

    yield from passing(fresh(), "*", kedge.measure(keep=2))


def function() -> Iterator[Turn]:
    """Call a function of the user's with outputs."""
    yield from passing(fresh(), "*", lambda value: None)


def function_with_event() -> Iterator[Turn]:
    """Call a function of the user's with outputs and events."""
    yield from passing(fresh(), "*", lambda value, event: None)


def inputs() -> Iterator[Turn]:
    """Keep inputs."""
    import kedge  # noqa: PLC0415

    yield from passing(fresh(), "*:in", kedge.record())


def output_gradients() -> Iterator[Turn]:
    """Measure the gradients of outputs."""
    import kedge  # noqa: PLC0415

    yield from passing(fresh(), "*:out.grad", kedge.measure(keep=2), graph=True)


def edited_gradients() -> Iterator[Turn]:
    """Call a function of the user's with the gradients of outputs."""
    yield from passing(fresh(), "*:out.grad", lambda value: None, graph=True)


def parameter_gradients() -> Iterator[Turn]:
    """Measure the gradients of parameters."""
    import kedge  # noqa: PLC0415

    yield from passing(linears(), "**:param.grad", kedge.measure(keep=2), graph=True)


def one_parameter_gradient() -> Iterator[Turn]:
    """Measure the gradient of one parameter of many."""
    import kedge  # noqa: PLC0415

    yield from passing(linears(), "0.weight:param.grad", kedge.measure(keep=2), graph=True)


def clipped_parameter_gradients() -> Iterator[Turn]:
    """Edit the gradients of parameters."""
    import kedge  # noqa: PLC0415

    yield from passing(linears(), "**:param.grad", kedge.clamp(-1, 1), graph=True)


def operations() -> Iterator[Turn]:
    """Call a function of the user's with outputs of operations."""
    yield from passing(Gelus(), "/gelu", lambda value: None)


def measured_operations() -> Iterator[Turn]:
    """Measure outputs of operations."""
    import kedge  # noqa: PLC0415

    yield from passing(Gelus(), "/gelu", kedge.measure(keep=2))


def saved() -> Iterator[Turn]:
    """Keep every saved tensor by Kedge's hooks in place of autograd."""
    import kedge  # noqa: PLC0415

    model, x = linears(), torch.randn(8, 8, requires_grad=True)

    def turn() -> None:
        for _ in range(3):
            model(x).sum().backward()

    with kedge.offload(model, to=kedge.Rebuild()):
        yield turn


def sessions() -> Iterator[Turn]:
    """Enter and leave a block that hooks 200 modules."""
    import kedge  # noqa: PLC0415

    model, x = nn.Sequential(*(Fresh() for _ in range(200))), torch.randn(2)

    def turn() -> None:
        with kedge.hook(model, "*", kedge.measure()):
            model(x)

    yield turn


def watched(model: nn.Module, x: Tensor, steps: int) -> Iterator[Turn]:
    """Yield a turn of training steps that are watched, each of them in full."""
    import kedge  # noqa: PLC0415

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def turn() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with (
        tempfile.TemporaryDirectory() as folder,
        kedge.watch(Path(folder, "bench.kedge"), every=1, budget=None) as watching,
    ):
        watching.tell = None
        yield turn


def watched_mlp() -> Iterator[Turn]:
    """Steps of a small net."""
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    yield from watched(model, torch.randn(64, 64), 5)


def watched_transformer() -> Iterator[Turn]:
    """A step of twelve small blocks."""
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
    yield from watched(model, torch.randn(4, 16, 32), 1)


CASES: dict[str, Case] = {
    "record() of outputs": record,
    "record() of inputs": inputs,
    "measure() of outputs": measure,
    "function of the value": function,
    "function of value and event": function_with_event,
    "measure() at :out.grad": output_gradients,
    "function at :out.grad": edited_gradients,
    "measure() at :param.grad": parameter_gradients,
    "measure() at one :param.grad": one_parameter_gradient,
    "clamp at :param.grad": clipped_parameter_gradients,
    "function at /gelu": operations,
    "measure() at /gelu": measured_operations,
    "backward under offload": saved,
    "a session on 200 modules": sessions,
    "watched steps of an MLP": watched_mlp,
    "a watched step of 12 blocks": watched_transformer,
}


def serve(name: str) -> None:
    """Be one version's process: take a turn for each line of the input, and print its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.closing(CASES[name]()) as case:
        turn = next(case)
        for _ in sys.stdin:
            start = time.thread_time()
            turn()
            answers.write(f"{json.dumps(time.thread_time() - start)}\n")
            answers.flush()
        with contextlib.suppress(StopIteration):
            next(case)


def process(name: str, source: Path) -> subprocess.Popen[str]:
    """Return a process of one version."""
    words = [sys.executable, "-W", "ignore", __file__, "--serve", name]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def compare(name: str, sources: list[Path], rounds: int) -> list[list[float]]:
    """Return the seconds of each round of each version."""
    running = [process(name, source) for source in sources]
    times: list[list[float]] = [[] for _ in running]
    for round_ in range(rounds + 5):
        for i in random.sample(range(len(running)), len(running)):
            version = running[i]
            assert version.stdin  # noqa: S101 - a pipe, and so the next
            assert version.stdout  # noqa: S101
            version.stdin.write("\n")
            version.stdin.flush()
            seconds = json.loads(version.stdout.readline())
            if round_ >= 5:
                times[i].append(seconds)
    for version in running:
        version.communicate()
    return times


def main() -> None:
    """Print, for each case, the median of the paired ratios and the ratio of the best rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?", type=Path, help="the `src` of the other version")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    for name in args.only.split(","):
        before, now = compare(name, [args.before, HERE], args.rounds)
        pairs = sorted(b / a for a, b in zip(before, now, strict=True))
        quarter = len(pairs) // 4
        best = min(now) / min(before)
        spread = f"{pairs[quarter]:.2f}-{pairs[-1 - quarter]:.2f}"
        print(
            f"{name:30} median {statistics.median(pairs):5.3f} ({spread})  best {best:5.3f}"
            f"  of {min(before) * 1e3:.2f} ms",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
