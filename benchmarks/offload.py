"""What it costs and what it frees to keep, rebuild, move or compress the tensors that autograd saves; on a CPU.

Each run is a process of its own that builds one model and takes some training steps, of which the
first is not counted. A round runs every case once, in a shuffled order, and a case's ratio in a
round is its time over that of the bare run in the same round. Printed are medians:

    time      a step, the fastest after the first, over the bare run's
    peak      the highest resident memory in the steps, above that before the first of them, MB
    packed    bytes that autograd saved in a step, MB, each time they were saved
    kept      bytes that were kept in memory or moved for it; on disk: how many of them
    io        seconds a step of putting away and bringing back, by rebuilding too

    python benchmarks/offload.py [--models resnet50,resnet152,gpt,llama] [--rounds 5] [--steps 4] [--threads 2]
    python benchmarks/offload.py --limit 1500MB --models resnet50-16    # in a memory cgroup, where bare is killed: time is
                                                                        # over the first case that
                                                                        # is not
    python benchmarks/offload.py --frontier [--models gpt,resnet] [--rounds 15] [--compiled] [--picture out.svg]
                                                                        # see frontier.py

"the tutorials' way" writes each tensor with `torch.save` to a file of its own and loads it with
`torch.load`, as the tutorials on saved-tensor hooks do. Every case but the lossy ones must end with
the bare run's gradients, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

sys.path.insert(0, str(Path(__file__).parent))
import models

MIN_BYTES = 65_536
TUNED = ", allocator tuned"
"""The end of the names of cases in which glibc gives large blocks back as soon as they are freed."""
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}
MB = 1e6
Made = tuple[nn.Module, Tensor, Tensor]
Numbers = dict[str, float]


def resnet(depths: tuple[int, ...], batch: int) -> Made:
    """Make a ResNet with a batch of images of 224x224."""
    return (
        models.DeepResNet(depths),
        torch.randn(batch, 3, 224, 224),
        torch.randint(0, 1000, (batch,)),
    )


def gpt(batch: int = 4, length: int = 512) -> Made:
    """Make a GPT of 8 layers and width 512, with dropout."""
    words = torch.randint(0, 8192, (batch, length + 1))
    model = models.GPT(layers=8, width=512, heads=8, length=length, dropout=0.1)
    return model, words[:, :-1], words[:, 1:].reshape(-1)


def llama(batch: int = 4, length: int = 512) -> Made:
    """Make a Llama of 8 layers and width 512."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - only this model needs it

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=length,
        use_cache=False,
    )
    words = torch.randint(0, 8192, (batch, length + 1))
    return LlamaForCausalLM(config), words[:, :-1], words[:, 1:].reshape(-1)


MODELS: dict[str, Callable[[], Made]] = {
    "resnet50": lambda: resnet((3, 4, 6, 3), 8),
    "resnet50-16": lambda: resnet((3, 4, 6, 3), 16),
    "resnet152": lambda: resnet((3, 8, 36, 3), 4),
    "gpt": gpt,
    "gpt-8": lambda: gpt(8),
    "llama": llama,
}


class File:
    """A tensor in a file of its own, as the tutorials write it."""

    seconds = 0.0

    def __init__(self, tensor: Tensor, folder: str) -> None:
        self.name = f"{folder}/{uuid.uuid4()}"
        start = time.perf_counter()
        torch.save(tensor, self.name)
        File.seconds += time.perf_counter() - start

    def load(self) -> Tensor:
        """Read it."""
        start = time.perf_counter()
        tensor: Tensor = torch.load(self.name)
        File.seconds += time.perf_counter() - start
        return tensor

    def __del__(self) -> None:
        Path(self.name).unlink()


@contextlib.contextmanager
def bare(model: nn.Module, folder: str) -> Iterator[Callable[[], Numbers]]:
    """Nothing."""
    yield dict


