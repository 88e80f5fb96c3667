"""What Kedge costs and frees on an accelerator: a card of CUDA, ROCm or XPU, or another device that PyTorch knows.

The first lines name the card and the versions, and what is skipped or less exact here because the
device lacks something.

**offload.** ResNet-152 and a GPT with a batch that fills most of the card, each case in a process
of its own:

    bare               plain PyTorch
    save_on_cpu        torch.autograd.graph.save_on_cpu(pin_memory=True)
    checkpoint         torch.utils.checkpoint around each block
    rebuild            kedge.offload(model): nothing moves
    move               kedge.offload(model, to=kedge.Cpu(rebuild=False)): everything moves
    lossless           kedge.offload(model, to=kedge.Cpu()): rebuilt, and the rest moves
    int8               the same with codec="int8"
    planned, time      the same with max_slowdown=1.05
    planned, memory    the same with max_memory= half of what bare takes

Printed: time of a step and its ratio to bare; the most memory in a step, above what model,
gradients and optimizer take; the bytes that moved each way; and the floor: the time that forward
and backward take bare, or that the bytes take on this link, whichever is longer, for each of the
two. "over floor" is what scheduling could still win.

**watch.** All statistics of all modules' outputs and gradients in each step, and norms alone;
`kedge run` of a training against `python`, at its default settings and with every step measured;
and whether what was measured is right.

**extract.** One feature of a batch by `kedge.extract`, against the model's whole forward.

**compiled.** A step under `torch.compile`, with and without norms of all modules' outputs.

**reductions.** All statistics of one tensor by PyTorch's reductions, and by Kedge's own kernel
where there is one.

    python benchmarks/gpu.py [--models resnet152,gpt] [--cases "bare;move"] [--fill 0.7] [--steps 6] [--only offload,watch]
    python benchmarks/gpu.py --try    # on whatever there is, with tiny models: whether the script works
    python benchmarks/gpu.py --try --import MODULE[:FUNCTION]    # the same on a device that a module or its function registers
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it
from torch.utils.checkpoint import checkpoint

import kedge
from kedge import native
from kedge.actions.measure import reduce
from kedge.offload.plan.link import measured
from kedge.offload.stores.cpu import CpuStore
from kedge.torch_internals import accelerators

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
    shape = (
        {"layers": 2, "width": 64, "heads": 2}
        if tiny
        else {"layers": 36, "width": 1280, "heads": 20}
    )
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
    "save_on_cpu": lambda model, half: torch.autograd.graph.save_on_cpu(pin_memory=Device().there),
    "checkpoint": lambda model, half: contextlib.nullcontext(checkpointed(model)),
    "rebuild": kedged(to=kedge.Rebuild()),
    "move": kedged(to=kedge.Cpu(rebuild=False)),
    "lossless": kedged(to=kedge.Cpu()),
    "int8": kedged(to=kedge.Cpu(), codec="int8"),
    "planned, time": kedged(to=kedge.Cpu(), max_slowdown=1.05),
    "planned, memory": lambda model, half: kedge.offload(model, to=kedge.Cpu(), max_memory=half),
    "statistics": lambda model, half: kedge.hook(model, "**:out, **:out.grad", kedge.measure()),
    "norms": lambda model, half: kedge.hook(model, "**:out, **:out.grad", kedge.measure("norm")),
    "compiled": lambda model, half: contextlib.nullcontext(),
    "compiled, norms": lambda model, half: kedge.hook(model, "**:out", kedge.measure("norm")),
}
OFFLOAD = [
    name for name in CASES if name not in ("statistics", "norms", "compiled", "compiled, norms")
]
FEATURE = {"resnet152": "layer3", "gpt": "h.1"}


class Device:
    """Time and memory of what the steps run on: the accelerator of this PyTorch, or the CPU."""

    def __init__(self) -> None:
        self.there = torch.accelerator.is_available()
        self.device = torch.device("cpu")
        if self.there:
            self.device = torch.device(torch.accelerator.current_accelerator().type, 0)
        self._has_clock = self.there and accelerators.has_clock(self.device)
        self._has_memory = self.there and _answers(torch.accelerator.memory_allocated)

    def lacks(self) -> Iterator[str]:
        """Yield what this device lacks, with the consequence."""
        if not self.there:
            yield "no accelerator: these figures mean nothing"
            return
        if not self._has_clock:
            yield "no events that take the time: the host's clock is read, after waiting for the device"
        if not self._has_memory:
            yield "no statistics of its memory: peaks are 0"
        if not accelerators.has_streams(self.device):
            yield "no streams: copies do not run beside the computation"
        if accelerators.pinned((1,), torch.uint8) is None:
            yield "no pinned memory of the host: the program waits for copies"

    def mark(self) -> Any:
        """Mark this moment on the device."""
        if self._has_clock:
            return accelerators.timed_mark(self.device)
        accelerators.synchronize(self.device)
        return time.perf_counter()

    def between(self, first: Any, last: Any) -> float:
        """Tell the seconds between two marks."""
        if not self._has_clock:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def allocated(self) -> int:
        """Bytes that tensors take now; begins to look for the peak."""
        if not self._has_memory:
            return 0
        accelerators.synchronize(self.device)
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()

    def peak(self) -> int:
        """The most bytes that tensors took since."""
        return torch.accelerator.max_memory_allocated() if self._has_memory else 0

    def size(self) -> int:
        """The bytes of the device's memory; of the host's where it does not tell."""
        if self.there and _answers(torch.accelerator.get_memory_info):
            return torch.accelerator.get_memory_info()[1]
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _answers(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except (
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ):  # not every kind of device has what is asked for
        return False
    return True


def work(case: str, model: str, batch: int, steps: int, half: int, *, tiny: bool) -> dict[str, Any]:
    """Run one case; give its figures."""
    torch.manual_seed(0)
    on = Device()
    made, x, y = (part.to(on.device) for part in MODELS[model](batch, tiny=tiny))
    optimizer = torch.optim.SGD(made.parameters(), 1e-4, momentum=0.9)
    rows, base = [], 0
    block = CASES[case](made, half)
    with block as account:
        run = torch.compile(made) if case.startswith("compiled") else made
        for number in range(WARM + steps):
            if number == WARM:
                optimizer.zero_grad(set_to_none=False)
                base = on.allocated()
            begun = on.mark()
            loss = F.cross_entropy(run(x).flatten(0, -2), y)
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


def ask(
    case: str, model: str, batch: int, args: argparse.Namespace, half: int = 0
) -> dict[str, Any]:
    """Run one case in a process of its own; what failed is in "failed"."""
    command = [
        sys.executable,
        __file__,
        "--work",
        json.dumps([case, model, batch, args.steps, half, args.tiny]),
    ]
    command += ["--import", args.module] if args.module else []
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
    card = Device().size()
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
    link = measured(store, on.device) if on.there else None
    store.close()
    if link is not None:
        print(f"link: {link.write / GB:.1f} GB/s out, {link.read / GB:.1f} GB/s back")
    for model in args.models.split(","):
        batch, expected = fill(model, args)
        print(f"\n{model}, batch {batch}: bare should take {expected / GB:.1f} GB in a step")
        print(
            f"  {'case':16}{'ms/step':>9}{'x bare':>8}{'peak GB':>9}{'of bare':>8}{'moved GB':>10}{'over floor':>12}"
        )
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
    print(
        f"\nwatching: statistics on {on.device} are {'right' if _is_right(on.device) else 'WRONG'}"
    )
    for model in args.models.split(","):
        batch = _batch(model, args)
        rows = {case: ask(case, model, batch, args) for case in ("bare", "norms", "statistics")}
        plain = sum(rows["bare"].get(part, 0) for part in ("forward", "backward", "rest"))
        for case, row in rows.items():
            _print_row(f"{model}, batch {batch}, {case}", row, plain)
        for options in ((), ("--every", "1", "--budget", "none")):
            print(f"  {model}, batch {batch}, {_run(model, batch, options, args)}")


def _print_row(name: str, row: dict[str, Any], plain: float) -> None:
    if "failed" in row:
        print(f"  {name}: skipped, {row['failed']}")
        return
    seconds = sum(row[part] for part in ("forward", "backward", "rest"))
    ratio = f" {seconds / plain:6.3f} x bare" if plain else ""
    print(f"  {name:36}{seconds * 1e3:9.1f} ms/step{ratio}")


def compiled(args: argparse.Namespace) -> None:
    """Print what hooks in compiled code cost."""
    print("\ncompiled: a step under torch.compile")
    for model in args.models.split(","):
        batch = _batch(model, args)
        rows = {case: ask(case, model, batch, args) for case in ("compiled", "compiled, norms")}
        plain = sum(rows["compiled"].get(part, 0) for part in ("forward", "backward", "rest"))
        for case, row in rows.items():
            _print_row(f"{model}, batch {batch}, {case}", row, plain)


def extract(args: argparse.Namespace) -> None:
    """Print what it costs to take one feature."""
    print("\nextract: one feature of a batch, without gradients")
    on = Device()
    for model in args.models.split(","):
        batch = _batch(model, args)
        made, x, _ = (part.to(on.device) for part in MODELS[model](batch, tiny=args.tiny))
        features = kedge.extract(made.eval(), [FEATURE[model]])
        with torch.no_grad():
            seconds = {
                "whole forward": _time(on, partial(made, x)),
                "kedge.extract": _time(on, partial(features, x)),
            }
        for name, each in seconds.items():
            print(
                f"  {model}, batch {batch}, {name:16}{each * 1e3:9.2f} ms {each / seconds['whole forward']:6.3f} x whole"
            )


def reductions(args: argparse.Namespace) -> None:
    """Print what all statistics of one tensor cost, and whether they are right."""
    on = Device()
    own = _own_kernel(on.device)
    print(
        "\nreductions: all statistics of one tensor"
        + ("" if callable(own) else f"; Kedge's own kernel: {own}")
    )
    ways: dict[str, Callable[[Tensor, Tensor], Any]] = {"PyTorch": _by_pytorch}
    ways |= {"kernel": own} if callable(own) else {}
    for count in (1 << 10, 1 << 16) if args.tiny else (1 << 12, 1 << 20, 1 << 27):
        for dtype in (torch.float32, torch.bfloat16):
            value = torch.randn(count, dtype=torch.float32).to(on.device, dtype)
            for name, way in ways.items():
                table = torch.full((_rows(count, own), 6), float("nan"), device=on.device)
                seconds = _time(on, partial(way, value, table))
                rate = value.nbytes / seconds / GB
                print(
                    f"  {name:8}{count:>12} {str(dtype)[6:]:9}{seconds * 1e6:10.1f} us{rate:9.1f} GB/s once"
                )


def _by_pytorch(value: Tensor, table: Tensor) -> None:
    reduce.full(value, reduce.StatisticsRow(table[0]))


def _own_kernel(device: torch.device) -> Callable[[Tensor, Tensor], Any] | str:
    """Return the function that measures by Kedge's own kernel; failing that, the reason."""
    try:
        module = importlib.import_module("kedge.native.on_device")
    except ImportError:
        return "this Kedge has none"
    if not module.available(device):
        return module.why_not().get(device.type, f"not for {device.type}")
    return lambda value, table: module.measure_into(table, 0, value, native.CODES["full"])


