"""Running Kedge's commands as a user would, for the benchmarks that judge what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kedge

LIMIT = 300.0
"Seconds after which a program is ended."

KEDGE = ("-m", "kedge")


def python(*arguments: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run Python on one thread in a folder, with this checkout's Kedge."""
    path = os.pathsep.join([str(Path(kedge.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": path.rstrip(os.pathsep),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        encoding="utf-8",
    )


def command(*arguments: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of Kedge in a folder."""
    return python(*KEDGE, *arguments, place=place)


def on_ranks(ranks: int, arguments: Sequence[str], place: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of Kedge under torchrun, on some ranks of this machine."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    return python(*launcher, *KEDGE, *arguments, place=place)


def findings(recording: Path, *options: str) -> tuple[dict[str, Any], ...]:
    """Return what ``kedge check --json``, with more options, finds in a recording.

    Raises:
        RuntimeError: The command failed.
    """
    checked = command("check", "--json", *options, recording.name, place=recording.parent)
    if checked.returncode not in {0, 1}:
        raise RuntimeError(f"kedge check: {last_line(checked.stderr)}")
    return tuple(json.loads(checked.stdout)["findings"])


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
