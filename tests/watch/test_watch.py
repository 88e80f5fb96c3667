"""Watching a program: its sites and their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kedge.store.exponents import spacing
from tests.watch.watched import Conv, images, norm, norms, train, watch


def test_sites_are_numbered_as_they_fire_and_know_where_their_inputs_come_from() -> None:
    """Ids are data-flow order within a kind; an input names the output it was, or None where none was."""
    log = watch(lambda: train(Conv(), 2), every=1)
    ids = {e["site"]: e["id"] for e in log.entries}
    assert list(ids.values()) == list(range(len(ids)))
    assert log.texts("out") == ["conv:out", "act:out", "fc:out", ":out"]
    assert log.texts("in") == [":in", "conv:in", "act:in", "fc:in"]
    assert log.texts("out.grad")[-2:] == ["act:out.grad", "conv:out.grad"]
    sources = {e["site"]: e["from"] for e in log.entries if e["kind"] == "in"}
    assert sources == {
        ":in": [None],
        "conv:in": [None],
        "act:in": [ids["conv:out"]],
        "fc:in": [None],
    }
    params = ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]
    assert {k: set(log.texts(k)) for k in ("param", "param.grad", "update")} == {
        k: {f"{p}:{k}" for p in params} for k in ("param", "param.grad", "update")
    }


def test_every_site_is_described() -> None:
    """Shape, dtype, owner, type, channels and autograd node are what a reader needs to name a place."""
    log = watch(lambda: train(Conv(), 1))
    sites = {e["site"]: e for e in log.entries}
    conv, act, weight = sites["conv:out"], sites["act:out"], sites["conv.weight:param"]
    assert conv == {
        "id": 2, "site": "conv:out", "path": "conv", "kind": "out", "type": "Conv2d", "root": 0, "shape": [5, 4, 4, 4],
        "dtype": "float32", "node": "ConvolutionBackward0",
        "source": {
            "file": conv["source"]["file"], "line": Conv.forward.__code__.co_firstlineno + 1, "function": "Conv.forward",
            "text": "return self.fc(self.act(self.conv(x)).flatten(1))",
        },
    }  # fmt: skip
    assert conv["source"]["file"].endswith("watched.py")
    assert (act["channels"], act["type"], act["node"]) == (4, "ReLU", "ReluBackward0")
    assert (weight["owner"], weight["type"], weight["shape"]) == ("conv", "Conv2d", [4, 1, 3, 3])
    (root,) = log.roots
    assert (root["name"], root["prefix"], root["parameters"]) == (
        "Conv",
        "",
        4 * 9 + 4 + 64 * 3 + 3,
    )
    assert [(m["path"], m["type"], m["parameters"]) for m in root["modules"]] == [
        ("", "Conv", 0), ("conv", "Conv2d", 40), ("act", "ReLU", 0), ("fc", "Linear", 195),
    ]  # fmt: skip


def test_what_is_saved_for_backward_is_reported_once() -> None:
    """The first step's account is the bytes that autograd keeps, by the module that saved them."""
    log = watch(lambda: train(Conv(), 3))
    (account,) = [e for e in log.events if e["kind"] == "saved"]
    kept = {m["path"]: m["bytes"] for m in account["modules"]}
    assert kept["conv"] == images().nbytes
    assert kept["act"] == 5 * 4 * 4 * 4 * 4
    assert account["bytes"] == sum(kept.values())


def test_what_several_passes_of_a_step_save_is_added_up() -> None:
    """Each module saves as much in the second micro-batch as in the first, and nothing is without a place."""

    def program(passes: int) -> Callable[[], None]:
        def run() -> None:
            model = Conv()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(passes):
                model(images()).square().mean().backward()
            optimizer.step()

        return run

    accounts = [next(e for e in watch(program(n)).events if e["kind"] == "saved") for n in (1, 2)]
    one, two = ({m["path"]: m["bytes"] for m in account["modules"]} for account in accounts)
    assert two == {path: 2 * size for path, size in one.items()}


