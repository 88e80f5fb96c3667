"""Features of real architectures, and against what others do on the models that they can follow."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

pytest.importorskip("transformers")
import kedge
from kedge.testing import assert_same_bits, assert_unhooked, hook_tables
from tests.architectures.training import seed
from tests.architectures.zoo import BY_NAME, Architecture, architectures
from tests.gallery.models import VGG16, Functional, resnet18, resnet50


def calls_of(model: nn.Module, batch: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Run a model with PyTorch's hooks on every module; return each tensor that one returned, copied, in order."""
    seen: list[tuple[str, Tensor]] = []

    def keep(path: str) -> Any:
        return lambda m, i, o: (
            seen.append((path, o.detach().clone())) if isinstance(o, Tensor) else None
        )

    handles = [m.register_forward_hook(keep(path)) for path, m in model.named_modules()]
    seed(2)
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def three(seen: list[tuple[str, Tensor]]) -> list[str]:
    """Choose an early, a middle and a late module among those that ran once."""
    paths = [path for path, _ in seen]
    once = [path for path in paths if path and paths.count(path) == 1]
    return [once[len(once) // 8], once[len(once) // 2], once[-2]]


@pytest.mark.parametrize("early_stop", [True, False])
@architectures
def test_three_sites_of_an_architecture_are_those_of_hand_written_hooks(
    architecture: Architecture, early_stop: bool
) -> None:
    """Early, middle and late values are equal to the last bit, asked for in the wrong order, in the first and later forwards."""
    model = architecture.build().eval()
    batch = architecture.inputs()
    seen = calls_of(model, batch)
    expected = {path: dict(seen)[path] for path in reversed(three(seen))}
    tables = hook_tables(model)
    features = kedge.extract(model, list(expected), early_stop=early_stop)
    for _ in range(3):
        seed(2)
        assert_same_bits(features(**batch), expected)
        assert hook_tables(model) == tables


def edited_by_hand(model: nn.Module, paths: list[str]) -> dict[str, Tensor]:
    """Make submodules store a copy of what their forward returns; returns where.

    No hook has a part in it.
    """
    stored: dict[str, Tensor] = {}

    def replace(path: str, module: nn.Module) -> None:
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            assert path not in stored
            stored[path] = output.detach().clone()
            return output

        module.forward = forward

    for path in paths:
        replace(path, model.get_submodule(path))
    return stored


@architectures
def test_three_sites_of_an_architecture_are_those_of_a_forward_edited_by_hand(
    architecture: Architecture,
) -> None:
    """With the submodules' own forwards rewritten to keep what they return, on a model that nobody hooks, every bit is the same."""
    batch = architecture.inputs()
    paths = three(calls_of(architecture.build().eval(), batch))
    edited = architecture.build().eval()
    stored = edited_by_hand(edited, paths)
    seed(2)
    with torch.no_grad():
        edited(**batch)
    features = kedge.extract(architecture.build().eval(), paths)
    for _ in range(2):
        seed(2)
        out = features(**batch)
        assert list(out) == paths
        assert all(torch.equal(out[path], stored[path]) for path in paths)


@architectures
def test_an_early_stop_changes_nothing_of_what_comes_before_it(architecture: Architecture) -> None:
    """In training mode, with dropout and layer drop drawn, gradients of the middle value are those of a whole forward."""
    model = architecture.build()
    twin = copy.deepcopy(model)
    batch = architecture.inputs()
    middle = three(calls_of(architecture.build(), batch))[1]
    gradients = []
    for one, stops in ((model, True), (twin, False)):
        features = kedge.extract(one, middle, no_grad=False, early_stop=stops)
        for _ in range(2):
            seed(2)
            one.zero_grad()
            values = features(**batch)
        sum(value.square().sum() for value in values.values()).backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    assert_same_bits(gradients[0], gradients[1])
    assert gradients[0]


def test_shapes_of_the_children_of_a_resnet() -> None:
    """M8: each child's output goes by its own name, in the order of execution."""
    shapes = {
        "conv1": [64, 112, 112],
        "layer1": [256, 56, 56],
        "layer2": [512, 28, 28],
        "layer3": [1024, 14, 14],
        "layer4": [2048, 7, 7],
        "avgpool": [2048, 1, 1],
        "fc": [1000],
    }
    with torch.device("meta"):
        features = kedge.extract(resnet50().eval(), list(shapes))
        out = features(torch.ones(10, 3, 224, 224))
    assert {name: list(value.shape) for name, value in out.items()} == {
        name: [10, *s] for name, s in shapes.items()
    }
    assert list(kedge.extract(resnet18().eval(), "*")(torch.ones(1, 3, 32, 32)))[:4] == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
    ]


def test_means_of_outputs_come_in_the_order_of_execution() -> None:
    """M9: with a mean as the transform, what is kept is one number a child."""
    model = resnet18().eval()
    names = [name for name, _ in model.named_children()]
    out = kedge.extract(model, {"*": Tensor.mean})(torch.ones(2, 3, 32, 32))
    assert list(out) == names
    assert [value.shape for value in out.values()] == [()] * len(names)
    seen = calls_of(model, {"x": torch.ones(2, 3, 32, 32)})
    assert_same_bits(list(out.values()), [dict(seen)[name].mean() for name in names])


def test_features_of_two_layers_leave_the_model_unchanged() -> None:
    """M10: layer4 and avgpool on images of 28 by 28, and every table and attribute of the model is as before."""
    model = resnet18().eval()
    tables, state = hook_tables(model), copy.deepcopy(model.state_dict())
    features = kedge.extract(model, ["layer4", "avgpool"])
    for _ in range(2):
        out = features(torch.randn(10, 3, 28, 28))
        assert list(out) == ["layer4", "avgpool"]
        assert [value.shape for value in out.values()] == [(10, 512, 1, 1)] * 2
    assert hook_tables(model) == tables
    assert_same_bits(model.state_dict(), state)


def test_a_layer_may_go_by_a_name_of_ones_own() -> None:
    """M14: VGG-16's first convolution under a name of the user's choice; no hook is left."""
    with torch.device("meta"):
        model = VGG16().eval()
        features = kedge.extract(model, "features.0", rename={"features.0": "edges"})
        for _ in range(2):
            assert features(torch.ones(2, 3, 224, 224))["edges"].shape == (2, 64, 224, 224)
    assert_unhooked(model)


class Graph(nn.Module):
    """An extractor in the manner of torchvision's: the model's graph with other outputs, and nothing behind them."""

    def __init__(self, model: nn.Module, nodes: dict[str, str]) -> None:
        super().__init__()
        traced = fx.Tracer()
        graph = traced.trace(model)
        named = {self._name(node): node for node in graph.nodes if node.op == "call_module"}
        for node in list(graph.nodes):
            if node.op == "output":
                graph.erase_node(node)
        graph.output({new: named[old] for old, new in nodes.items()})
        self.inner = fx.GraphModule(model, graph)
        self.inner.graph.eliminate_dead_code()
        self.inner.recompile()

    @staticmethod
    def _name(node: fx.Node) -> str:
        return str(node.target)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.inner(x)


class Followed(nn.Module):
    """A model whose graph can be followed: branches that do not depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.left(x)) + self.right(x).sigmoid()
        return self.fc(self.pool(x).flatten(1))


class Unfollowed(Followed):
    """The same with a branch on a value, which a graph cannot have."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = (
            self.left(x)
            if operator.gt(float(x.mean()), 1e9)
            else F.relu(self.left(x)) + self.right(x).sigmoid()
        )
        return self.fc(self.pool(x).flatten(1))


