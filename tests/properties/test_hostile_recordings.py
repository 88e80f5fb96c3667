"""For all damage to a recording: each command reads it or says in one line why not."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kedge
from kedge.cli.main import main
from kedge.errors import KedgeError
from kedge.report.live.heading import heading
from kedge.report.live.reading import RunReader
from kedge.report.page.document import condense
from kedge.report.page.render import page_of
from kedge.report.shown_run import ShownRun
from kedge.rules.registry import ALL, check
from kedge.store.recording import Recording
from tests.properties.profiles import fuzzed
from tests.properties.spoiling import fresh, spoil, spoilers

COMMANDS = [
    ["report", "RUN"], ["report", "RUN", "--all"], ["report", "RUN", "--sites", "**"], ["report", "RUN", "--headroom"],
    ["report", "RUN", "--saved"], ["report", "RUN", "--html", "-o", "page.html"],
    ["report", "RUN", "--html", "--no-source", "-o", "page.html"],
    ["check", "RUN"], ["check", "RUN", "--json"], ["check", "RUN", "--strict"],
    ["diff", "RUN", "SOUND"], ["diff", "SOUND", "RUN", "--json"], ["diff", "RUN", "SOUND", "--html", "-o", "page.html"],
    ["diff", "RUN", "--ranks", "0", "1"],
    ["export", "RUN", "--parquet", "-o", "out.parquet", "--force"],
    ["query", "RUN", "SELECT * FROM stats"], ["query", "RUN", "--json", "SELECT * FROM sites"],
    ["query", "RUN", "--csv", "SELECT * FROM findings"], ["query", "RUN", "SELECT * FROM events"],
    ["live", "RUN"], ["serve", "RUN"],
]  # fmt: skip
#: An event of each kind that the recorded program does not write.
EVENTS: list[dict[str, Any]] = [
    {"kind": "joined", "started": "2026-11-21T07:00:00+00:00", "pid": 3, "host": "here", "device": "cpu"},
    {"kind": "note", "step": 1, "text": "no dump was written"},
    {"kind": "producer", "step": 15, "loss": "loss", "operation": "log", "node": "LogBackward0", "module": "act", "where": "forward",
     "file": "train.py", "line": 7, "text": "x.log()", "detail": "3 of its results", "certain": True},
    {"kind": "grads-kept", "step": 5, "optimizer": 0, "checked": 4, "kept": 4},
    {"kind": "grads-kept", "step": 10, "optimizer": 0, "checked": 4, "kept": 4},
    {"kind": "modes", "step": 0, "root": 0, "training": True, "eval": ["norm"], "train": []},
    {"kind": "not-optimized", "root": 0, "training": True, "unheld": ["fc.weight"], "unheld_elements": 9, "graded": ["fc.weight"],
     "replaced": ["fc.bias"], "outside": ["Linear"], "outside_fixed": False, "tensors": ["scale"], "passes": 9},
    {"kind": "not-optimized", "root": None, "foreign": 3}, {"kind": "not-optimized", "root": None, "in_vain": 30},
    {"kind": "unseen", "what": "children", "detail": {"steps": 3, "seconds": 2.5}}, {"kind": "unseen", "what": "hook-tables", "detail": {}},
    {"kind": "saved", "step": 5, "bytes": 3_000_000_000, "modules": [{"path": "fc", "bytes": 2_900_000_000, "tensors": 3}],
     "total": {"path": None, "tensors": 3, "packed": 9, "bytes": 3_000_000_000, "rebuild": 4, "parameters": 2, "inputs": 1},
     "tree": [{"path": "", "bytes": 10, "tensors": 3}, {"path": None, "bytes": 10, "tensors": 3}],
     "lines": [{"file": "train.py", "line": 3, "function": "f", "text": "x = y", "tensors": 1, "packed": 3, "bytes": 3, "rebuild": 0}],
     "items": [{"path": "fc", "bytes": 3, "line": ["train.py", 3]}], "seconds": 0.1,
     "course": {"bytes": [1, 5, 3], "at": [1, 2, 3], "peak": 5, "peak_at": 2, "backward": 3, "holders": [["fc", 5]]}},
    {"kind": "ledger", "sampled": 4, "sites": [{"site": "idle:out", "fired": 0, "cause": "never called", "remedy": "call it"},
     {"site": "idle.weight:param.grad", "fired": 0, "cause": "no gradient", "remedy": "use it"}]},
    {"kind": "optimizers", "optimizers": [{"index": 0, "type": "SGD", "steps": 20, "parameters": 9, "roots": [0], "rates": [0.1], "first_step": 0}]},
]  # fmt: skip
FILES = [
    "manifest.json",
    "sites.json",
    "events.jsonl",
    "stats-0.arrows",
    "sites-1.json",
    "events-1.jsonl",
    "stats-1.arrows",
]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Linear(9, 4)
        self.act, self.flat, self.idle = nn.Sigmoid(), nn.Flatten(), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, broken: bool) -> torch.Tensor:
        made = self.act(self.fc(self.flat(torch.relu(self.norm(self.conv(x))))))
        return (made - 1).log() if broken else made


@cache
def workplace() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the recording of a run of two ranks, named sound.kedge."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    folder = Path(made.name) / "sound.kedge"
    torch.manual_seed(0)
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.watch(folder, every=4, budget=None, dump=True):
        for step in range(20):
            optimizer.zero_grad()
            model(torch.randn(2, 1, 4), step > 14).sum().backward()
            optimizer.step()
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in EVENTS)
    for name in ("sites.json", "events.jsonl"):
        shutil.copy(folder / name, folder / name.replace(".", "-1."))
    shutil.copy(folder / "stats-0.arrows", folder / "stats-1.arrows")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "world": 2}))
    return made


def _run(words: list[str]) -> int:
    """Run a command, or what it does beside its terminal or its socket."""
    recording = Path(words[1])
    try:
        if words[0] == "live":
            reader = RunReader(recording)
            for _ in range(2):
                reader.read()
                heading(reader)
            return 0
        if words[0] == "serve":
            opened = Recording.open(recording)
            page_of(condense(ShownRun(opened, check(opened, ALL), ALL)), live=True).encode()
            return 0
    except KedgeError as error:
        sys.stderr.write(f"kedge: {error}\n")
        return 2
    return main(words)


@fuzzed
@given(spoilers(st.sampled_from(FILES)), st.sampled_from(COMMANDS), st.booleans())
def test_a_damaged_recording_is_read_or_refused(
    changes: list[Any], command: list[str], ranks: bool
) -> None:
    """Whatever is in a recording's files, a command ends with a status of its own, and prints nothing that a terminal obeys."""
    place = Path(workplace().name)
    folder = fresh(place / "sound.kedge", place / "run.kedge")
    if not ranks:
        for name in FILES[4:]:
            (folder / name).unlink()
    spoil(folder, changes)
    names = {"RUN": "run.kedge", "SOUND": "sound.kedge"}
    out, told = io.StringIO(), io.StringIO()
    with contextlib.chdir(place), contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        status = _run([names.get(word, word) for word in command])

    assert status in (0, 1, 2, 3)
    assert bool(told.getvalue()) == (status == 2)
    if status == 2:
        assert told.getvalue().startswith("kedge: ")
        assert told.getvalue().count("\n") == 1 or "query" in command
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out.getvalue() + told.getvalue()
    )
