"""Whatever becomes of the recording, the program is what it is; and what was written before is kept."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.report.head import head
from kedge.store.recording import Recording
from tests.cli.serving import Server
from tests.marks import sampled

pytestmark = pytest.mark.timing

NOBODY = 65534
RUN = ["run", "--every", "1", "--budget", "none", "-o", "it.kedge"]
STEPS = """
import os, sys, time, shutil
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, flush=True)
"""
TRAINED = STEPS.replace("1_000_000", "40")


def numbers(steps: int) -> str:
    """What the program prints."""
    return "".join(f"{step}\n" for step in range(steps))


def until(condition: object, seconds: float = 60) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@pytest.mark.parametrize("seed", sampled(range(20), range(5)))
def test_a_kill_at_any_moment_costs_at_most_one_step(
    server: Server, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After kill -9 every step that the program had ended is read, and can be reported."""
    dice = random.Random(seed)
    running = server.start(STEPS, tmp_path, [*RUN, "prog.py"])
    least = dice.randrange(0, 60)
    until(lambda: (tmp_path / "stdout").exists() and running.said().count("\n") > least)
    time.sleep(dice.uniform(0, 0.02))
    os.kill(running.pid, signal.SIGKILL)
    ended = running.wait()

    assert ended.ending == signal.SIGKILL
    done = ended.stdout.count("\n")
    recording = Recording.open(tmp_path / "it.kedge")
    written = len(recording.steps)
    assert recording.steps.tolist() == list(range(written))
    assert done <= written <= done + 1
    for site in recording.sites:
        assert len(recording.rows(site)) >= written - 1
    assert recording.end is None
    assert main(["check", str(tmp_path / "it.kedge")]) == 0
    assert main(["report", str(tmp_path / "it.kedge")]) == 0
    assert "the recording has no end: the program was killed" in capsys.readouterr().out


def test_a_killed_run_blocks_nobody(server: Server, tmp_path: Path) -> None:
    """Its recording can be replaced with --force at once."""
    running = server.start(STEPS, tmp_path, [*RUN, "prog.py"])
    until(lambda: (tmp_path / "stdout").exists() and running.said().count("\n") > 3)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()

    again = server.run(TRAINED, tmp_path, [*RUN, "--force", "-q", "prog.py"])

    assert (again.status, again.stderr, again.stdout) == (0, "", numbers(40))
    assert len(Recording.open(tmp_path / "it.kedge").steps) == 40
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_two_runs_do_not_share_a_recording(server: Server, tmp_path: Path) -> None:
    """The second is refused before its program starts, --force or not, and the first one's is whole."""
    waits = TRAINED.replace(
        "    print(",
        "    while step == 20 and not os.path.exists('go'): time.sleep(0.01)\n    print(",
    )
    first = server.start(waits, tmp_path / "one", [*RUN, "-q", "-o", "../it.kedge", "prog.py"])
    until(lambda: (tmp_path / "one" / "stdout").exists() and first.said() == numbers(20))

    refused = server.run(TRAINED, tmp_path / "two", [*RUN, "-o", "../it.kedge", "prog.py"])
    forced = server.run(
        TRAINED, tmp_path / "three", [*RUN, "--force", "-o", "../it.kedge", "prog.py"]
    )
    (tmp_path / "one" / "go").touch()
    done = first.wait()

    assert (refused.status, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        "kedge: cannot create the recording ../it.kedge: there is one already; "
    )
    assert (forced.status, forced.stdout) == (2, "")
    assert f"it is being written by process {first.pid} on " in forced.stderr
    assert len(forced.told) == 1
    assert (done.status, done.stderr, done.stdout) == (0, "", numbers(40))
    recording = Recording.open(tmp_path / "it.kedge")
    assert len(recording.steps) == 40
    assert recording.end is not None


