"""What it costs and what it frees to move, rebuild and compress saved tensors on a GPU; and what watching costs there.

ResNet-152 and a GPT with a batch that fills most of the card, each case in a process of its own:

    bare               plain PyTorch
    save_on_cpu        torch.autograd.graph.save_on_cpu(pin_memory=True)
    checkpoint         torch.utils.checkpoint around each block
    rebuild            kedge.offload(model): nothing moves
    move               kedge.offload(model, to=kedge.Cpu(rebuild=False)): everything moves
    lossless           kedge.offload(model, to=kedge.Cpu()): rebuilt, and the rest moves
    int8               the same with codec="int8"
    planned, time      the same with max_slowdown=1.05
    planned, memory    the same with max_memory= half of what bare takes

Printed: time of a step and its ratio to bare; the most memory in a step, above what model, gradients and optimizer take;
the bytes that moved each way; and the floor: the time that forward and backward take bare, or that the bytes take on
this link, whichever is longer, for each of the two. "over floor" is what scheduling could still win.

Then what watching costs: all statistics of all modules' outputs and gradients in each step, norms alone, and
`kedge run --budget 3%` of this script against `python`; and whether what was measured is right.

    python benchmarks/gpu.py [--models resnet152,gpt] [--cases bare,move] [--fill 0.7] [--steps 6] [--only offload,watch]
    python benchmarks/gpu.py --try    # on whatever there is, with tiny models: whether the script works
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.plan.link import measured
from kedge.offload.stores.cpu import CpuStore

sys.path.insert(0, str(Path(__file__).parent))
import models

GB = 1e9
WARM = 4  # steps before the first that counts: a plan holds from the third on
Made = tuple[nn.Module, Tensor, Tensor]


def resnet152(batch: int, *, tiny: bool) -> Made:
    """Make a ResNet-152 and a batch of images."""
    size = 32 if tiny else 224
    model = models.DeepResNet((1, 1, 1, 1) if tiny else (3, 8, 36, 3))
    return model, torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))


def gpt(batch: int, *, tiny: bool) -> Made:
    """Make a GPT-2-large-like decoder (36 layers, width 1280) and a batch of 1024 words."""
    length = 64 if tiny else 1024
    shape = {"layers": 2, "width": 64, "heads": 2} if tiny else {"layers": 36, "width": 1280, "heads": 20}
    words = torch.randint(0, 8192, (batch, length + 1))
    return models.GPT(**shape, length=length, dropout=0.1), words[:, :-1], words[:, 1:].reshape(-1)


MODELS: dict[str, Callable[..., Made]] = {"resnet152": resnet152, "gpt": gpt}


def checkpointed(model: nn.Module) -> None:
    """Have each block of a model recompute what it saves."""
    for block in (m for m in model.modules() if isinstance(m, (models.Bottleneck, models.Layer))):
        block.forward = _recomputing(block.forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def kedged(**options: Any) -> Callable[..., Any]:
    """Give a case that offloads."""
    return lambda model, half: kedge.offload(model, **options)


CASES: dict[str, Callable[..., Any]] = {
    "bare": lambda model, half: contextlib.nullcontext(),
    "save_on_cpu": lambda model, half: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()),
    "checkpoint": lambda model, half: contextlib.nullcontext(checkpointed(model)),
    "rebuild": kedged(to=kedge.Rebuild()),
    "move": kedged(to=kedge.Cpu(rebuild=False)),
    "lossless": kedged(to=kedge.Cpu()),
    "int8": kedged(to=kedge.Cpu(), codec="int8"),
    "planned, time": kedged(to=kedge.Cpu(), max_slowdown=1.05),
    "planned, memory": lambda model, half: kedge.offload(model, to=kedge.Cpu(), max_memory=half),
    "statistics": lambda model, half: kedge.hook(model, "**:out, **:out.grad", kedge.measure()),
    "norms": lambda model, half: kedge.hook(model, "**:out, **:out.grad", kedge.measure("norm")),
}
OFFLOAD = [name for name in CASES if name not in ("statistics", "norms")]


class Device:
    """Time and memory of what the steps run on."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")

    def mark(self) -> Any:
        """Mark this moment on the device."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Tell the seconds between two marks."""
        if not self.cuda:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def allocated(self) -> int:
        """Bytes that tensors take now; begins to look for the peak."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The most bytes that tensors took since."""
        return torch.cuda.max_memory_allocated() if self.cuda else 0


