"""Threads of its own, threads of Python's, and processes that fork."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kedge import native
from tests.native.ways import COMPILED, compiled

pytestmark = [pytest.mark.timing, COMPILED]


@pytest.fixture
def threads() -> Iterator[None]:
    """Put back the number of threads that PyTorch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def large() -> list[Tensor]:
    """Values that several threads share, contiguous and not."""
    x = torch.randn(3_000_001)
    spoiled = x.clone()
    spoiled[2_500_000] = float("nan")
    return [
        x,
        x.double(),
        x.half(),
        x.bfloat16(),
        spoiled,
        torch.randn(3000, 1000).t()[::1, 1:],
        x * 1e-25,
    ]


def test_the_number_of_threads_changes_no_bit(threads: None) -> None:
    """Who adds up which span is left to chance; the result is not."""
    for value in large():
        found = []
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            rows = native.table(1)
            assert native.measure_into(rows, 0, value)
            found.append(rows.tobytes())
        assert len(set(found)) == 1


def test_other_threads_run_while_a_large_value_is_read(threads: None) -> None:
    """Python's lock is free meanwhile."""
    before, turns, stop = sys.getswitchinterval(), [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    much, rows = torch.ones(1 << 24), native.table(1)
    sys.setswitchinterval(
        1000
    )  # the other thread gets its turn only where this one gives the lock away
    try:
        other.start()
        given = []
        for _ in range(100):
            at = turns[0]
            native.measure_into(rows, 0, much)
            given.append(turns[0] > at)
            if given[-1]:
                break
    finally:
        sys.setswitchinterval(before)
        stop.set()
        other.join()
    assert any(given)


def test_threads_of_python_measure_at_the_same_time(threads: None) -> None:
    """Nothing is shared between two passes."""
    torch.set_num_threads(2)
    found: dict[int, list[float]] = {}

    def work(n: int) -> None:
        value = torch.full((3_000_000,), float(n))
        found[n] = [compiled(value)["sum"] for _ in range(5)]

    workers = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {n: [3_000_000.0 * n] * 5 for n in range(1, 5)}


FORK = """
import os, torch
from kedge import native
torch.set_num_threads(2)
x = torch.ones(3_000_000)
rows = native.table(2)
assert native.measure_into(rows, 0, x) == 3_000_000
child = os.fork()
if not child:
    ok = native.measure_into(rows, 1, x) == 3_000_000 and rows[1].tolist() == rows[0].tolist()
    os._exit(0 if ok else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_fork_measures_as_its_parent_did() -> None:
    """No thread is expected in the child that only the parent has."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=120)


def test_a_signal_reaches_the_program() -> None:
    """Threads started for a pass take no signals; the main thread's handler runs."""
    script = """
import os, signal, torch
from kedge import native
torch.set_num_threads(2)
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
x, rows = torch.ones(1 << 23), native.table(1)
for _ in range(20):
    os.kill(os.getpid(), signal.SIGUSR1)
    native.measure_into(rows, 0, x)
assert len(seen) >= 1, seen
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
