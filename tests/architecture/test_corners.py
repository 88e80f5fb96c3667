"""What is private of PyTorch is named in one folder, looked up late, and costs one feature where it is missing."""

from __future__ import annotations

import ast
import math
import re
import sys

import pytest

from kedge.cli.main import main
from kedge.torch_internals import corners
from tests import forked

ALLOWED = {
    "repro/script.py": {"TorchDispatchMode"},  # public in all but the name of its module
}


def _private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _names(tree):
    """Yield every private name of PyTorch's that a file imports, or reaches through ``torch``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                if _private(f"{node.module}.{alias.name}"):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, a.name)
                for a in node.names
                if a.name.startswith("torch.") and _private(a.name)
            )
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", text) and text.startswith("torch.") and _private(text):
                yield node.lineno, text


def test_private_names_of_torch_stand_in_one_folder(sources):
    """Nothing but ``torch_internals`` names ``torch._*``."""
    found = {
        f"{source.name}:{line} {name}"
        for source in sources
        if not source.name.startswith("torch_internals/")
        for line, name in _names(source.tree)
        if name not in ALLOWED.get(source.name, ())
    }
    assert found == set()


def test_every_name_that_is_looked_up_is_in_a_corner(sources):
    """Whatever `late`, `at_once` or `find` is asked for is listed, or is found by the same means as what is listed."""
    listed = {path for corner in corners.CORNERS for path in corner.privates}
    asked = {
        argument.value
        for source in sources
        if source.name.startswith("torch_internals/")
        and source.name != "torch_internals/corners.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in {"late", "at_once", "find"}
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant)
    }
    assert asked
    assert asked - listed == set()


def test_a_name_that_was_changed_is_found_by_both_of_its_names():
    """A corner lists the new and the old one, for releases that have either."""
    for path in ("math:floor or math:old_floor", "math:new_floor or math:floor"):
        assert corners.find(path) is math.floor
    assert corners.find("gone_module:floor or math:floor") is math.floor
    assert corners.find("math:new_floor or gone_module:floor") is None


def test_this_pytorch_has_every_corner():
    """No feature is lost on a PyTorch that is supported."""
    assert {corner.name: corner.missing() for corner in corners.CORNERS if corner.missing()} == {}


def test_the_version_lists_every_corner(capsys, monkeypatch):
    """``kedge --version -v`` says of each corner whether it is there, and what a missing one costs."""
    resolve = corners._resolve
    monkeypatch.setattr(
        corners, "_resolve", lambda path: None if "foreach_norm" in path else resolve(path)
    )
    assert main(["--version", "-v"]) == 0
    said = capsys.readouterr().out

    assert "dynamo: present" in said
    assert "kernels: missing (torch._foreach_norm): norms of many tensors" in said
    assert all(f"  {corner.name}: " in said for corner in corners.CORNERS)


PROGRAM = """
import sys, warnings
from kedge.torch_internals import corners
resolve, corner = corners._resolve, next(c for c in corners.CORNERS if c.name == sys.argv[1])
corners._resolve = lambda path: None if path in corner.privates else resolve(path)

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import kedge

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        return self.b(torch.relu(self.a(x))).view(-1, 64)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(64, 64), Block(), nn.Linear(64, 4)
    def forward(self, x):
        return self.last(checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=False))

def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]

torch.manual_seed(0)
model, x = Net(), torch.randn(512, 64)
plain = gradients(model, x)
warnings.simplefilter("ignore")
with kedge.session() as session:
    outs = session.hook(model, "**:out", kedge.record())
    session.hook(model, "last:out.grad, first.weight:param.grad", kedge.measure())
    session.hook(model, "block/*:out", kedge.record())
    hooked = gradients(model, x)
assert all(map(torch.equal, plain, hooked))
assert outs["first"].shape == (512, 64)
with kedge.offload(model, to=kedge.Disk(), min_bytes=1):
    assert all(map(torch.equal, plain, gradients(model, x)))
print(kedge.saved(model)(x))
with kedge.watch(sys.argv[2]):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        gradients(model, x)
        optimizer.step()
"""


@pytest.mark.parametrize("name", [corner.name for corner in corners.CORNERS])
def test_without_a_corner_everything_else_works(name, tmp_path):
    """Importing, hooking, watching and offloading go on, with the same gradients, whichever corner PyTorch lacks."""
    recording = tmp_path / "run.kedge"
    ran = forked.run([sys.executable, "-c", PROGRAM, name, str(recording)], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "failed" not in ran.stderr
    assert (recording / "manifest.json").exists()
