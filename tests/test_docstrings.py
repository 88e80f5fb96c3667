"""The examples in the docstrings of the public names, which are the reference of the API, run as they stand."""

from __future__ import annotations

import doctest
from collections import OrderedDict

import pytest
import torch
from torch import nn

import kedge
from kedge import figures, recipes

NAMES = sorted({*kedge.__all__} | {*recipes.__all__} | {*figures.__all__})


def meant(name):
    """Return the object of a public name; of `offload` and `sites`, which are packages as well, the function."""
    found = next(getattr(home, name) for home in (kedge, recipes, figures) if name in home.__all__)
    if name == "offload":
        from kedge.offload.offload import offload as found
    elif name == "sites":
        from kedge.examination.model_sites import sites as found
    return found


def surroundings():
    """Return the names that the examples use: an image classifier with layers that have names, images and labels."""
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "relu": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(4 * 6 * 6, 3),
    }
    return {
        "kedge": kedge,
        "recipes": recipes,
        "figures": figures,
        "torch": torch,
        "model": nn.Sequential(OrderedDict(layers)).eval(),
        "images": torch.rand(8, 1, 8, 8),
        "labels": torch.arange(8) % 3,
    }


def examples(name):
    """Return the examples in a name's docstring."""
    return doctest.DocTestParser().get_doctest(
        meant(name).__doc__ or "", surroundings(), name, None, 0
    )


@pytest.mark.parametrize("name", [name for name in NAMES if ">>>" in (meant(name).__doc__ or "")])
def test_the_examples_in_a_docstring_run(name):
    """Whoever copies them gets what stands there."""
    said = []
    doctest.DocTestRunner().run(examples(name), out=said.append)

    assert "".join(said) == ""


WITHOUT = """
    Cpu Finding Recording Session session watch Quantiles Reducer frechet_distance stored_table contrast offload
    Ablation Attribution FeatureTable Features Graph Means Patching Steering Tokens
    Blocks Route
"""  # what needs a file, a device or another package, or is part of another name's example


def test_all_other_names_have_an_example():
    """A new public name is shown in use."""
    bare = {name for name in NAMES if ">>>" not in (meant(name).__doc__ or "")}

    assert bare <= {*WITHOUT.split(), "everywhere"}
