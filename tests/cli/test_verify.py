"""``kedge run --verify``: whether watching changes a program, told by what both runs computed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import ScriptError
from kedge.verify.compare import Difference, DigestLine, entries, first_difference

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

TRAIN = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.MSELoss()
    for step in range(3):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(5, 4)), torch.zeros(5, 2))
        loss.backward()
        optimizer.step()
    print("loss", loss.item(), sys.argv[1:])
"""


def test_a_deterministic_program_is_bit_equal(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """What was compared is counted, the status is 0, and nothing stays in the folder."""
    done = kedge("run", "--verify", "--every", "1", script(TRAIN), "--lr", "1")

    assert done.stdout.splitlines() == [
        "train.py: 3 steps, 4 parameters, 6 outputs of models: bit-equal with and without watching",
        "standard output (1 line) and exit status 0: equal",
    ]
    assert done.returncode == 0
    said = done.stderr.splitlines()
    assert (said[0], said[2]) == (
        "[kedge] running train.py without watching",
        "[kedge] running train.py with watching",
    )
    assert len(said) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_failing_program_is_compared_up_to_its_failure(kedge: Kedge, script: Script) -> None:
    """The exit status and the error are printed; two runs that fail alike count as equal."""
    name = script(TRAIN + "    raise ValueError('too late')\n")

    done = kedge("run", "-q", "--verify", name)

    assert done.stdout.splitlines() == [
        "train.py: 3 steps, 4 parameters, 6 outputs of models: bit-equal with and without watching",
        "standard output (1 line) and exit status 1 (ValueError: too late): equal",
    ]
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_that_differs_from_itself_is_reported(kedge: Kedge, script: Script) -> None:
    """With another seed each time, as without one, nothing can be said of watching: status 2, and where it begins."""
    done = kedge("run", "--verify", script(TRAIN.replace("manual_seed(0)", "seed()")))

    assert done.stdout.splitlines() == [
        "train.py is not deterministic: two runs without watching differ from step 0 on (output of Sequential), "
        "so --verify cannot compare it",
        "set a seed (torch.manual_seed(0)), and torch.use_deterministic_algorithms(True) if operations vary",
    ]
    assert done.returncode == 2
    assert (
        "[kedge] running train.py once more without watching, because the two runs differ"
        in done.stderr.splitlines()
    )


def test_a_program_that_watching_changes_is_found_out(kedge: Kedge, script: Script) -> None:
    """A draw of random numbers that only the watched run makes is found at its step: status 1."""
    watched = "if step == 1 and 'kedge.watch.watcher' in sys.modules: torch.rand(1)"
    name = script(TRAIN.replace("optimizer.zero_grad()", watched))

    done = kedge("run", "-q", "--verify", name, ahead="")

    assert done.stdout.splitlines() == [
        "train.py: watching changes the program from step 1 on: output of Sequential"
    ]
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("source", "said", "status"),
    [
        (
            "print('hello')",
            [
                "train.py: no optimizer step and no module call in this process: bit-equal with and without watching",
                "standard output (1 line) and exit status 0: equal",
            ],
            0,
        ),
        (
            "import time; print(time.perf_counter_ns())",
            [
                "train.py: no optimizer step and no module call in this process: bit-equal with and without watching",
                "standard output was not compared: it also differs between two runs without watching, for example in times",
            ],
            0,
        ),
        (
            "import sys; print('same'); print('kedge.cli.watching' in sys.modules)\n"
            "print(len([f for f in sys.meta_path if type(f).__name__ == 'AfterImport']))",
            [
                "train.py: no optimizer step and no module call in this process: bit-equal with and without watching",
                "watching changes standard output, first in line 3:",
                "  without: 1",
                "  with:    2",
            ],
            1,
        ),
        (
            "import os; raise SystemExit(os.getpid() % 200 + 2)",
            None,
            2,
        ),
    ],
)
def test_a_program_without_torch_is_compared_by_what_it_prints(
    kedge: Kedge, script: Script, source: str, said: list[str] | None, status: int
) -> None:
    """Standard output and exit status are compared too, and what varies by itself is left out."""
    done = kedge("run", "-q", "--verify", script(source), fresh=True)

    assert done.returncode == status
    if said is None:
        assert done.stdout.startswith(
            "train.py is not deterministic: two runs without watching differ at the end (exit status "
        )
    else:
        assert done.stdout.splitlines() == said


