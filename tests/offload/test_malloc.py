"""The allocator's threshold: pinned for a block, and said so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kedge.offload import malloc
from kedge.offload.malloc import Trimmer, tuned_malloc

GLIBC = pytest.mark.skipif(bool(malloc._why_not()), reason="needs glibc's allocator")

HEAP = """
import ctypes
from kedge.offload.malloc import tuned_malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def mapped(megabytes):
    'Whether a block of this size is one that goes back when freed: a flag in the word before it.'
    block = libc.malloc(megabytes << 20)
    flags = ctypes.c_size_t.from_address(block - 8).value
    libc.free(block)
    return bool(flags & 2)

said = [mapped(30), mapped(20)]  # the first makes the threshold grow
with tuned_malloc() as tuned:
    said += [mapped(20), mapped(5), mapped(3), mapped(30), mapped(5), str(tuned)]
    with tuned_malloc():
        said += [mapped(5)]
    said += [mapped(5)]
said += [mapped(20), mapped(40), tuned.restored]
print(said)
"""


def run(code, **environment):
    """Run code in a process of its own and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@GLIBC
def test_blocks_from_4_mb_on_go_back_while_the_block_runs():
    """Seen in glibc's own flags: 20 MB come from the heap before, from the system inside, and from the heap again after."""
    told = "blocks of 4,194,304 bytes and more go back to the system when they are freed"

    assert run(HEAP) == str(
        [True, False, True, True, False, True, True, told, True, True, False, True, (33554432, 67108864)]
    )


@GLIBC
@pytest.mark.parametrize(
    "asked",
    [
        {"MALLOC_MMAP_THRESHOLD_": "16777216"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=16777216:glibc.malloc.trim_threshold=0x100000"},
    ],
)
def test_what_the_environment_asked_for_is_restored(asked):
    """A threshold of the user's own is in force again after the block."""
    code = HEAP.replace("print(said)", "print(mapped(20), mapped(12), tuned.restored[0])")

    assert run(code, **asked) == "True False 16777216"


def test_elsewhere_nothing_is_done_and_said(monkeypatch):
    """Without glibc the block runs as it is, and the value says why."""
    monkeypatch.setattr(os, "confstr_names", {}, raising=False)
    monkeypatch.setattr(malloc, "_set", lambda values: pytest.fail("something was set"))
    with tuned_malloc() as said:
        pass

    assert not said.done
    assert str(said) == "the allocator is as it was: the C library is not glibc"


@GLIBC
def test_an_error_in_the_block_restores_too(monkeypatch):
    """The threshold does not stay pinned because a step failed."""
    values = []
    monkeypatch.setattr(malloc, "_set", values.append)
    with pytest.raises(ZeroDivisionError):
        with tuned_malloc() as said:
            1 / 0

    assert values == [malloc._PINNED, said.restored]
    assert str(said).endswith("since the block ended, those of 33,554,432 bytes and more do")


RESIDENT = """
import contextlib
import sys
import torch
from torch import nn
import kedge

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x):
        return x + nn.functional.gelu(self.inner(x))

def resident(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

torch.set_num_threads(1)
model = nn.Sequential(*[Block() for _ in range(40)])
x = torch.randn(8192, 256)  # 8 MB, as each value in it
model(x[:64]).sum().backward()
before = resident("VmRSS")
with TUNED as said, kedge.offload(model, to=kedge.Disk()):
    for _ in range(3):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        model(x).sum().backward()
        model.zero_grad()
print(round(resident("VmHWM") - before), said)
"""


@GLIBC
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's count of resident memory")
def test_memory_can_be_given_back_now_and_then():
    """A network that saves some 800 MB takes a fraction of that in its third step, and it is said how often that was done."""
    peak, *said = run(RESIDENT.replace("TUNED", "kedge.tuned_malloc(at_once=False)")).split()
    kept = run(RESIDENT.replace("TUNED", "contextlib.nullcontext()")).split()[0]

    assert int(peak) < 0.7 * int(kept), f"{peak} MB with, {kept} MB without giving memory back"
    assert 8 <= int(said[-2]) <= 40


@GLIBC
def test_a_step_is_cut_into_parts(monkeypatch):
    """After a step of 800 bytes memory is given back at each 100 of the next, in a block that asks for it alone."""
    monkeypatch.setattr(malloc, "_LEAST", 100)
    monkeypatch.setattr(malloc, "_FIRST", 1_000)
    trimmer = Trimmer()
    trimmer.freed(800)
    trimmer.turn()
    trimmer.freed(100)
    with tuned_malloc(at_once=False) as said:
        for _ in range(16):
            trimmer.freed(50)
    trimmer.freed(100)

    assert str(said) == "free memory was given back to the system 8 times"
    assert said.restored is None
