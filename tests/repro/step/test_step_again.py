"""The lines of a bad step run again in a copy of the process, and show the operation."""

import sys
import textwrap

import pytest

import kedge
from kedge.rules import check
from kedge.store.recording import Recording
from tests.forked import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux")

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).sigmoid()


def batches(bad):
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        x = torch.rand(8, 4, generator=generator) + 0.1
        if step == bad:
            x[3] = 0
        yield x, torch.rand(8, 4, generator=generator)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
"""

IN_LINE = """
for x, y in batches(12):
    p = net(x)
    loss = F.mse_loss(p, y) + (1 / x * p).mean()  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

IN_A_FUNCTION = """
def objective(x, y):
    p = net(x)
    weight = 1 / x  # here
    return F.mse_loss(p, y) + (weight * p).mean()

def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for x, y in batches(12):
    step(objective(x, y))
"""

IN_A_CLASS = """
class Trainer:
    def __init__(self):
        self.net, self.optimizer = net, optimizer

    def forward(self):
        self.p = self.net(self.x)
        self.weight = 1 / self.x  # here

    def backward(self):
        self.loss = F.mse_loss(self.p, self.y) + (self.weight * self.p).mean()
        self.loss.backward()

    def optimize(self):
        self.forward()
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

trainer = Trainer()
for trainer.x, trainer.y in batches(12):
    trainer.optimize()
"""

WITH_A_CLOSURE = """
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)
for x, y in batches(12):
    def closure():
        optimizer.zero_grad()
        p = net(x)
        loss = F.mse_loss(p, y) + (1 / x * p).mean()  # here
        loss.backward()
        return loss
    optimizer.step(closure)
"""

ACCUMULATED = """
for x, y in batches(12):
    optimizer.zero_grad()
    losses = []
    for a, b in zip(x.chunk(2), y.chunk(2)):
        p = net(a)
        losses.append(F.mse_loss(p, b) + (1 / a * p).mean())  # here
    total = sum(losses) / len(losses)
    total.backward()
    optimizer.step()
"""

UNDER_AUTOCAST = """
for x, y in batches(12):
    with torch.autocast("cpu", torch.bfloat16):
        p = net(x)
        weight = 1 / x  # here
        loss = F.mse_loss(p.float(), y) + (weight * p).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CHANGED_BEFORE = """
for x, y in batches(12):
    x = x * 2
    x -= 0.05
    x = x.clamp(min=0)
    p = net(x)
    loss = F.mse_loss(p, y) + (p / x).mean()  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

