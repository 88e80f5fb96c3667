"""The lists under "The way of a value" in docs/explanation/how-it-works.md, measured; docs/pictures/house.py writes them."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn

import kedge

SOURCE = f"{Path(kedge.__file__).parent}/"
LEFT_OUT = f"{SOURCE}calls/arguments.py"  # stands around a public function, and only explains calls that do not fit
BLOCK = re.compile(r"(<!-- measured: (.+?) -->\n\n```text\n).*?(```\n)", re.DOTALL)


class Call(NamedTuple):
    """A running function of src/kedge, and whether it had not run before; a return to it has an empty name."""

    file: str
    function: str
    is_new: bool
    frame: FrameType


def measure(work: Callable[[], object]) -> list[list[tuple[Call, ...]]]:
    """Return, for each call into src/kedge, the running functions at each first call of a function and at its return."""
    entries: list[list[tuple[Call, ...]]] = []
    running: list[Call] = []
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename == LEFT_OUT:
            return
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name != "<module>":
            if not running:
                entries.append([])
                seen.clear()
            running.append(
                Call(
                    code.co_filename.removeprefix(SOURCE), code.co_qualname, code not in seen, frame
                )
            )
            seen.add(code)
            if running[-1].is_new:
                entries[-1].append(tuple(running))
        elif event == "return" and running and running[-1].frame is frame and running.pop().is_new:
            first = [call for call in running if call.is_new]
            entries[-1] += [(*first[:-1], first[-1]._replace(function=""))] if first else []

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entries


def text(file: str, work: Callable[[], object], *, path: bool = False) -> str:
    """Return the stays of the first call into src/kedge that enters a file, a line for each; or only the path to that file."""
    entry = next(entry for entry in measure(work) if any(calls[-1].file == file for calls in entry))
    if path:
        calls = next(calls for calls in entry if calls[-1].file == file)
        entry = [calls[:count] for count in range(1, len(calls) + 1)]
    stays = groupby(entry, lambda calls: calls[-1].file)
    return "".join(f"{number:2}  {line(list(stay))}\n" for number, (_, stay) in enumerate(stays, 1))


def line(stay: list[tuple[Call, ...]]) -> str:
    """Return a stay as text: indented by the files that wait for it, with the first function entered in it, if any."""
    depth = sum(a.file != b.file for a, b in pairwise(stay[0]))
    names = [calls[-1].function.split(".<locals>")[0].removesuffix(".__init__") for calls in stay]
    return f"{'  ' * depth}{stay[0][-1].file}  {purpose(stay[0][-1].file, next(filter(None, names), ''))}".rstrip()


def purpose(file: str, name: str) -> str:
    """Return the name of a function or class with the first sentence of its docstring."""
    module = import_module(f"kedge.{file.removesuffix('.py').replace('/', '.')}")
    told = (attrgetter(name)(module).__doc__ or "").split("\n\n")[0] if name else ""
    sentence = " ".join(re.split(r"[.;:](?:\s|$)", told)[0].replace("``", "`").split())
    return f"{name}: {sentence}" if sentence else name


def ways(folder: str) -> dict[str, str]:
    """Return each list by its name."""
    x, model = torch.ones(512, 512), nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), {}

    def step(loss: Callable[[torch.Tensor], torch.Tensor] = torch.mean) -> None:
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    for name in (
        "first",
        "second",
    ):  # the first time also calls functions that look something up once
        with kedge.session() as session:
            found["hook"] = text(
                "hooks/attach.py", lambda: session.hook(model, "0", kedge.record())
            )
            model(x)
        with kedge.offload(model, to=kedge.Disk(folder, rebuild=False)):
            found["disk"] = text("offload/stores/disk.py", step)
            found["back"] = text("offload/stores/mapped.py", step)
        block = kedge.watch(f"{folder}/{name}.kedge", every=1, budget=None).begin()
        block.tell = str  # prints nothing
        step()
        found["measure"] = text("actions/measure/values.py", step, path=True)
        found["write"] = text("store/writing/arrow.py", step, path=True)
        step(lambda y: y.square().sum().neg().log())
        found["judge"] = text("rules/nonfinite/nan_born.py", block.end, path=True)
    return found


def filled(page: str) -> str:
    """Return the text of docs/explanation/how-it-works.md with the lists of today."""
    with tempfile.TemporaryDirectory() as folder:
        found = ways(folder)
    return BLOCK.sub(lambda block: block[1] + found[block[2]] + block[3], page)
