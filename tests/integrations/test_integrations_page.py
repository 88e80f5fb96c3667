"""The programs of docs/how-to/integrations.md, each run as it stands where its host is installed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from kedge.store.recording import Recording
from tests import forked
from tests.marks import sampled

pytestmark = pytest.mark.timing

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "integrations.md"
SECTION = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PROGRAMS = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
HOSTS = {
    "Lightning": ("lightning", "run.kedge"),
    "The Trainer of transformers": ("accelerate", "results/*.kedge"),
    "Accelerate": ("accelerate", "run.kedge"),
    "Ignite": ("ignite", "run.kedge"),
    "pytest": ("pytest", ""),
    "TensorBoard": ("tensorboard", "run.kedge"),
    "Weights & Biases": ("wandb", "run.kedge"),
}


def test_the_page_has_a_program_for_each_host():
    """No program of the page is left out here, but for the plain loop and logged values, which run with the other pages' examples, and a cell."""
    assert set(PROGRAMS) - set(HOSTS) == {"A plain loop", "Logged values", "Notebooks"}
    assert set(HOSTS) <= set(PROGRAMS)


#: The others are run by `make test-all`.
ALWAYS = {"Lightning", "The Trainer of transformers", "Accelerate", "pytest"}


@pytest.mark.parametrize("host", sampled(HOSTS, ALWAYS))
def test_the_program_of_a_host_runs(host, tmp_path):
    """Whoever types what the page shows gets a recording that ended well, and with pytest tests that pass."""
    package, place = HOSTS[host]
    pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "test_page.py").write_text(PROGRAMS[host], encoding="utf-8")
    quiet = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    start = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if host == "pytest" else []
    command = [sys.executable, *start, "test_page.py"]
    done = forked.run(command, cwd=tmp_path, env=os.environ | quiet, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    if place:
        [recording] = tmp_path.glob(place)
        assert Recording.open(recording).end.error is None
    else:
        assert "2 passed" in done.stdout
