"""Whether what Kedge does on the device is right: figures, bits, and no waits.

**Figures.** Tensors of four formats and ten layouts, with and without NaN and infinities, against
NumPy's float64 on the CPU. **Bits.** Trainings that are watched, measured, recorded and offloaded
end with the weights and losses of a plain one. **Waits.** How often the host waits for the device
in eight steps. **Compiled code.** How many sites fire inside `torch.compile`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kedge
from on_card import trainings
from on_card.bench import Bench
from on_card.looking import EVERYWHERE
from on_card.trainings import Training

Block = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]
STEPS = 4
WARM, COUNTED = 12, 8

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "a scalar": ((), lambda v: v),
    "one number": ((1,), lambda v: v),
    "seven numbers": ((7,), lambda v: v),
    "a matrix": ((1000, 37), lambda v: v),
    "a million numbers": ((1 << 20,), lambda v: v),
    "five dimensions": ((3, 4, 5, 6, 7), lambda v: v),
    "transposed": ((300, 40), lambda v: v.t()),
    "strided": ((64, 64), lambda v: v[::2, 1::3]),
    "channels last": ((2, 8, 9, 10), lambda v: v.to(memory_format=torch.channels_last)),
    "expanded": ((64, 1), lambda v: v.expand(64, 5)),
}
KERNEL, FLOAT32 = 1e-6, 1e-4
"""How far sums may be off, as shares of the sums of magnitudes: with Kedge's kernel, and with PyTorch's reductions."""
EXACT = ("count", "nonfinite", "nan", "nonzero")


def right(bench: Bench) -> None:
    """Fill the table."""
    table = bench.sheet.table("Is it right?")
    with bench.sheet.trying("right: figures"):
        table.put("figures against float64", "found", compare_figures(bench))
    bench.on.clean()

    sizes = {"ResNet": _images, "GPT": _texts}
    with _deterministic():
        for name, make in sizes.items():
            for bf16 in (False, True):
                row = f"bits of a {name}, {'bf16 autocast' if bf16 else 'float32'}"
                with bench.sheet.trying(f"right: {row}"):
                    table.put(row, "found", compare_bits(bench, row, make, bf16=bf16))
    blocks = _blocks(bench, "waits") | {"offload to the host": offloaded}
    for case, block in blocks.items():
        with bench.sheet.trying(f"right: waits, {case}"):
            told = count_waits(bench, block)
            table.put(f"waits in {COUNTED} steps, {case}", "found", told)
    with bench.sheet.trying("right: compiled code"):
        table.put("sites that fire in compiled code", "found", compiled_sites(bench))


# -- figures -----------------------------------------------------------------------------------


def compare_figures(bench: Bench) -> str:
    """Tell how many values are measured right, and print what is wrong in some of the others."""
    model = nn.Sequential(nn.Identity())
    drawn = torch.Generator().manual_seed(0)
    number, inexact, wrong = 0, 0, []
    for dtype in DTYPES:
        for layout, (shape, view) in LAYOUTS.items():
            for special in (False, True):
                number += 1
                base = torch.randn(shape, generator=drawn, dtype=torch.float64)
                if special:
                    _spoil(base)
                base = base.to(dtype)
                with kedge.hook(model, "0", kedge.measure()) as found:
                    model(view(base.to(bench.on.device)))
                differs = _differences(found["0"], view(base), FLOAT32)
                if differs:
                    wrong.append(f"{layout}, {dtype}, special {special}: {differs}")
                if _differences(found["0"], view(base), KERNEL):
                    inexact += 1
    for told in wrong[:6]:
        bench.sheet.line(told)
    right = number - len(wrong)
    return f"{right} of {number} right; {number - inexact} with sums to {KERNEL:g}"


def _spoil(base: Tensor) -> None:
    numbers = base.view(-1)
    for place, number in ((4, float("nan")), (7, float("inf")), (10, 0.0)):
        numbers[place % len(numbers)] = number


def _differences(found: Any, value: Tensor, share: float) -> str:
    """Tell which figures differ from those of NumPy, and how."""
    numbers = value.double().numpy()
    expected: dict[str, float] = {
        "count": numbers.size,
        "nonfinite": np.count_nonzero(~np.isfinite(numbers)),
        "nan": np.count_nonzero(np.isnan(numbers)),
        "nonzero": np.count_nonzero(numbers),
        "min": numbers.min(),
        "max": numbers.max(),
        "sum": numbers.sum(),
        "sumsq": np.square(numbers).sum(),
    }
    # Extremes are exact, except of float64 on a device that lacks it.
    extreme = 1e-6 if value.dtype == torch.float64 else 0.0
    finite = numbers[np.isfinite(numbers)]
    room = dict.fromkeys(EXACT, 0.0)
    room |= dict.fromkeys(("min", "max"), extreme * np.abs(finite).max(initial=0))
    room |= {"sum": share * np.abs(finite).sum(), "sumsq": share * np.square(finite).sum()}
    told = []
    for name, figure in expected.items():
        measured = float(getattr(found, name))
        if not np.isclose(measured, figure, rtol=0, atol=room[name], equal_nan=True):
            told.append(f"{name} {measured:.9g} instead of {figure:.9g}")
    return ", ".join(told)


# -- bits --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Ask PyTorch for algorithms that give the same bits again, where it has them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _images(bench: Bench) -> trainings.Made:
    if bench.tiny:
        return trainings.small_images(bench.on)
    return trainings.resnet(bench.on, (1, 1, 1, 1), 8, 64)


def _texts(bench: Bench) -> trainings.Made:
    if bench.tiny:
        return trainings.small_gpt(bench.on)
    return trainings.gpt(bench.on, layers=3, width=128, heads=4, length=64, batch=4)


def _blocks(bench: Bench, name: str) -> dict[str, Block]:
    """Return the blocks of Kedge in which trainings run."""
    return {
        "watch": lambda model: watched(bench, name),
        "watch every step": lambda model: watched(bench, name, every=1, budget=None),
        "measure": lambda model: kedge.hook(model, EVERYWHERE, kedge.measure()),
        "record": lambda model: kedge.hook(model, "**:out", kedge.record()),
    }


def watched(bench: Bench, name: str, **options: Any) -> Any:
    """Return a block that watches silently, into a recording that replaces an older one."""
    name = "".join(letter if letter.isalnum() else "-" for letter in name)
    block = kedge.watch(bench.folder / f"{name}.kedge", force=True, **options)
    block.tell = None
    return block


def offloaded(model: nn.Module) -> Any:
    """Return a block in which saved tensors go to the host, small ones too."""
    return kedge.offload(model, to=kedge.Cpu(), min_bytes=1024)


def compare_bits(
    bench: Bench, row: str, make: Callable[[Bench], trainings.Made], *, bf16: bool
) -> str:
    """Tell which trainings end with other bits than a plain one."""
    train = partial(_trained, bench, make, bf16=bf16)
    plain = train(lambda model: contextlib.nullcontext())
    again = train(lambda model: contextlib.nullcontext())
    if not _same(plain, again):
        return "the plain training differs from itself"
    blocks = _blocks(bench, row)
    del blocks["watch"]  # it does a part of what the next one does
    blocks["offload to the host"] = offloaded
    same, others = 0, []
    for case, block in blocks.items():
        with bench.sheet.trying(f"right: {row}, {case}"):
            if _same(plain, train(block)):
                same += 1
            else:
                others.append(case)
    told = f"{same} of {len(blocks)} equal to plain"
    return f"{told}; not {', '.join(others)}" if others else told


def _trained(
    bench: Bench, make: Callable[[Bench], trainings.Made], block: Block, *, bf16: bool
) -> dict[str, Tensor]:
    """Train some steps; return losses and weights."""
    training = Training(bench.on, *make(bench), bf16=bf16)
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-3
    torch.manual_seed(1)
    with block(training.model):
        losses = [training.step() for _ in range(STEPS)]
    weights = training.model.state_dict()
    return {name: value.detach().cpu() for name, value in weights.items()} | {
        "losses": torch.stack(losses).cpu()
    }


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# -- waits and compiled code -------------------------------------------------------------------


def count_waits(bench: Bench, block: Block) -> str:
    """Tell how often the host waited for the device, after the steps in which things begin."""
    training = Training(bench.on, *_texts(bench))
    with block(training.model):
        for _ in range(WARM):
            training.step()
        waits = bench.on.waits(lambda: [training.step() for _ in range(COUNTED)])
    return "cannot be counted here" if waits is None else str(waits)


def compiled_sites(bench: Bench) -> str:
    """Tell how many of the outputs that are measured in plain code are in compiled code, too."""
    model, x, _ = trainings.mlp(bench.on, width=16, layers=2)
    with kedge.hook(model, "**:out", kedge.measure("norm")) as plainly:
        model(x)
    torch._dynamo.reset()
    with kedge.hook(model, "**:out", kedge.measure("norm")) as compiled:
        torch.compile(model, backend="aot_eager")(x)
    torch._dynamo.reset()
    told = f"{len(compiled)} of {len(plainly)}"
    if len(compiled) < len(plainly):
        told += f", with PyTorch {torch.__version__}"
    return told
