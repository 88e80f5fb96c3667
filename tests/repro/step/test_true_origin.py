"""What ran again is named only where it is the origin in the program, too."""

import sys

import pytest

from tests.repro.step.test_step_again import HEAD, watched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")

LOOP = """
for step, (x, y) in enumerate(batches(12)):
    loss = objective(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ON_PURPOSE = """
mask = torch.ones(8, 4)
mask[:, 3] = 0

def objective(x, y):
    scores = net(x) + mask.log()
    scores = scores + (x - x) / x  # here
    return (scores.softmax(1) * y).sum()
"""

BESIDE_A_MASK = """
mask = torch.ones(8, 4)
mask[:, 3] = 0

def objective(x, y):
    scores = net(x) * 0 + mask.log()
    scores = scores / x  # here
    return (scores.softmax(1) * y).sum()
"""

OVERWRITTEN = """
def objective(x, y):
    w = x.log()
    w.nan_to_num_(0, 0, 0)
    flat = w.view(-1)
    w.mul_(x).div_((x != 0).float())  # here
    return (net(x).view(-1) * flat).sum()
"""

SCALED_IN_PLACE = """
def objective(x, y):
    x.mul_(1.5).sub_(0.7)
    angle = torch.acos(x)
    weight = torch.full((8,), float(step != 12))
    scale = 1 / weight.sum()  # here
    return angle.mean() * 0 + (net(x).mean(1) * weight).sum() * scale
"""

INTO_OLD_MEMORY = """
def objective(x, y):
    spoiled = torch.full((8, 4), torch.nan)
    del spoiled
    weight = torch.empty(8, 4)
    torch.div(x - x, x, out=weight)  # here
    return (net(x) * weight).sum()
"""

MAY_LEAVE = """
for x, y in batches(12):
    loss = (net(x) / x).mean()  # here
    if loss.item() == -1:
        loss = None
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "text",
    [
        ON_PURPOSE + LOOP,
        BESIDE_A_MASK + LOOP,
        OVERWRITTEN + LOOP,
        SCALED_IN_PLACE + LOOP,
        INTO_OLD_MEMORY + LOOP,
        MAY_LEAVE,
    ],
    ids=[
        "on purpose",
        "beside a mask",
        "overwritten",
        "scaled in place",
        "into old memory",
        "may leave",
    ],
)
def test_the_true_origin_is_named(tmp_path, text):
    """Not an infinity by design, one that was removed, or one that only the second run has."""
    finding, line = watched(tmp_path, HEAD + text)
    _, _, again = " ".join(finding.message.split()).partition("ran again")

    assert f"train.py:{line}" in again, finding.message


BY_NUMPY = """
import numpy as np

def objective(x, y):
    with np.errstate(divide="ignore"):
        weight = np.log(x.numpy())
    return (net(x) * torch.tensor(weight)).sum()  # here
"""


def test_what_numpy_made_is_not_blamed_on_what_takes_it(tmp_path):
    """NumPy is not seen; the operation that makes a tensor of its numbers has not made them."""
    finding, _ = watched(tmp_path, HEAD + BY_NUMPY + LOOP)

    assert "ran again" not in " ".join(finding.message.split())


SPARSE = """
def objective(x, y):
    weight = (1 / x.T @ torch.ones(8, 8)).to_sparse()
    return torch.sparse.mm(weight, net(x).mean(1, keepdim=True)).mean()  # here
"""


def test_what_takes_numbers_that_cannot_be_read_is_not_blamed(tmp_path):
    """The numbers of a sparse tensor are not looked at; so nobody knows that they were finite."""
    finding, _ = watched(tmp_path, HEAD + SPARSE + LOOP)

    assert "made of finite numbers" not in " ".join(finding.message.split())


HUGGING_FACE = """
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, labels):
        logits = self.fc(x)
        loss = F.mse_loss(logits, labels) + (logits / x).mean()  # here
        return {"loss": loss, "logits": logits}

samples = [{"x": row, "labels": goal} for x, y in batches(3) for row, goal in zip(x, y)]
arguments = TrainingArguments(
    "out", max_steps=20, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
)
Trainer(Model(), arguments, train_dataset=samples).train()
"""


def test_the_lines_of_a_trainer_run_again(tmp_path, monkeypatch):
    """The frames of a library have the variables of the step, those of the program do not."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    finding, line = watched(tmp_path, HEAD + HUGGING_FACE)
    _, _, again = " ".join(finding.message.split()).partition("ran again")

    assert f"train.py:{line}" in again, finding.message


DRAWN = """
import numpy as np

def objective(x, y):
    noise = torch.from_numpy(np.random.randn(8)).float()
    if step < 12:
        noise = noise.abs()
    return net(x).mean() + noise.log().mean()  # here
"""


def test_random_numbers_that_are_drawn_anew_are_told(tmp_path):
    """Those of NumPy are not the same again, so the rows are those of the second run."""
    finding, line = watched(tmp_path, HEAD + DRAWN + LOOP)
    text = " ".join(finding.message.split())

    assert f"train.py:{line}" in text
    assert "random numbers were drawn anew" in text