def test_outputs_gradients_and_activity_are_those_of_the_program() -> None:
    """What is written of a step is what flowed through the model in it."""
    model, seen = Conv(), {}
    with torch.no_grad():
        model.conv.bias[2] = -100.0  # a channel that is never active

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        seen[module] = out
        out.retain_grad()

    for module in (model.conv, model.act):
        module.register_forward_hook(keep)
    recording = watch(lambda: train(model, 1)).recording()
    for path, module in (("conv", model.conv), ("act", model.act)):
        assert norms(recording, f"{path}:out") == pytest.approx([norm(seen[module])], rel=1e-5)
        assert norms(recording, f"{path}:out.grad") == pytest.approx(
            [norm(seen[module].grad)], rel=1e-5
        )
    steps, samples, active = recording.active("act:out")
    assert (steps.tolist(), samples.tolist(), active.tolist()) == (
        [0],
        [5 * 16],
        [[True, True, False, True]],
    )


def test_parameters_their_gradients_and_updates_have_their_norms() -> None:
    """Of plain SGD the update is the learning rate times the gradient, of up to 1,024 elements exactly."""
    model, truth = Conv(), []

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.25)
        for _ in range(3):
            optimizer.zero_grad()
            model(images()).square().mean().backward()
            truth.append({n: (norm(p), norm(p.grad)) for n, p in model.named_parameters()})
            optimizer.step()

    recording = watch(program, every=1).recording()
    for name, param in model.named_parameters():
        assert norms(recording, f"{name}:param") == pytest.approx(
            [t[name][0] for t in truth], rel=1e-5
        )
        assert norms(recording, f"{name}:param.grad") == pytest.approx(
            [t[name][1] for t in truth], rel=1e-5
        )
        assert norms(recording, f"{name}:update") == pytest.approx(
            [0.25 * t[name][1] for t in truth], rel=1e-4
        )
        assert recording.rows(f"{name}:update").count.tolist() == [param.numel()] * 3


def test_the_update_of_a_large_parameter_is_that_of_a_sample() -> None:
    """At most 1,024 elements are kept from before the step; they are spread over the parameter, and their ratio is its."""
    model = nn.Linear(100, 77)
    log = watch(lambda: train(model, 1, batch=lambda: torch.randn(4, 100)), every=1)
    count, sumsq = (
        getattr(log.recording().rows("weight:update"), n)[0] for n in ("count", "sumsq")
    )
    grad = model.weight.grad.reshape(-1)[:: spacing(7700, 1024)]
    assert count == len(grad) <= 1024
    assert np.sqrt(sumsq) == pytest.approx(0.1 * norm(grad), rel=1e-4)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_model_is_watched_with_the_parameters_it_gets() -> None:
    """Parameters that have no shape before the first forward are watched from the step after it."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())

    def program() -> None:
        model(torch.ones(2, 3))
        train(model, 3, batch=lambda: torch.randn(2, 3))

    log = watch(program, every=1)
    assert {"0.weight:param.grad", "0.weight:param", "0.weight:update"} <= set(log.texts())
    assert {e["type"] for e in log.entries if e.get("owner", e["path"]) == "0"} == {"Linear"}
    assert [root["parameters"] for root in log.roots] == [16]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_left_alone() -> None:
    """PyTorch runs no hooks on TorchScript; what is around it is watched, and the program goes on."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(3, 2))

    def program() -> None:
        scripted(torch.ones(1, 3))
        train(model, 1, batch=lambda: torch.randn(2, 3))

    log = watch(program)
    assert log.texts("out") == ["1:out", ":out"]
    assert "0.0.weight:param" in log.texts("param")


@pytest.mark.parametrize(
    ("selector", "outs", "params"),
    [
        ("conv", ["conv:out"], []),
        ("**{ReLU}", ["act:out"], []),
        (
            "**, !fc",
            ["conv:out", "act:out", ":out"],
            ["conv.bias", "conv.weight", "fc.bias", "fc.weight"],
        ),
        ("**, !fc.*", ["conv:out", "act:out", "fc:out", ":out"], ["conv.bias", "conv.weight"]),
        ("fc.weight", [], ["fc.weight"]),
        ("nothing.here", [], []),
    ],
)
def test_a_selector_says_what_is_watched(selector: str, outs: list[str], params: list[str]) -> None:
    """Outputs, gradients and parameters at the paths it names, and nothing else."""
    log = watch(lambda: train(Conv(), 2), every=1, sites=selector)
    assert log.texts("out") == outs
    assert sorted(log.texts("param")) == [f"{p}:param" for p in params]
    assert sorted(log.texts("update")) == [f"{p}:update" for p in params]
