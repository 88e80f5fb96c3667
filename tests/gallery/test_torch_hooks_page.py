"""The table of docs/how-to/from-torch-hooks.md: it has every way of PyTorch to register a hook, and each of its lines runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import kedge
from tests.architecture.test_upstream import DECLINED, every_way

PAGE = Path(__file__).parents[2] / "docs/how-to/from-torch-hooks.md"
MARK = "<!-- every name and every line is tested -->\n\n"
MORE = {
    "Tensor.retain_grad",
    "torch.autograd.graph.saved_tensors_hooks",
    "torch.autograd.graph.save_on_cpu",
}


class Row(NamedTuple):
    """A row of the table."""

    names: list[str]
    lines: list[str]
    note: str


def rows() -> list[Row]:
    """Read the table of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[2].partition("\n\n")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return [
        Row(re.findall("`([^`]+)`", names), re.findall("`([^`]+)`", lines), note.strip())
        for names, lines, note in cells
    ]


def test_the_table_has_every_way_to_register_a_hook() -> None:
    """Each once: what PyTorch offers, and three other ways to the same."""
    names = [name for row in rows() for name in row.names]

    assert sorted(names) == sorted(every_way() | MORE)


def test_what_is_not_here_has_a_reason() -> None:
    """And is among the hooks that Kedge's code does not use, or uses for itself alone."""
    missing = [row for row in rows() if not row.lines]

    assert all(row.note for row in missing)
    ours = {name for row in missing for name in row.names} - DECLINED.keys()
    assert {name.rpartition(".")[2] for name in ours} == {
        "register_module_module_registration_hook"
    }


@pytest.mark.parametrize("line", [line for row in rows() for line in row.lines])
def test_a_line_of_the_table_runs(line: str) -> None:
    """Every site that it names fires in one step of training: the session is strict."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(3, 2, requires_grad=True)
    z = w * 2
    seen: list[Any] = []

    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        (model(x) * z).sum().backward()
        optimizer.step()

    def f(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    names = {
        "kedge": kedge, "model": model, "z": z, "w": w, "f": f,
        "f_grad": lambda grad: seen.append(grad), "pre": lambda module, args: seen.append(args),
        "action": lambda value, event: seen.append(value), "run": run,
        "pack": lambda tensor: seen.append(tensor) or tensor.half(), "unpack": lambda half: half.float(),
    }  # fmt: skip
    if line.startswith("with "):
        exec(f"{line}:\n    run()", names)
        return
    with kedge.session(strict=True) as names["s"]:
        exec(f"hooked = {line}", names)
        run()
    assert seen or "kedge.record()" in line
