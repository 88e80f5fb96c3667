"""The environment variables that docs/how-to/offloading.md names make glibc give large blocks back as soon as they are freed."""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "offloading.md"
HEAP = """
import ctypes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def mapped(megabytes):
    'Whether a block of this size goes back to the system when it is freed: a flag in the word before it.'
    block = libc.malloc(megabytes << 20)
    flags = ctypes.c_size_t.from_address(block - 8).value
    libc.free(block)
    return bool(flags & 2)

print([mapped(size) for size in (30, 20, 5, 3)])
"""


def named_on_the_page():
    """Return the settings of both ways that the page names, as environments."""
    text = PAGE.read_text(encoding="utf-8")
    command = re.search(r"^\$ (.*) python train\.py$", text, re.MULTILINE)
    tunables = re.search(r"`(GLIBC_TUNABLES=\S+)`", text)
    return [
        dict(word.split("=", 1) for word in shlex.split(found[1])) for found in (command, tunables)
    ]


def blocks_that_go_back(settings):
    """Return whether blocks of 30, 20, 5 and 3 MB, freed one after the other, go back to the system."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    ended = subprocess.run(
        [sys.executable, "-c", HEAP],
        env=plain | settings,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ast.literal_eval(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_the_settings_on_the_page_have_blocks_go_back_from_4_mb_on():
    """Without them the first block that is freed moves glibc's threshold beyond the next; with them it stays at 4 MB."""
    assert blocks_that_go_back({}) == [True, False, False, False]
    for settings in named_on_the_page():
        assert blocks_that_go_back(settings) == [True, True, True, False], settings
