"""What a step costs against what it holds: ways to keep fewer saved tensors, beside each other; on a CPU.

`benchmarks/offload.py --frontier` runs it. Every case has a model of its own with the same weights, in
one process. A round makes one step of every case, in shuffled order, and a case's ratio in a round
is its time over that of the bare step in the same round; printed are medians and quartiles. The
first rounds are not counted: Kedge learns and proves in them.

`held` is what a process of its own holds more after the forward than before it, in anonymous memory
(`RssAnon`), of what the bare one does, in the last of some steps. Its allocator gives each large
block back as soon as it is freed; the times are without that. Files are not memory here: how much of
them stays in the system's cache is up to the system.

Every case must have the gradients of the bare step, bit for bit. PyTorch's compiler, with
``--compiled``, is the exception: it computes other bits, takes its own decisions within a budget of
memory, and its time is beside that of the bare step all the same.

At the end stands each of PyTorch's ways beside the fastest of Kedge's that holds no more.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kedge

MB = 1e6
LEAST = 65_536
SAME = 0.5 * MB
"""Of what two processes hold, a difference that is none."""
LEARNING = 12
"""The rounds that are not counted, and the steps before memory is read."""
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(LEAST), "MALLOC_TRIM_THRESHOLD_": str(LEAST)}
WIDTH, HEIGHT = 820, 430
LEFT, RIGHT, TOP, BOTTOM = 62, 560, 22, 380
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .grid { stroke: #24292f; stroke-opacity: .15 }
.torch { fill: #b35900 } .kedge { fill: #0969da } text.small { font-size: 11px }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #e6edf3 } .torch { fill: #f0883e } .kedge { fill: #58a6ff }
}
"""

Around = contextlib.AbstractContextManager[Any]
Case = Callable[[nn.Module, str, int], Around]


@dataclass(frozen=True)
class Model:
    """A model with a batch.

    Attributes:
        make: Makes the model.
        x: The batch.
        y: Its labels.
        blocks: A selector of its blocks.
        every_second: One of every second block.
    """

    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    blocks: str
    every_second: str

    def loss(self, model: nn.Module) -> Tensor:
        """Run the forward."""
        logits = model(self.x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.y)


def gpt() -> Model:
    """Return a GPT of 6 layers and width 192, with dropout."""
    words = torch.randint(0, 1024, (4, 129))
    return Model(
        lambda: models.GPT(layers=6, width=192, heads=6, words=1024, length=128, dropout=0.1),
        words[:, :-1],
        words[:, 1:].reshape(-1),
        "h.*",
        "h.[135]",
    )


def resnet() -> Model:
    """Return a ResNet-18 with a batch of small images."""
    return Model(
        models.ResNet18,
        torch.randn(4, 3, 96, 96),
        torch.randint(0, 1000, (4,)),
        "layer*.*",
        "layer*.1",
    )


def resnet50() -> Model:
    """Return a ResNet-50 with a batch of small images."""
    return Model(
        models.DeepResNet,
        torch.randn(4, 3, 64, 64),
        torch.randint(0, 1000, (4,)),
        "layer*.*",
        "layer*.[135]",
    )


def vit() -> Model:
    """Return a vision transformer of 8 layers and width 192."""
    return Model(
        lambda: models.ViT(layers=8, width=192, heads=6, size=96),
        torch.randn(4, 3, 96, 96),
        torch.randint(0, 1000, (4,)),
        "layers.*",
        "layers.[1357]",
    )


def unet() -> Model:
    """Return a U-Net of four levels with a batch of small images."""
    return Model(
        lambda: models.UNet(width=16, levels=4),
        torch.randn(2, 3, 96, 96),
        torch.randint(0, 10, (2 * 96 * 96,)),
        "down.*, up.*",
        "down.[02], up.[02]",
    )


MODELS: dict[str, Callable[[], Model]] = {
    "gpt": gpt,
    "resnet": resnet,
    "resnet50": resnet50,
    "vit": vit,
    "unet": unet,
}
COMPILER = "torch: compiler"
BUDGETS = (1.0, 0.7, 0.5, 0.3)
KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.convolution.default,
    }
)


def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the results of products of matrices, and of convolutions."""
    if operation in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: nn.Module, selector: str, **options: Any) -> Around:
    """Put modules under PyTorch's checkpoint, as `torch.utils.checkpoint` is used."""
    for site in kedge.select(selector).on(model):
        module = model.get_submodule(site.path)
        inner = module.forward

        def forward(*args: Any, _inner: Callable[..., Any] = inner) -> Any:
            return checkpoint(_inner, *args, use_reentrant=False, **options)

        module.forward = forward  # type: ignore[method-assign]
    return contextlib.nullcontext()


