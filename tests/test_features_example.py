"""The example that takes the features of digits: it learns, writes, draws, and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kedge.features.dataset import open_features
from tests import forked

pytest.importorskip("matplotlib", reason="needs the extra plot")
STORED = Path(__file__).parents[1] / "docs" / "pictures" / "features.png"
SIZE = slice(16, 24)  # where a PNG has its width and height
SCRIPT = Path(__file__).parents[1] / "examples" / "features.py"


def test_digits_become_a_map(tmp_path):
    """The classifier gets over 95 % of unseen images right, its features are in the folder, and the map is laid out as the one in the documentation."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--out",
        str(tmp_path / "f"),
        "--picture",
        str(tmp_path / "map.png"),
    ]
    done = forked.run(command, check=True, ahead="sklearn.datasets")
    taken = open_features(tmp_path / "f")

    assert done.stderr == ""
    assert float(done.stdout.partition("test accuracy ")[2].partition("%")[0]) > 95
    assert len(taken.samples) == 1797
    assert taken["hidden"].shape == (1797, 64)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "map.png").read_bytes()[SIZE] == STORED.read_bytes()[
        SIZE
    ]  # or it has to be drawn anew
