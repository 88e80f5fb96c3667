"""What one pass over a value costs, beside `torch.dot` and beside the six reductions of PyTorch's that it replaces.

On a device, if there is one for which Triton compiles, the same of one launch of the kernel, beside
PyTorch's reductions there.

All that is compared runs in turn within each round; printed are medians over the rounds, in
microseconds, and ratios of what ran in the same round.

    python benchmarks/native.py [--rounds 15] [--sizes 100 10000 1000000 16000000] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kedge import native
from kedge.actions.measure import reduce
from kedge.actions.measure.host import HostTable
from kedge.native import on_device, reductions

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000, 16_000_000)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
ROUND = 0.02
"""How many seconds a function runs in a round, at least once."""
TOGETHER = 20
"""How many launches are queued before the device is waited for."""

Function = Callable[[], object]


def main() -> None:
    """Measure calls, sizes, formats and layouts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not native.available():
        raise SystemExit(f"the compiled part is missing: {native.why_not()}")
    print(
        f"PyTorch {torch.__version__}, {args.threads} thread(s), instruction sets {native.instruction_sets()}"
    )
    calls(args.rounds)
    sizes(args.rounds, args.sizes)
    layouts(args.rounds)
    bad_numbers(args.rounds)
    devices(args.rounds, args.sizes)


def calls(rounds: int) -> None:
    """What a call costs of itself: a value of one number, beside an empty function of Python's."""

    def empty(table: object, row: int, value: Tensor) -> None:
        pass

    one, memory, table = torch.ones(1), native.table(1).data, HostTable()
    image = torch.ones(8, 16, 4, 4)
    many = [torch.ones(1) for _ in range(100)]
    rows = native.table(100).data
    found = paired(
        rounds,
        {
            "empty": lambda: empty(memory, 0, one),
            "measure_into": lambda: native.measure_into(memory, 0, one),
            "channels_above_zero": lambda: native.channels_above_zero(image, 1),
            "observe, a value of its own": lambda: (
                table.observe(torch.ones(1), 0, 0, 0, True),
                table.counts.fill(0),
            ),
            "measure_many, each of 100": lambda: native.measure_many(rows, 0, many),
            "torch.dot": lambda: torch.dot(one, one),
        },
    )
    print("\nmicroseconds a call, one number")
    for name, (median, _) in found.items():
        print(f"  {name:26} {median / (100 if 'each of 100' in name else 1):8.2f}")


def sizes(rounds: int, numbers: list[int]) -> None:
    """Every format and instruction set over sizes, beside PyTorch."""
    print(
        "\none pass, microseconds, and its ratio to torch.dot and to six reductions; norm: the sum of squares alone"
    )
    print(
        f"  {'':10}{'':9}{'numbers':>10} {'full':>10} {'norm':>10} {'dot':>10} {'six':>10}  full/dot norm/dot full/six"
    )
    for dtype in DTYPES:
        for size in numbers:
            value = torch.randn(size).to(dtype)
            for name in native.instruction_sets():
                _row(rounds, value, name)


def _row(rounds: int, value: Tensor, instruction_set: str) -> None:
    before = native.use(instruction_set)
    memory, norm = native.table(1).data, native.CODES["norm"]
    found = paired(
        rounds,
        {
            "dot": lambda: torch.dot(value, value),
            "full": lambda: native.measure_into(memory, 0, value),
            "norm": lambda: native.measure_into(memory, 0, value, norm),
            "six": lambda: six(value),
        },
    )
    native.use(before)
    ratios = (found["full"][1], found["norm"][1], found["full"][0] / found["six"][0])
    dtype = str(value.dtype).removeprefix("torch.")
    times = " ".join(f"{found[name][0]:10.1f}" for name in ("full", "norm", "dot", "six"))
    print(
        f"  {dtype:10} {instruction_set:8}{value.numel():10,} {times}  "
        + " ".join(f"{r:8.2f}" for r in ratios)
    )


def six(value: Tensor) -> Tensor:
    """Reduce six times, one statistic each."""
    x = reductions.flat(value)
    return torch.stack(
        [
            x.sum(),
            torch.dot(x, x),
            x.amin(),
            x.amax(),
            torch.count_nonzero(x),
            x.numel() - torch.isfinite(x).sum(),
        ]
    )


