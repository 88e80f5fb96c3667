"""What watching costs: training steps side by side in one run, medians of paired ratios.

Each round runs one step of every variant in a shuffled order; a variant's ratio in a round is its
time over that of what it is compared with in the same round. Machines drift, ratios of neighbours
do not.

    python benchmarks/overhead.py [--rounds 30] [--threads 1] [--only value,small,steps,event,run,modules,printed]

With an accelerator, and with ``--import MODULE:FUNCTION`` on one that a function registers, a
measured value is also one of the device: then it is the host's time that is printed, the
processor's time of the thread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kedge

sys.path.insert(0, str(Path(__file__).parent))
import models

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"
Variant = Callable[[nn.Module], "contextlib.AbstractContextManager[Any]"]


def bare(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Nothing."""
    return contextlib.nullcontext()


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold no other."""
    return {name: m for name, m in model.named_modules() if not list(m.children()) and name}


def selector(model: nn.Module, kind: str = "out") -> str:
    """Those modules, as a selector."""
    return ", ".join(f"{name}:{kind}" for name in leaves(model))


def off_schedule(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Hooks attached everywhere, none on schedule."""
    return kedge.hook(model, "**:out, **:out.grad", kedge.measure(), when=kedge.at(10**9))


@contextlib.contextmanager
def by_hand(model: nn.Module) -> Iterator[None]:
    """What people write: a forward hook that puts the detached output into a dict."""
    kept: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kept[name] = output.detach()

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in leaves(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recording(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Kedge recording every leaf module's output."""
    return kedge.hook(model, selector(model), kedge.record())


@contextlib.contextmanager
def norms_by_hand(model: nn.Module) -> Iterator[None]:
    """Norms of each leaf module's output and output gradient, by hand, one copy a step."""
    norms: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        norms.append(torch.linalg.vector_norm(output.detach()))
        if output.requires_grad:
            output.register_hook(lambda g: norms.append(torch.linalg.vector_norm(g)))

    def flush(module: nn.Module, args: Any) -> None:
        if norms:
            torch.stack(norms).tolist()
            norms.clear()

    handles = [m.register_forward_hook(hook) for m in leaves(model).values()]
    handles.append(model.register_forward_pre_hook(flush))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def norms_by_item(model: nn.Module) -> Iterator[None]:
    """Norms of the same values, each fetched by itself with ``.item()``, as people write it."""
    norms: list[float] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        norms.append(output.detach().norm().item())
        if output.requires_grad:
            output.register_hook(lambda g: norms.append(g.norm().item()))

    handles = [m.register_forward_hook(hook) for m in leaves(model).values()]
    handles.append(model.register_forward_pre_hook(lambda module, args: norms.clear()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def wandb_watch(model: nn.Module) -> Iterator[None]:
    """``wandb.watch`` of gradients and parameters in every step, into a run that goes nowhere."""
    import wandb  # noqa: PLC0415 - not everybody has it

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="disabled", dir=folder)
        run.watch(model, log="all", log_freq=1)
        try:
            yield
        finally:
            run.unwatch(model)
            run.finish()


def norms(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Kedge measuring the norm of every output and output gradient at every step."""
    return kedge.hook(model, "**:out, **:out.grad", kedge.measure("norm"))


def full(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Kedge measuring the full statistics of every output and output gradient at every step."""
    return kedge.hook(model, "**:out, **:out.grad", kedge.measure())


STEPS: list[tuple[str, Variant, str, float]] = [
    ("attached, off schedule", off_schedule, "bare", 1.01),
    ("recording by hand", by_hand, "bare", 0),
    ("recording, Kedge", recording, "recording by hand", 1.03),
    ("norms by hand", norms_by_hand, "bare", 0),
    ("norms by .item()", norms_by_item, "bare", 0),
    ("norms, Kedge", norms, "bare", 1.03),
    ("full statistics, Kedge", full, "bare", 1.05),
]
if importlib.util.find_spec("wandb") is not None:
    STEPS.append(("wandb.watch(log='all')", wandb_watch, "bare", 0))


class Runner:
    """One variant on its own copy of a model, hooks in place."""

    def __init__(self, make: Callable[[], Any], variant: Variant) -> None:
        self.model, self.x, self.y = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.block = variant(self.model)
        self.block.__enter__()

    def step(self) -> float:
        """Take one step; return its seconds."""
        start = time.perf_counter()
        models.step(self.model, self.x, self.y, self.optimizer)
        return time.perf_counter() - start

    def close(self) -> None:
        """Remove the hooks without a report: what is off schedule never fires, and is meant to."""
        session = getattr(self.block, "session", None)
        session.end(quiet=True) if session else self.block.__exit__(None, None, None)


def compare(make: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Time every variant, one step each a round, in shuffled order."""
    runners = {"bare": Runner(make, bare)} | {name: Runner(make, v) for name, v, _, _ in STEPS}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(rounds + 3):
        for name in random.sample(list(runners), len(runners)):
            seconds = runners[name].step()
            if round_ >= 3:
                times[name].append(seconds)
    for runner in runners.values():
        runner.close()
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> tuple[float, float, float]:
    """Median and quartiles of the paired ratios."""
    pairs = sorted(a / b for a, b in zip(times[name], times[to], strict=True))
    quarter = len(pairs) // 4
    return statistics.median(pairs), pairs[quarter], pairs[-1 - quarter]


def steps(rounds: int) -> None:
    """Print the table of training steps."""
    for title, make in (
        ("ResNet-18, 8x3x96x96", models.resnet),
        ("GPT, 12 layers, 4x128", models.gpt),
    ):
        times = compare(make, rounds)
        print(
            f"\n{title}: bare step {statistics.median(times['bare']) * 1e3:.1f} ms, {rounds} rounds"
        )
        for name, _, to, target in STEPS:
            median, low, high = ratio(times, name, to)
            goal = f"  (to reach {target:.2f})" if target else ""
            print(f"  {name:26} {median:6.3f} x {to:18} quartiles {low:.3f} {high:.3f}{goal}")


def event(rounds: int) -> None:
    """Print the Python cost of one event over an empty PyTorch hook."""
    x, passes, modules = torch.zeros(4), 100, 100

    def seconds(attach: Callable[[nn.Module], Any]) -> float:
        model = nn.Sequential(*(nn.Identity() for _ in range(modules)))
        handles = attach(model)
        for _ in range(passes // 4):
            model(x)
        start = time.perf_counter()
        for _ in range(passes):
            model(x)
        spent = time.perf_counter() - start
        for handle in handles:
            handle.remove()
        return spent / (passes * modules) * 1e6

    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "empty PyTorch hook": lambda m: [c.register_forward_hook(lambda *_: None) for c in m],
        "Kedge, empty action (value)": lambda m: [kedge.hook(m, "*", lambda _: None)],
        "Kedge, empty action (value, event)": lambda m: [kedge.hook(m, "*", lambda _, event: None)],
        "Kedge, record()": lambda m: [kedge.hook(m, "*", kedge.record())],
        "by hand: d[name] = out.detach()": lambda m: [
            c.register_forward_hook(_detaching({})) for c in m
        ],
    }
    times = {name: [seconds(attach) for _ in range(rounds)] for name, attach in kinds.items()}
    empty = statistics.median(times["empty PyTorch hook"])
    print("\none event, microseconds over an empty PyTorch hook (to reach 3 for the empty action)")
    for name, each in times.items():
        print(f"  {name:36} {statistics.median(each) - empty:6.2f}")


class _Fresh(nn.Module):
    """Returns a new tensor, so that what is measured was not measured already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def value(rounds: int, device: str = "cpu") -> None:
    """Print what a measured value costs over an empty PyTorch hook: 64 x 32 numbers, statistics in full."""
    modules, passes = 100, 30
    clock = time.perf_counter if device == "cpu" else time.thread_time
    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "no hook": lambda m: [],
        "empty PyTorch hook": lambda m: [c.register_forward_hook(lambda *_: None) for c in m],
        "Kedge, measure()": lambda m: [kedge.hook(m, "*", kedge.measure(keep=2))],
        "Kedge, measure('norm')": lambda m: [kedge.hook(m, "*", kedge.measure("norm", keep=2))],
        "by hand, five statistics": lambda m: [
            c.register_forward_hook(_five_statistics) for c in m
        ],
    }
    running = {name: nn.Sequential(*(_Fresh() for _ in range(modules))) for name in kinds}
    handles = [handle for name, model in running.items() for handle in kinds[name](model)]
    x, times = torch.randn(64, 32).to(device), {name: [] for name in kinds}
    for _ in range(rounds):
        for name in random.sample(list(kinds), len(kinds)):
            spent = 0.0
            for _ in range(passes):
                start = clock()
                running[name](x)
                spent += clock() - start
                if device != "cpu":
                    torch.accelerator.synchronize()
            times[name].append(spent / (passes * modules) * 1e6)
    for handle in handles:
        handle.remove()
    print(
        f"\na measured value on {device}, microseconds over an empty PyTorch hook, "
        "end of the step included (to reach 8)"
    )
    for name, each in times.items():
        over = sorted(a - b for a, b in zip(each, times["empty PyTorch hook"], strict=True))
        best = min(each) - min(times["empty PyTorch hook"])
        print(f"  {name:36} median {statistics.median(over):6.2f}  of the best rounds {best:6.2f}")


def _five_statistics(module: nn.Module, args: Any, output: Any) -> None:
    (
        output.detach().sum(),
        output.detach().norm(),
        output.min(),
        output.max(),
        output.count_nonzero(),
    )


def small(rounds: int) -> None:
    """Print what full steps of a small model cost: ten sigmoid layers, 133 sites."""
    times: dict[str, list[float]] = {"bare": [], "watched": []}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(rounds):
            times["bare"].append(_starved())
            with kedge.watch(Path(folder) / f"{round_}.kedge", every=1, budget=None) as watched:
                watched.tell = None
                times["watched"].append(_starved())
    median, low, high = ratio(times, "watched", "bare")
    best = min(times["watched"]) / min(times["bare"])
    print(
        f"\nten sigmoid layers, every step in full: bare {min(times['bare']) * 1e3:.2f} ms, {rounds} rounds (to reach 3)"
    )
    print(
        f"  watched  median {median:6.3f}  quartiles {low:.3f} {high:.3f}  of the best rounds {best:.3f}"
    )


def _starved(steps: int = 120) -> float:
    """Train for some steps; returns the seconds of the median step."""
    hidden = [layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.Sigmoid())]
    model = nn.Sequential(*hidden, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(512, 32), torch.randint(0, 4, (512,))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        batch = torch.randint(0, 512, (64,))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[steps // 6 :])


def _detaching(kept: dict[str, Any]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept["0"] = output.detach()

    return hook


def run(rounds: int) -> None:
    """Print what `kedge run` of the example costs against `python`, whole processes in turn."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "bench.kedge")
        commands = {
            "python": [sys.executable, str(EXAMPLE)],
            "kedge run": [
                sys.executable,
                "-m",
                "kedge",
                "run",
                "-q",
                "--force",
                "-o",
                out,
                str(EXAMPLE),
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.perf_counter() - start)
    median, low, high = ratio(times, "kedge run", "python")
    plain = statistics.median(times["python"])
    print(f"\nexamples/digits.py, whole process: python {plain:.1f} s, {rounds} rounds")
    print(
        f"  kedge run                  {median:6.3f} x python             quartiles {low:.3f} {high:.3f}  (to reach 1.10)"
    )


MANY = """
import sys, torch
from torch import nn
torch.manual_seed(0)
sys.setrecursionlimit(100_000)
model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(int(sys.argv[1]))])
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 2)).sum().backward()
    optimizer.step()
"""


SHORT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 51), nn.Linear(51, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 51)
        said = []
        for value in x.split(1, dim=1):
            h, c = self.cell(value, (h, c))
            said.append(self.out(h))
        return torch.cat(said, 1)


def convolutions():
    block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(nn.Conv2d(3, 8, 3), *[block() for _ in range(60)], nn.Flatten(), nn.LazyLinear(10))


what, steps = sys.argv[1], int(sys.argv[2])
if what == "cells":
    model, x = Cells(), torch.randn(16, 300)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=10)
elif what == "convolutions":
    model, x = convolutions(), torch.randn(4, 3, 16, 16)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
else:
    layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.Sequential(*[layer() for _ in range(12)]), torch.randn(4, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)


def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss


for _ in range(steps):
    optimizer.step(closure)
"""


def modules(rounds: int) -> None:
    """Programs of three steps of thousands of modules: processor seconds of whole processes."""
    for number in (1_000, 2_500, 10_000):
        _added_and_printed(rounds, MANY, f"{number:,} modules, 3 steps", [str(number)])


def printed(rounds: int) -> None:
    """Short programs of small modules, which cost most beside the measuring: what is added, and what is printed."""
    for what, steps in (("cells", 4), ("convolutions", 6), ("convolutions", 100), ("layers", 60)):
        _added_and_printed(rounds, SHORT, f"{what}, {steps} steps", [what, str(steps)])


def _added_and_printed(rounds: int, source: str, name: str, words: list[str]) -> None:
    """Print the processor seconds that ``kedge run`` adds to a program, and the seconds that it prints.

    The share that it prints is of the time without Python's start and end.
    """
    plain: list[float] = []
    watched: list[float] = []
    said: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(source, encoding="utf-8")
        program = ["program.py", *words]
        kedge_run = ["-m", "kedge", "run", "--force", "-o", "it.kedge"]
        for _ in range(rounds):
            plain.append(_processor_seconds([sys.executable, *program], folder)[0])
            took, told = _processor_seconds([sys.executable, *kedge_run, *program], folder)
            watched.append(took)
            share, _, whole = told.partition("watching took ")[2].partition(" % of ")
            said.append(float(share) / 100 * float(whole.partition(" s")[0]))
    own, all_of_it = statistics.median(plain), statistics.median(watched)
    added = statistics.median(b - a for a, b in zip(plain, watched, strict=True))
    print(
        f"{name:26} {own:5.1f} s plain, {all_of_it:5.1f} s watched ({all_of_it / own:.2f}); "
        f"added {added:.1f} s, printed {statistics.median(said):.1f} s"
    )


def _processor_seconds(command: list[str], folder: str) -> tuple[float, str]:
    """Return the processor seconds of a process, and what it wrote to stderr."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.stderr


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="value,small,event,steps,run,modules,printed")
    parser.add_argument("--import", dest="registers", metavar="MODULE:FUNCTION")
    args = parser.parse_args()
    if args.registers is not None:
        module, _, function = args.registers.partition(":")
        getattr(importlib.import_module(module), function)()
    torch.set_num_threads(args.threads)
    random.seed(0)
    print(f"torch {torch.__version__}, {args.threads} thread(s)")
    devices = ["cpu"]
    found = torch.accelerator.current_accelerator()
    if found is not None:
        devices.append(found.type)
    parts = {
        "value": lambda: [value(min(args.rounds, 15), device) for device in devices],
        "small": lambda: small(min(args.rounds, 10)),
        "event": lambda: event(min(args.rounds, 15)),
        "steps": lambda: steps(args.rounds),
        "run": lambda: run(max(3, args.rounds // 6)),
        "modules": lambda: modules(max(3, args.rounds // 10)),
        "printed": lambda: printed(max(3, args.rounds // 10)),
    }
    for part in args.only.split(","):
        parts[part]()


if __name__ == "__main__":
    main()
