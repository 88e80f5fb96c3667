"""What it costs to take features: Kedge, hooks written by hand, models cut by hand, and what others offer.

Each round runs every variant once, in shuffled order, and a ratio compares two forwards of one
round; medians are printed, with quartiles. With one thread it is the processor's time of that
thread, else the clock's. Peers run in an environment of their own, one process each, against hooks
by hand in that process; what is not installed there, or fails, is left out, and said.

    python benchmarks/extract.py [--rounds 40] [--threads 1] [--images 20000] [--parts forward,data]
    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/extract.py --parts peers --peers peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import models

Forward = Callable[[], Any]
Made = tuple[nn.Module, Tensor, str, Forward]
PEERS = ("torchextractor", "timm's way", "nnsight", "torchlens")
WARM = 3


def resnet() -> Made:
    """A ResNet-18 and its stem up to the second stage."""
    model, x, _ = models.resnet()
    m: Any = model.eval()
    return model, x, "layer2", lambda: m.layer2(m.layer1(m.maxpool(m.relu(m.bn1(m.conv1(x))))))


def gpt() -> Made:
    """A GPT of 12 layers and its first six."""
    model, words, _ = models.gpt()
    m: Any = model.eval()

    def cut() -> Tensor:
        value = m.wte(words) + m.wpe(torch.arange(words.shape[1]))
        for layer in m.h[:6]:
            value = layer(value)
        return value

    return model, words, "h.5", cut


MODELS = {"ResNet-18, 8x3x96x96": resnet, "GPT, 12 layers, 4x128": gpt}


def leaves(model: nn.Module) -> list[str]:
    """The modules without children, by path."""
    return [path for path, module in model.named_modules() if path and not list(module.children())]


def by_hand(model: nn.Module, x: Tensor, paths: list[str]) -> Forward:
    """Hooks that stay, each of which puts what its module returns into a dict under its name, a list for several calls.

    Whoever wrote them knows that ReLUs in place would overwrite what each ``bn1`` returns, and
    copies that.
    """
    kept: dict[str, list[Tensor]] = {}

    def keep(path: str, module: nn.Module, args: Any, output: Tensor) -> None:
        kept.setdefault(path, []).append(output.clone() if path.endswith("bn1") else output)

    for path in paths:
        model.get_submodule(path).register_forward_hook(partial(keep, path))

    def forward() -> dict[str, list[Tensor]]:
        model(x)
        taken = dict(kept)
        kept.clear()
        return taken

    return forward


def calling(features: Callable[[Tensor], Any], x: Tensor) -> Forward:
    """A forward of an extractor."""
    return lambda: features(x)


def race(variants: dict[str, Forward], rounds: int) -> dict[str, list[float]]:
    """Time every variant once a round, in shuffled order, without grad; what one gives is held until its next turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    held: dict[str, Any] = {}
    with torch.no_grad():
        for round_ in range(rounds + WARM):
            for name in random.sample(list(variants), len(variants)):
                held.pop(name, None)
                start = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
                held[name] = variants[name]()
                end = time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
                if round_ >= WARM:
                    times[name].append(end - start)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> str:
    """Median and quartiles of paired ratios."""
    pairs = sorted(a / b for a, b in zip(times[name], times[to], strict=True))
    quarter = len(pairs) // 4
    return f"{statistics.median(pairs):6.3f} ({pairs[quarter]:.3f}-{pairs[-1 - quarter]:.3f})"


def forwards(rounds: int) -> None:
    """One layer against whole and cut models, all layers against hooks by hand."""
    kedge = import_module("kedge")

    for name, make in MODELS.items():
        model, x, layer, cut = make()
        one = kedge.extract(model, layer)
        times = race(
            {"features": calling(one, x), "whole": lambda m=model, x=x: m(x), "cut": cut}, rounds
        )
        milliseconds = statistics.median(times["whole"]) * 1e3
        print(f"{name}: {milliseconds:.1f} ms a forward")
        print(
            f"  {layer}, stopped early / whole forward        {ratio(times, 'features', 'whole')}"
        )
        print(
            f"  {layer}, stopped early / model cut by hand    {ratio(times, 'features', 'cut')}   to reach 1.05"
        )
        model, x, _, _ = make()
        twin, _, _, _ = make()
        paths = leaves(model)
        every = kedge.extract(model, paths, early_stop=False)
        times = race(
            {"features": calling(every, x), "by hand": by_hand(twin, x, paths), "bare": cut}, rounds
        )
        label = f"all {len(paths)} leaf modules / hooks by hand"
        print(f"  {label:45} {ratio(times, 'features', 'by hand')}   to reach 1.03")


