"""Interventions as a file: read again they change a model to the same bits, and nothing in a file is run."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor, nn

import kedge
from kedge.errors import InterventionError, NoSiteMatched, SelectorError
from kedge.recipes import Ablation, Interventions, Steering, means, resample
from kedge.testing import assert_same_bits, assert_unhooked

KEY = "kedge.interventions"


class Tokens(nn.Module):
    """Values of four tokens of width eight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Two layers."""
        return self.second(self.first(x))


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    """Three samples of four tokens."""
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def wide(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of odd numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


ACTIONS: dict[str, Callable[[], Any]] = {
    "add a number": lambda: kedge.add(0.1),
    "add a tensor": lambda: kedge.add(wide(8)),
    "add an expanded view": lambda: kedge.add(wide(1, 8).expand(4, 8)),
    "scale": lambda: kedge.scale(1 / 3),
    "scale by a tensor": lambda: kedge.scale(wide(4, 1)),
    "clamp": lambda: kedge.clamp(max=0.25),
    "clamp without end": lambda: kedge.clamp(-0.5, math.inf),
    "zero": kedge.zero,
    "replace by a number": lambda: kedge.replace(-0.0),
    "replace by NaN": lambda: kedge.replace(math.nan),
    "replace by a tensor": lambda: kedge.replace(wide(3, 4, 8)),
    "replace by another shape": lambda: kedge.replace(wide(5, 8), reshape=True),
    "skip": kedge.skip,
    "skip with a tensor": lambda: kedge.skip(wide(3, 4, 8)),
    "ablate": lambda: Ablation(0.0),
    "ablate positions": lambda: Ablation(0.5, [1, -1]),
    "ablate a slice": lambda: Ablation(wide(8), slice(1, None, 2), -1),
    "ablate by a mask": lambda: Ablation(0.0, torch.tensor([True, False, False, True])),
    "ablate by an action": lambda: Ablation(kedge.scale(0.5), positions=0),
    "ablate by means": lambda: Ablation(means(Tokens(), "first", [inputs()], over=(0, 1))),
    "means alone": lambda: means(Tokens(), "first", [inputs()]),
    "ablate by other samples": lambda: Ablation(resample(seed=3)),
    "steer": lambda: Steering(wide(8), 2.5),
    "steer with a norm": lambda: Steering(wide(8), norm=3.0, keep_norm=True, positions=[0, 2]),
}


def content(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description in a file, and its tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[KEY]), load_file(path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write a file again with a changed description."""
    about, tensors = content(path)
    about = change(about) or about
    text = about if isinstance(about, str) else json.dumps(about)
    save_file(tensors, path, metadata={KEY: text})
    return path