def work(case: str, model: str, batch: int, steps: int, half: int, *, tiny: bool) -> dict[str, Any]:
    """Run one case; give its figures."""
    torch.manual_seed(0)
    on = Device()
    made, x, y = (part.to(on.device) for part in MODELS[model](batch, tiny=tiny))
    optimizer = torch.optim.SGD(made.parameters(), 1e-4, momentum=0.9)
    rows, base = [], 0
    block = CASES[case](made, half)
    with block as account:
        for number in range(WARM + steps):
            if number == WARM:
                optimizer.zero_grad(set_to_none=False)
                base = on.allocated()
            begun = on.mark()
            loss = F.cross_entropy(made(x).flatten(0, -2), y)
            turned = on.mark()
            loss.backward()
            ended = on.mark()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            rows.append((begun, turned, ended, on.mark()))
            del loss
        peak = on.peak()
    spans = [[on.between(row[i], row[i + 1]) for i in range(3)] for row in rows[WARM:]]
    forward, backward, rest = (statistics.median(column) for column in zip(*spans, strict=True))
    told = account if hasattr(account, "rows") else None
    step = None if told is None else told.step
    return {
        "forward": forward, "backward": backward, "rest": rest, "peak": peak - base,
        "moved": 0 if step is None else step.stored.bytes,
        "stalled": 0 if step is None else step.restored.stalled,
        "plan": None if told is None or told.plan is None else str(told.plan),
    }  # fmt: skip


