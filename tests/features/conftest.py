"""What recipes' tests wait for before they end."""

from __future__ import annotations

import gc
import threading
from importlib import import_module

import pytest

FEEDER = "QueueFeederThread"


@pytest.fixture(autouse=True)
def loaders_have_ended():
    """The threads that feed a loader's workers are told to end with the loader, and do so a moment later."""
    yield
    for thread in threading.enumerate():
        if thread.name == FEEDER:
            thread.join(10)


@pytest.fixture
def no_threads_of_zarr():
    """Zarr keeps threads for as long as the process lives, which every other test would find."""
    yield
    import_module("zarr.core.sync").cleanup_resources()
    gc.collect()  # the pool goes with the loop that held it
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio_"):
            thread.join(10)
