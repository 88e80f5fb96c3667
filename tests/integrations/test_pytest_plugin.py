"""The mark and the fixture, in pytest runs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

TESTS = """
import pytest
import torch
from torch import nn


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()


def net(*last):
    return nn.Sequential(nn.Linear(4, 4), *last)


@pytest.mark.finite
def test_forward():
    net(Log())(torch.randn(8, 4))


@pytest.mark.finite
def test_backward():
    net(Root(), nn.Linear(4, 1))(torch.ones(8, 4)).sum().backward()


@pytest.mark.finite
@pytest.mark.parametrize("steps", [1, 3])
def test_training(steps):
    model = net(nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.finite
class TestMethods:
    def test_one(self):
        net()(torch.randn(8, 4))


@pytest.mark.finite
def test_nothing():
    assert True


@pytest.fixture
def spoiled():
    return net(Log())(torch.randn(8, 4))


def test_unmarked():
    net(Log())(torch.randn(8, 4))


@pytest.mark.finite
def test_given(spoiled):
    assert spoiled.isnan().any()


@pytest.mark.finite
@pytest.mark.parametrize("scale", [1.0, pytest.param(-1.0, marks=pytest.mark.xfail(strict=True)), -2.0])
def test_scales(scale):
    Log()(torch.full((4,), scale))


@pytest.mark.finite
@pytest.mark.xfail(strict=True)
def test_finite_after_all():
    Log()(torch.ones(4))


@pytest.mark.finite
def test_fails_by_itself():
    assert net(Log())(torch.randn(8, 4)).shape == (3, 3)


@pytest.mark.finite
def test_skips():
    net(Log())(torch.randn(8, 4))
    pytest.skip("not here")


def test_block(kedge_watch, tmp_path):
    with kedge_watch() as run:
        net(Log())(torch.randn(8, 4))
    assert run.recording == tmp_path / "run.kedge"
    assert [finding.code for finding in run.findings()] == ["NAN-BORN"]


def test_healthy_block(kedge_watch):
    with kedge_watch("other.kedge", sites="0", every=2) as run:
        net()(torch.randn(8, 4))
    assert run.findings() == ()
    assert run.recording.name == "other.kedge"
"""

LIGHT = """
import sys


def test_light():
    assert "kedge.integrations.pytest_plugin" in sys.modules
    assert not {"torch", "numpy"} & set(sys.modules)
"""


def start(folder, *words):
    """Run pytest in a process of its own, where warnings are errors."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "--strict-markers",
        *words,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the tests above once; give for each how it ended and what was shown."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "test_nets.py").write_text(TESTS)
    done = start(folder, "--junit-xml=report.xml", "-o", "junit_logging=all", "test_nets.py")
    assert done.returncode == 1, done.stdout + done.stderr
    cases = ET.parse(folder / "report.xml").iter("testcase")
    return {case.get("name"): _ending(case) for case in cases} | {"shown": ("", done.stdout)}


def _ending(case):
    for outcome in ("failure", "error", "skipped"):
        found = case.find(outcome)
        if found is not None:
            return found.get("type") or outcome, f"{found.get('message')}\n{found.text}"
    return "passed", ""


def test_a_marked_test_fails_where_an_output_is_not_finite(ran):
    """The message is the verdict: which module made the NaN, and what to do."""
    outcome, text = ran["test_forward"]

    assert outcome == "failure"
    assert text.startswith("Failed: NAN-BORN: 1:out was the first to contain NaN")
    assert "clamp the input" in text
    assert "Traceback" not in text


def test_a_marked_test_fails_where_a_gradient_is_not_finite(ran):
    """A finite forward with an infinite gradient is found too, and it is said that it is a gradient."""
    outcome, text = ran["test_backward"]

    assert outcome == "failure"
    assert "NAN-BORN" in text
    assert "grad" in text


@pytest.mark.parametrize(
    "name", ["test_training[1]", "test_training[3]", "test_one", "test_nothing"]
)
def test_a_healthy_marked_test_passes(ran, name):
    """Training, parametrized tests, methods and tests without a model pass with the mark as without it."""
    assert ran[name][0] == "passed"


@pytest.mark.parametrize("name", ["test_unmarked", "test_given"])
def test_only_marked_tests_are_watched(ran, name):
    """A NaN in a test without the mark is that test's own business, and so is one made in a fixture."""
    assert ran[name][0] == "passed"


def test_parameters_and_expected_failures_go_with_the_mark(ran):
    """One set of parameters fails alone; a failure that is expected is one, and where none comes that is a failure."""
    assert [ran[f"test_scales[{scale}]"][0] for scale in ("1.0", "-1.0", "-2.0")] == [
        "passed",
        "pytest.xfail",
        "failure",
    ]
    assert ran["test_finite_after_all"][0] == "failure"
    assert "XPASS(strict)" in ran["test_finite_after_all"][1]


def test_a_test_that_ends_by_itself_keeps_its_own_ending(ran):
    """The assertion is what is shown, and the verdict stands beside it; a skipped test stays one."""
    outcome, text = ran["test_fails_by_itself"]
    _, shown = ran["shown"]

    assert outcome == "failure"
    assert text.startswith("assert torch.Size([8, 4]) == (3, 3)")
    assert "- Captured kedge call -" in shown
    assert shown.count("NAN-BORN: 1:out was the first") >= 2
    assert ran["test_skips"][0] == "pytest.skip"


@pytest.mark.parametrize("name", ["test_block", "test_healthy_block"])
def test_the_fixture_watches_a_block(ran, name):
    """What it gives has the recording in the test's folder, the findings, and every step."""
    assert ran[name][0] == "passed"


def test_a_run_without_the_mark_imports_neither_torch_nor_numpy(tmp_path):
    """Who has Kedge installed and tests something else does not wait for it."""
    (tmp_path / "test_light.py").write_text(LIGHT)
    done = start(tmp_path, "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:zarr")

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_mark_and_the_fixture_are_explained_when_pytest_is_asked(tmp_path):
    """``pytest --markers`` and ``pytest --fixtures`` say what they are for."""
    said = start(tmp_path, "--markers").stdout + start(tmp_path, "--fixtures").stdout

    assert (
        "@pytest.mark.finite: fail if an output or a gradient of a module holds a NaN or an infinity"
        in said
    )
    assert "kedge_watch" in said
