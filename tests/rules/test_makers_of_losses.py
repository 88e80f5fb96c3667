"""Which operation made a loss, where a program calls backward on several in one step."""

from __future__ import annotations

import pytest

from kedge.rules.recorded.losses import maker_at
from kedge.store.recording import Recording

LINE = {"file": "train.py", "line": 12, "function": "fit", "text": "loss.backward()"}
OTHER = {**LINE, "line": 15}


@pytest.mark.parametrize(
    ("step", "node", "line"),
    [(0, "MeanBackward0", 12), (1, None, 15), (2, "AddBackward0", 15), (3, "AddBackward0", 15)],
    ids=["the first", "two in one step", "from now on another", "as before"],
)
def test_the_operation_is_named_where_a_step_had_one(step: int, node: str | None, line: int):
    """Of two backward passes in one step that began at results of two operations, neither is named."""
    site = {"site": "loss", "path": "loss", "kind": "loss", "node": "MeanBackward0", "source": LINE}
    rows = [{"step": n, "site": "loss", "count": 1, "calls": 1 + (n == 1)} for n in range(4)]
    events = [
        {"kind": "loss-operation", "step": 1, "loss": "loss", "node": "AddBackward0", "source": OTHER},
    ]  # fmt: skip
    recording = Recording.build([site], rows, events=events)

    made, source = maker_at(recording, recording.site("loss"), step)

    assert made == node
    assert source is not None
    assert source.line == line


def test_an_operation_that_takes_over_between_two_passes_is_named():
    """A step with one backward pass has one operation, also in the step in which it changes."""
    site = {"site": "loss", "path": "loss", "kind": "loss", "node": "MeanBackward0", "source": LINE}
    rows = [{"step": n, "site": "loss", "count": 1, "calls": 1} for n in range(2)]
    events = [{"kind": "loss-operation", "step": 1, "loss": "loss", "node": "AddBackward0"}]
    recording = Recording.build([site], rows, events=events)

    assert maker_at(recording, recording.site("loss"), 1)[0] == "AddBackward0"