def peers(python: str, rounds: int) -> None:
    """Run each peer in a process of the other environment; and Kedge in this one."""
    print(f"{'the same work / hooks by hand, in one process':48} {'one layer':22} all leaf modules")
    for name in ("kedge", *PEERS):
        runs = sys.executable if name == "kedge" else python
        command = [
            runs,
            __file__,
            "--peer",
            name,
            "--rounds",
            str(rounds),
            "--threads",
            str(torch.get_num_threads()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"{name:16} left out: {last}")
            continue
        for model, ratios in json.loads(done.stdout.strip().splitlines()[-1]).items():
            print(f"{name:16} {model:31} {ratios['one']:22} {ratios['all']}")


def peer(name: str, rounds: int) -> None:
    """Be the process of one peer: print its ratios as JSON."""
    results = {}
    for title, make in MODELS.items():
        ratios = {}
        for what in ("one", "all"):
            model, x, layer, _ = make()
            twin, _, _, _ = make()
            paths = [layer] if what == "one" else list(by_hand(make()[0], x, leaves(model))())
            theirs = FAST[name](model, x, paths)
            mine = by_hand(twin, x, paths)
            with torch.no_grad():
                wrong = len(_wrong(theirs(), mine(), paths))
            said = ratio(race({"peer": theirs, "by hand": mine}, rounds), "peer", "by hand")
            ratios[what] = said + (f", {wrong} of {len(paths)} values wrong" if wrong else "")
        results[title] = ratios
    print(json.dumps(results))


def _wrong(theirs: Any, truth: dict[str, list[Tensor]], paths: list[str]) -> list[str]:
    """Name the modules of which a value is none that the module returned."""
    named = theirs.items() if isinstance(theirs, dict) else zip(paths, theirs, strict=True)
    pairs = ((name.partition("#")[0], value) for name, value in named)
    return [
        path for path, value in pairs if not any(torch.equal(value, right) for right in truth[path])
    ]


def _kedge(model: nn.Module, x: Tensor, paths: list[str]) -> Forward:
    kedge = import_module("kedge")

    return calling(kedge.extract(model, paths), x)


def _torchextractor(model: nn.Module, x: Tensor, paths: list[str]) -> Forward:
    torchextractor = import_module("torchextractor")

    extractor = torchextractor.Extractor(model, paths)
    return lambda: extractor(x)[1]


def _timm(model: nn.Module, x: Tensor, paths: list[str]) -> Forward:
    """Timm's `FeatureHooks`, written again, as the package cannot be imported without torchvision."""
    outputs: dict[torch.device, OrderedDict[str, Tensor]] = {}

    def collect(path: str, *args: Any) -> None:
        outputs.setdefault(args[-1].device, OrderedDict())[path] = args[-1]

    for path in paths:
        model.get_submodule(path).register_forward_hook(partial(collect, path))

    def forward() -> Any:
        model(x)
        return outputs.pop(x.device)

    return forward


def _nnsight(model: nn.Module, x: Tensor, paths: list[str]) -> Forward:
    wrapped = import_module("nnsight").NNsight(model)
    envoys = [wrapped.get(path) for path in paths]

    def forward() -> list[Tensor]:
        with wrapped.trace(x) as tracer:
            kept = [envoy.output for envoy in envoys].save()
            if len(envoys) == 1:
                tracer.stop()
        return kept

    return forward


def _torchlens(model: nn.Module, x: Tensor, paths: list[str]) -> Forward:
    """One layer by `pluck`; all modules by `record`, which notes what they returned and keeps none of it: less work."""
    torchlens = import_module("torchlens")
    if len(paths) == 1:
        return lambda: [torchlens.pluck(model, x, paths[0])]

    def forward() -> dict[str, Tensor]:
        torchlens.record(model, x, default_op=False, default_module=True)
        return {}

    return forward


FAST = {
    "kedge": _kedge,
    "torchextractor": _torchextractor,
    "timm's way": _timm,
    "nnsight": _nnsight,
    "torchlens": _torchlens,
}


class Images(torch.utils.data.Dataset[Tensor]):
    """Small images, made from their number; every 640th notes the resident memory in MiB."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.base = torch.randn(64, 3, 32, 32)
        self.seen: list[float] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        if i % 640 == 0:
            self.seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
        return self.base[i % 64]

    def slope(self) -> float:
        """How it grew over the last three quarters, in MiB for 10,000 images, by least squares."""
        late = self.seen[len(self.seen) // 4 :]
        return statistics.linear_regression(range(len(late)), late).slope * 10_000 / 640


def small() -> nn.Module:
    """A small convolutional net, whose features have 256 numbers an image."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1),
    ]
    return nn.Sequential(
        *layers, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    ).eval()


def data(images: int, rounds: int) -> None:
    """A data set to disk against a loop that keeps everything in memory."""
    kedge = import_module("kedge")

    times: dict[str, list[float]] = {"kedge": [], "by hand": []}
    slopes = []
    for _ in range(rounds):
        for name in random.sample(list(times), 2):
            model, images_ = small(), Images(images)
            loader = torch.utils.data.DataLoader(images_, batch_size=64)
            start = time.perf_counter()
            if name == "kedge":
                with tempfile.TemporaryDirectory() as folder:
                    kedge.extract(model, "7").dataset(
                        loader, Path(folder) / "features", progress=False
                    )
                    times[name].append(time.perf_counter() - start)
                slopes.append(images_.slope())
            else:
                kept: list[Tensor] = []
                model[7].register_forward_hook(lambda m, i, o, kept=kept: kept.append(o))
                with torch.no_grad():
                    for batch in loader:
                        model(batch)
                torch.cat(kept)
                times[name].append(time.perf_counter() - start)
    print(
        f"{images:,} images of 3x32x32 to disk: {images / statistics.median(times['kedge']):,.0f} a second"
    )
    print(
        f"  rate / that of a loop that keeps all in memory  {ratio(times, 'by hand', 'kedge')}   to reach 0.95"
    )
    print(f"  resident memory: {statistics.median(slopes):+.3f} MiB for 10,000 images")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--parts", default="forward,data")
    parser.add_argument(
        "--peers", metavar="PYTHON", help="the Python of an environment with benchmarks/peers.txt"
    )
    parser.add_argument("--peer", choices=[*FAST], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.peer:
        peer(asked.peer, asked.rounds)
        return
    parts = asked.parts.split(",")
    if "forward" in parts:
        forwards(asked.rounds)
    if "data" in parts:
        data(asked.images, max(3, asked.rounds // 10))
    if "peers" in parts:
        peers(asked.peers or sys.executable, asked.rounds)


if __name__ == "__main__":
    main()