def test_modules_and_options_are_those_of_run(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """``-m``, arguments with dashes, and ``-o``, which keeps the recording of the watched run."""
    script(TRAIN, "jobs/train.py")

    done = kedge(
        "run",
        "--verify",
        "-q",
        "-o",
        "it.kedge",
        "--sites",
        "2",
        "-m",
        "jobs.train",
        "--verify",
        "-q",
    )

    assert done.stdout.splitlines()[0].startswith("jobs.train: 3 steps, 4 parameters")
    manifest = json.loads((tmp_path / "it.kedge" / "manifest.json").read_text())
    assert manifest["command"] == ["-m", "jobs.train", "--verify", "-q"]
    assert manifest["sites"] == "2"


def test_what_cannot_be_run_is_refused_first(kedge: Kedge) -> None:
    """A program that is not there is not tried."""
    done = kedge("run", "--verify", "nope.py")

    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("kedge: cannot run nope.py: there is no such file")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write what a digest log holds."""

    def write(*lines: Any, torn: str = "") -> Path:
        place = tmp_path / f"digests-{len(list(tmp_path.iterdir()))}"
        place.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
        return place

    return write


NAMES = {"table": 0, "names": ["fc.weight", "fc.bias"]}
OUTPUT = {"table": 1, "names": ["logits"]}


def line(step: int, what: str, table: int, digests: str) -> dict[str, Any]:
    """Make a line of digests."""
    return {"step": step, "what": what, "table": table, "digests": digests}


def test_a_torn_line_ends_what_is_read(written: Callable[..., Path], tmp_path: Path) -> None:
    """A run that was killed is read up to its last whole line; one that never began has none."""
    place = written(NAMES, line(0, "gradient", 0, "aabb"), torn='{"step": 1, "what"')

    assert list(entries(place)) == [DigestLine(0, "gradient", {"fc.weight": "aa", "fc.bias": "bb"})]
    assert list(entries(tmp_path / "nothing")) == []


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([line(4, "gradient", 0, "aabb")], [line(4, "gradient", 0, "aabb")], None),
        (
            [line(4, "gradient", 0, "aabb")],
            [line(4, "gradient", 0, "aacc")],
            Difference(4, "gradient fc.bias"),
        ),
        (
            [line(4, "parameter", 0, "aabb")],
            [line(4, "parameter", 0, "ccdd")],
            Difference(4, "parameter fc.weight and 1 more"),
        ),
        (
            [line(4, "output of Net", 1, "aa")],
            [line(4, "output of Net", 1, "bb")],
            Difference(4, "output of Net[logits]"),
        ),
        ([line(4, "gradient", 0, "aabb")], [], Difference(4, "gradient exists in one run only")),
        (
            [line(4, "gradient", 0, "aabb")],
            [line(4, "output of Net", 1, "aa")],
            Difference(4, "one run continues with gradient, the other with output of Net"),
        ),
        (
            [line(4, "x", 0, "aabb")],
            [line(4, "x", 1, "aa")],
            Difference(4, "x fc.weight and 2 more"),
        ),
    ],
)
def test_the_first_difference_is_named(
    written: Callable[..., Path], one: list[Any], other: list[Any], found: Difference | None
) -> None:
    """Step, subject and the first tensor, and how many more differ there; what comes after it is not read."""
    before, after = line(3, "parameter", 0, "aabb"), line(5, "parameter", 0, "ffff")
    mine = written(NAMES, OUTPUT, before, *one, *([after] if other else []))
    theirs = written(NAMES, OUTPUT, before, *other)

    if found is None:
        mine = written(NAMES, OUTPUT, before, *one)
    assert first_difference(mine, theirs) == found


def test_a_log_that_failed_is_an_error(written: Callable[..., Path]) -> None:
    """A comparison that is not complete is never called equal."""
    with pytest.raises(ScriptError, match="in step 7 the digest log failed: RuntimeError: no"):
        list(
            entries(
                written(NAMES, {"step": 7, "failed": "the digest log failed: RuntimeError: no"})
            )
        )