def ask(case: str, model: str, batch: int, args: argparse.Namespace, half: int = 0) -> dict[str, Any]:
    """Run one case in a process of its own; what failed is in "failed"."""
    command = [sys.executable, __file__, "--work", json.dumps([case, model, batch, args.steps, half, args.tiny])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    wrong = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failed": wrong[-1][:120] if wrong else f"exit {done.returncode}"}


def fill(model: str, args: argparse.Namespace) -> tuple[int, int]:
    """Choose a batch that fills the card, as far as the host's memory takes it; give it and what it should take."""
    if args.tiny:
        return 2, 1 << 20
    few = 8
    small, large = (ask("bare", model, n, args)["peak"] for n in (few, 2 * few))
    each = (large - small) / few
    card = torch.cuda.get_device_properties(0).total_memory
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = min(
        args.fill * card, 0.35 * host
    )  # save_on_cpu needs about twice as much of the host's as bare of the card's
    batch = max(few, int((room - small) / each) // 8 * 8 + few)
    return batch, int(small + each * (batch - few))


def offload(args: argparse.Namespace) -> None:
    """Print the table of each model."""
    on = Device()
    store = CpuStore()
    link = measured(store, on.device) if on.cuda else None
    store.close()
    if link is not None:
        print(f"link: {link.write / GB:.1f} GB/s out, {link.read / GB:.1f} GB/s back")
    for model in args.models.split(","):
        batch, expected = fill(model, args)
        print(f"\n{model}, batch {batch}: bare should take {expected / GB:.1f} GB in a step")
        print(f"  {'case':16}{'ms/step':>9}{'x bare':>8}{'peak GB':>9}{'of bare':>8}{'moved GB':>10}{'over floor':>12}")
        bare: dict[str, Any] = {}
        for case in args.cases.split(";"):
            found = ask(case, model, batch, args, half=(bare.get("peak", 0) or expected) // 2)
            if "failed" in found:
                print(f"  {case:16}  {found['failed']}")
                continue
            bare = bare or found
            print(f"  {case:16}{_figures(found, bare, link)}")
            if found["plan"]:
                print("      " + found["plan"].replace("\n", "\n      "))


def _figures(found: dict[str, Any], bare: dict[str, Any], link: Any) -> str:
    parts = ("forward", "backward", "rest")
    seconds, plain = sum(found[part] for part in parts), sum(bare[part] for part in parts)
    moved = found["moved"]
    # What a plain run moves is not counted by Kedge: save_on_cpu has no floor here.
    floor = bare["rest"]
    floor += max(bare["forward"], moved / link.write if link else 0) + max(
        bare["backward"], moved / link.read if link else 0
    )
    share = found["peak"] / bare["peak"] if bare["peak"] else 0.0
    over = f"{seconds / floor:11.2f}x" if moved else f"{'':12}"
    return f"{seconds * 1e3:9.1f}{seconds / plain:8.2f}{found['peak'] / GB:9.2f}{share:8.2f}{moved / GB:10.2f}{over}"


def watch(args: argparse.Namespace) -> None:
    """Print what statistics cost, what `kedge run` costs, and whether the numbers are right."""
    on = Device()
    print(f"\nwatching: statistics on {on.device} are {'right' if _is_right(on.device) else 'WRONG'}")
    for model in args.models.split(","):
        batch = 2 if args.tiny else {"resnet152": 64, "gpt": 4}[model]
        rows = {case: ask(case, model, batch, args) for case in ("bare", "norms", "statistics")}
        plain = sum(rows["bare"].get(part, 0) for part in ("forward", "backward", "rest"))
        for case, row in rows.items():
            if "failed" in row:
                print(f"  {model}, batch {batch}, {case}: {row['failed']}")
                continue
            seconds = sum(row[part] for part in ("forward", "backward", "rest"))
            print(f"  {model}, batch {batch}, {case:12}{seconds * 1e3:9.1f} ms/step {seconds / plain:6.3f} x bare")
        print(f"  {model}, batch {batch}, {_run(model, batch, args)}")


def _is_right(device: torch.device) -> bool:
    """Compare what is measured on a device with what a CPU gives for the same values."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Identity())
    value = torch.randn(1 << 16)
    value[::3] = 0
    with kedge.hook(layer, "0", kedge.measure()) as there:
        layer(value.to(device))
    with kedge.hook(layer, "0", kedge.measure()) as here:
        layer(value)
    names = ("rms", "min", "max")
    return all(abs(getattr(there["0"], n) - getattr(here["0"], n)) <= 1e-4 * abs(getattr(here["0"], n)) for n in names)


def _run(model: str, batch: int, args: argparse.Namespace) -> str:
    """Compare `kedge run --budget 3%` of a training loop with `python`, by the loop's own time."""
    number = 20 if args.tiny else 150
    loop = [__file__, "--loop", json.dumps([model, batch, number, args.tiny])]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "gpu.kedge")
        commands = {
            "python": [sys.executable, *loop],
            "kedge": [sys.executable, "-m", "kedge", "run", "-q", "--budget", "3%", "--force", "-o", out, *loop],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(1 if args.tiny else 3):
            for name, command in commands.items():
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    return f"{name}: exit {done.returncode}: {done.stderr.strip()[-200:]}"
                seconds[name].append(float(done.stdout.split()[-1]))
    ratios = [a / b for a, b in zip(seconds["kedge"], seconds["python"], strict=True)]
    return f"kedge run --budget 3%: {statistics.median(ratios):.3f} x python, {number} steps (to reach 1.03)"


def loop(model: str, batch: int, number: int, *, tiny: bool) -> None:
    """Train, and print how long it took after the first steps."""
    torch.manual_seed(0)
    on = Device()
    made, x, y = (part.to(on.device) for part in MODELS[model](batch, tiny=tiny))
    optimizer = torch.optim.SGD(made.parameters(), 1e-4)
    begun = on.mark()
    for step in range(number):
        if step == number // 5:
            begun = on.mark()
        optimizer.zero_grad()
        F.cross_entropy(made(x).flatten(0, -2), y).backward()
        optimizer.step()
    print(on.between(begun, on.mark()))


def parts(argv: list[str] | None = None) -> Iterator[Callable[[], None]]:
    """Yield what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet152,gpt")
    parser.add_argument("--cases", default=";".join(OFFLOAD), help="separated by semicolons")
    parser.add_argument("--fill", type=float, default=0.7, help="the share of the card that bare takes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="offload,watch")
    parser.add_argument("--try", dest="tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--loop", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        yield lambda: print(json.dumps(work(*args.work[:5], tiny=args.work[5])))
    elif args.loop:
        yield lambda: loop(*args.loop[:3], tiny=args.loop[3])
    elif not torch.cuda.is_available() and not args.tiny:
        yield lambda: print("no CUDA device: nothing to measure here (--try shows whether the script works)")
    else:
        name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU: these figures mean nothing"
        yield lambda: print(f"torch {torch.__version__}, {name}")
        named = {"offload": offload, "watch": watch}
        yield from ((lambda part=part: named[part](args)) for part in args.only.split(","))


if __name__ == "__main__":
    for part in parts():
        part()
