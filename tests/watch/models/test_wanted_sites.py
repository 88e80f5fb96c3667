"""The selector of a watch: a word stands for the names that begin with it, and a wrong one is reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import NoSuchKind
from kedge.store.recording import Recording


def train(steps: int = 2) -> None:
    """Train a small network of named layers, with a module for its loss."""
    model = nn.Sequential()
    for name in ("attn", "attn_out", "mlp"):
        model.add_module(name, nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.MSELoss()(model(torch.randn(2, 4)), torch.zeros(2, 4)).backward()
        optimizer.step()


def recorded(sites: str, place: Path) -> set[str]:
    """Return the modules whose outputs are recorded with this selector."""
    with kedge.watch(str(place), sites=sites, budget=None):
        train()
    return {site.path for site in Recording.open(place).of_kind("out")} if place.exists() else set()


@pytest.mark.parametrize(
    ("sites", "paths"),
    [
        ("attn", {"attn"}),
        ("att", {"attn", "attn_out"}),
        ("**, !attn_, !MSE", {"", "attn", "mlp"}),
        ("ml, attn_o", {"mlp", "attn_out"}),
    ],
)
def test_a_word_stands_for_names_that_begin_with_it(
    sites: str, paths: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that there is stays itself; nothing is complained of."""
    assert recorded(sites, tmp_path / "x.kedge") == paths
    assert "selects nothing" not in capsys.readouterr().err


def test_what_selects_nothing_is_reported_after_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with the names that are near; the run goes on, and the rest is recorded."""
    said = []
    with kedge.watch(str(tmp_path / "x.kedge"), sites="mlp, atn_out, **{Linera}", budget=None):
        for _ in range(2):
            train(1)
            said.append(capsys.readouterr().err.splitlines())

    assert said[0] == [
        '[kedge] "**{Linera}" selects nothing in the models of this program; the nearest are "**{Linear}"',
        '[kedge] "atn_out" selects nothing in the models of this program; the nearest are "attn_out", "attn"',
    ]
    assert said[1] == []
    assert {site.path for site in Recording.open(tmp_path / "x.kedge").of_kind("out")} >= {"mlp"}


@pytest.mark.parametrize(
    ("sites", "kinds"),
    [
        ("mlp:out", {"out"}),
        ("mlp:in, mlp:out.grad", {"in", "out.grad"}),
        ("mlp.weight:param.grad", {"param", "param.grad"}),
    ],
)
def test_a_kind_that_is_named_is_recorded_alone(
    sites: str, kinds: set[str], tmp_path: Path
) -> None:
    """Without one, all kinds of a module are recorded."""
    with kedge.watch(str(tmp_path / "x.kedge"), sites=sites, budget=None):
        train()
    found = Recording.open(tmp_path / "x.kedge").sites
    assert {site.kind for site in found if site.owner == "mlp"} - {"update"} == kinds


@pytest.mark.parametrize(
    "sites",
    ["/gelu:out[0]", "/y=", "mlp/linear#0:out", "**/*:out", "mlp:saved", "mlp:in.grad", "mlp:in.share", "mlp.weight:param.acc", "mlp:pre",
     "mlp:out[0]", "mlp#1", "attn, mlp:saved"],
)  # fmt: skip
def test_what_a_watch_cannot_record_is_refused_at_once(sites: str, tmp_path: Path) -> None:
    """Nothing of a selector is dropped without a word; the message says what takes its place."""
    with pytest.raises(
        NoSuchKind, match=r"a watch of a whole run does not record .*kedge\.hook\(model"
    ):
        kedge.watch(str(tmp_path / "x.kedge"), sites=sites)
    assert not list(tmp_path.iterdir())
