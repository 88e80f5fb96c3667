"""Python's own way into a process, from 3.14 on."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kedge.errors import CannotAttach
from kedge.running import remote_exec
from kedge.running.private_folder import PrivateFolder
from kedge.running.process import RunningProcess
from kedge.running.remote_exec import has_remote_exec, replace_request, send_by_python

HERE = RunningProcess(os.getpid(), Path("/proc/self"))


def test_a_request_is_taken_back_by_one_for_an_empty_script(monkeypatch):
    """The first script is removed, and nobody can put another in its place that would be run."""
    asked = []
    monkeypatch.setattr(
        remote_exec, "_remote_exec", lambda pid, script: asked.append((pid, Path(script)))
    )
    with PrivateFolder((os.geteuid(), os.getegid())) as folder:
        send_by_python(HERE, "text", folder)
        assert asked[0][1].read_text() == "text"
        assert asked[0][1].stat().st_mode & 0o777 == 0o600
        assert folder.path.stat().st_mode & 0o777 == 0o700
        replace_request(HERE)

    assert not asked[0][1].exists()
    assert [type(node) for node in ast.parse(asked[1][1].read_text()).body] == [
        ast.Expr
    ]  # a docstring


def test_a_refusal_names_the_settings_that_cause_it(monkeypatch):
    """Python may have been started so that nobody can enter it."""

    def refuse(pid, script):
        raise RuntimeError("Remote debugging is not enabled in the remote process.")

    monkeypatch.setattr(remote_exec, "_remote_exec", refuse)
    with PrivateFolder((os.geteuid(), os.getegid())) as folder:
        with pytest.raises(CannotAttach, match="PYTHON_DISABLE_REMOTE_DEBUG"):
            send_by_python(HERE, "text", folder)
    replace_request(HERE)  # the process may have ended


@pytest.mark.skipif(hasattr(sys, "remote_exec"), reason="this Python can enter other processes")
def test_an_older_python_cannot():
    """The command uses gdb instead."""
    assert not has_remote_exec(HERE)


@pytest.mark.timing
@pytest.mark.skipif(not hasattr(sys, "remote_exec"), reason="needs Python 3.14")
def test_python_runs_a_text_in_another_process(tmp_path):
    """Tried on a program without torch: only the way in."""
    program = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"])
    try:
        time.sleep(1)
        process = RunningProcess(program.pid, Path(f"/proc/{program.pid}"))
        assert has_remote_exec(process)
        with PrivateFolder(process.owner) as folder:
            send_by_python(process, f"open({str(tmp_path / 'done')!r}, 'w').close()", folder)
            while not (tmp_path / "done").exists():
                time.sleep(0.01)
            replace_request(process)
    finally:
        program.kill()
        program.wait()