def written(path: Path, *actions: Any) -> Path:
    """Write actions at one site."""
    Interventions({"first": list(actions)}).save(path)
    return path


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_comes_back_with_its_bits(name: str, tmp_path: Path) -> None:
    """Output and gradients of a hooked model are the same, also after a second round."""
    model, x = Tokens(), inputs()
    path = tmp_path / "saved.interventions"
    with kedge.hook(model, "first", ACTIONS[name]()):
        plain = model(x)
        gradient = torch.autograd.grad(plain.sum(), model.second.weight)[0]
    written(path, ACTIONS[name]())

    for _ in range(2):
        loaded = Interventions.load(path)
        loaded.save(path)
        with loaded.on(model):
            output = model(x)
            again = torch.autograd.grad(output.sum(), model.second.weight)[0]
        assert_same_bits(output, plain)
        assert_same_bits(again, gradient)
    assert_unhooked(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_each_type_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of the tensors themselves, with NaN, infinities and negative zeros."""
    odd = torch.tensor([math.nan, math.inf, -0.0, 1 / 3], dtype=dtype)
    loaded = Interventions.load(written(tmp_path / "saved", kedge.add(odd), Steering(odd)))
    add, steer = loaded["first"]
    assert_same_bits(add.arguments["term"], odd)
    assert_same_bits(steer.direction, odd)


def test_several_sites_and_actions_keep_their_order(tmp_path: Path) -> None:
    """Selectors are texts, and a tensor that occurs twice is written once."""
    shared = wide(8)
    both = Interventions({
        "first": [kedge.add(shared), kedge.scale(2.0)],
        "second:out.grad": kedge.clamp(-0.1, 0.1),
        "**{Linear}:in": Ablation(shared, -1),
    })  # fmt: skip
    both.save(tmp_path / "saved")
    loaded = Interventions.load(tmp_path / "saved")

    assert list(loaded) == ["first", "second:out.grad", "**{Linear}:in"]
    assert repr(loaded) == repr(both)
    assert len(loaded) == 3
    about, tensors = content(tmp_path / "saved")
    assert len(tensors) == 1
    assert about["format"] == 1
    model, x = Tokens(), inputs()
    found = []
    for each in (both, loaded):
        with each.on(model):
            output = model(x)
            found.append((output, torch.autograd.grad(output.sum(), model.first.weight)[0]))
    assert_same_bits(found[0], found[1])


def test_all_are_attached_or_none() -> None:
    """A site that the model has not is an error."""
    model = Tokens()
    with pytest.raises(NoSiteMatched):
        Interventions({"first": kedge.zero(), "third": kedge.zero()}).on(model)
    assert_unhooked(model)


REFUSED: dict[str, Any] = {
    "a function": lambda value: value * 2,
    "torch's own": torch.zeros_like,
    "replace by a function": kedge.replace(torch.relu),
    "record": kedge.record(),
    "a hook": kedge.from_hook(lambda module, args, output: None),
    "a function inside": Ablation(lambda value: value),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_is_not_written(name: str, tmp_path: Path) -> None:
    """And the error says what is."""
    with pytest.raises(InterventionError, match=r"which holds no code; write it with the .*scale"):
        written(tmp_path / "saved", REFUSED[name])
    assert list(tmp_path.iterdir()) == []


def test_tensors_without_a_plain_form_are_not_written(tmp_path: Path) -> None:
    """Sparse and complex ones."""
    for tensor in (wide(8).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
        with pytest.raises(InterventionError, match="cannot be written"):
            written(tmp_path / "saved", kedge.add(tensor))


def _sites(about: dict[str, Any]) -> dict[str, Any]:
    return about["sites"]["first"][0]


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a later format": (lambda about: about.update(format=2), "its format is 2, written by Kedge"),
    "no format": (lambda about: about.pop("format") and None, "its format is None"),
    "no JSON": (lambda _: "{", "its description is damaged"),
    "deep JSON": (lambda _: "[" * 100_000, "its description is damaged"),
    "another value": (lambda _: "[1]", "its format is None"),
    "an unknown action": (lambda about: _sites(about).update(action="exec"), "the action 'exec', which this version"),
    "an action that is no text": (lambda about: _sites(about).update(action=["add"]), "names the action"),
    "other arguments": (lambda about: _sites(about)["arguments"].update(more=1), "action add cannot be made"),
    "a text for a number": (lambda about: _sites(about).update(arguments={"term": "x"}), "action add cannot be made"),
    "no arguments": (lambda about: _sites(about).pop("arguments") and None, "add has no arguments"),
    "another shape": (lambda about: _sites(about)["arguments"]["term"].update(shape=[2, 4]), r"float32\[8\], and float32\[2, 4\]"),
    "another type": (lambda about: _sites(about)["arguments"]["term"].update(dtype="float16"), r"and float16\[8\]"),
    "a missing tensor": (lambda about: _sites(about)["arguments"]["term"].update(tensor="7"), "its tensor 7 is missing"),
    "an odd entry": (lambda about: _sites(about)["arguments"].update(term={"import": "os"}), r"an entry of \['import'\]"),
    "no sites": (lambda about: about.pop("sites") and None, "is damaged"),
    "sites of another kind": (lambda about: about.update(sites=[1]), "is damaged"),
    "no action there": (lambda about: about["sites"].update(first=[]), "is not an action"),
    "a selector that cannot be read": (lambda about: about["sites"].update({"a[": about["sites"]["first"]}), "cannot read interventions"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    """With the file's name and what is wrong with it."""
    change, message = DAMAGED[name]
    path = rewritten(written(tmp_path / "saved", kedge.add(wide(8))), change)
    with pytest.raises(InterventionError, match=message) as told:
        Interventions.load(path)
    assert f"cannot read interventions from {path}" in str(told.value)


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A part of a file at any place, tensors alone, a pickle, a folder, and no file."""
    whole = written(tmp_path / "saved", kedge.add(wide(8))).read_bytes()
    path = tmp_path / "other"
    for end in (*range(0, len(whole) - 1, 37), len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(InterventionError, match="cannot read interventions from"):
            Interventions.load(path)
    save_file({"a": wide(2)}, path)
    with pytest.raises(InterventionError, match="a file of tensors without interventions"):
        Interventions.load(path)
    path.write_bytes(pickle.dumps({"first": 1}))
    for wrong in (path, tmp_path, tmp_path / "nothing"):
        with pytest.raises(InterventionError, match="incomplete or of another kind"):
            Interventions.load(wrong)
    with pytest.raises(InterventionError, match="cannot write .*name another place"):
        written(tmp_path / "no" / "folder", kedge.zero())


def test_what_is_no_intervention_is_refused() -> None:
    """At once, and not when it is attached."""
    for wrong in ({}, [kedge.zero()], None):
        with pytest.raises(InterventionError, match="give a dict of selectors and actions"):
            Interventions(wrong)
    for wrong in (3, [], [kedge.zero(), "zero"]):
        with pytest.raises(InterventionError, match="is not an action"):
            Interventions({"first": wrong})
    with pytest.raises(InterventionError, match="3 is not a selector"):
        Interventions({3: kedge.zero()})
    with pytest.raises(SelectorError):
        Interventions({"a[": kedge.zero()})
