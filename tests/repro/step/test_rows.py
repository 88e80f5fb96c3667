"""The rows of a batch that make its loss jump, found by running the step's lines with some rows alone."""

import sys

import pytest

import kedge
from kedge.rules import check
from kedge.store.events import RowsEvent
from kedge.store.recording import Recording

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
true = nn.Linear(8, 3).requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)


def batch(step):
    x = torch.randn(24, 8)
    y = true(x)
    if step == 60:
        spoil(x, y)
    return x, y
"""

ONE_ROW = """
def spoil(x, y):
    y[7] += 1000
"""

TWO_ROWS = """
def spoil(x, y):
    y[7] += 1000
    y[20] += 700
"""

ALL_ROWS = """
def spoil(x, y):
    y += 1000
"""

MEAN = """
for step in range(80):
    x, y = batch(step)
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SUM = MEAN.replace("F.mse_loss(net(x), y)", 'F.mse_loss(net(x), y, reduction="sum")')

IN_A_DICTIONARY = """
def objective(given):
    return F.l1_loss(net(given["x"]), given["y"])

for step in range(80):
    x, y = batch(step)
    given = {"x": x, "y": y, "step": step}
    loss = objective(given)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

WITH_A_BATCH_NORM = MEAN.replace("for step", "net.insert(1, nn.BatchNorm1d(16))\nfor step")

OF_ALL_TOGETHER = """
for step in range(80):
    x, y = batch(step)
    loss = (net(x) - y).square().sum().square()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def found(tmp_path, text):
    """Train a program under a watch; return what is known of its rows, and the finding about the loss."""
    file = tmp_path / "train.py"
    file.write_text(text, encoding="utf-8")
    code = compile(text, str(file), "exec")
    with kedge.watch(tmp_path / "run.kedge", force=True):
        exec(code, {"__name__": "train", "__file__": str(file)})
    recording = Recording.open(tmp_path / "run.kedge")
    findings = [each for each in check(recording) if each.code == "SPIKE" and each.site == "loss"]
    events = [event for event in recording.of(RowsEvent) if event.step == 60]
    return (events or [None])[0], (findings or [None])[0]


@pytest.mark.parametrize("loop", [MEAN, SUM, IN_A_DICTIONARY], ids=["mean", "sum", "dictionary"])
def test_the_row_is_named_with_its_shares(tmp_path, loop):
    """Of a mean and of a sum, of arguments and of values in a dictionary."""
    event, finding = found(tmp_path, HEAD + ONE_ROW + loop)

    assert event.of == 24
    assert [each.row for each in event.rows] == [7]
    assert event.rows[0].loss == pytest.approx(1, abs=0.01)
    assert event.rows[0].gradient > 0.1
    assert "row 7 carries" in " ".join(finding.message.split())
    assert "Look at these rows of the batch of step 60" in finding.remedy


def test_two_rows_are_named_the_larger_share_first(tmp_path):
    """As far as single rows have a share worth naming."""
    event, _ = found(tmp_path, HEAD + TWO_ROWS + MEAN)

    assert [each.row for each in event.rows] == [7, 20]
    assert event.rows[0].loss == pytest.approx(1000**2 / (1000**2 + 700**2), abs=0.02)


def test_a_jump_of_all_rows_is_said_to_be_one(tmp_path):
    """Then no sample is to blame."""
    event, finding = found(tmp_path, HEAD + ALL_ROWS + MEAN)

    assert event.rows == ()
    assert "no few of the 24 rows of the batch carry the loss" in " ".join(finding.message.split())


def test_behind_a_batch_norm_the_loss_alone_runs_again(tmp_path):
    """A row alone would be normalized otherwise; the outputs are there, so the shares of the loss are known."""
    event, _ = found(tmp_path, HEAD + ONE_ROW + WITH_A_BATCH_NORM)

    assert event is None or [each.row for each in event.rows] == [7]


def test_of_a_loss_that_is_no_sum_of_its_rows_nothing_is_said(tmp_path):
    """Those of some rows are neither its parts nor have it as their mean."""
    event, finding = found(tmp_path, HEAD + ALL_ROWS + OF_ALL_TOGETHER)

    assert event is None
    assert "ran again" not in finding.message


def test_the_row_is_named_as_a_sample_of_the_data_set(tmp_path):
    """As the loader's sampler had it."""
    program = """
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
x = torch.randn(240, 8)
y = x[:, :3].clone()
y[77] += 1000
where = {"step": 0}
order = [*range(100, 180), *range(77), *range(78, 100), *range(180, 200), 77, *range(200, 240)]
data = DataLoader(TensorDataset(x, y), 4, sampler=order)
for inputs, targets in data:
    loss = F.mse_loss(net(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    path = tmp_path / "train.py"
    path.write_text(HEAD.split("torch.manual_seed", maxsplit=1)[0] + program)
    with kedge.watch(tmp_path / "run.kedge", budget=None):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})

    (event,) = Recording.open(tmp_path / "run.kedge").of(RowsEvent)
    assert event.step == 49
    assert [(each.row, each.sample) for each in event.rows] == [(3, 77)]
