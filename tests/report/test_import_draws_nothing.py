"""Python's random numbers are the program's, also while Kedge imports what it shows things with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import full

DRAWS = "print(random.random())"
SEEDED = "import random; random.seed(0); import torch"
TRAINS = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def printed(*command: str) -> str:
    """Return what a fresh python prints."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("between", [full(""), full(TRAINS), TRAINS + "import rich.style"])
def test_a_program_that_seeds_before_it_imports_torch_draws_the_same_numbers(
    tmp_path: Path, between: str
) -> None:
    """Kedge imports its own modules when the program imports PyTorch, and draws nothing then; Rich is the program's to import first."""
    program, recording = tmp_path / "program.py", tmp_path / "it.kedge"
    program.write_text(f"{SEEDED}\n{between}\n{DRAWS}")

    ours = printed("-m", "kedge", "run", "-q", "-o", str(recording), str(program))

    assert ours == printed(str(program))


@pytest.mark.parametrize("module", ["kedge.report.curves", "kedge.features.dataset.engine"])
def test_an_import_in_the_midst_of_a_program_draws_nothing(module: str) -> None:
    """Rich draws a number when it is imported; the program does not miss it."""
    source = (
        "import random, sys; random.seed(0); before = random.getstate()\n"
        f"import {module}\n"
        "print('rich.style' in sys.modules, random.getstate() == before)"
    )

    assert printed("-c", source) == "True True\n"
