"""The tables of docs/how-to/features.md for those who come from torchvision and timm; where neither is installed, nothing is run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision", reason="compares with torchvision")
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import kedge
from kedge.testing import assert_same_bits

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> torch.nn.Module:
    """A ResNet-18 of torchvision's with weights drawn at random."""
    torch.manual_seed(0)
    return resnet18(weights=None).eval()


@pytest.mark.parametrize("nodes", [["layer4"], {"layer4": "x"}], ids=["list", "dict"])
def test_a_layer_as_torchvision_names_it(net: torch.nn.Module, nodes: Any) -> None:
    """A list of names, or new names, give the same dict, with the same bits and a graph."""
    rename = nodes if isinstance(nodes, dict) else None
    theirs = create_feature_extractor(net, nodes)(X)
    ours = kedge.extract(net, list(nodes), rename=rename, no_grad=False)(X)
    assert list(ours) == list(theirs)
    assert_same_bits(ours, theirs)
    assert all(value.requires_grad for value in ours.values())


def test_nodes_of_the_graph_have_sites(net: torch.nn.Module) -> None:
    """A second call and an operation have names of their own; what a ReLU in place overwrites there is not overwritten here."""
    named = {
        "layer1.0.relu_1": "layer1.0.relu#1",
        "flatten": "/flatten",
        "layer1.0.add": "layer1.0/add_",
    }
    assert named.keys() <= set(get_graph_node_names(net)[1])
    theirs = create_feature_extractor(net, list(named))(X)
    ours = kedge.extract(net, list(named.values()))(X)
    for node in ("layer1.0.relu_1", "flatten"):
        assert torch.equal(ours[named[node]], theirs[node])
    assert torch.equal(theirs["layer1.0.add"], theirs["layer1.0.relu_1"])
    assert torch.equal(ours["layer1.0/add_"].relu(), theirs["layer1.0.relu_1"])
    assert ours["layer1.0/add_"].min() < 0


def test_the_tail_stays_a_part_of_the_model(net: torch.nn.Module) -> None:
    """There the new graph has no parameters behind the last node; here they are all there, under `model.`."""
    theirs, ours = create_feature_extractor(net, ["layer4"]), kedge.extract(net, "layer4")
    assert not any(name.startswith("fc") for name in theirs.state_dict())
    assert {f"model.{name}" for name in net.state_dict()} == set(ours.state_dict())


def test_stages_as_timm_counts_them() -> None:
    """The list of `features_only`, and what its three other extractors give, are the values of the layers by name."""
    timm = pytest.importorskip("timm", reason="compares with timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet18").eval()
    stages = timm.create_model("resnet18", features_only=True, out_indices=(2, 3)).eval()
    stages.load_state_dict(
        {name: value for name, value in model.state_dict().items() if name in stages.state_dict()}
    )
    ours = list(kedge.extract(model, ["layer2", "layer3"], no_grad=False)(X).values())
    others = [cls(copy.deepcopy(model), out_indices=(2, 3)).eval() for cls in hook_and_graph()]
    for theirs in (stages, *others):
        assert_same_bits(ours, list(theirs(X)))
    early = copy.deepcopy(model)
    early.feature_info = [
        {"num_chs": 64, "reduction": 4, "module": "layer2", "hook_type": "forward_pre"}
    ]
    inputs: list[Tensor] = hook_and_graph()[0](early, out_indices=(0,)).eval()(X)
    assert torch.equal(inputs[0], kedge.extract(model, "layer2:in")(X)["layer2:in"])


def hook_and_graph() -> list[Any]:
    """Return the extractors of timm that hook and that trace."""
    models = pytest.importorskip("timm.models")
    return [models.FeatureHookNet, models.FeatureGraphNet]


def test_attention_as_timm_extracts_it() -> None:
    """Its graph's nodes of softmax are the operations of that name."""
    layers, utils = (
        pytest.importorskip(f"timm.{name}", reason="compares with timm")
        for name in ("layers", "utils")
    )
    fused = layers.use_fused_attn()
    layers.set_fused_attn(False)
    try:
        model = (
            pytest.importorskip("timm")
            .create_model("vit_tiny_patch16_224", depth=2, img_size=32)
            .eval()
        )
        x = X[:, :, :32, :32]
        theirs = utils.AttentionExtract(model, names=["*attn.softmax"])(x)
        ours = kedge.extract(model, "**.attn/softmax")(x)
    finally:
        layers.set_fused_attn(bool(fused))
    assert len(ours) == len(theirs) == 2
    assert_same_bits(list(ours.values()), [value.detach() for value in theirs.values()])
