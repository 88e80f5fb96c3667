"""What the tests of integrations share."""

from __future__ import annotations

import pytest

import kedge


@pytest.fixture
def told():
    """The messages to the user, as a list that grows."""
    return []


@pytest.fixture
def watch(tmp_path, told):
    """Make a watch whose recording is in the test's folder and that tells the test what it has to say."""
    made = []

    def make(name="run.kedge", **options):
        watched = kedge.watch(tmp_path / name, **{"budget": None, **options})
        watched.tell = told.append
        made.append(watched)
        return watched

    yield make
    for watched in made:
        watched.end()