def selective(model: nn.Module, selector: str) -> Around:
    """Put modules under PyTorch's selective checkpoint."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(model, selector, context_fn=contexts)


def offloaded(model: nn.Module, **options: Any) -> Around:
    """Kedge, with options of `kedge.offload`."""
    around: Around = kedge.offload(model, min_bytes=LEAST, **options)
    return around


def compiled(model: nn.Module, budget: float) -> Around:
    """Compile a model; its budget is the share of the memory that the compiler's own choice would take."""
    model.compile()
    around: Around = torch._functorch.config.patch(activation_memory_budget=budget)
    return around


def cases(of: Model) -> dict[str, Callable[[nn.Module, int], Around]]:
    """Return the cases by name: what surrounds the steps of a model, given the bytes that it saves."""
    disk = kedge.Disk()
    every, second = of.blocks, of.every_second
    found: dict[str, Callable[[nn.Module, int], Around]] = {
        "bare": lambda _model, _saved: contextlib.nullcontext(),
        "torch: save_on_cpu": lambda _model, _saved: torch.autograd.graph.save_on_cpu(),
        "torch: checkpoint, each block": lambda model, _saved: checkpointed(model, every),
        "torch: checkpoint, every second": lambda model, _saved: checkpointed(model, second),
        "torch: selective, keeps products": lambda model, _saved: selective(model, every),
        "Kedge: rebuild": lambda model, _saved: offloaded(model),
        "Kedge: recompute each block": lambda model, _saved: offloaded(model, recompute=every),
        "Kedge: recompute every second": lambda model, _saved: offloaded(model, recompute=second),
    }
    for percent in (75, 50, 25):
        found[f"Kedge: recompute, limit {percent} %"] = lambda model, saved, _share=percent / 100: (
            offloaded(model, recompute=every, max_memory=int(saved * _share))
        )
    for percent in (75, 50, 25, 0):
        found[f"Kedge: disk, limit {percent} %"] = lambda model, saved, _share=percent / 100: (
            offloaded(model, to=disk, max_memory=int(saved * _share))
        )
    found["Kedge: recompute each, disk"] = lambda model, _saved: offloaded(
        model, recompute=every, to=disk
    )
    found["Kedge: recompute every second, disk"] = lambda model, _saved: offloaded(
        model, recompute=second, to=disk
    )
    for budget in BUDGETS:
        found[f"{COMPILER}, budget {budget}"] = lambda model, _saved, _budget=budget: compiled(
            model, _budget
        )
    return found


def saved_bytes(of: Model) -> int:
    """Return the bytes that a bare forward saves: each storage once, without parameters."""
    model = of.make()
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = of.loss(model)
    total = sum(found.values())
    del loss
    return total


@dataclass
class Run:
    """One case: its model, what surrounds its steps, and its times.

    Attributes:
        model: The model.
        around: Surrounds each step.
        seconds: The times of its steps.
        held: What it holds after the forward, in bytes.
    """

    model: nn.Module
    around: Around
    seconds: list[float] = field(default_factory=list)
    held: float = 0.0

    def step(self, of: Model, number: int) -> None:
        """Make a step."""
        self.model.zero_grad(set_to_none=False)
        torch.manual_seed(number)
        with self.around:  # once around all steps, where no other case comes in between
            begun = time.perf_counter()
            of.loss(self.model).backward()
            self.seconds.append(time.perf_counter() - begun)


def made(of: Model, name: str, saved: int) -> Run:
    """Return a case that is ready to run."""
    torch.manual_seed(0)
    model = of.make()
    return Run(model, cases(of)[name](model, saved))


def anonymous() -> int:
    """Return the process's anonymous memory, in bytes."""
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def print_held(of: Model, name: str, saved: int) -> None:
    """Print what a case holds after the forward; the work of a process of its own."""
    run = made(of, name, saved)
    for number in range(LEARNING):
        run.step(of, number)
    with run.around:
        before = anonymous()
        loss = of.loss(run.model)
        print(anonymous() - before)
        loss.backward()


