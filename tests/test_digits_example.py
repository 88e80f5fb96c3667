"""The demonstration: the healthy training is healthy, and each mistake really happens in training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import forked

SCRIPT = Path(__file__).parents[1] / "examples" / "digits.py"
ENOUGH = 200


@pytest.fixture(scope="module")
def example():
    """The script, imported."""
    spec = importlib.util.spec_from_file_location("digits_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_example"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["digits_example"]


@pytest.fixture
def train(example):
    """Train a model as the script does, but with hooks on it and for as many steps as needed."""

    def run(name, watch, steps=ENOUGH):
        torch.manual_seed(0)
        recipe = example.RECIPES[name]
        images, labels = example.digits(0)
        model = recipe.build()
        watch(model)
        some = slice(example.TEST_IMAGES, None)
        example.train(model, recipe, images[some], labels[some], steps=steps, lr=recipe.lr)
        return model

    return run


def _losses(printed):
    return [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step")]


def test_the_healthy_network_learns():
    """The script as a newcomer runs it gets over 95 % of unseen images right, and says nothing besides."""
    ended = forked.run([sys.executable, str(SCRIPT)], check=True, ahead="sklearn.datasets")

    assert float(ended.stdout.split()[-1].rstrip("%")) > 95
    assert ended.stderr == ""


def test_the_script_knows_nothing_of_kedge():
    """What is watched is a program like any other."""
    assert "kedge" not in SCRIPT.read_text(encoding="utf-8").lower()


def test_hardly_any_gradient_reaches_the_first_sigmoid_layers(train):
    """From the last layer to the first the gradient shrinks by more than a million, at every step."""
    norms = {"hidden.0": [], "output": []}

    def watch(model):
        for path, kept in norms.items():
            model.get_submodule(path).weight.register_hook(
                lambda grad, kept=kept: kept.append(grad.norm())
            )

    train("deep-sigmoid", watch)
    first, last = torch.stack(norms["hidden.0"]), torch.stack(norms["output"])

    assert len(first) == ENOUGH
    assert (first > 0).all()
    assert (last / first > 1e6).all()


def test_relus_fall_silent_and_the_loss_stays_finite(train, capsys):
    """They answer at first; in the last hundred steps most units of some layer never do."""
    active = {}

    def watch(model):
        for path, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                kept = active.setdefault(path, [])
                module.register_forward_hook(
                    lambda _module, _args, out, kept=kept: kept.append(
                        (out > 0).transpose(0, 1).flatten(1).any(1)
                    )
                )

    train("dying-relu", watch)
    alive_at_first = {path: kept[0].float().mean().item() for path, kept in active.items()}
    alive_at_last = {
        path: torch.stack(kept[-100:]).any(0).float().mean().item() for path, kept in active.items()
    }

    assert len(active) == 3
    assert min(alive_at_first.values()) > 0.5
    assert min(alive_at_last.values()) < 0.2
    assert all(loss < float("inf") for loss in _losses(capsys.readouterr().out))


def test_the_log_of_zero_is_met_in_the_midst_of_training(train, capsys):
    """Training goes well until a probability is exactly zero; its log is the first value that is not finite."""
    firsts = {}
    steps = {}

    def watch(model):
        def count(path):
            def hook(_module, _args, out):
                steps[path] = steps.get(path, -1) + 1
                if not out.isfinite().all():
                    firsts.setdefault(path, steps[path])

            return hook

        for path, module in model.named_modules():
            if not any(module.children()):
                module.register_forward_hook(count(path))

    train("log-of-zero", watch)
    first = firsts.pop("log")

    assert 50 < first < ENOUGH - 10
    assert first % 10
    assert set(firsts.values()) == {first + 1}
    assert _losses(capsys.readouterr().out)[first // 50] < 0.5


def test_the_seed_decides_the_run(example, capsys):
    """Two runs with one seed print the same, and another seed prints something else."""
    printed = []
    for seed in ("0", "0", "1"):
        example.main(["--steps", "20", "--seed", seed])
        printed.append(capsys.readouterr().out)

    assert printed[0] == printed[1] != printed[2]