IN_THE_BACKWARD = """
for x, y in batches(12):
    p = net(x)
    scale = (x * p).square().sum(1).sqrt()  # here
    loss = F.mse_loss(p, y) + scale.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

HIDDEN_BY_A_MASK = """
for x, y in batches(12):
    p = net(x)
    ratio = p / x  # here
    loss = F.mse_loss(p, y) + torch.where(x > 0, ratio, torch.zeros(())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

WITH_DROPOUT = """
for step in range(20):
    x = torch.rand(8, 4) + 0.1
    if step == 12:
        x[3] = 0
    p = F.dropout(net(x), 0.5)
    ratio = p / x  # here
    loss = F.mse_loss(p, torch.zeros(8, 4)) + ratio.nan_to_num(posinf=0).mean() + (p > 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

IN_A_BACKWARD_OF_ITS_OWN = """
class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod  # here
    def backward(ctx, arrived):
        (x,) = ctx.saved_tensors
        return arrived / (2 * x.sqrt())

for x, y in batches(12):
    p = net(x)
    loss = F.mse_loss(p, y) + Root.apply(x * p).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PROGRAMS = {
    "in a backward of its own": IN_A_BACKWARD_OF_ITS_OWN,
    "with dropout": WITH_DROPOUT,
    "in line": IN_LINE,
    "in a function": IN_A_FUNCTION,
    "in a class": IN_A_CLASS,
    "with a closure": WITH_A_CLOSURE,
    "accumulated": ACCUMULATED,
    "under autocast": UNDER_AUTOCAST,
    "changed before": CHANGED_BEFORE,
    "in the backward": IN_THE_BACKWARD,
    "hidden by a mask": HIDDEN_BY_A_MASK,
}


def watched(tmp_path, text, **options):
    """Train a program under a watch; return its first finding about NaN, and the number of its line."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    with kedge.watch(tmp_path / "run.kedge", force=True, **options):
        exec(code, {"__name__": "train", "__file__": str(file)})
    found = [f for f in check(Recording.open(tmp_path / "run.kedge")) if f.code == "NAN-BORN"]
    lines = file.read_text(encoding="utf-8").splitlines()
    return found[0], next(n for n, line in enumerate(lines, start=1) if "# here" in line)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_operation_is_named_however_the_program_is_written(tmp_path, name):
    """The step's own lines run again, wherever they stand, and show the operation, its line and the row."""
    finding, line = watched(tmp_path, HEAD + PROGRAMS[name])
    text = " ".join(finding.message.split())

    assert finding.step == 12
    assert "ran again in a copy of the process" in text
    assert f"train.py:{line}" in text


def test_the_rows_of_the_batch_are_named(tmp_path):
    """The rows with values that are not finite are told, as a user looks for them in the data."""
    finding, _ = watched(tmp_path, HEAD + IN_LINE)

    assert "4 of its 32 results are infinite, in row 3 of 8" in " ".join(finding.message.split())


def test_nothing_runs_again_if_that_is_not_wanted(tmp_path):
    """Then the finding is that of the graph of the loss."""
    finding, line = watched(tmp_path, HEAD + IN_LINE, rerun=False)

    assert "ran again" not in finding.message
    assert f"train.py:{line}" in finding.message


CHANGED_TWICE = """
table = torch.zeros(20)
table[12] = torch.inf
for step, (x, y) in enumerate(batches(99)):
    x = x * 1e20  # here
    loss = F.mse_loss(net(x * 1e-20), y) + (x * 1e-20).mean() + table[step]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_line_that_would_change_its_variable_twice_is_not_accused(tmp_path):
    """Run once more, it would overflow; but then the variable is another than the program's."""
    finding, line = watched(tmp_path, HEAD + CHANGED_TWICE)

    assert finding.step == 12
    assert f"train.py:{line}" not in finding.message


SEEN = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("error")
noticed = []
os.register_at_fork(
    before=lambda: noticed.append("before"), after_in_parent=lambda: noticed.append("parent")
)
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
log = open("log.txt", "w")
numbers = open("numbers.txt")
"""

WRITING = """
def objective(x, y):
    print("step")
    log.write("step\\n")
    numbers.readline()
    with open("trace.txt", "a") as trace:
        trace.write("x")
    p = net(x)
    return F.mse_loss(p, y) + (1 / x * p).mean()

for x, y in batches(12):
    loss = objective(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
stop.set()
log.close()
print(noticed, numbers.readline().strip(), os.path.getsize("log.txt"), os.path.getsize("trace.txt"))
try:
    os.wait()
except ChildProcessError:
    print("no child")
"""


def test_the_program_notices_nothing(tmp_path):
    """Its output, its files, their positions, its functions for forks, warnings and children are as without a copy."""
    (tmp_path / "numbers.txt").write_text("\n".join(map(str, range(100))), encoding="utf-8")
    (tmp_path / "train.py").write_text(SEEN + HEAD + WRITING, encoding="utf-8")
    plain = run([sys.executable, "train.py"], cwd=tmp_path)
    (tmp_path / "trace.txt").unlink()
    under = run([sys.executable, "-m", "kedge", "run", "-q", "train.py"], cwd=tmp_path)

    assert plain.returncode == under.returncode == 0, under.stderr
    assert under.stdout == plain.stdout
    assert "no child" in plain.stdout


IN_A_DATA_SET = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(160, WIDTH) + 0.1
x[77, 2] = 0
net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for (batch,) in DataLoader(TensorDataset(x), 8, shuffle=True):
    features = SPOILED  # here
    loss = net(features).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_rows_are_named_as_samples_of_the_data_set(tmp_path):
    """And the operation that made a variable bad, not the first one that its values went through."""
    program = IN_A_DATA_SET.replace("WIDTH", "5").replace("SPOILED", "torch.log(batch)")
    finding, line = watched(tmp_path, program)

    text = " ".join(finding.message.split())
    assert f"log made it, outside of modules, at {tmp_path}/train.py:{line}" in text
    assert "it is sample 77 of the data set, without which all is finite" in text


def test_a_dimension_as_long_as_the_batch_is_not_taken_for_it(tmp_path):
    """Whatever sample is left out, the value stays: the row is a feature's."""
    spoiled = "batch * torch.log(torch.arange(8.0)).unsqueeze(1).mean(1)"
    program = IN_A_DATA_SET.replace("WIDTH", "8").replace("SPOILED", spoiled)
    finding, _ = watched(tmp_path, program)

    assert "log made it" in finding.message
    assert "of the data set" not in finding.message


COUNTING = """
import torch
from torch import nn

torch.manual_seed(0)


class Sharpening(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.temperature = 1.0

    def forward(self, x):
        self.temperature = round(self.temperature - 0.05, 2)
        return self.net(x) / self.temperature  # here


model = Sharpening()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(22):
    loss = model(torch.randn(8, 4)).abs().clamp(max=5).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_attribute_that_the_forward_changes_is_put_back_first(tmp_path):
    """Otherwise the step that runs again is the one after it, which divides by another number."""
    finding, line = watched(tmp_path, COUNTING)
    text = " ".join(finding.message.split())

    assert finding.step == 19
    assert "ran again in a copy of the process: div made it" in text
    assert f"train.py:{line}" in text
