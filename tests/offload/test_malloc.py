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
with kedge.offload(model, to=kedge.Disk()):
    for _ in range(3):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        model(x).sum().backward()
        model.zero_grad()
print(round(resident("VmHWM") - before))
"""


@GLIBC
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's count of resident memory")
def test_freed_memory_goes_back_within_the_step():
    """A network that saves some 800 MB takes a fraction of that in its third step, with the allocator as it comes."""
    idle = RESIDENT.replace(
        "with kedge", "from kedge.offload import malloc\nmalloc._PARTS = 1e-9\nmalloc._FIRST = 1 << 60\nwith kedge"
    )
    peak, kept = int(run(RESIDENT)), int(run(idle))

    assert peak < 0.7 * kept, f"{peak} MB with, {kept} MB without giving memory back"


@GLIBC
def test_giving_back_pauses_where_the_threshold_is_pinned(monkeypatch):
    """In a `tuned_malloc` block there is nothing in the heap to give back; outside there is."""
    monkeypatch.setattr(malloc, "_FIRST", 100)
    monkeypatch.setattr(malloc, "_set", lambda values: None)
    trimmer = Trimmer()
    with tuned_malloc():
        trimmer.freed(200)
    inside = trimmer.trims
    trimmer.freed(200)

    assert (inside, trimmer.trims) == (0, 1)


@GLIBC
def test_a_step_is_cut_into_parts(monkeypatch):
    """After a step of 800 bytes memory is given back at each 100 of the next; a small step never comes to the least."""
    monkeypatch.setattr(malloc, "_LEAST", 100)
    trimmer = Trimmer()
    trimmer.freed(800)
    trimmer.turn()
    for _ in range(16):
        trimmer.freed(50)

    assert trimmer.trims == 8
