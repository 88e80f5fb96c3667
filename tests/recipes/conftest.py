"""What recipes' tests wait for before they end."""

from __future__ import annotations

import threading

import pytest

FEEDER = "QueueFeederThread"


@pytest.fixture(autouse=True)
def loaders_have_ended():
    """The threads that feed a loader's workers are told to end with the loader, and do so a moment later."""
    yield
    for thread in threading.enumerate():
        if thread.name == FEEDER:
            thread.join(10)
