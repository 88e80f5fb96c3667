"""What the tests of commands share: recordings on disk, and commands that run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from kedge.store.events import event_from
from kedge.store.writing.folder import create
from tests import forked
from tests.cli.serving import Server

MANIFEST = {
    "kedge": "0.1.0",
    "command": ["train.py", "--lr", "1"],
    "script": "train.py",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "device": "cpu",
    "started": "2026-11-21T07:00:00+00:00",
    "pid": 1,
    "every": 10,
    "sites": "**",
    "rank": 0,
    "world": 1,
}
SITES = [
    {
        "id": 0,
        "site": "log:in",
        "path": "log",
        "kind": "in",
        "type": "Log",
        "from": [None],
        "owner": "log",
    },
    {
        "id": 1,
        "site": "log:out",
        "path": "log",
        "kind": "out",
        "type": "Log",
        "from": [0],
        "owner": "log",
    },
    {"id": 2, "site": ":out", "path": "", "kind": "out", "type": "Net", "from": [1], "owner": ""},
]
END = {
    "kind": "end",
    "exit": 0,
    "steps": 30,
    "sampled": 3,
    "seconds": 2.0,
    "watching": 0.1,
    "error": None,
}


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """Write a recording of a module whose output breaks at a step, or never."""

    def write(broken_at: int | None = None, events: Iterable[Mapping[str, Any]] = (END,)) -> Path:
        folder = tmp_path / "train.kedge"
        sites = [
            {"root": 0, "shape": [2, 5], "dtype": "float32", "channels": None} | s for s in SITES
        ]
        with create(folder, MANIFEST, force=False) as writer:
            writer.sites(sites, [{"name": "Net", "prefix": "", "parameters": 12}])
            for step in (0, 10, 20):
                bad = broken_at is not None and step >= broken_at
                writer.stats(step, _columns([1.0, np.nan if bad else 0.5]))
            for event in events:
                writer.event(event_from(event))
        return folder

    return write


def _columns(scales: list[float]) -> dict[str, Any]:
    scale = np.array(scales)
    finite = np.isfinite(scale)
    return {
        "site": np.arange(len(scale)),
        "count": np.full(len(scale), 10),
        "sum": scale * 10,
        "sumsq": scale**2 * 10,
        "min": scale,
        "max": scale,
        "nonzero": np.full(len(scale), 10),
        "nonfinite": np.where(finite, 0, 10),
    }


@pytest.fixture
def kedge(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``kedge`` in the test's folder, in a process of its own: a fork of one that has imported torch, or a fresh one."""

    def run(
        *words: str, fresh: bool = False, ahead: str = forked.WATCH, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kedge", *words]
        options = {"env": dict(os.environ, OMP_NUM_THREADS="1"), "timeout": 120, **options}
        if fresh:
            return subprocess.run(
                command, cwd=tmp_path, text=True, capture_output=True, check=False, **options
            )
        return forked.run(command, cwd=tmp_path, forks=True, ahead=ahead, **options)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a program into the test's folder."""

    def write(source: str, name: str = "train.py") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(source))
        return name

    return write


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A process that has imported torch and forks for each program."""
    server = Server()
    yield server
    server.close()