@contextlib.contextmanager
def identity(model: nn.Module, folder: str) -> Iterator[Callable[[], Numbers]]:
    """Hooks that keep each tensor as it is: what hooks alone cost."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        yield dict


@contextlib.contextmanager
def tutorial(model: nn.Module, folder: str) -> Iterator[Callable[[], Numbers]]:
    """A file for each saved tensor."""
    sizes = [0]

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < MIN_BYTES:
            return tensor.detach()
        sizes[0] += tensor.nbytes
        return File(tensor, folder)

    def read() -> Numbers:
        size, seconds = sizes[0], File.seconds
        sizes[0], File.seconds = 0, 0.0
        return {"packed": size, "kept": size, "moved": size, "io": seconds}

    with torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: kept.load() if isinstance(kept, File) else kept
    ):
        yield read


@contextlib.contextmanager
def checkpointing(model: nn.Module, folder: str) -> Iterator[Callable[[], Numbers]]:
    """Each block under activation checkpointing, which computes it again in the backward pass."""
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415 - only this case needs it

    for module in model.modules():
        if type(module).__name__ in {"Bottleneck", "Layer", "LlamaDecoderLayer"}:
            inner = module.forward

            def forward(*args: Any, _inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
                return checkpoint(_inner, *args, use_reentrant=False, **kwargs)

            module.forward = forward  # type: ignore[method-assign]
    yield dict


def kedged(**options: Any) -> Callable[..., Any]:
    """Kedge, with options of `kedge.offload`."""

    @contextlib.contextmanager
    def case(model: nn.Module, folder: str) -> Iterator[Callable[[], Numbers]]:
        import kedge  # noqa: PLC0415 - each process loads what it measures

        to = options.get("to")
        given = {**options, "to": kedge.Disk(folder, **to[1]) if to else kedge.Rebuild()}
        with kedge.offload(model, min_bytes=MIN_BYTES, **given) as account:
            yield lambda: figures(account)

    return case


def figures(account: Any) -> Numbers:
    """Read what an offload did in the last step; parameters, buffers and inputs are in memory in any case."""
    step = account.step
    kept = step.sum("kept").bytes - step.resident + step.extra
    return {
        "packed": step.naive,
        "kept": kept + step.stored.bytes,
        "moved": step.stored.bytes,
        "io": step.putting + step.restored.stalled,
    }


CASES: dict[str, Callable[..., Any]] = {
    "bare": bare,
    "hooks that do nothing": identity,
    "the tutorials' way": tutorial,
    "checkpointing each block": checkpointing,
    "Kedge, rebuild": kedged(),
    f"Kedge, rebuild{TUNED}": kedged(),
    "Kedge, disk": kedged(to=("disk", {})),
    f"Kedge, disk{TUNED}": kedged(to=("disk", {})),
    "Kedge, disk, nothing rebuilt": kedged(to=("disk", {"rebuild": False})),
    f"Kedge, disk, nothing rebuilt{TUNED}": kedged(to=("disk", {"rebuild": False})),
    "Kedge, disk, uncached": kedged(to=("disk", {"uncached": True})),
    "Kedge, disk, checksums": kedged(to=("disk", {"checksum": True})),
    "Kedge, int8 in memory": kedged(codec="int8"),
}
LOSSY = {"Kedge, int8 in memory"}


def resident(what: str) -> float:
    """Read a line of the process's status, in MB: VmRSS, or VmHWM, the highest since the process began."""
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / MB