def held(model: str, name: str, saved: int, threads: int) -> float:
    """Return what a case holds after the forward, from a process of its own."""
    words = ["--held", model, name, str(saved), "--threads", str(threads), "--frontier"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offload.py")), *words],
        env={**os.environ, **GIVE_BACK},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} on {model} ended with {done.returncode}:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of a model."""
    return [param.grad for param in model.parameters() if param.grad is not None]


def compare(model: str, args: argparse.Namespace) -> dict[str, Run]:
    """Run one model, and print its table."""
    torch.manual_seed(0)
    of = MODELS[model]()
    saved = saved_bytes(of)
    chosen = [name for name in cases(of) if args.compiled or not name.startswith(COMPILER)]
    runs = {name: made(of, name, saved) for name in chosen}
    wrong: set[str] = set()
    for number in range(LEARNING + args.rounds):
        for name in random.sample(list(runs), len(runs)):
            runs[name].step(of, number)
        expected = gradients(runs["bare"].model)
        for name, run in runs.items():
            if name.startswith(COMPILER):
                continue
            if not all(map(torch.equal, expected, gradients(run.model))):
                wrong.add(name)
    for name, run in runs.items():
        run.held = held(model, name, saved, args.threads)

    print(f"\n{model}: {args.rounds} rounds, {args.threads} threads, saves {saved / MB:.0f} MB")
    print(f"  {'':38}{'time':>7}{'(quartiles)':>14}{'held, MB':>10}{'held':>7}")
    for name, run in runs.items():
        ratios = sorted(ratios_of(run, runs["bare"]))
        low, middle, high = statistics.quantiles(ratios, n=4)
        other = "  OTHER GRADIENTS" if name in wrong else ""
        share = run.held / runs["bare"].held
        spread = f"{low:.2f}-{high:.2f}"
        print(f"  {name:38}{middle:>7.2f}{spread:>14}{run.held / MB:>10.1f}{share:>7.2f}{other}")
    print_beside(runs)
    return runs


def print_beside(runs: dict[str, Run]) -> None:
    """Print each of PyTorch's ways, and the fastest of Kedge's that holds no more, paired by rounds."""
    print("  at the memory of each way of PyTorch's, Kedge's fastest:")
    for name, run in runs.items():
        if not name.startswith("torch"):
            continue
        fitting = {
            other: statistics.median(ratios_of(one, run))
            for other, one in runs.items()
            if other.startswith("Kedge") and one.held <= run.held + SAME
        }
        if not fitting:
            print(f"  {name:38}{'none':>7}")
            continue
        fastest = min(fitting, key=fitting.__getitem__)
        print(f"  {name:38}{fitting[fastest]:>7.2f} of its time: {fastest}")


def ratios_of(run: Run, bare: Run) -> list[float]:
    """Return the times of a case over those of the bare steps in the same rounds."""
    pairs = zip(run.seconds[LEARNING:], bare.seconds[LEARNING:], strict=True)
    return [one / other for one, other in pairs]


def drawn(model: str, runs: dict[str, Run]) -> Iterator[str]:
    """Yield the lines of an SVG file: time against memory, of the bare step's."""
    bare = runs["bare"]
    points = [
        (name, statistics.median(ratios_of(run, bare)), run.held / bare.held)
        for name, run in runs.items()
    ]
    slowest = max(1.2, *(ratio for _, ratio, _ in points)) + 0.1

    def x(ratio: float) -> float:
        return LEFT + (ratio - 0.9) / (slowest - 0.9) * (RIGHT - LEFT)

    def y(share: float) -> float:
        most = max(1.0, *(share for _, _, share in points)) * 1.05
        return BOTTOM - share / most * (BOTTOM - TOP)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    yield f"<title>{model}: time of a step against the memory that it holds</title>"
    yield f"<style>{STYLE}</style>"
    for quarter in range(5):
        share = quarter / 4
        yield f'<path class="grid" d="M{LEFT} {y(share):.1f}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.2f}</text>'
    tenth = 0
    while 1 + tenth / 5 <= slowest:
        ratio = 1 + tenth / 5
        yield f'<text x="{x(ratio):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{ratio:.1f}</text>'
        tenth += 1
    middle = (LEFT + RIGHT) / 2
    yield (
        f'<text x="{middle}" y="{BOTTOM + 42}" text-anchor="middle">'
        f"{model}: time of a step, of the bare one's</text>"
    )
    middle = (TOP + BOTTOM) / 2
    yield (
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        "held after the forward, of the bare one's</text>"
    )
    for number, (name, ratio, share) in enumerate(points, 1):
        kind = "kedge" if name.startswith("Kedge") else "torch"
        yield f'<circle class="{kind}" cx="{x(ratio):.1f}" cy="{y(share):.1f}" r="4"/>'
        yield f'<text class="small" x="{x(ratio) + 6:.1f}" y="{y(share) - 5:.1f}">{number}</text>'
        yield (
            f'<text class="small {kind}" x="{RIGHT + 12}" y="{TOP + 20 * number}">'
            f"{number} {name}</text>"
        )
    yield "</svg>"


def main(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Run the models, or be the process that reads what one case holds."""
    if args.held:
        torch.manual_seed(0)
        model, name, saved = args.held
        print_held(MODELS[model](), name, int(saved))
        return
    random.seed(0)
    print(f"torch {torch.__version__}, saved tensors from {LEAST // 1024} KB up")
    for model in names:
        if model not in MODELS:
            raise SystemExit(f"--models {model}: with --frontier there are {', '.join(MODELS)}")
        runs = compare(model, args)
        if args.picture:
            path = Path(args.picture)
            path = path.with_name(f"{path.stem}-{model}{path.suffix or '.svg'}")
            path.write_text("\n".join(drawn(model, runs)) + "\n", encoding="utf-8")
