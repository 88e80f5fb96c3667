"""What it costs to look at a whole training run: Kedge, what people use instead, and nothing.

Each run is a process of its own that trains one model from its first step to its last, watched from
before the first to after the last; imports, building and three steps to warm up come before, and
are not counted. In a round every variant runs once, all at the same time in turns of some 40 ms
(`turns.py`), and a variant's ratio is its time over that of the bare run in the same round;
"processor" is that ratio for the processor's time, that of other threads included.

    pip install wandb traceml-ai
    python benchmarks/rivals.py [--rounds 5] [--threads 1] [--models mlp,resnet,gpt] [--variants Kedge] [--length 1.0]

wandb runs offline. TraceML times the phases of a step and looks at no tensor: it does less. What is
not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

sys.path.insert(0, str(Path(__file__).parent))
import models
import turns

EVERY = 10
Made = tuple[nn.Module, Tensor, Tensor]


def mlp() -> Made:
    """Make a model whose step takes 0.3 ms."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return model, torch.randn(64, 64), torch.randint(0, 10, (64,))


MODELS: dict[str, tuple[str, Callable[[], Made], int, int]] = {
    "mlp": ("MLP, 3 layers, 64x64", mlp, 12_000, 100),
    "resnet": ("ResNet-18, 8x3x96x96", models.resnet, 210, 1),
    "gpt": ("GPT, 12 layers, 4x128", models.gpt, 205, 1),
}
"""What a model is called, how it is made, the steps of a run, and those of a turn."""


@dataclass
class Habit:
    """What a variant does in each step: around it, and between backward and the optimizer's step."""

    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    graded: Callable[[int], None] = field(default=lambda step: None)


Variant = Callable[[nn.Module, str], "contextlib.AbstractContextManager[Habit]"]


@contextlib.contextmanager
def bare(model: nn.Module, folder: str) -> Iterator[Habit]:
    """Nothing."""
    yield Habit()


@contextlib.contextmanager
def watched(model: nn.Module, folder: str) -> Iterator[Habit]:
    """Kedge, as it comes."""
    import kedge  # noqa: PLC0415 - each process loads what it measures

    with kedge.watch(f"{folder}/bench.kedge"):
        yield Habit()


@contextlib.contextmanager
def frugal(model: nn.Module, folder: str) -> Iterator[Habit]:
    """Kedge, with a third of what it may take otherwise."""
    import kedge  # noqa: PLC0415

    with kedge.watch(f"{folder}/bench.kedge", budget=0.01):
        yield Habit()


@contextlib.contextmanager
def unlimited(model: nn.Module, folder: str) -> Iterator[Habit]:
    """Kedge without a budget: one step in ten in full, all others checked, whatever it takes."""
    import kedge  # noqa: PLC0415

    with kedge.watch(f"{folder}/bench.kedge", budget=None):
        yield Habit()


@contextlib.contextmanager
def wandb_watch(model: nn.Module, folder: str) -> Iterator[Habit]:
    """`wandb.watch`: histograms of gradients and parameters of one step in ten; the run is begun before and ended after."""
    import wandb  # noqa: PLC0415

    run = wandb.run
    assert run is not None  # noqa: S101 - `prepare` began it
    run.watch(model, log="all", log_freq=EVERY)

    def graded(step: int) -> None:
        if step % EVERY == 0:
            run.log({"step": step})

    yield Habit(graded=graded)
    run.unwatch(model)


@contextlib.contextmanager
def gradient_norms(model: nn.Module, folder: str) -> Iterator[Habit]:
    """The norm of each parameter's gradient in each step, as Lightning's `grad_norm` takes it."""
    kept: list[dict[str, float]] = []

    def graded(step: int) -> None:
        norms = {
            name: p.grad.norm(2).item()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        kept.append({**norms, "total": torch.tensor(list(norms.values())).norm(2).item()})

    yield Habit(graded=graded)


@contextlib.contextmanager
def anomaly_mode(model: nn.Module, folder: str) -> Iterator[Habit]:
    """Autograd's anomaly mode, which finds the backward function that makes a NaN."""
    with torch.autograd.set_detect_anomaly(True):
        yield Habit()


@contextlib.contextmanager
def traceml(model: nn.Module, folder: str) -> Iterator[Habit]:
    """TraceML: the time of each phase of a step."""
    import traceml_ai  # noqa: PLC0415

    yield Habit(around=lambda: traceml_ai.trace_step(model))


VARIANTS: dict[str, tuple[Variant, str]] = {
    "bare": (bare, "torch"),
    "Kedge": (watched, "kedge"),
    "Kedge at 1 %": (frugal, "kedge"),
    "Kedge without a budget": (unlimited, "kedge"),
    "wandb.watch": (wandb_watch, "wandb"),
    "gradient norms by .item()": (gradient_norms, "torch"),
    "anomaly mode": (anomaly_mode, "torch"),
    "TraceML": (traceml, "traceml_ai"),
}


def train(
    made: Made,
    optimizer: torch.optim.Optimizer,
    steps: range,
    habit: Habit,
    turn: Callable[[int], None] = lambda s: None,
) -> float:
    """Train for some steps, telling of each before it; return the last loss."""
    model, x, y = made
    loss = torch.zeros(())
    for step in steps:
        turn(step)
        with habit.around():
            optimizer.zero_grad()
            logits = model(x)
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)
            loss.backward()
            habit.graded(step)
            optimizer.step()
    return loss.item()


