"""``:state`` sites: what an optimizer keeps of a parameter, after each of its steps."""

from __future__ import annotations

import copy
import json
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

import kedge
from kedge.errors import ActionError, NeverFiredWarning, NoSuchKind, SelectorError
from tests import forked


def net() -> nn.Module:
    """Return a model of two layers, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    """Train a model on the same data each time."""
    for step in range(steps):
        x = torch.linspace(-1, 1 + step, 8).reshape(2, 4)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", MAKES)
def test_the_values_are_those_of_the_optimizer(name: str) -> None:
    """Each tensor that it keeps, of each parameter, after each step, scalars too; no bit of the training changes."""
    plain = net()
    expected = MAKES[name](plain.parameters())
    train(plain, expected)

    model = net()
    optimizer = MAKES[name](model.parameters())
    with kedge.session() as s:
        acts = s.hook(model, "**:state", kedge.record())
        s.hook(model, "**:state", kedge.measure())
        train(model, optimizer)

    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    kept = {}
    for path, param in plain.named_parameters():
        for key, value in expected.state[param].items():
            if isinstance(value, torch.Tensor):
                kept[f"{path}:state[{key}]"] = value
    assert set(acts) == set(kept)
    assert len(kept) >= 4
    assert all(torch.equal(acts[site], value) for site, value in kept.items())
    assert json.dumps(str(optimizer.state_dict())) == json.dumps(str(expected.state_dict()))
    assert not optimizers._global_optimizer_post_hooks


def test_one_tensor_is_selected_by_its_name() -> None:
    """A value belongs to the step after which it stood, and is a copy of that moment."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen = []

    def note(value: torch.Tensor, event: Any) -> None:
        seen.append((event.step, str(event.site), value.clone()))

    with kedge.session() as s:
        acts = s.hook(model, "2.weight:state[exp_avg]", kedge.record(keep=None))
        s.hook(model, "2.weight:state[exp_avg]", note)
        train(model, optimizer)

    assert [(step, site) for step, site, _ in seen] == [
        (step, "2.weight:state[exp_avg]") for step in range(3)
    ]
    values = [record.value for record in acts.records("2.weight:state[exp_avg]")]
    assert all(torch.equal(value, then) for value, (_, _, then) in zip(values, seen, strict=True))
    assert not torch.equal(values[0], values[2])


def test_the_steps_are_measured() -> None:
    """The statistics are those of the tensors, and `step` counts."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with kedge.hook(model, "**:state[exp_avg_sq], **:state[step]", kedge.measure()) as acts:
        train(model, optimizer)
    second = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert acts["0.weight:state[exp_avg_sq]"].max == second.max()
    assert acts["0.weight:state[step]"].max == 3


def test_an_edit_is_written_into_the_state() -> None:
    """The next step works with it; all else is as if the program had written it itself."""
    by_hand = net()
    first = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        train(by_hand, first, 1)
        first.state[by_hand[0].weight]["momentum_buffer"].mul_(0.5)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with kedge.hook(model, "0.weight:state[momentum_buffer]", kedge.scale(0.5)):
        for _ in range(3):
            train(model, optimizer, 1)
    assert all(map(torch.equal, by_hand.parameters(), model.parameters()))


def test_an_edit_keeps_the_form() -> None:
    """Another shape or type is an error, and the state stays."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        pytest.raises(ActionError, match="state must keep its shape, dtype and device"),
        kedge.hook(model, "0.weight:state", lambda value: value.double()),
    ):
        train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.float32


def adam(model: nn.Module) -> None:
    """Train with Adam."""
    train(model, torch.optim.Adam(model.parameters()), 1)


def other(model: nn.Module) -> None:
    """Train a part."""
    train(model, torch.optim.Adam(model[2].parameters()), 1)


@pytest.mark.parametrize(
    ("run", "site", "why"),
    [
        (adam, "0.weight:state[exp_average]", r"keeps no tensor \[exp_average\].*\[exp_avg\]"),
        (lambda model: None, "0.weight:state", "no optimizer has stepped"),
        (other, "0.weight:state", "no optimizer that stepped holds the parameter"),
        (
            lambda model: train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1),
            "0.weight:state",
            "keeps nothing of it",
        ),
    ],
)
def test_what_did_not_fire_says_why(run: Callable[..., None], site: str, why: str) -> None:
    """No optimizer, none that holds it, none that keeps anything, or nothing of that name."""
    model = net()
    with (
        pytest.warns(NeverFiredWarning, match=f"(?s){why}"),
        kedge.hook(model, site, kedge.record()),
    ):
        run(model)


def test_modules_have_no_state_of_an_optimizer() -> None:
    """The message names the parameters of the module."""
    with pytest.raises(NoSuchKind, match=r"0.weight"):
        kedge.hook(net(), "0:state", kedge.record())
    with pytest.raises(SelectorError):
        kedge.hook(net(), "0.weight:state[", kedge.record())


def test_a_copy_and_an_end_leave_nothing() -> None:
    """A model and an optimizer that were hooked are copied and stepped as before."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with kedge.hook(model, "**:state", kedge.measure()):
        train(model, optimizer, 1)
        copy.deepcopy(optimizer)
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_every_model_has_its_own() -> None:
    """A hook on every model names the parameters as it names their gradients."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with kedge.hook("**:state[exp_avg]", kedge.record()) as acts:
        train(model, optimizer, 2)
    assert torch.equal(
        acts["Sequential.0.weight:state[exp_avg]"], optimizer.state[model[0].weight]["exp_avg"]
    )


SHARDED = """
    import json, torch, kedge
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    with kedge.session() as s:
        kept = s.hook(model, "**:state[exp_avg]", kedge.record())
        numbers = s.hook(model, "**:state[exp_avg]", kedge.measure())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    for name, param in model.named_parameters():
        whole = optimizer.state[param]["exp_avg"].full_tensor()
        site = f"{name}:state[exp_avg]"
        found = kept[site]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        print(json.dumps([name, torch.equal(found, whole), bool(numbers[site].max == whole.max())]))
    dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch without torch.distributed"
)
def test_the_state_of_a_sharded_parameter_is_seen() -> None:
    """It is spread as its parameter is, and measured as that."""
    done = forked.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(SHARDED)], timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    assert all(same and measured for _, same, measured in found), found
