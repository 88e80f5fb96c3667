"""What a type checker knows about a program that uses Kedge."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

# What mypy is to say of a line stands behind it; nothing is to be said of the others.
PROGRAM = """\
from typing import Any, reveal_type

import kedge
from torch import Tensor, nn

model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
with kedge.hook(model, "1", kedge.record()) as acts:
    reveal_type(acts["1"])  # torch._tensor.Tensor
with kedge.session() as s:
    stats = s.hook(model, ["0", "1"], kedge.measure(), when=kedge.every(2))
    edited = s.hook(model, "0", kedge.scale(2), kedge.record(copy=True))
    function = s.hook(model, "1", lambda v: v * 2)
    weight = s.hook(model[0].weight, kedge.record())
reveal_type(stats["1"])  # kedge.actions.measure.results.Statistics
reveal_type(stats["1"].rms)  # float
reveal_type(stats["1"].count)  # int
reveal_type(list(acts.items()))  # list[tuple[str, torch._tensor.Tensor]]
reveal_type(acts.get("0"))  # torch._tensor.Tensor | None
reveal_type(acts[["0", "1"]])  # kedge.hooks.recorded_values.NamedValues[torch._tensor.Tensor]
reveal_type(stats[kedge.select("*")])  # kedge.hooks.recorded_values.NamedValues[kedge.actions.measure.results.Statistics]
reveal_type(edited["0"])  # torch._tensor.Tensor
reveal_type(weight["tensor"])  # torch._tensor.Tensor
reveal_type(function)  # kedge.hooks.handle.Hooked[Any]
reveal_type(kedge.extract(model, {"1": "feat"}))  # kedge.features.extract.Features
reveal_type(kedge.extract(model, return_nodes=["1"], no_grad=False))  # kedge.features.extract.Features
plain: dict[str, Tensor] = dict(acts)
session: kedge.Session = s
recording: kedge.Recording = kedge.Recording.open("run.kedge")
findings: list[kedge.Finding] = []
kedge.hok(model, "1", kedge.record())  # error: Module has no attribute "hok"; maybe "hook"?
stats["1"].rmss  # error: "Statistics" has no attribute "rmss"; maybe "rms"?
acts["1"].rms  # error: "Tensor" has no attribute
kedge.extract(model, nodes=["1"])  # error: No overload variant
"""


def test_a_type_checker_knows_what_is_read(root, tmp_path):
    """A recorded value is a tensor, a measured one has figures, and a slip of the pen is found, all without a cast."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-codes", str(program)],
        cwd=root,  # with its settings, which are strict, and its store of what is known already
        env=os.environ | {"MYPYPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    said = dict.fromkeys(range(1, PROGRAM.count("\n") + 1), "")
    for line, what in re.findall(
        r"program\.py:(\d+): (?:note: Revealed type is )?\"?(.*)", ran.stdout
    ):
        said[int(line)] += what.removesuffix('"') + "\n"
    wanted = dict(enumerate((line.partition("  # ")[2] for line in PROGRAM.splitlines()), 1))

    assert ran.stderr == ""
    assert {n: want for n, want in wanted.items() if want and want not in said[n]} == {}
    assert {n: what for n, what in said.items() if what and not wanted[n]} == {}
