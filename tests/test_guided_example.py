"""The demonstration of attribution: it trains, explains and draws, and guided backpropagation keeps to the ink."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import forked

pytest.importorskip("matplotlib")
STORED = Path(__file__).parents[1] / "docs" / "pictures" / "guided.png"
SIZE = slice(16, 24)  # where a PNG has its width and height
SCRIPT = Path(__file__).parents[1] / "examples" / "guided_backprop.py"


def test_the_example_explains_a_network_that_has_learned(tmp_path):
    """Over 95 % of unseen images are right, what guided backpropagation shows is more on the ink than the gradient, and the picture is laid out as the one in the documentation."""
    picture = tmp_path / "digits.png"
    command = [sys.executable, str(SCRIPT), "--save", str(picture)]
    ended = forked.run(command, check=True, ahead="sklearn.datasets")
    shares = {
        name: int(share)
        for name, share in re.findall(r"^(\S+) +(\d+)% of what speaks", ended.stdout, re.MULTILINE)
    }

    assert float(re.search(r"test accuracy ([\d.]+)%", ended.stdout)[1]) > 95
    assert set(shares) == {"gradient", "SmoothGrad", "guided", "Grad-CAM"}
    assert shares["guided"] > shares["gradient"] + 5
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.read_bytes()[SIZE] == STORED.read_bytes()[SIZE]  # or it has to be drawn anew
    assert ended.stderr == ""
