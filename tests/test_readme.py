"""README.md stays short, one page has the whole interface, and each line for those who come from elsewhere runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import kedge
from kedge import figures, recipes
from kedge.cli.main import GROUPS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INTERFACE = (ROOT / "docs/reference/interface.md").read_text(encoding="utf-8")
COMING = (ROOT / "docs/how-to/coming-from.md").read_text(encoding="utf-8")
TABLES = COMING.split("<!-- every line is tested -->\n\n")[1:]
ROWS = [row for table in TABLES for row in table.partition("\n\n")[0].splitlines()[2:]]
LINES = [re.fullmatch(r"`([^`]+)`", row.split(" | ")[1])[1] for row in ROWS]


def test_every_public_name_is_shown():
    """The interface stands on its page as a whole; so do the commands."""
    commands = {command for group in GROUPS.values() for command in group} - {"completion"}

    assert [name for name in kedge.__all__ if not re.search(rf"\b{name}\b", INTERFACE)] == []
    assert [name for name in commands if not re.search(rf"`(kedge )?{name}`", INTERFACE)] == []


def test_the_readme_is_read_in_three_minutes():
    """What it says, without code, tables and addresses, is at most 600 words."""
    text = re.sub(
        r"^```.*?^```$|<!--.*?-->|\]\([^)]*\)", "", README, flags=re.MULTILINE | re.DOTALL
    )

    assert len(re.findall(r"[\w'-]+", text)) <= 600


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_table_runs(line):
    """A command exists; a hook or a block serves for a step of training; anything else returns a value."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    gpt = nn.Sequential(
        nn.Embedding(9, 8),
        nn.TransformerEncoder(block, 2, enable_nested_tensor=False),
        nn.Linear(8, 9),
    ).eval()
    names = {
        "gpt": gpt, "tokens": torch.tensor([[1, 4, 2]]),
        "kedge": kedge, "torch": torch, "model": model, "x": x, "recipes": recipes, "figures": figures, "f": lambda module, args, output: None,
        "pack": lambda tensor: tensor, "unpack": lambda tensor: tensor,
    }  # fmt: skip
    if line.startswith("kedge "):
        assert line.split()[1] in {command for group in GROUPS.values() for command in group}
        return
    found = eval(line, names)
    assert found is not None
    if line.startswith(
        ("kedge.hook", "kedge.offload", "recipes.ablate", "recipes.route", "recipes.steer")
    ):
        optimizer = torch.optim.Adam(model.parameters())
        with found:
            model(x).sum().backward()
            optimizer.step()