@pytest.mark.parametrize("training", [True, False])
def test_features_are_those_of_an_extractor_made_from_the_graph(training: bool) -> None:
    """Drop-in: one dict for the other, values, gradients and running statistics equal to the last bit."""
    torch.manual_seed(0)
    nodes = {"left": "one", "pool": "two"}
    model = Followed().train(training)
    twin = copy.deepcopy(model)
    graph, features = (
        Graph(twin, nodes).train(training),
        kedge.extract(model, list(nodes), rename=nodes, no_grad=False),
    )
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8)
        for extractor in (graph, features):
            out = extractor(x)
            assert list(out) == ["one", "two"]
            (out["one"].square().mean() + out["two"].sum()).backward()
        assert_same_bits(graph(x), features(x))
        for name in ("stem.0.weight", "left.weight", "right.bias"):
            assert_same_bits(
                model.get_parameter(name).grad, graph.inner.get_parameter(name).grad, name
            )
        assert_same_bits(model.stem.state_dict(), graph.inner.stem.state_dict())


def test_features_come_of_models_whose_graph_cannot_be_followed() -> None:
    """A branch on a value stops a tracer, and not hooks."""
    model, x = Unfollowed().eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises((fx.proxy.TraceError, TypeError)):
        Graph(copy.deepcopy(model), {"left": "left"})
    features = kedge.extract(model, ["left", "pool"])
    for _ in range(2):
        assert_same_bits(
            features(x), {name: dict(calls_of(model, {"x": x}))[name] for name in ("left", "pool")}
        )


def test_features_of_a_net_with_functions_between_its_modules() -> None:
    """Hand-edited: the middle of the gallery's functional net, with and without its end."""

    class Edited(Functional):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            middle = self.conv(x)
            return middle, self.pool(F.relu(middle))

    torch.manual_seed(0)
    model = Functional().eval()
    edited = Edited().eval()
    edited.load_state_dict(model.state_dict())
    features = kedge.extract(model, ["pool", "conv"])
    for _ in range(2):
        x = torch.randn(1, 3, 8, 8)
        middle, pooled = edited(x)
        assert_same_bits(features(x), {"pool": pooled.detach(), "conv": middle.detach()})


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_generation_is_collected_pass_by_pass(name: str) -> None:
    """There is one value a token under each name, each the one that hand-written hooks see."""
    model = BY_NAME[name].build().eval()
    paths = {
        "gpt2": ["transformer.h.1", "lm_head"],
        "llama": ["model.layers.1.mlp", "lm_head"],
        "t5": ["encoder", "lm_head"],
    }
    first, head = paths[name]
    ids = torch.tensor([[1, 8, 9, 10], [1, 11, 12, 13]])
    options = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    seen: dict[str, list[Tensor]] = {first: [], head: []}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[path].append(
                (output if isinstance(output, Tensor) else output[0]).detach().clone()
            )

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in seen]
    plain = model.generate(ids, **options)
    for handle in handles:
        handle.remove()
    features = kedge.extract(model, [first, head], rename={head: "scores"})
    with features.collect() as taken:
        collected = model.generate(ids, **options)
    assert torch.equal(plain, collected)
    assert_same_bits(taken["scores"], seen[head])
    assert_same_bits(
        next(values for name, values in taken.items() if name != "scores"), seen[first]
    )
    assert_unhooked(model)


def test_features_of_one_pass_of_a_language_model() -> None:
    """Keyword arguments and model outputs: hidden states by layer are those that the model gives itself."""
    architecture = BY_NAME["gpt2"]
    model, batch = architecture.build().eval(), architecture.inputs()
    features = kedge.extract(
        model, [f"transformer.h.{i}:in[hidden_states]" for i in range(2)] + ["transformer.ln_f"]
    )
    expected = model(**batch, output_hidden_states=True).hidden_states
    for _ in range(2):
        assert_same_bits(list(features(**batch).values()), [state.detach() for state in expected])
