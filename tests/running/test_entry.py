"""The first code inside a program does no harm, whatever it finds."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time

import pytest

from kedge.running import entry
from kedge.running.attached_program import _surroundings, sent_text
from kedge.running.entry import BusyImporting, HeldSignals, LentModules, enter
from kedge.running.late_watch import LateWatch
from kedge.running.private_folder import PrivateFolder


@pytest.fixture
def listening():
    """The folder and the socket of a command."""
    with (
        PrivateFolder((os.geteuid(), os.getegid())) as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(str(folder.path / entry.CONTROL))
        server.listen(1)
        server.settimeout(0.2)
        yield folder, server


def _order(folder, **more):
    return {**_surroundings(), "folder": str(folder.path), "until": time.monotonic() + 10, **more}


def test_an_entry_that_comes_too_late_does_nothing(listening):
    """The command has given up, and nobody would let the program go."""
    folder, server = listening
    enter(_order(folder, until=time.monotonic() - 1), LateWatch)

    with pytest.raises(TimeoutError):
        server.accept()


def test_a_folder_that_others_can_open_is_not_trusted(listening):
    """Somebody else may have put a socket there."""
    folder, server = listening
    folder.path.chmod(0o755)
    enter(_order(folder), LateWatch)

    with pytest.raises(TimeoutError):
        server.accept()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": "0.0"}, "its environment has Kedge"),
        ({"torch": (99, 0)}, "Kedge needs 99.0 or newer"),
        ({}, "KeyError"),  # the order lacks the options: stands for any error of ours
    ],
)
def test_what_fails_is_reported_to_the_command_and_not_to_the_program(
    listening, wrong, text, capfd
):
    """The text that is sent raises nothing, prints nothing and leaves no name."""
    folder, server = listening
    names = {"__name__": "program"}
    exec(sent_text(_order(folder, **wrong)), names)

    with server.accept()[0] as control:
        told = json.loads(control.makefile().readline())
    assert told["event"] == "failed"
    assert text in told["text"]
    assert names.keys() == {"__name__", "__builtins__"}
    assert capfd.readouterr() == ("", "")


def test_a_program_that_is_importing_is_not_entered(tmp_path, monkeypatch):
    """Kedge would import modules that are half made, and both would break."""
    package = tmp_path / "half_made"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from kedge.running import entry\nentry._check({'names': ['half_made']})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(BusyImporting, match="half_made"):
        importlib.import_module("half_made")


def test_only_what_kedge_needs_is_lent(tmp_path, monkeypatch):
    """Other packages of the command's environment are not found through it."""
    for name in ("lent_one", "other_one"):
        (tmp_path / f"{name}.py").touch()
    lent = LentModules(["lent_one"], [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, lent])

    assert importlib.util.find_spec("lent_one").origin == str(tmp_path / "lent_one.py")
    assert importlib.util.find_spec("other_one") is None
    lent.remove()
    assert importlib.util.find_spec("lent_one") is None
    lent.remove()


def test_a_signal_that_arrives_meanwhile_reaches_the_program_afterwards():
    """Its handler may raise, and the error belongs to the program's own code."""

    def handler(number, frame):
        raise TimeoutError("the program's")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="the program's"):
            _held()
            until = time.monotonic() + 10
            while time.monotonic() < until:
                time.sleep(0.01)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def _held():
    with HeldSignals("<no file>"):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