def test_two_runs_that_start_at_once_do_not_either(server: Server, tmp_path: Path) -> None:
    """If both find the place free, the one whose model is called first has it; the other runs unrecorded and says so."""
    words = [*RUN, "--force", "-q", "-o", "../it.kedge", "prog.py"]
    waiting = "    while not os.path.exists('go'): time.sleep(0.01)\n"
    late = server.start(
        "import os, time; print('up', flush=True)\n" + waiting.strip() + TRAINED,
        tmp_path / "late",
        words,
    )
    until(lambda: (tmp_path / "late" / "stdout").exists() and late.said() == "up\n")
    soon = server.start(
        TRAINED.replace("    print(", f"    if step == 20:\n    {waiting}    print("),
        tmp_path / "soon",
        words,
    )
    until(lambda: (tmp_path / "soon" / "stdout").exists() and soon.said() == numbers(20))
    (tmp_path / "late" / "go").touch()
    unrecorded = late.wait()
    (tmp_path / "soon" / "go").touch()
    recorded = soon.wait()

    assert (unrecorded.status, unrecorded.stdout) == (0, "up\n" + numbers(40))
    assert f"it is being written by process {soon.pid} on " in unrecorded.told[0]
    assert len(unrecorded.told) == 1
    assert (recorded.status, recorded.stdout, recorded.stderr) == (0, numbers(40), "")
    recording = Recording.open(tmp_path / "it.kedge")
    assert (len(recording.steps), recording.end is not None) == (40, True)


def test_a_recording_that_is_removed_is_missed_once(server: Server, tmp_path: Path) -> None:
    """The program goes on to its own end, and one message says what happened."""
    source = TRAINED.replace(
        "    print(", "    if step == 5: shutil.rmtree('it.kedge')\n    print("
    )

    done = server.run(source + "sys.exit(3)", tmp_path, [*RUN, "prog.py"])

    assert (done.status, done.stdout) == (3, numbers(40))
    assert done.told[0].startswith("[kedge] writing failed: cannot write ")
    assert done.told[0].endswith("the program goes on, but is not recorded from here on")
    assert "it was removed while it was being written" in done.told[0]
    assert done.stderr.count("writing failed") == 1
    assert not (tmp_path / "it.kedge").exists()


def test_a_full_disk_keeps_what_was_written(server: Server, tmp_path: Path) -> None:
    """Where files may not grow any more, one message says so, and the steps before can be read."""
    done = server.run(TRAINED, tmp_path, [*RUN, "prog.py"], limit=60_000)

    assert (done.status, done.stdout) == (0, numbers(40))
    assert done.told[0].startswith("[kedge] writing failed: cannot write to ")
    assert "File too large" in done.told[0]
    assert done.stderr.count("writing failed") == 1
    recording = Recording.open(tmp_path / "it.kedge")
    assert 2 < len(recording.steps) < 40
    assert not recording.truncated
    last = recording.steps[-1]
    on_disk = f"40 measured, {len(recording.steps)} of them on the disk (up to step {last}), the rest could not be written"
    assert any(on_disk in line for line in done.told), done.told
    assert recording.stopped is not None
    assert recording.stopped.step > last
    assert "File too large" in recording.stopped.error
    report = str(list(head(recording))[-1])
    assert report.startswith("the recording ends before step ")
    assert report.endswith("; the program went on")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for 100 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_without_room_does_so_too(server: Server, tmp_path: Path, small_disk: Path) -> None:
    """The message says to free some space."""
    done = server.run(TRAINED, tmp_path, [*RUN, "-o", "disk/it.kedge", "prog.py"])

    assert (done.status, done.stdout) == (0, numbers(40))
    assert (
        "No space left on device; free some space there, or record to another disk" in done.told[0]
    )
    assert 2 < len(Recording.open(small_disk / "it.kedge").steps) < 40


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody without rights")
def test_a_folder_that_is_read_only_is_refused_at_once(server: Server, tmp_path: Path) -> None:
    """Where nothing can be written, the command ends before the program starts."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o555)

    done = server.run(TRAINED, tmp_path, [*RUN, "-o", "closed/it.kedge", "prog.py"], user=NOBODY)

    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == (
        "kedge: cannot create the recording closed/it.kedge: /closed is not writable; "
        "name a folder that you can write to\n"
    )


def test_strict_ends_the_program_with_the_recording(server: Server, tmp_path: Path) -> None:
    """With --strict a failure of Kedge's ends the program as sys.exit does, with status 2."""
    source = f"import atexit; atexit.register(print, 'bye')\ntry:\n{_indented(TRAINED)}\nfinally:\n    print('unwound')\n"

    done = server.run(source, tmp_path, [*RUN, "--strict", "prog.py"], limit=60_000)

    assert done.status == 2
    assert done.told[0].endswith("; the program ends here, because of --strict")
    *steps, last, farewell = done.stdout.splitlines()
    assert 2 < len(steps) < 40
    assert (last, farewell) == ("unwound", "bye")
    assert len(Recording.open(tmp_path / "it.kedge").steps) >= len(steps)


