"""A program that trains under ``kedge run`` does to its process what it does under ``python``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kedge.store.recording import Recording
from tests.cli.programs import PROGRAMS, TRAIN
from tests.cli.serving import Server

pytestmark = pytest.mark.timing

ALWAYS = ["run", "-q", "--every", "1", "--budget", "none", "-o", "../it.kedge", "prog.py"]
INSIDE_TORCH = re.compile(r'  File "[^"]*/torch/.*\n(    .*\n)+')


@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_training_program_does_what_it_does_without_kedge(
    server: Server, tmp_path: Path, source: str
) -> None:
    """Stdout, stderr and the way it ends are the same, and what was written can be read."""
    plain = server.run(TRAIN + source, tmp_path / "plain", None)
    ours = server.run(TRAIN + source, tmp_path / "ours", ALWAYS)

    assert (ours.stdout, ours.ending) == (plain.stdout, plain.ending)
    assert INSIDE_TORCH.sub("", ours.stderr) == INSIDE_TORCH.sub("", plain.stderr)
    assert len(Recording.open(tmp_path / "it.kedge").sites) > 3
