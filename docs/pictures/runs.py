"""Draw `runs.png`, the picture of docs/how-to/compare-runs.md: six runs of examples/digits.py in one page.

python docs/pictures/runs.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import opened

ROOT = Path(__file__).parents[2]
RUNS = {
    "lr-3e-4": ("--lr", "0.0003"),
    "lr-1e-3": ("--lr", "0.001"),
    "lr-1e-2": ("--lr", "0.01"),
    "lr-1e-1": ("--lr", "0.1"),
    "deep": ("--model", "deep-sigmoid"),
    "log-of-zero": ("--model", "log-of-zero"),
}


def kedge(*words: str) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "kedge", *words], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - its own words


def main() -> None:
    """Record the runs, and write the picture beside this file."""
    picture = Path(__file__).with_name("runs.png")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder, "examples"))
        os.chdir(folder)
        for name, options in RUNS.items():
            kedge(
                "run",
                "-q",
                "--budget",
                "none",
                "-o",
                name,
                "examples/digits.py",
                "--steps",
                "300",
                *options,
            )
        kedge("report", *RUNS, "--html")
        with opened(Path(folder, "runs.html"), (1366, 1000, "light")) as [page]:
            page.screenshot(path=picture, full_page=True)


if __name__ == "__main__":
    main()
