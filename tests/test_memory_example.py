"""The demonstration of `kedge.offload`: what does not fit within a memory limit is trained in it, bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timing,
    pytest.mark.full,
]  # half a minute for what tests/offload has in small

SCRIPT = Path(__file__).parents[1] / "examples" / "bigger_than_memory.py"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is RLIMIT_DATA as Linux counts it")
def test_what_does_not_fit_is_trained_within_the_limit(tmp_path):
    """The bare run dies for want of memory; the one with Kedge stays below the limit and has the losses of a free one."""
    saved = tmp_path / "memory.json"
    command = [sys.executable, str(SCRIPT), "--save", str(saved)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr

    assert ended.returncode == 0, said
    free, bare, spare = re.split(r"\n(?=\S)", ended.stdout.strip())
    assert "does not fit" in bare
    assert re.search(r"allocate memory|bad_alloc|could not create", ended.stderr), said
    assert "equal, bit for bit" in spare

    measured = json.loads(saved.read_text(encoding="utf-8"))
    highest = {name: max(memory for _, memory in measured[name]) for name in ("bare", "kedge")}
    assert highest["kedge"] < measured["limit"] < highest["bare"], highest
    assert f"at most {highest['bare']:,.0f} MB" in free
    assert re.search(r" [1-9]\d* MB rebuilt, [1-9]\d* MB moved", spare)
