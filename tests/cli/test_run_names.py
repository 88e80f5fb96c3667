"""Files beside a script that have the names of modules which Kedge imports."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kedge.store.recording import Recording

pytestmark = pytest.mark.timing

# Of the standard library and of packages, imported by Kedge before the program, with torch, at the
# end, or never.
NAMES = ["html", "nanoarrow", "safetensors", "kedge", "tomllib", "argparse", "webbrowser", "report", "metadata", "colorsys", "sched", "json"]  # fmt: skip
LIKE_JSON = """
class JSONEncoder: ...
class JSONDecoder: ...
JSONDecodeError = ValueError
def dumps(*args, **options): raise SystemExit("the program's own")
load = loads = dump = dumps
"""
PROGRAM = f"""
import sys
import zipfile
names = {NAMES}
def found(names): print([getattr(__import__(name), "WHO", "not mine") for name in names])
found(names[::2])
import torch
found(names)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
for _ in range(3):
    model(torch.ones(2, 4)).square().mean().backward()
found(names)
print([name for name in names if sys.modules[name].WHO != "mine"])
"""
START = "import sys; from kedge.cli.main import main; sys.argv[0] = 'kedge'; sys.path[0] = sys.prefix; sys.exit(main())"


def test_each_side_has_its_own_modules(tmp_path: Path) -> None:
    """The program imports the files beside it, each when it does so under python; Kedge imports none of them, and records."""
    folder = tmp_path / "program"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"print('imported {name}')\nWHO = 'mine'\n{LIKE_JSON if name == 'json' else ''}"
        )
    (folder / "prog.py").write_text(PROGRAM)
    words = [
        "run",
        "-q",
        "--every",
        "1",
        "--budget",
        "none",
        "-o",
        str(tmp_path / "it.kedge"),
        str(folder / "prog.py"),
    ]
    plain, ours = (
        subprocess.run([sys.executable, *command], cwd=tmp_path, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False)
        for command in ([str(folder / "prog.py")], ["-c", START, *words])
    )  # fmt: skip

    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, 0)
    assert plain.stdout.count("imported ") == len(NAMES)
    assert "not mine" not in plain.stdout
    assert len(Recording.open(tmp_path / "it.kedge").steps) == 3


def test_the_working_directory_is_not_searched(tmp_path: Path) -> None:
    """``python -m kedge`` imports nothing of its own from there, where the program begins."""
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "prog.py").write_text(
        "import json, sys; print(hasattr(json, 'dumps'), sys.path[0])"
    )
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "run", "-q", "sub/prog.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, f"True {tmp_path / 'sub'}\n"), done.stderr


def test_a_zip_files_own_modules_come_first_also_where_no_folder_does(tmp_path: Path) -> None:
    """Under ``-P`` python searches the zip file it runs, and no folder; Kedge keeps its own modules."""
    with zipfile.ZipFile(tmp_path / "prog.zip", "w") as archive:
        archive.writestr("html.py", "own = 'mine'")
        archive.writestr(
            "__main__.py",
            "import html, torch; print(html.own); torch.nn.Linear(2, 2)(torch.ones(2))",
        )
    words = ["-m", "kedge", "run", "-o", "it.kedge", "prog.zip"]
    done = subprocess.run(
        [sys.executable, "-P", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert "watching" in done.stderr
    assert len(Recording.open(tmp_path / "it.kedge").sites)
