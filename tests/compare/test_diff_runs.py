"""Real runs, recorded and compared: what was changed is what is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.compare.comparison import Comparison, compare
from kedge.compare.verdict import Verdict, judge
from kedge.store.recording import Recording
from tests import forked

pytestmark = pytest.mark.timing

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


class Net(nn.Module):
    """A small model."""

    def __init__(
        self, act: type[nn.Module] = nn.ReLU, name: str = "head", *, drop: bool = False
    ) -> None:
        super().__init__()
        layers = [nn.Linear(16, 16), act(), nn.Linear(16, 16), act()]
        self.body = nn.Sequential(*layers[:2], *[nn.Dropout(0.2)] * drop, *layers[2:])
        setattr(self, name, nn.Linear(16, 4))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(self.body(x))


class Trainer(nn.Module):
    """A module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def build(change: str) -> nn.Module:
    """Make the model with one thing changed."""
    changed = {"gelu": {"act": nn.GELU}, "drop": {"drop": True}, "renamed": {"name": "classifier"}}
    torch.manual_seed(0)
    model: nn.Module = Net(**changed.get(change, {}))
    if change == "wrapped":
        model = Trainer(model)
    if change == "compiled":
        model = torch.compile(model, backend="aot_eager")
    return model.bfloat16() if change == "bfloat16" else model


def train(change: str) -> None:
    """Train the model for some steps with one thing changed."""
    model = build(change)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1 if change == "smooth" else 0.0)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9 if change == "momentum" else 0.0
    )
    torch.manual_seed(1)
    images, labels = torch.randn(6, 8, 16), torch.randint(4, (6, 8))
    if change == "order":
        images, labels = images.flip(0), labels.flip(0)
    for x, y in zip(images, labels, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
            out = model(x.bfloat16() if change == "bfloat16" else x)
        optimizer.zero_grad()
        loss(out.float(), y).backward()
        if change == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


Ran = Callable[..., Recording]


def recorded(folder: Path, name: str, *words: str) -> Recording:
    """Run a program under ``kedge run`` and read what it recorded."""
    place = folder / f"{name}.kedge"
    command = [
        sys.executable,
        "-m",
        "kedge",
        "run",
        "-q",
        "--every",
        "1",
        "--budget",
        "none",
        "-o",
        str(place),
        *words,
    ]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    ahead = f"sklearn.datasets {forked.WATCH}" if str(DIGITS) in words else forked.WATCH
    forked.run(command, cwd=folder, env=environment, check=True, timeout=120, ahead=ahead)
    return Recording.open(place)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Train on digits for some steps, with other options."""
    folder = tmp_path_factory.mktemp("digits")
    return lambda name, *options: recorded(folder, name, str(DIGITS), "--steps", "12", *options)


@pytest.fixture(scope="module")
def first(digits: Ran) -> Recording:
    """The run that others are compared with."""
    return digits("first")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Train the small model with one thing changed, and record it."""
    folder = tmp_path_factory.mktemp("changed")

    def run(change: str = "") -> Recording:
        place = folder / f"{change or 'plain'}.kedge"
        with kedge.watch(place, every=1, budget=None, strict=True):
            train(change)
        torch.compiler.reset()  # fixtures of later files begin before conftest forgets compiled code
        return Recording.open(place)

    return run


@pytest.fixture(scope="module")
def plain(changed: Ran) -> Recording:
    """The small model as it is."""
    return changed()


def judged(a: Recording, b: Recording) -> tuple[Comparison, Verdict]:
    """Compare two runs and say what is found."""
    found = compare(a, b)
    return found, judge(found)


def test_the_same_run_twice_is_equal_to_the_last_bit(first: Recording, digits: Ran) -> None:
    """A program that is run again records the same bits, in every statistic of every site and step."""
    found, told = judged(first, digits("again"))

    assert (told.parted, told.cause.code) == (False, "same")
    assert len(found.steps) == 12
    assert not found.apart.any()
    assert found.alignment.only_a == found.alignment.only_b == ()


def test_another_seed_is_found(first: Recording, digits: Ran) -> None:
    """Parameters begin otherwise, with numbers of the same distribution."""
    _, told = judged(first, digits("seed", "--seed", "1"))

    assert told.cause.code == "seed"
    assert told.first is not None
    assert (told.first.step, told.first.same.text) == (0, "conv1.weight:param")


def test_another_learning_rate_is_found(first: Recording, digits: Ran) -> None:
    """Everything is equal up to the first update, which is larger by the factor."""
    found, told = judged(first, digits("rate", "--lr", "0.002"))

    assert (
        told.cause.headline
        == "another learning rate: the updates of all 11 parameters are 2 times as large in B"
    )
    assert told.first is not None
    assert (told.first.step, told.first.same.kind) == (0, "update")
    assert told.first.b / told.first.a == pytest.approx(2, rel=1e-4)
    assert found.parted[:, 1:].any()


@pytest.mark.parametrize(
    ("change", "code", "site"),
    [
        ("gelu", "layer", "body.1:out"),
        ("drop", "layer", "body.2:in = body.3:in"),
        ("bfloat16", "dtype", "body.0.weight:param"),
        ("autocast", "dtype", "body.0:out"),
        ("smooth", "loss", "CrossEntropyLoss:out"),
        ("momentum", "optimizer", "body.0.weight:update"),
        ("order", "order", ":in"),
        ("clipped", "clipping", "body.0.weight:update"),
    ],
)
def test_what_was_changed_is_found(
    plain: Recording, changed: Ran, change: str, code: str, site: str
) -> None:
    """One thing is changed in a program, and it is what the headline says, at the site where it begins."""
    _, told = judged(plain, changed(change))

    assert told.cause.code == code
    assert told.first is not None
    assert told.first.same.text == site


@pytest.mark.parametrize(
    ("change", "how", "only"),
    [("renamed", "structure", []), ("wrapped", "prefix", ["Trainer"]), ("compiled", "name", [])],
)
def test_other_names_hide_no_equality(
    plain: Recording, changed: Ran, change: str, how: str, only: list[str]
) -> None:
    """A renamed layer, a model in another module and a compiled one are found again and equal to the last bit."""
    found, told = judged(plain, changed(change))

    assert told.cause.code == "same"
    assert how in {same.how for same in found.alignment.modules}
    assert found.alignment.only_a == ()
    assert [module.type for module in found.alignment.only_b] == only
    missing = {site.site for site in plain.sites} - {same.a.site for same in found.alignment.sites}
    assert missing == set()
