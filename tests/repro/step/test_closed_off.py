"""A copy of the process ends with what it has begun, and leaves the program's files alone."""

import _imp
import ctypes
import sys
import threading
import time

import pytest

from kedge.repro.step import copied_process
from tests.forked import run
from tests.repro.step.test_step_again import HEAD, watched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")

HANGING = """
import os, pathlib, signal, time
import torch
from kedge.repro.step import copied_process

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
copied_process.MOST_SECONDS = 1
reader, writer = os.pipe()

def alive():
    return [p.name for p in pathlib.Path("/proc").iterdir() if p.name.isdigit() and in_group(p)]

def in_group(place):
    try:
        state, _, group, *_ = (place / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(group) == os.getpid() and state != "Z"

def hang():
    signal.alarm(0)  # as a program with time limits of its own
    while True:
        time.sleep(0.1)

os.setsid()
copy = copied_process.CopiedProcess(lambda: copied_process.each_in_a_copy(iter([hang]), 1))
print(len(alive()))
print(copy.result(20))
time.sleep(0.5)
print(len(alive()))
"""


def test_what_hangs_ends_with_the_copy(tmp_path):
    """Also where the program blocks the alarm's signal, or has alarms of its own."""
    (tmp_path / "hang.py").write_text(HANGING, encoding="utf-8")
    done = run([sys.executable, "hang.py"], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    before, result, after = done.stdout.split()
    assert int(before) > 1
    assert result == "b''"
    assert int(after) == 1


WITHOUT_PYTHON = """
import os, sqlite3, time
from torch import save
from safetensors.torch import load_file, save_file

db = sqlite3.connect("log.db")
db.execute("create table log(pid)")

def objective(x, y):
    db.execute("insert into log values(?)", [os.getpid()])
    db.commit()
    save(os.getpid(), "last.pt")
    save_file({"pid": torch.tensor(os.getpid())}, "last.safetensors")
    p = net(x)
    return F.mse_loss(p, y) + (1 / x * p).mean()

for x, y in list(batches(12))[:13]:
    loss = objective(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

time.sleep(1)  # until the copy has come to an end
assert torch.load("last.pt") == os.getpid()
assert int(load_file("last.safetensors")["pid"]) == os.getpid()
assert not os.path.exists("log.db-journal")
"""


def _has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


@pytest.mark.skipif(not _has_landlock(), reason="the kernel has no Landlock")
def test_files_that_are_opened_without_python_are_left_alone(tmp_path):
    """Checkpoints and databases are written by libraries that Python's audit knows nothing of."""
    (tmp_path / "train.py").write_text(HEAD + WITHOUT_PYTHON, encoding="utf-8")
    done = run([sys.executable, "-m", "kedge", "run", "-q", "train.py"], cwd=tmp_path)

    assert done.returncode == 0, done.stderr


MANY_FILES = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

for x, y in batches(12):
    loss = (1 / x * net(x)).mean()  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for each in kept:
    os.close(each)
"""


def test_a_program_with_many_files_open_is_examined_too(tmp_path):
    """Their numbers are larger than `select` can take."""
    finding, line = watched(tmp_path, HEAD + MANY_FILES)

    assert f"train.py:{line}" in finding.message
    assert "ran again" in " ".join(finding.message.split())


def test_a_copy_is_made_with_the_lock_of_imports_held(monkeypatch):
    """As in Python's own fork, which takes it before and releases it in the child: Python 3.13 ends a child without it."""
    fork = copied_process._fork
    held = []

    def seen() -> int:
        held.append(_imp.lock_held())
        return fork()

    monkeypatch.setattr(copied_process, "_fork", seen)
    copy = copied_process.CopiedProcess(lambda: b"found")

    assert held == [True]
    assert not _imp.lock_held()
    assert copy.result(30.0) == b"found"


def test_a_child_that_hangs_is_ended_and_the_program_goes_on(monkeypatch):
    """A thread that was waiting for the interpreter at the fork does not exist in the child, which may wait for it."""
    monkeypatch.setattr(copied_process, "_become_a_copy", lambda *_: time.sleep(1000))
    monkeypatch.setattr(copied_process, "_LEAST_PATIENCE", 0.2)
    interval = sys.getswitchinterval()
    began = time.monotonic()

    copy = copied_process.CopiedProcess(lambda: b"found")

    assert time.monotonic() - began < 30
    assert copy.result(1.0) == b""
    assert sys.getswitchinterval() == interval


def test_copies_are_made_beside_threads_that_never_rest():
    """They all want the interpreter; each copy still does its work."""
    over = threading.Event()

    def compute():
        while not over.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        copies = [copied_process.CopiedProcess(lambda: b"found") for _ in range(8)]
        found = [copy.result(60.0) for copy in copies]
    finally:
        over.set()
        for each in threads:
            each.join()

    assert found == [b"found"] * 8