def work(name: str, model: str, steps: int, folder: str) -> None:
    """Be one run: write its figures into the folder."""
    torch.manual_seed(0)
    module, x, y = MODELS[model]()
    before, seconds, last = resident("VmRSS"), [], {}
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="ascii"
    )  # the highest is counted from here
    with CASES[name](module, folder) as read:
        for step in range(steps):
            module.zero_grad()
            torch.manual_seed(step)
            start = time.perf_counter()
            logits = module(x)
            logits = getattr(logits, "logits", logits)
            F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y).backward()
            seconds.append(time.perf_counter() - start)
            last = read()
            del logits
    grads = [p.grad.numpy().tobytes() for p in module.parameters() if p.grad is not None]
    bits = hashlib.sha256(b"".join(grads)).hexdigest()
    result = {
        "seconds": min(seconds[1:] or seconds),
        "peak": resident("VmHWM") - before,
        "bits": bits,
        **last,
    }
    (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")


class Limit:
    """A memory cgroup with a limit, for the length of a block; needs the right to make one."""

    def __init__(self, limit: str) -> None:
        self.bytes = int(float(limit.removesuffix("MB")) * MB)
        first = Path("/sys/fs/cgroup/memory")
        self.first = first.exists()
        self.place = (first if self.first else Path("/sys/fs/cgroup")) / f"offload-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            self.place.mkdir()
            name = "memory.limit_in_bytes" if self.first else "memory.max"
            (self.place / name).write_text(str(self.bytes), encoding="ascii")
        except OSError as error:
            raise SystemExit(f"no memory limit could be set here: {error}") from error
        return self

    def join(self) -> None:
        """Put the process that calls this under the limit."""
        (self.place / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def __exit__(self, *error: object) -> None:
        self.place.rmdir()


def measure(
    name: str, model: str, args: argparse.Namespace, limit: Limit | None
) -> dict[str, Any] | None:
    """Start one run and wait for it; None if it was killed."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        words = ["--work", name, model, str(args.steps), folder, "--threads", str(args.threads)]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, __file__, *words],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                **(GIVE_BACK if name.endswith(TUNED) else {}),
            },
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=limit.join if limit else None,
        )
        wall = time.perf_counter() - start
        place = Path(folder) / "result.json"
        if done.returncode == -9 and limit:
            return None
        if done.returncode or not place.exists():
            raise SystemExit(
                f"{name} on {model} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return {**json.loads(place.read_text(encoding="utf-8")), "wall": wall}


def compare(model: str, args: argparse.Namespace) -> None:
    """Print the table of one model."""
    names = [name for name in CASES if not args.cases or name in args.cases.split(";")]
    runs: dict[str, list[dict[str, Any] | None]] = {name: [] for name in names}
    with Limit(args.limit) if args.limit else contextlib.nullcontext() as limit:
        for _ in range(args.rounds):
            for name in random.sample(names, len(names)):
                runs[name].append(measure(name, model, args, limit))
    under = f", under a limit of {args.limit}" if args.limit else ""
    print(f"\n{model}: {args.rounds} rounds of {args.steps} steps, {args.threads} threads{under}")
    print(
        f"  {'':48}{'time':>7}{'(quartiles)':>14}{'peak':>8}{'packed':>8}{'kept':>8}{'on disk':>8}{'io':>8}{'wall':>8}"
    )
    base = next((name for name in names if any(runs[name])), "bare")
    plain = runs[base]
    if base != "bare":
        print(f"  time is over that of: {base}")
    bits = next((run["bits"] for run in plain if run), None)
    for name in names:
        print(line(name, [run for run in runs[name] if run], plain, bits), flush=True)


def line(
    name: str, done: list[dict[str, Any]], plain: list[dict[str, Any] | None], bits: str | None
) -> str:
    """Make the line of one case."""
    if not done:
        return f"  {name:48}  killed"
    pairs = sorted(a["seconds"] / b["seconds"] for a, b in zip(done, plain, strict=False) if b)
    spread = f"{pairs[len(pairs) // 4]:.2f}-{pairs[-1 - len(pairs) // 4]:.2f}" if pairs else ""
    ratio = f"{statistics.median(pairs):.2f}" if pairs else "-"

    def middle(what: str, unit: float, digits: int = 0) -> str:
        found = [run[what] for run in done if what in run]
        return f"{statistics.median(found) / unit:.{digits}f}" if found else "-"

    amounts = f"{middle('peak', 1):>8}{middle('packed', MB):>8}{middle('kept', MB):>8}{middle('moved', MB):>8}"
    same = (
        ""
        if name in LOSSY or bits is None or {run["bits"] for run in done} == {bits}
        else "  OTHER GRADIENTS"
    )
    return f"  {name:48}{ratio:>7}{spread:>14}{amounts}{middle('io', 1, 2):>8}{middle('wall', 1, 1):>8}{same}"


def main() -> None:
    """Run the models that are asked for, or be one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        help="resnet50,resnet152,gpt,llama; with --frontier gpt,resnet,resnet50,vit,unet",
    )
    parser.add_argument(
        "--frontier", action="store_true", help="time against memory, beside PyTorch's own ways"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="with --frontier: the compiler's budgets as well"
    )
    parser.add_argument("--picture", help="with --frontier: where to write an SVG of each model")
    parser.add_argument("--cases", default="", help="names of cases, with ; between them; all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--folder", default=None, help="where files go; the system's folder for temporary ones"
    )
    parser.add_argument("--limit", help="resident memory, as 1100MB")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--held", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.work:
        name, model, steps, folder = args.work
        work(name, model, int(steps), folder)
        return
    if args.frontier:
        import frontier  # noqa: PLC0415 - it imports Kedge, which the processes of the cases do not all load

        frontier.main(args, (args.models or "gpt,resnet,resnet50,vit,unet").split(","))
        return
    random.seed(0)
    print(f"torch {torch.__version__}, saved tensors from {MIN_BYTES // 1024} KB up")
    for model in (args.models or "resnet50,resnet152,gpt,llama").split(","):
        compare(model, args)


if __name__ == "__main__":
    main()
