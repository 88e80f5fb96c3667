"""Paths that a user gives: a home folder can be named as in a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import OffloadError
from kedge.features.dataset import open_features
from kedge.files.given_path import given_path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the home folder of this test; the current one is another."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.mark.parametrize("given", ["~/a", Path("~/a")], ids=["text", "Path"])
def test_the_home_folder_is_expanded(given: Any, home: Path) -> None:
    """At the beginning alone; the home of a user who does not exist is a name like any other."""
    assert given_path(given) == home / "a"
    assert given_path("a/~") == Path("a/~")
    assert given_path("~nobody-has-this-name/a") == Path("~nobody-has-this-name/a")


def test_every_public_path_may_begin_with_the_home_folder(home: Path) -> None:
    """Recordings, features, pictures and the files of saved tensors: nothing is made in a folder named ``~``."""
    (home / "saved").mkdir()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with (
        kedge.watch("~/run.kedge") as watched,
        kedge.offload(model, to=kedge.Disk("~/saved"), min_bytes=0) as account,
    ):
        watched.tell = None
        model(x).sum().backward()
    assert str(home / "saved") in str(account)
    assert kedge.Recording.open("~/run.kedge").path == home / "run.kedge"
    kedge.extract(model, "0").dataset([x], "~/features")
    assert list(open_features("~/features")) == ["0"]
    kedge.saved(model)(x).flame().save("~/memory.html")
    assert sorted(p.name for p in home.iterdir()) == [
        "features",
        "memory.html",
        "run.kedge",
        "saved",
    ]
    assert list(Path().iterdir()) == []


def test_a_folder_that_is_missing_is_named_as_it_was_understood(home: Path) -> None:
    """One given without a home folder is named once."""
    with pytest.raises(
        OffloadError, match=f"Disk\\('~/none'\\), which is {home / 'none'}: there is no such folder"
    ):
        kedge.Disk("~/none")
    with pytest.raises(OffloadError, match=r"Disk\('\./none/'\): there is no such folder"):
        kedge.Disk("./none/")
