"""A process that cannot be watched is refused with the reason and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.errors import CannotAttach
from kedge.running import attached_program, process
from kedge.running.attached_program import _no_way
from kedge.running.gdb import SIZE, _reason, free_page
from kedge.running.process import RunningProcess

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="kedge attach works on Linux"
)


class Described(RunningProcess):
    """A process as the system might describe it."""

    status = {"State": "S (sleeping)", "Uid": f"0 {os.geteuid()}", "Gid": f"0 {os.getegid()}"}  # noqa: RUF012
    maps = "7f00-7f01 r--p /usr/lib/python3.12/x.so\n7f02-7f03 r--p /x/libtorch_cpu.so\n"
    command = ["/usr/bin/python3", "train.py"]  # noqa: RUF012


def _described(**differently):
    return type("Described", (Described,), differently)(
        os.getppid(), Path("/proc") / str(os.getppid())
    )


def _trouble(**differently):
    with pytest.raises(CannotAttach) as caught:
        _described(**differently).check()
    return str(caught.value)


def test_a_usual_process_can_be_watched(monkeypatch):
    """Nothing is said against it."""
    monkeypatch.setattr(process, "_PTRACE_SCOPE", Path("/nowhere"))
    _described().check()


def test_each_hindrance_has_its_sentence(monkeypatch):
    """What was found, and what to do."""
    monkeypatch.setattr(process, "_PTRACE_SCOPE", Path("/nowhere"))
    usual = Described.status

    assert "there is no process" in _trouble(status={})
    assert "let it run on: kill -CONT" in _trouble(
        status={**usual, "State": "T (stopped)", "TracerPid": "0"}
    )
    assert "held by a debugger, process 77" in _trouble(status={**usual, "TracerPid": "77"})
    assert "is a thread of process 12" in _trouble(status={**usual, "Tgid": "12"})
    assert "cannot be inspected" in _trouble(maps="")
    assert "not a Python process, but /usr/bin/python3" in _trouble(
        maps="7f00-7f01 r--p /usr/bin/cat\n"
    )
    assert "Kedge needs 3.11" in _trouble(maps="7f00-7f01 r--p /usr/bin/python3.9\n")
    assert "has not imported torch" in _trouble(maps="7f00-7f01 r--p /usr/bin/python3.12\n")
    monkeypatch.setattr(
        process, "_namespace", lambda proc, kind: "" if kind == "pid" else str(proc)
    )
    assert "docker exec" in _trouble()


def test_a_process_of_somebody_else_is_named_as_such(monkeypatch):
    """Only root may look into it."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    assert "sudo kedge attach" in _trouble(status={**Described.status, "Uid": "0 0"})


@pytest.mark.parametrize(
    ("scope", "may", "says"),
    [("0", False, None), ("1", True, None), ("1", False, "sysctl kernel.yama.ptrace_scope=0"), ("2", False, "Attach as root"), ("3", True, "forbids it to everybody")],
)  # fmt: skip
def test_what_the_system_forbids_is_explained(monkeypatch, tmp_path, scope, may, says):
    """The setting is named, and how to change it."""
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(process, "_PTRACE_SCOPE", tmp_path / "scope")
    monkeypatch.setattr(process, "_may_debug", lambda: may)

    trouble = process._trouble_with_debugging()
    assert trouble is None if says is None else says in trouble


def test_the_script_of_a_process_names_the_recording():
    """Options of Python, and of its modules, are left out."""
    words = {
        ("python", "train.py", "-x"): "train.py",
        ("python", "-u", "-m", "pkg.train"): "pkg.train",
    }
    words |= {
        ("python", "-W", "error", "a/b.py"): "b.py",
        ("python", "-c", "pass"): "python",
        ("python",): "python",
    }

    assert {given: _described(command=list(given)).script for given in words} == words


def test_without_a_way_in_the_remedy_depends_on_the_version(monkeypatch):
    """From 3.14 on Python can do it, by a command of the same version."""
    assert "which only gdb can enter" in _no_way(_described())
    assert "the kedge command of the program's environment" in _no_way(_described(python=99))
    monkeypatch.setattr(attached_program, "is_installed", lambda: False)
    monkeypatch.setattr(attached_program, "has_remote_exec", lambda process: False)
    with pytest.raises(CannotAttach, match="install it"):
        attached_program._send(_described(), {}, None)


def test_what_gdb_says_is_explained():
    """The usual reasons have words of their own."""
    assert "not permit" in _reason("ptrace: Operation not permitted.")
    assert "no Python" in _reason('No symbol "Py_AddPendingCall" in current context.')
    assert "try again" in _reason("kedge: -1")
    assert _reason("a\nlast\n\n") == "last"


def test_the_text_gets_memory_that_nothing_is_near():
    """Its address is free in the process."""
    maps = RunningProcess(os.getpid(), Path("/proc/self")).maps
    page = free_page(maps)

    taken = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in maps.splitlines()]
    assert page % SIZE == 0
    assert all(end <= page or page + SIZE <= begin for begin, end in taken)


def test_the_command_refuses_real_processes(capsys):
    """A program that is not Python, a thread, a number that nobody has, and the command itself."""
    asleep = subprocess.Popen(["sleep", "60"])
    try:
        assert main(["attach", str(asleep.pid)]) == 2
    finally:
        asleep.kill()
        asleep.wait()
    assert main(["attach", str(asleep.pid)]) == 2
    assert main(["attach", str(os.getpid())]) == 2
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    assert main(["attach", str(other.native_id)]) == 2
    over.set()
    other.join()

    said = capsys.readouterr().err.splitlines()
    assert ["is not a Python process, but" in said[0], "there is no process" in said[1]] == [
        True,
        True,
    ]
    assert [
        "this command itself" in said[2],
        f"is a thread of process {os.getpid()}" in said[3],
    ] == [True, True]


@pytest.mark.parametrize("text", ["5 minutes", "-1", "0", ""])
def test_a_time_that_is_none_is_refused(text, capsys):
    """The message names what can be written."""
    with pytest.raises(SystemExit):
        main(["attach", "1", f"--for={text}"])

    assert "write one such as 90s, 5m or 2h" in capsys.readouterr().err
