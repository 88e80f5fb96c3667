"""What Kedge costs and frees on an accelerator, and whether it is right there: a card of CUDA, ROCm or XPU, or another.

One process, in under nine minutes. The first lines name the card and the versions, and say what
the device lacks. Each part prints its results as they come; the tables of all parts come last, as
Markdown. A part that fails prints a line, and the others go on; one that takes too long is cut off.

    looking    what it costs to measure every output and gradient, beside hooks by hand
    kernel     what it costs to measure one tensor, on the device and on the host
    right      figures against NumPy's, bits of trainings, waits for the device
    watch      what `kedge.watch` costs, how much it sees of short runs, and a NaN in a long one
    offload    time and memory of training steps, beside `save_on_cpu` and checkpoints

    python benchmarks/gpu.py [--only looking,right] [--out card.md]
    python benchmarks/gpu.py --try    # on whatever there is, with tiny models: whether the script works
    python benchmarks/gpu.py --try --import MODULE[:FUNCTION]    # on a device that a module or its function registers

Nothing needs to be installed but PyTorch and NumPy: `PYTHONPATH=src:. python3 benchmarks/gpu.py`
runs from a checkout whose compiled part is built.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch

sys.path.insert(0, str(Path(__file__).parent))
from on_card.bench import Bench
from on_card.device import Device
from on_card.kernel import kernel
from on_card.looking import looking
from on_card.offloading import offload
from on_card.right import right
from on_card.sheet import Sheet
from on_card.watching import watch

import kedge
from kedge import native
from kedge.errors import NothingGained
from kedge.torch_internals import accelerators

PARTS: dict[str, tuple[Callable[[Bench], None], int]] = {
    "looking": (looking, 140),
    "kernel": (kernel, 40),
    "right": (right, 80),
    "watch": (watch, 125),
    "offload": (offload, 145),
}
"""The parts, with the seconds after which each is cut off: below nine minutes together."""

COMPILED_FROM = "2.12"
"""The oldest PyTorch that Kedge supports, and the first in which hooks run inside compiled code."""


class OutOfTime(BaseException):
    """A part has taken its seconds; no ordinary error, so that nothing on the way takes it for one."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Cut a block off after some seconds."""

    def cut_off(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"{seconds} seconds are up")

    before = signal.signal(signal.SIGALRM, cut_off)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def describe(bench: Bench) -> None:
    """Say what this runs on, and what it lacks."""
    on = bench.on
    host = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    bench.sheet.about(f"{accelerators.name()}, {on.size() / 1e9:.0f} GB; {host}")
    versions = [f"PyTorch {torch.__version__}", f"Python {platform.python_version()}"]
    versions.append(f"Kedge {kedge.__version__}")
    for package in ("triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    bench.sheet.about(", ".join(versions))
    if not native.available():
        bench.sheet.about(f"note: no compiled part: {native.why_not()}")
    if torch.torch_version.TorchVersion(torch.__version__) < COMPILED_FROM:
        bench.sheet.about(
            f"note: before PyTorch {COMPILED_FROM}, hooks do not run in compiled code"
        )
    for lack in on.lacks():
        bench.sheet.about(f"note: {lack}")


def run(bench: Bench, names: list[str]) -> None:
    """Run some parts, and print the tables of all."""
    describe(bench)
    bench.sheet.write()  # a file that cannot be written is told now, not after the first part
    begun = time.perf_counter()
    for name in names:
        part, seconds = PARTS[name]
        if bench.tiny:  # whether it works is also tried on machines that are busy
            seconds *= 10
        since = time.perf_counter()
        print(f"\n{name}", flush=True)
        with bench.sheet.trying(name, OutOfTime), limited(seconds):
            part(bench)
        with bench.sheet.trying(f"{name}, afterwards"):
            bench.on.clean()
        bench.sheet.write()
        print(f"  ({time.perf_counter() - since:.0f} s)", flush=True)
    bench.sheet.about(f"{', '.join(names)}: {time.perf_counter() - begun:.0f} s in all")
    bench.sheet.write()
    print("\n" + bench.sheet.markdown(), flush=True)


def register(name: str) -> None:
    """Import a module, and call its function after the colon, which registers a device."""
    module, _, function = name.partition(":")
    imported = importlib.import_module(module)
    if function:
        getattr(imported, function)()


def parts(text: str) -> list[str]:
    """Return the names of parts that a list names."""
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}: there are {', '.join(PARTS)}")
    return names


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=parts, default=list(PARTS), help="parts, with commas")
    parser.add_argument("--out", type=Path, help="a file for the tables")
    parser.add_argument("--try", dest="tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--import", dest="module", help="what registers a device")
    asked = parser.parse_args()
    if asked.module:
        register(asked.module)
    if not torch.accelerator.is_available() and not asked.tiny:
        print("no accelerator: nothing to measure here (--try shows whether the script works)")
        return
    torch.set_float32_matmul_precision("high")  # as whoever trains in float32 on a card has it
    on = Device()
    if not on.there:
        warnings.simplefilter("ignore", NothingGained)  # by moving what is on the host already
    with tempfile.TemporaryDirectory() as folder:
        run(Bench(on, Sheet(asked.out), Path(folder), tiny=asked.tiny), asked.only)


if __name__ == "__main__":
    main()
