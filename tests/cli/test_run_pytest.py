"""``kedge run -m pytest``: the tests of a project pass, fail and warn as they do under pytest alone."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from kedge.store.recording import Recording
from tests.forked import run
from tests.marks import sampled

pytestmark = pytest.mark.timing

NET = """
import gc, warnings
import pytest
import torch
from torch import nn

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad * 2

class Net(nn.Sequential):
    def forward(self, x): return Doubled.apply(super().forward(x))

def train(steps=2):
    model = Net(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model
"""

SOUND = """
def test_trains(): train(8)

def test_counts_the_warnings(recwarn):
    train()
    assert len(recwarn) == 0

def test_records_its_own_warnings():
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        train()
        warnings.warn("mine")
    assert [str(each.message) for each in log] == ["mine"]

def test_expects_a_warning():
    with pytest.warns(UserWarning, match="mine"):
        train()
        warnings.warn("mine")

def test_prints(capfd):
    train()
    print("out")
    assert capfd.readouterr() == ("out\\n", "")

def test_raises():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train()(torch.ones(1, 5))

def test_leaves_garbage():
    model = train()
    model.itself = model
    del model
    gc.collect()

@pytest.fixture
def trained(): return train()

@pytest.mark.parametrize("size", [1, 2])
def test_takes_a_fixture(trained, size): assert trained(torch.ones(size, 2)).shape == (size, 1)

@pytest.mark.skip
def test_is_skipped(): train()

@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(): assert train() is None
"""

FAILING = """
def test_passes(): train()
def test_fails(): assert train() is None, "not none"
def test_raises(): train(); raise ValueError("mine")
def test_prints_and_fails(): train(); print("captured"); assert False
"""

WARNING = """
import warnings
def test_warns_twice():
    for _ in range(2): warnings.warn("mine")
    train()
def test_warns_in_a_hook():
    model = train()
    model.register_forward_hook(lambda *_: warnings.warn("in my hook"))
    model(torch.ones(1, 2))
"""

CASES = {
    "sound": (SOUND, "error", [], 0),
    "sound, in one process of xdist": (SOUND, "error", ["-n", "1"], 0),
    "failing": (FAILING, "error", [], 1),
    "warning": (WARNING, "default", [], 0),
    "warnings are errors": (WARNING, "error", [], 1),
    "nothing chosen": (SOUND, "error", ["-k", "nowhere"], 5),
    "a wrong option": (SOUND, "error", ["--no-such-option"], 4),
    "stopped": (FAILING, "error", ["-x"], 1),
}


#: The others are run by `make test-all`.
ALWAYS = {"sound", "failing"}


@pytest.mark.parametrize("case", sampled(CASES, ALWAYS))
def test_a_suite_ends_as_under_pytest_alone(tmp_path: Path, case: str) -> None:
    """Output, summary and exit status are the same, and the models of the tests were recorded."""
    tests, filters, options, status = CASES[case]
    if "-n" in options and find_spec("xdist") is None:
        pytest.skip("pytest-xdist is not installed")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = {filters}\n")
    (tmp_path / "test_net.py").write_text(NET + dedent(tests))
    words = ["-m", "pytest", "-rA", "-p", "no:cacheprovider", "--tb=short", *options]

    plain = run([sys.executable, *words], cwd=tmp_path)
    ours = run([sys.executable, "-m", "kedge", "run", "-q", "-o", "it.kedge", *words], cwd=tmp_path)

    assert plain.returncode == status, plain.stdout
    assert (timeless(ours.stdout), ours.stderr, ours.returncode) == (
        timeless(plain.stdout),
        plain.stderr,
        plain.returncode,
    )
    if status in (0, 1) and "-n" not in options:
        assert any(site.site == "0:out" for site in Recording.open(tmp_path / "it.kedge").sites)


def timeless(text: str) -> str:
    """Return pytest's output without times, and without the lines of '=' whose length they change."""
    return re.sub(r"=+", "=", re.sub(r"\d+\.\d\ds", "s", text))