def test_strict_without_a_failure_changes_nothing(server: Server, tmp_path: Path) -> None:
    """The program's own status is the command's."""
    done = server.run(TRAINED + "sys.exit(3)", tmp_path, [*RUN, "-q", "--strict", "prog.py"])

    assert (done.status, done.stdout, done.stderr) == (3, numbers(40), "")


def test_a_newer_recording_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names its version and guesses nothing."""
    (tmp_path / "it.kedge").mkdir()
    (tmp_path / "it.kedge" / "manifest.json").write_text(json.dumps({"format": 2, "kedge": "9.0"}))

    assert main(["report", str(tmp_path / "it.kedge")]) == 2
    assert capsys.readouterr().err == (
        f"kedge: {tmp_path / 'it.kedge'} is written in format 2, by Kedge 9.0; this version reads formats up to 1: "
        "upgrade Kedge to read it\n"
    )


def _indented(source: str) -> str:
    return "\n".join(f"    {line}" for line in source.strip().splitlines())


FAILING_HOOK = "import kedge.watch.records.optimizer_updates as kedges\ndef fail(*_, **__): raise RuntimeError('broken')\nkedges.Updates.before = fail\n"
FAILING_SURVEY = FAILING_HOOK.replace("optimizer_updates", "saved_by_module").replace(
    "Updates.before", "SavedByModule.account"
)
FAILING_END = FAILING_HOOK.replace("records.optimizer_updates", "records.record").replace(
    "Updates.before", "TrainingRecord.end"
)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("breaking", "said"),
    [
        (FAILING_HOOK, "[kedge] the optimizer SGD cannot be watched: RuntimeError: broken ("),
        (FAILING_SURVEY, "[kedge] recording saved tensors failed: RuntimeError: broken ("),
        (FAILING_END, "[kedge] ending the watch failed: RuntimeError: broken ("),
    ],
    ids=["in a hook", "in what is looked at once", "at the end"],
)
def test_a_failure_of_kedges_own_is_reported(
    server: Server, tmp_path: Path, breaking: str, said: str, *, strict: bool
) -> None:
    """The program runs to its end; only with --strict the status tells of it."""
    done = server.run(breaking + TRAINED, tmp_path, [*RUN, "-q", *["--strict"] * strict, "prog.py"])

    assert (done.status, done.stdout) == (2 if strict else 0, numbers(40))
    assert len(done.told) == 1
    assert done.told[0].startswith(said)


def test_what_is_lost_at_the_end_is_told_on_the_stderr_that_was_there_at_first(
    server: Server, tmp_path: Path
) -> None:
    """A program that has put its own object in the place of stderr reads nothing of Kedge's there."""
    broken = FAILING_HOOK.replace("records.optimizer_updates", "records.closing_exam").replace(
        "Updates.before", "ClosingExam.end"
    )
    replaced = "import io; sys.stderr = io.StringIO()\nimport atexit; atexit.register(lambda: print(repr(sys.stderr.getvalue())))\n"
    done = server.run(broken + TRAINED + replaced, tmp_path, [*RUN, "-q", "prog.py"])

    assert done.stdout == numbers(40) + "''\n"
    assert len(done.told) == 1
    assert "cannot be watched: RuntimeError: broken (" in done.told[0]
