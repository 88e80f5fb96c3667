"""A training that runs already is watched from outside, and let go again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kedge.cli.attach import _follow
from kedge.cli.main import main
from kedge.errors import CannotAttach
from kedge.running.attached_program import attach
from kedge.running.gdb import trouble_with_calls
from kedge.running.process import RunningProcess, _trouble_with_debugging
from kedge.store.recording import Recording
from tests import forked
from tests.marks import full
from tests.running.training import digest_of

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kedge attach works on Linux"),
    pytest.mark.skipif(
        not hasattr(sys, "remote_exec") and shutil.which("gdb") is None,
        reason="needs gdb, or Python 3.14: apt-get install gdb",
    ),
]


@pytest.fixture(autouse=True)
def _permitted():
    if os.geteuid() and (trouble := _trouble_with_debugging()):
        pytest.skip(trouble)


@pytest.fixture(scope="module", autouse=True)
def _can_call():
    """Skip where the machine's gdb does not know its processor."""
    trouble = "" if hasattr(sys, "remote_exec") else trouble_with_calls()
    if trouble:
        pytest.skip(trouble)


class Running:
    """A training in another process."""

    def __init__(self, folder, sleep=0):
        self.folder, self.told = folder, None
        command = [
            sys.executable,
            "-c",
            "import sys; from tests.running.training import main; main(*sys.argv[1:])",
        ]
        command += [str(folder), str(sleep)]
        self._thread = threading.Thread(target=self._run, args=(command,))
        self._thread.start()
        while not (folder / "pid").exists():
            assert self._thread.is_alive(), self.told
            time.sleep(0.02)
        self.pid = int((folder / "pid").read_text())

    def _run(self, command):
        self.told = forked.run(command, cwd=ROOT, timeout=120)

    def stop(self):
        """Tell it to end; returns what it prints."""
        (self.folder / "stop").touch()
        self._thread.join()
        assert (self.told.returncode, self.told.stderr) == (0, "")
        return json.loads(self.told.stdout)


@pytest.fixture
def running(tmp_path):
    """Start a training."""
    begun = []

    def start(**options):
        begun.append(Running(tmp_path, **options))
        return begun[-1]

    yield start
    for each in begun:
        (each.folder / "stop").touch()
        each._thread.join()


@contextmanager
def attached(pid, recording, patience=60.0):
    """Attach to a process, and let it go at the end of the block at the latest."""
    wishes = {
        "recording": str(recording),
        "force": False,
        "sites": "**",
        "every": 1,
        "budget": None,
    }
    program = attach(RunningProcess.found(pid), wishes, patience)
    try:
        yield program
    finally:
        program.close()


@pytest.mark.parametrize("times", [2, full(20)])
def test_a_training_that_was_watched_now_and_then_has_the_same_losses_and_nothing_left_in_it(
    running, tmp_path, times
):
    """Attached and let go several times, it computes the same bits, and no hook, thread or open file stays."""
    training = running()
    heard = []
    for number in range(times):
        with attached(training.pid, tmp_path / f"{number}.kedge") as program:
            for event in program.events():
                heard.append(event["event"])
                if event["event"] == "began":
                    program.until = time.monotonic() + 0.2
    told = training.stop()

    assert heard == ["began", "summary", "over"] * times
    assert told["digest"] == digest_of(told["steps"])
    assert told["after"] == told["before"]
    assert told["own"] == 0
    recording = Recording.open(tmp_path / "1.kedge")
    assert len(recording.steps)
    assert recording.end.steps >= 1
    assert recording.manifest["late"]


def test_the_command_watches_for_the_given_time_and_names_the_recording(running, tmp_path, capsys):
    """``--for`` ends the watch; the last lines are those of `kedge run`, and all that is printed."""
    training = running()

    assert (
        main(
            [
                "attach",
                str(training.pid),
                "-o",
                str(tmp_path / "a.kedge"),
                "--for",
                "0.3s",
                "--budget",
                "none",
            ]
        )
        == 0
    )
    told = training.stop()
    assert told["digest"] == digest_of(told["steps"])
    lines = capsys.readouterr().err.splitlines()
    assert "AdamW trains Sequential" in lines[0]
    assert "Ctrl-C stops the recording" in lines[1]
    assert "runs on without hooks" in lines[2]
    assert "kedge report" in lines[-1]


