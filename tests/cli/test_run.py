"""``kedge run``: the program is what it is under ``python``, and leaves a recording."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.store.recording import Recording
from tests import forked
from tests.marks import full

pytestmark = pytest.mark.timing

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

TRAIN = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 4)
    for step in range(int(sys.argv[1])):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item(), sys.argv[1:])
"""


def python(folder: Path, *words: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the same with ``python``, as the fixture `kedge` runs it."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, *words]
    if fresh:
        return subprocess.run(
            command, cwd=folder, text=True, capture_output=True, check=False, env=environment
        )
    return forked.run(command, cwd=folder, env=environment, forks=True)


def recordings(folder: Path) -> list[str]:
    """Name the recordings in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".kedge")


def test_a_run_is_recorded_and_told_in_three_lines(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """The program's output is its own; stderr has what was seen, what was found, and the next command."""
    words = [script(TRAIN), "25", "-o", "--force", "--", "-m"]

    done = kedge("run", "--budget", "none", "-o", "it.kedge", *words)

    assert done.stdout == python(tmp_path, *words).stdout
    assert done.returncode == 0
    seen, found, following = done.stderr.splitlines()
    pattern = r"\[kedge\] \d+ sites, 25 steps, 4 measured; watching took (< )?\d+\.\d % of \S+ s"
    assert re.fullmatch(pattern, seen), seen
    assert found.startswith("[kedge] no findings; "), found
    assert f"kedge run --budget none --every 1 {shlex.join(words)}" in found
    assert following == "[kedge] see more with: kedge report it.kedge"
    recording = Recording.open(tmp_path / "it.kedge")
    assert recording.steps.tolist() == [0, 1, 10, 20]
    assert recording.manifest["command"] == words
    assert (recording.manifest["device"], recording.manifest["every"]) == ("cpu", 10)
    assert recording.manifest["torch"].startswith("2.")
    assert recording.end is not None
    assert {k: getattr(recording.end, k) for k in ("exit", "steps", "sampled", "error")} == {
        "exit": 0,
        "steps": 25,
        "sampled": 4,
        "error": None,
    }


def test_quiet_says_nothing(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """With ``-q`` stdout and stderr are those under ``python``, and the recording has its plain name."""
    words = ["-m", script(TRAIN).removesuffix(".py"), "3"]

    done = kedge("run", "-q", "--every", "2", *words)

    plain = python(tmp_path, *words)
    assert (done.stdout, done.stderr, done.returncode) == (
        plain.stdout,
        plain.stderr,
        plain.returncode,
    )
    (name,) = recordings(tmp_path)
    assert re.fullmatch(r"train\.\d+\.kedge", name)
    assert Recording.open(tmp_path / name).steps.tolist() == [
        0,
        1,
        2,
    ]  # the one after an optimizer's first too


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        ("raise ValueError('no data')", 1, "ValueError: no data"),
        full("sys.exit(3)", 3, None),
        full("sys.exit('no data')", 1, None),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_end_of_the_program_is_recorded(
    kedge: Kedge, script: Script, tmp_path: Path, ending: str, status: int, error: str | None
) -> None:
    """However the program ends, it is shown and exits as under ``python``, and the recording has it."""
    words = [script(TRAIN + f"    print('last')\n    {ending}\n"), "1"]

    done = kedge("run", "-q", "-o", "it.kedge", *words)

    plain = python(tmp_path, *words, fresh="KeyboardInterrupt" in ending)
    assert (done.stdout, done.stderr, done.returncode) == (
        plain.stdout,
        plain.stderr,
        plain.returncode,
    )
    end = Recording.open(tmp_path / "it.kedge").end
    assert end is not None
    assert (end.exit, end.error, end.steps) == (status, error, 1)


def test_the_traceback_comes_before_the_last_words(kedge: Kedge, script: Script) -> None:
    """What went wrong in the program is above what Kedge says of it, so that both are in sight."""
    done = kedge("run", "-o", "it.kedge", script(TRAIN + "    1 / 0\n"), "1")

    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-4] == "ZeroDivisionError: division by zero"
    assert [line.startswith("[kedge] ") for line in lines[-3:]] == [True] * 3


def test_what_is_found_is_reported(kedge: Kedge, script: Script) -> None:
    """A run that makes NaNs is reported at its end, and ``kedge check`` agrees."""
    broken = TRAIN.replace(
        "loss = model(x)", "loss = model(x * (float('nan') if step == 2 else 1))"
    )

    done = kedge("run", "-o", "it.kedge", script(broken), "5")

    assert done.returncode == 0
    assert re.match(
        r"\[kedge\] 1 error: NAN-BORN at \S+; \d+ rules could not judge$",
        done.stderr.splitlines()[1],
    )
    assert kedge("check", "it.kedge").returncode == 1


def test_a_kill_leaves_a_recording(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """What was seen before ``kill -9`` can be read, also while the program runs."""
    endless = TRAIN.replace("for step in range(int(sys.argv[1])):", "step = 0\n    while True:")
    script(
        endless.replace("optimizer.step()", "optimizer.step(); step += 1; print(step, flush=True)")
    )
    command = [
        sys.executable,
        "-m",
        "kedge",
        "run",
        "-o",
        "it.kedge",
        "--every",
        "1",
        "--budget",
        "none",
        "train.py",
        "1",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as printed:
        for line in printed:
            if line == "50\n":
                break
        running = kedge("report", "it.kedge")
        os.kill(process.pid, signal.SIGKILL)
    process.wait()

    told = " ".join(running.stdout.split())
    assert "the recording has no end: the program is running; the last measured step is" in told
    recording = Recording.open(tmp_path / "it.kedge")
    assert len(recording.steps) >= 45
    assert recording.end is None


def test_only_the_process_that_was_started_writes(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """A fork of the program trains and ends unseen; the recording is the first process's."""
    forks = TRAIN.replace("    for step", "    import os\n    pid = os.fork()\n    for step")
    done = kedge("run", "-o", "it.kedge", script(forks + "    if pid: os.waitpid(pid, 0)\n"), "4")

    assert done.returncode == 0
    assert done.stdout.count("loss") == 2
    assert len(done.stderr.splitlines()) == 3
    events = [
        json.loads(line)
        for line in (tmp_path / "it.kedge" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["kind"] for event in events].count("end") == 1
    assert Recording.open(tmp_path / "it.kedge").rows("0:out").calls.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('hello')", "nothing was recorded: the program did not import torch"),
        (
            "import torch; print('hello')",
            "nothing was recorded: the program called no module in this process, except in functions that are compiled as a whole, "
            "and made no operation with tensors that can be seen",
        ),
    ],
)
def test_a_program_without_a_model_leaves_nothing(
    kedge: Kedge, script: Script, tmp_path: Path, source: str, said: str
) -> None:
    """Where there is nothing to record, no recording is made, and a message says so."""
    done = kedge("run", script(source), fresh=True)

    assert (done.stdout, done.stderr, done.returncode) == ("hello\n", f"[kedge] {said}\n", 0)
    assert recordings(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torchh", "the program ended with ModuleNotFoundError before it imported torch"),
        (
            "import torch; torch.nn.Linear(1, 1).weigth",
            "the program ended with AttributeError before it called a module",
        ),
    ],
)
def test_a_program_that_fails_early_leaves_nothing(
    kedge: Kedge, script: Script, source: str, said: str
) -> None:
    """The last line gives the error as the cause, and does not guess about the program."""
    done = kedge("run", script(source), fresh=True)

    assert (done.stderr.splitlines()[-1], done.returncode) == (
        f"[kedge] nothing was recorded: {said}",
        1,
    )


def test_a_watch_that_cannot_begin_is_reported_as_such(kedge: Kedge, script: Script) -> None:
    """The failure has its line, and the last one does not say that the program did without torch."""
    source = "import sys; sys.modules['kedge.watch.run.begin'] = None; import torch; print('hello')"

    done = kedge("run", script(source), fresh=True)
    failure, *rest = done.stderr.splitlines()

    assert (done.stdout, done.returncode) == ("hello\n", 0)
    assert failure.startswith("[kedge] beginning to watch failed: ModuleNotFoundError")
    assert rest == ["[kedge] nothing was recorded"]


def test_the_program_imports_torch_itself(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """What a program sets in its environment before it imports torch reaches torch."""
    source = """
        import os, sys, importlib.util
        assert not {"torch", "numpy"} & set(sys.modules), "imported ahead"
        assert importlib.util.find_spec("torch") is not None
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        print(torch.get_num_threads())
        torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
    """
    name = script(source)

    done = kedge("run", "-o", "it.kedge", name, fresh=True)

    assert (done.stdout, done.returncode) == (python(tmp_path, name, fresh=True).stdout, 0)
    assert "1 step, 1 measured" in done.stderr


def test_a_disk_that_refuses_does_not_end_the_program(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """When the recording cannot be written, one message says so, and the program runs to its end."""
    (tmp_path / "gone").mkdir()
    source = TRAIN.replace("    for step", "    import os; os.rmdir('gone')\n    for step")

    done = kedge("run", "-o", "gone/it.kedge", script(source), "30")

    assert done.stdout.startswith("loss")
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert first.startswith("[kedge] writing failed: cannot create the recording")
    assert first.endswith("the program goes on, but is not recorded from here on")
    assert second == "[kedge] nothing was recorded"


def test_an_existing_recording_is_refused_before_the_program_starts(
    kedge: Kedge, script: Script, tmp_path: Path, recorded: Callable[..., Path]
) -> None:
    """A recording is replaced only with ``--force``, and something else never."""
    name = recorded().name
    (tmp_path / "precious").mkdir()
    train = script(TRAIN)

    refused = kedge("run", "-o", name, train, "1")
    never = kedge("run", "--force", "-o", "precious", train, "1")
    replaced = kedge("run", "-q", "--force", "-o", name, train, "1")

    assert (refused.stdout, refused.returncode) == ("", 2)
    assert refused.stderr == (
        "kedge: cannot create the recording train.kedge: there is one already; "
        "name another place, or replace it with --force (in code: force=True)\n"
    )
    assert (never.stdout, never.returncode) == ("", 2)
    assert never.stderr == (
        "kedge: cannot create the recording precious: something that is not a recording is there and is left alone; "
        "name another place\n"
    )
    assert replaced.returncode == 0
    assert Recording.open(tmp_path / name).manifest["command"] == ["train.py", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nope.py"],
            "kedge: cannot run nope.py: there is no such file in {cwd}; check the path\n",
        ),
        (
            ["-m", "nope"],
            "kedge: cannot run -m nope: there is no module nope; check the name, and that {cwd} is the folder to import it "
            "from\n",
        ),
        (
            ["-o", "no/it.kedge", "train.py"],
            "kedge: cannot create the recording no/it.kedge: there is no folder no; create it, or name another place\n",
        ),
        (
            ["--", "nope.py", "-x"],
            "kedge: cannot run nope.py: there is no such file in {cwd}; check the path\n",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    """A program that is not there, or a place that cannot be written to, ends with status 2 and one message."""
    monkeypatch.chdir(tmp_path)
    script("raise AssertionError")

    assert main(["run", *words]) == 2
    assert capsys.readouterr() == ("", message.format(cwd=tmp_path))


def test_a_selector_that_cannot_be_read_is_refused(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A bad selector is shown with a caret, before the program starts."""
    monkeypatch.chdir(tmp_path)
    script("raise AssertionError")

    assert main(["run", "--sites", "conv1:", "train.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kedge: cannot read the selector")
    assert "\n  conv1:\n        ^\n" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--every", "0", "train.py"],
            "--every: '0' is not a number of steps; 1 measures every step, 10 one in ten",
        ),
        (["-q"], "name the program to run: a script, or -m and a module"),
        (["-m"], "name the program to run: a script, or -m and a module"),
        (["--lr", "1", "train.py"], "there is no option --lr; see kedge run --help"),
    ],
)
def test_bad_usage_is_explained(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be understood is answered with one line."""
    with pytest.raises(SystemExit) as left:
        main(["run", *words])

    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"kedge run: {message}\n")


def test_only_chosen_sites_are_watched(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """``--sites`` names what is measured."""
    done = kedge("run", "-q", "--sites", "2", "-o", "it.kedge", script(TRAIN), "2")

    assert done.returncode == 0, done.stderr
    sites = {site.site for site in Recording.open(tmp_path / "it.kedge").sites}
    assert "2:out" in sites
    assert {site for site in sites if not site.startswith("2")} == {"loss"}


def test_an_interrupted_run_is_finished(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """Interrupting a run finishes the recording and ends the process by the signal, as ``python`` does."""
    script(TRAIN + "    import time; print('asleep', flush=True); time.sleep(60)\n")
    command = [sys.executable, "-m", "kedge", "run", "-o", "it.kedge", "train.py", "12"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("loss")
    assert process.stdout.readline() == "asleep\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert err.splitlines()[-4:-3] == ["KeyboardInterrupt"]
    assert err.splitlines()[-1] == "[kedge] see more with: kedge report it.kedge"
    end = Recording.open(tmp_path / "it.kedge").end
    assert end is not None
    assert end.exit == 130


def test_sites_that_no_module_has_are_not_taken_for_a_program_without_modules(
    kedge: Kedge, script: Script
) -> None:
    """Where ``--sites`` names nothing that was called, that is said at once, and the last words do not say that nothing was."""
    done = kedge("run", "--sites", "nosuch", "-o", "it.kedge", script(TRAIN), "2")
    assert done.stderr == (
        '[kedge] "nosuch" selects nothing in the models of this program; kedge sites lists their names\n'
        "[kedge] nothing was recorded: modules were called, but no selected site had a value that can be measured; "
        "list the sites with kedge sites\n"
    )


def test_the_last_words_show_the_line_that_has_the_fault(kedge: Kedge, script: Script) -> None:
    """The line of the softmax, and not that of the loss or of backward."""
    program = script("""
        import torch
        from torch import nn

        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            shares = net(torch.randn(8, 4)).softmax(1)
            loss = nn.functional.cross_entropy(shares, torch.arange(8) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """)
    lines = kedge("run", "-o", "run.kedge", program).stderr.splitlines()

    place = next(i for i, line in enumerate(lines) if "DOUBLE-SOFTMAX at loss" in line)
    assert lines[place + 1].endswith("8: shares = net(torch.randn(8, 4)).softmax(1)")


def test_a_long_line_that_has_the_fault_is_cut_in_its_middle(kedge: Kedge, script: Script) -> None:
    """Such as one that holds data."""
    program = script(f"""
        import torch
        from torch import nn

        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            shares = net(torch.randn(8 + 0 * sum({list(range(400))}), 4)).softmax(1)
            nn.functional.cross_entropy(shares, torch.arange(8) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    """)
    lines = kedge("run", "-o", "run.kedge", program).stderr.splitlines()
    shown = next(line for line in lines if "softmax(1)" in line)
    assert shown.endswith("398, 399]), 4)).softmax(1)")
    assert "…" in shown
    assert len(shown) < 500