def layouts(rounds: int) -> None:
    """A million numbers in several layouts, beside contiguous ones."""
    memory = native.table(1).data
    image = torch.randn(10, 100, 40, 25)
    values = {
        "contiguous": torch.randn(1_000_000),
        "transposed": torch.randn(1000, 1000).t(),
        "channels last": image.to(memory_format=torch.channels_last),
        "a third of a projection": torch.randn(1000, 3000)[:, 1000:2000],
        "rows of 10": torch.randn(100_000, 11)[:, 1:],
        "every other": torch.randn(2_000_000)[::2],
        "expanded": torch.randn(1000, 1).expand(1000, 1000),
    }
    found = paired(
        rounds, {n: lambda v=v: native.measure_into(memory, 0, v) for n, v in values.items()}
    )
    print("\none pass over a million float32, by layout")
    for name, (median, ratio) in found.items():
        print(f"  {name:26} {median:8.1f} {ratio:8.2f}")


def bad_numbers(rounds: int) -> None:
    """A million numbers whose sums have to be made in float64, beside others."""
    memory = native.table(1).data
    values = {
        "usual": torch.randn(1_000_000),
        "zeros": torch.zeros(1_000_000),
        "NaN": torch.full((1_000_000,), float("nan")),
        "of 1e-25": torch.randn(1_000_000) * 1e-25,
    }
    found = paired(
        rounds, {n: lambda v=v: native.measure_into(memory, 0, v) for n, v in values.items()}
    )
    print("\none pass over a million float32, by what they are")
    for name, (median, ratio) in found.items():
        print(f"  {name:26} {median:8.1f} {ratio:8.2f}")


def devices(rounds: int, numbers: list[int]) -> None:
    """One launch of the kernel on a device, beside PyTorch's reductions: the host's time, and that until the device is done."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not on_device.available(
        torch.device(found.type, torch.accelerator.current_device_index())
    ):
        print(f"\nnothing to measure on a device; {on_device.described()}")
        return
    print(
        f"\none launch of the kernel on {found.type}, microseconds, and its ratio to PyTorch's reductions"
    )
    print(f"  {'':10}{'numbers':>12} {'queued':>10} {'done':>10} {'queued':>8} {'done':>8}")
    for dtype in DTYPES:
        for size in numbers:
            value = reductions.flat(torch.randn(size, device=found).to(dtype))
            table = torch.zeros(on_device.MOST, 6, dtype=torch.float64, device=found)
            row = reduce.StatisticsRow(torch.zeros(6, device=found))
            kernel = partial(on_device.measure_into, table, 0, value, native.CODES["full"])
            six = partial(reduce.full, value, row)
            queued = paired(rounds, {"six": six, "kernel": kernel})["kernel"]
            torch.accelerator.synchronize()
            done = paired(rounds, {"six": partial(waited, six), "kernel": partial(waited, kernel)})[
                "kernel"
            ]
            times = f"{queued[0]:10.1f} {done[0] / TOGETHER:10.1f} {queued[1]:8.2f} {done[1]:8.2f}"
            print(f"  {str(dtype).removeprefix('torch.'):10}{size:12,} {times}")


def waited(function: Function) -> None:
    """Call a function some times, and wait until the device is done."""
    for _ in range(TOGETHER):
        function()
    torch.accelerator.synchronize()


def paired(rounds: int, functions: dict[str, Function]) -> dict[str, tuple[float, float]]:
    """Run functions in turn; returns the median of each in microseconds, and of its ratio to the first one."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    repeats = {
        name: max(1, int(ROUND / timed(function, 1))) for name, function in functions.items()
    }
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(timed(function, repeats[name]))
    first = next(iter(times.values()))
    return {
        name: (
            1e6 * statistics.median(own),
            statistics.median(a / b for a, b in zip(own, first, strict=True)),
        )
        for name, own in times.items()
    }


def timed(function: Function, repeats: int) -> float:
    """Seconds for one call of a function."""
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    main()