def test_a_command_that_dies_lets_the_training_go(running, tmp_path):
    """Its connection is closed by the system, and the watch ends as if it had been asked to."""
    training = running()
    with attached(training.pid, tmp_path / "a.kedge") as program:
        assert next(program.events())["event"] == "began"
    while (
        Recording.open(tmp_path / "a.kedge").end is None
        if (tmp_path / "a.kedge").exists()
        else True
    ):
        time.sleep(0.05)
    time.sleep(0.5)
    told = training.stop()

    assert told["after"] == told["before"]
    assert told["digest"] == digest_of(told["steps"])


def test_a_training_that_ends_while_it_is_watched_has_a_whole_recording(running, tmp_path):
    """The watch ends with the program, and says so."""
    training = running()
    with attached(training.pid, tmp_path / "a.kedge") as program:
        events = program.events()
        assert next(events)["event"] == "began"
        (tmp_path / "stop").touch()
        heard = list(events)
    training.stop()

    assert heard[-1] == {"event": "over", "why": "the program ended"}
    assert Recording.open(tmp_path / "a.kedge").end.exit == 0


def test_a_program_in_a_long_call_is_left_alone(running, tmp_path):
    """The command gives up with a reason; when the call is over, nothing happens any more."""
    training = running(sleep=8)

    with pytest.raises(
        CannotAttach, match=r"its main thread stays in one long call.*nothing is left in it"
    ):
        with attached(training.pid, tmp_path / "a.kedge", patience=2.0):
            pass
    while (Path("/proc") / str(training.pid) / "wchan").read_text() == "hrtimer_nanosleep":
        time.sleep(0.1)
    told = training.stop()
    assert told["after"] == told["before"]
    assert told["digest"] == digest_of(told["steps"])
    assert not (tmp_path / "a.kedge").exists()


def test_a_second_command_is_refused_and_a_place_that_is_taken(running, tmp_path):
    """One watch at a time: the second would pay for the first.

    The reasons come from inside the program.
    """
    training = running()
    (tmp_path / "taken.kedge").mkdir()
    with pytest.raises(CannotAttach, match=r"RecordingExists: .*taken\.kedge"):
        with attached(training.pid, tmp_path / "taken.kedge"):
            pass
    with attached(training.pid, tmp_path / "a.kedge") as first:
        events = first.events()
        assert next(events)["event"] == "began"
        with pytest.raises(CannotAttach, match="another kedge attach watches this process"):
            with attached(training.pid, tmp_path / "b.kedge"):
                pass
        first.leave()
        assert [event["event"] for event in events] == ["summary", "over"]


class Interrupted:
    """A program whose command is interrupted by Ctrl-C, once or always, while it waits."""

    def __init__(self, process, *, always):
        self.process, self.always, self.left, self.until = process, always, False, None

    def events(self):
        """Yield what the watch reports."""
        if self.always or not self.left:
            raise KeyboardInterrupt
        yield {"event": "over", "why": "the command left"}

    def leave(self):
        """End the watch."""
        self.left = True


@pytest.mark.parametrize(
    ("always", "last"), [(False, "nothing was recorded"), (True, "stopped at once")]
)
def test_ctrl_c_ends_the_watch_and_a_second_one_the_command(always, last, tmp_path, capsys):
    """The first waits for the end of the watch, the second does not; the program goes on in both cases."""
    program = Interrupted(RunningProcess(1, Path("/proc/1")), always=always)

    assert _follow(program, str(tmp_path / "a.kedge"), None) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "detaching at the next step" in lines[0]
    assert last in lines[-1]
    assert program.left
