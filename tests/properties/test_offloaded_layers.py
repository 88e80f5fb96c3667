"""For all nets: with any of its layers offloaded, a net computes and names the same, to the last bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.offload import Offload

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SIZE = 4


class Residual(nn.Module):
    """Adds a layer's output to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        y: Tensor = x + self.inner(x)
        return y


class Recurrent(nn.GRU):
    """A GRU over the rows, without its state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs."""
        y: Tensor = super().forward(x)[0]
        return y


class Checkpointed(Residual):
    """A layer that is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(SIZE, SIZE),
    lambda: nn.Linear(SIZE, SIZE, bias=False),
    lambda: nn.LayerNorm(SIZE),
    lambda: nn.BatchNorm1d(SIZE),
    lambda: nn.Dropout(0.3),
    lambda: nn.PReLU(SIZE),
    lambda: Recurrent(SIZE, SIZE),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid,
)  # fmt: skip
TO: tuple[dict[str, Any], ...] = (
    {},
    {"to": kedge.Disk(rebuild=False)},
    {"to": kedge.Disk(checksum=True)},
    {"min_bytes": "1 MB"},
)

Plan = Any
"""A description of a layer: the number of its kind, or a container's name with those inside; whether and how it is offloaded."""
how = st.one_of(st.none(), st.sampled_from(range(len(TO))))
plans = st.recursive(
    st.tuples(st.sampled_from(range(len(LEAVES))), how),
    lambda inner: st.one_of(
        st.tuples(st.just("sequence"), how, st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("residual"), how, inner),
        st.tuples(st.just("checkpoint"), how, inner),
        st.tuples(st.just("twice"), how, inner),
    ),
    max_leaves=5,
)


def build(plan: Plan, *, offloads: bool) -> nn.Module:
    """Return the layer that a plan describes."""
    kind, to, *inside = plan
    if kind == "sequence":
        layer: nn.Module = nn.Sequential(*(build(each, offloads=offloads) for each in inside[0]))
    elif kind == "twice":
        shared = build(inside[0], offloads=offloads)
        layer = nn.Sequential(shared, nn.Tanh(), shared)
    elif kind in ("residual", "checkpoint"):
        layer = (Residual if kind == "residual" else Checkpointed)(
            build(inside[0], offloads=offloads)
        )
    else:
        layer = LEAVES[kind]()
    return (
        kedge.offload(layer, **{"min_bytes": 1} | TO[to]) if offloads and to is not None else layer
    )


def computed(model: nn.Module, dtype: torch.dtype, mode: str) -> list[Tensor]:
    """Return a model's output, and the gradients of its input and parameters, in two steps."""
    found: list[Tensor] = []
    torch.manual_seed(1)
    for _ in range(2):
        x = torch.randn(8, SIZE, dtype=dtype, requires_grad=mode != "no_grad")
        with torch.no_grad() if mode == "no_grad" else nullcontext():
            out = model(x)
        found.append(out.detach())
        if out.requires_grad:
            model.zero_grad()
            out.square().sum().backward()
            found += [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are the same, bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True)
    )


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@few
@given(
    plan=plans,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    mode=st.sampled_from(["train", "eval", "no_grad"]),
    twin=st.sampled_from(["itself", "deep copy", "pickle"]),
)
def test_offloaded_layers_change_nothing(
    plan: Plan, dtype: torch.dtype, mode: str, twin: str
) -> None:
    """Outputs, gradients, buffers, names and state dicts are those of the net without offloading, also of its copies."""
    torch.manual_seed(0)
    plain = build(plan, offloads=False).to(dtype).train(mode == "train")
    net = build(plan, offloads=True)
    net.to(dtype).train(mode == "train")
    assert not any(net.load_state_dict(plain.state_dict()))
    if twin == "deep copy":
        net = copy.deepcopy(net)
    elif twin == "pickle" and not any(map(nn.utils.parametrize.is_parametrized, net.modules())):
        net = pickle.loads(pickle.dumps(net))

    assert alike(computed(net, dtype, mode), computed(plain, dtype, mode))
    for of in ("named_modules", "named_parameters", "named_buffers"):
        names, others = ([name for name, _ in getattr(each, of)()] for each in (net, plain))
        assert names == others
    for module, other in zip(net.modules(), plain.modules(), strict=True):
        assert isinstance(module, type(other)) or nn.utils.parametrize.is_parametrized(other)
        assert module.training == other.training
    state, expected = net.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert alike(list(state.values()), list(expected.values()))
    assert not any(plain.load_state_dict(state))
    assert sum(isinstance(module, Offload) for module in net.modules()) == offloaded(plan)


def offloaded(plan: Plan) -> int:
    """Return the number of offloaded layers that a plan describes."""
    inside = plan[2:] if plan[0] != "sequence" else plan[2]
    return (plan[1] is not None) + sum(map(offloaded, inside))