def prepare(name: str, folder: str) -> None:
    """Import what a variant needs, and begin what it needs before anything is watched."""
    if name.startswith("Kedge"):
        import kedge  # noqa: PLC0415

        _ = kedge.watch  # names are loaded when they are first used
    if name == "wandb.watch":
        import wandb  # noqa: PLC0415

        wandb.init(
            mode="offline", dir=folder, project="bench", settings=wandb.Settings(silent=True)
        )
    if name == "TraceML":
        import traceml_ai  # noqa: PLC0415

        traceml_ai.init(mode="auto")


def work(name: str, model: str, steps: int, folder: str) -> None:
    """Be one run: write its seconds, those it computed, and its last loss into the folder."""
    turn = turns.Turn(folder)
    turn.take()
    prepare(name, folder)
    _, make, _, each = MODELS[model]
    made = make()
    optimizer = torch.optim.SGD(made[0].parameters(), 1e-3)
    train(made, optimizer, range(3), Habit())
    turn.pass_on()

    def tell(step: int) -> None:
        if step % each == 0 and step:
            turn.pass_on()

    start, computed = turn.clock(), time.process_time()
    with VARIANTS[name][0](made[0], folder) as habit:
        loss = train(made, optimizer, range(steps), habit, tell)
    result = {
        "seconds": turn.clock() - start,
        "computed": time.process_time() - computed,
        "loss": loss,
    }
    (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    turn.leave()


def begin(name: str, model: str, steps: int, threads: int, folder: str) -> subprocess.Popen[str]:
    """Start one run, which waits for its turn."""
    turns.make_pipes(folder)
    words = ["--work", name, model, str(steps), folder, "--threads", str(threads)]
    command = [sys.executable, __file__, *words]
    if name == "TraceML":
        launcher, port = str(Path(sys.executable).parent / "traceml"), str(free_port())
        command = [
            launcher,
            "run",
            "--aggregator-port",
            port,
            "--logs-dir",
            f"{folder}/logs",
            __file__,
            "--args",
            *words,
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with Path(f"{folder}/log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=log, text=True
        )


def measure(names: list[str], model: str, steps: int, threads: int) -> dict[str, dict[str, float]]:
    """Run each of some variants once, in turns; return what came out."""
    with tempfile.TemporaryDirectory() as top:
        folders = {name: tempfile.mkdtemp(dir=top) for name in names}
        runs = {
            name: begin(name, model, steps, threads, folder) for name, folder in folders.items()
        }

        def died(name: str) -> None:
            raise SystemExit(
                f"{name} on {model} ended early:\n{(Path(folders[name]) / 'log').read_text()}"
            )

        try:
            turns.conduct(runs, folders, died)
        finally:
            for run in runs.values():
                run.terminate()
                run.wait()
        return {
            name: json.loads((Path(f) / "result.json").read_text(encoding="utf-8"))
            for name, f in folders.items()
        }


def free_port() -> int:
    """Find a port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def compare(model: str, names: list[str], steps: int, args: argparse.Namespace) -> None:
    """Print the table of one model."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, result in measure(names, model, steps, args.threads).items():
            runs[name].append(result)
    plain = statistics.median(run["seconds"] for run in runs["bare"])
    print(
        f"\n{MODELS[model][0]}: {steps:,} bare steps {plain:.1f} s, {plain / steps * 1e3:.2f} ms a step, {args.rounds} rounds"
    )
    bits = {run["loss"] for run in runs["bare"]}
    for name in names[1:]:
        middle, low, high = ratio(runs[name], runs["bare"], "seconds")
        computed, _, _ = ratio(runs[name], runs["bare"], "computed")
        loss = "same loss" if {run["loss"] for run in runs[name]} == bits else "ANOTHER LOSS"
        print(
            f"  {name:26} {middle:6.3f} x bare   quartiles {low:.3f} {high:.3f}   processor {computed:.3f}   {loss}",
            flush=True,
        )


def ratio(
    runs: list[dict[str, float]], to: list[dict[str, float]], what: str
) -> tuple[float, float, float]:
    """Median and quartiles of the paired ratios."""
    pairs = sorted(a[what] / b[what] for a, b in zip(runs, to, strict=True))
    quarter = len(pairs) // 4
    return statistics.median(pairs), pairs[quarter], pairs[-1 - quarter]


def main() -> None:
    """Run the models that are asked for, or be one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="mlp,resnet,gpt")
    parser.add_argument(
        "--variants", help="which to run beside the bare one, separated by commas; all if not given"
    )
    parser.add_argument("--length", type=float, default=1.0, help="how long the runs are")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.work:
        name, model, steps, folder = args.work
        work(name, model, int(steps), folder)
        return
    random.seed(0)
    asked = {"bare", *args.variants.split(",")} if args.variants else set(VARIANTS)
    names = [
        n
        for n, (_, package) in VARIANTS.items()
        if n in asked and importlib.util.find_spec(package)
    ]
    print(f"torch {torch.__version__}, {args.threads} thread(s)")
    if len(names) < len(asked):
        print(f"not installed: {', '.join(sorted(asked - set(names)))}")
    for model in args.models.split(","):
        compare(model, names, max(1, round(MODELS[model][2] * args.length)), args)


if __name__ == "__main__":
    main()
