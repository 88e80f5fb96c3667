"""Recordings to export and to ask."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.cli.main import main
from kedge.store.events import EndEvent, NoteEvent
from kedge.store.exponents import BUCKETS, encode
from kedge.store.writing.folder import create

SITES = [
    {
        "id": 0,
        "site": "conv:out",
        "path": "conv",
        "kind": "out",
        "type": "Conv2d",
        "shape": [2, 5],
        "from": [None],
    },
    {
        "id": 1,
        "site": "conv:out.grad",
        "path": "conv",
        "kind": "out.grad",
        "type": "Conv2d",
        "shape": [2, 5],
    },
    {
        "id": 2,
        "site": "log:out",
        "path": "log",
        "kind": "out",
        "type": "Log",
        "dtype": "float16",
        "from": [0],
        "source": {"file": "net.py", "line": 7, "function": "forward", "text": "x = self.log(x)"},
    },
    {"id": 3, "site": "idle:out", "path": "idle", "kind": "out", "type": "Linear"},
]
STEPS = (0, 10, 20, 30)
BROKEN = 20


def columns(step: int) -> dict[str, Any]:
    """Return the rows of a step, those of the sites 2, 0 and 1; the first of them breaks."""
    bad = step >= BROKEN
    drawn = np.zeros(BUCKETS, dtype=np.int64)
    drawn[40:44] = [1, 2, 3, step + 1]
    return {
        "site": [2, 0, 1],
        "count": [10, 10, 10],
        "sum": [np.nan if bad else 1.0, 5.0 + step, 2.0],
        "sumsq": [np.nan if bad else 40.0, 90.0, np.nan],
        "min": [np.nan if bad else -2.0, -1.0, np.nan],
        "max": [np.nan if bad else 3.0, 4.0, np.nan],
        "nonzero": [10, 5, -1],
        "nonfinite": [3 if bad else 0, 0, -1],
        "sampled": [-1, 8, -1],
        "saturated": [-1, 2, -1],
        "exponents": [b"", encode(drawn), b""],
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recording of four sites, one of which breaks and one of which never fired."""
    manifest = {"kedge": "0.1.0", "script": "train.py", "command": ["train.py"], "every": 10}
    with create(tmp_path / "train.kedge", manifest, force=False) as writer:
        writer.sites(SITES, [{"name": "Net", "prefix": "", "parameters": 3}])
        for step in STEPS:
            writer.stats(step, columns(step))
        writer.event(NoteEvent(step=3, text="hello"))
        writer.event(EndEvent(exit=0, steps=40))
    return tmp_path / "train.kedge"


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kedge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run ``kedge`` in the test's folder: in this process, or in one of its own where a package is missing."""

    def run(*words: str, missing: str = "", input: str = "") -> subprocess.CompletedProcess[str]:  # noqa: A002
        if missing:
            return _without(missing, words, tmp_path)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("COLUMNS", "160")
            patch.setattr(sys, "stdin", io.StringIO(input))
            status = main(list(words))
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return run


def _without(
    package: str, words: tuple[str, ...], folder: Path
) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nsys.modules[{package!r}] = None\nfrom kedge.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *words]
    environment = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(
        command, cwd=folder, text=True, capture_output=True, check=False, env=environment
    )
