"""The digest log holds what a program computes, in digests, and changes nothing about it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kedge.verify.digests import LENGTH, DigestLog, digest


@pytest.fixture
def digested(tmp_path):
    """Run a program with a digest log; return its lines."""

    def run(program) -> list[dict[str, Any]]:
        log = DigestLog(tmp_path / "digests")
        log.begin()
        try:
            program()
        finally:
            log.end()
        return [json.loads(line) for line in (tmp_path / "digests").read_text().splitlines()]

    return run


def told(lines: list[dict[str, Any]]) -> list[tuple[int, str, list[str]]]:
    """Step, subject and names of each line of digests."""
    names = {line["table"]: line["names"] for line in lines if "names" in line}
    return [(line["step"], line["what"], names[line["table"]]) for line in lines if "what" in line]


def train(model, steps=2, lr=0.1):
    """Train a model with a criterion."""
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=lr), nn.MSELoss()
    x = torch.ones(4, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), x).backward()
        optimizer.step()


def test_a_step_is_digested_in_its_order(digested):
    """Outputs of root modules, gradients before the step, parameters and buffers after it; names are written once."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))

    lines = digested(lambda: train(model))

    step = [
        ("output of Sequential", [""]),
        ("output of MSELoss", [""]),
        ("gradient", ["Sequential.0.weight", "Sequential.0.bias"]),
        ("parameter", ["Sequential.0.weight", "Sequential.0.bias"]),
        (
            "buffer",
            [f"Sequential.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")]
            + ["random generator"],
        ),
    ]
    assert told(lines) == [(0, *each) for each in step] + [(1, *each) for each in step]
    assert sum("names" in line for line in lines) == 3


def test_the_same_computation_gives_the_same_lines_and_another_one_others(digested):
    """Equal runs have equal lines; a learning rate that is a trifle larger shows in the parameters of the first step."""

    def run(lr):
        torch.manual_seed(0)
        train(nn.Linear(3, 3), lr=lr)

    one, same, other = (digested(lambda lr=lr: run(lr)) for lr in (0.1, 0.1, 0.1000001))

    assert one == same
    first = next(line for line, mine in zip(other, one, strict=True) if line != mine)
    assert (first["step"], first["what"]) == (0, "parameter")


def test_nothing_is_changed(digested):
    """Parameters, gradients, random numbers and the modules themselves are those of a run without the log."""

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        train(model)
        states.append(
            [*(p.grad for p in model.parameters()), *model.state_dict().values(), torch.rand(1)]
        )
        attributes.append(
            [
                sorted(vars(m)) + list(m._forward_hooks) + list(m._forward_pre_hooks)
                for m in model.modules()
            ]
        )

    states: list[list[torch.Tensor]] = []
    attributes: list[list[Any]] = []
    run()
    digested(run)

    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert attributes[0] == attributes[1]


def test_a_recompute_is_not_a_call_of_a_root(digested):
    """What a checkpoint runs again in backward is written once, in the forward, as part of its root."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x):
            return {"y": checkpoint(self.block, x, use_reentrant=False)}

    lines = digested(lambda: Net()(torch.ones(2, 3))["y"].sum().backward())

    assert told(lines) == [(0, "output of Net", ["y"])]


def test_a_root_that_raises_does_not_hide_the_next(digested):
    """A call that failed is over; two models of one class have two names; a call inside itself is one call."""

    class Net(nn.Module):
        def forward(self, x, again=False):
            return self(x) + 1 if again else x.sin()

    def program():
        one, two = Net(), Net()
        with pytest.raises(AttributeError):
            one("no tensor")
        one(torch.ones(2), again=True)
        two(torch.ones(2))

    assert told(digested(program)) == [
        (0, "output of Net", []),
        (0, "output of Net", [""]),
        (0, "output of Net_2", [""]),
    ]


def test_tensors_without_a_model_are_named_by_their_optimizer(digested):
    """A parameter that belongs to no called module is compared as well; one without a gradient has none."""

    def program():
        free, idle = (nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = torch.optim.Adam([free, idle])
        free.sum().backward()
        optimizer.step()

    assert told(digested(program))[:2] == [
        (0, "gradient", ["Adam[0]"]),
        (0, "parameter", ["Adam[0]", "Adam[1]"]),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1e-7,
        lambda x: -x,
        lambda x: x.double(),
        lambda x: x.reshape(3, 2),
        lambda x: x.t(),
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.bfloat16(),
        lambda x: x > 0,
    ],
)
def test_a_digest_is_of_bytes_shape_and_dtype(change):
    """One other bit, shape or dtype is another digest; another layout of the same values is not."""
    x = torch.arange(6.0).reshape(2, 3)

    assert len(digest(x)) == LENGTH
    assert digest(change(x)) != digest(x)
    assert digest(change(x)) == digest(change(x.clone()))
    assert digest(x.t().contiguous().t()) == digest(x)
    assert digest(x.to(torch.complex64).conj()) == digest(
        x.to(torch.complex64).conj().resolve_conj()
    )


def test_what_is_transformed_has_the_digest_of_what_is_inside(digested):
    """Gradients of single samples are reported: a forward under `vmap` and `grad` computes the values of all of them."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params, one):
        return torch.func.functional_call(model, params, (one,)).square().sum()

    lines = digested(lambda: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x))

    assert [line["digests"] for line in lines if "digests" in line] == [digest(model(x))]


def test_a_failure_is_written_and_the_program_goes_on(digested):
    """What the log cannot take ends neither the program nor silently the comparison."""

    class Odd(nn.Module):
        def forward(self, x):
            return Refuses(x)

    class Refuses(torch.Tensor):
        def detach(self):
            raise RuntimeError("no")

    lines = digested(lambda: Odd()(torch.ones(2)))

    assert lines[-1]["step"] == 0
    assert lines[-1]["failed"].startswith(
        "the digest log failed: RuntimeError: no (verify/digests.py:"
    )


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_code_runs_without_a_break(digested, compiled):
    """A compiled model is a root like another, in one graph."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    lines = digested(lambda: compiled(model, backend="eager", fullgraph=True)(torch.ones(2, 3)))

    assert [what for _, what, _ in told(lines)] == ["output of OptimizedModule"]