def _rows(count: int, own: Any) -> int:
    """Return how many rows the measurement of a value may take."""
    return importlib.import_module("kedge.native.on_device").rows_for(count) if callable(own) else 1


def _time(on: Device, work: Callable[[], Any], rounds: int = 20) -> float:
    """Return the median of the seconds that some work takes on the device."""
    for _ in range(WARM):
        work()
    marks = [on.mark()]
    for _ in range(rounds):
        work()
        marks.append(on.mark())
    return statistics.median(on.between(a, b) for a, b in itertools.pairwise(marks))


def _batch(model: str, args: argparse.Namespace) -> int:
    return 2 if args.tiny else {"resnet152": 64, "gpt": 4}[model]


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
    return all(
        abs(getattr(there["0"], n) - getattr(here["0"], n)) <= 1e-4 * abs(getattr(here["0"], n))
        for n in names
    )


def _run(model: str, batch: int, options: tuple[str, ...], args: argparse.Namespace) -> str:
    """Compare `kedge run` of a training loop with `python`, by the loop's own time."""
    number = 20 if args.tiny else 150
    loop = [__file__, "--loop", json.dumps([model, batch, number, args.tiny])]
    loop += ["--import", args.module] if args.module else []
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "gpu.kedge")
        commands = {
            "python": [sys.executable, *loop],
            "kedge": [
                sys.executable,
                "-m",
                "kedge",
                "run",
                "-q",
                *options,
                "--force",
                "-o",
                out,
                *loop,
            ],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(1 if args.tiny else 3):
            for name, command in commands.items():
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    return f"{name}: exit {done.returncode}: {done.stderr.strip()[-200:]}"
                seconds[name].append(float(done.stdout.split()[-1]))
    ratios = [a / b for a, b in zip(seconds["kedge"], seconds["python"], strict=True)]
    of = f"{number} steps" + ("" if options else ", of which two seconds are free")
    return f"kedge run {' '.join(options)}: {statistics.median(ratios):.3f} x python, {of}"


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


def about() -> None:
    """Print the card, the versions, and what is skipped."""
    on = Device()
    if on.there:
        torch.zeros(1, device=on.device)  # so that the device is in use, and has a name
    runtime = [
        f"{name} {found}"
        for name in ("cuda", "hip", "xpu")
        if (found := getattr(torch.version, name, None))
    ]
    print(
        f"{accelerators.name()}, {on.size() / GB:.1f} GB; {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    versions = [f"torch {torch.__version__}", *runtime, f"Python {platform.python_version()}"]
    for package in ("triton", "kedge"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    print(", ".join(versions))
    for lack in on.lacks():
        print(f"note: {lack}")


def parts(argv: list[str] | None = None) -> Iterator[Callable[[], None]]:
    """Yield what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet152,gpt")
    parser.add_argument("--cases", default=";".join(OFFLOAD), help="separated by semicolons")
    parser.add_argument(
        "--fill", type=float, default=0.7, help="the share of the card that bare takes"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="offload,watch,extract,compiled,reductions")
    parser.add_argument("--try", dest="tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument(
        "--import",
        dest="module",
        help="a module to import first, and its function to call, which registers a device",
    )
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--loop", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.module:
        name, _, function = args.module.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
    if args.work:
        yield lambda: print(json.dumps(work(*args.work[:5], tiny=args.work[5])))
    elif args.loop:
        yield lambda: loop(*args.loop[:3], tiny=args.loop[3])
    elif not torch.accelerator.is_available() and not args.tiny:
        yield lambda: print(
            "no accelerator: nothing to measure here (--try shows whether the script works)"
        )
    else:
        yield about
        named = {
            "offload": offload, "watch": watch, "extract": extract, "compiled": compiled, "reductions": reductions,
        }  # fmt: skip
        yield from ((lambda part=part: named[part](args)) for part in args.only.split(","))


if __name__ == "__main__":
    for part in parts():
        part()
