"""Saved tensors of a kind that is not known stay where they are, and the account says so by name."""

from __future__ import annotations

import re
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import kedge
from kedge.offload.rebuild.norms import NORMS
from tests.offload.engines import Save

X = torch.linspace(-2, 2, 64 * 128).view(64, 128)
PART = 64 * 128 * 4  # bytes
TO = {
    "rebuild": {"to": kedge.Rebuild()},
    "disk": {"to": kedge.Disk()},
    "disk alone": {"to": kedge.Disk(rebuild=False)},
    "codec": {"to": kedge.Rebuild(), "codec": "int8"},
}


class Kind(nn.Module):
    """Multiplies with a weight; what is saved of the rest is of another kind than an ordinary tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 128 * 128).view(128, 128))


class Mkldnn(Kind):
    def forward(self, x):
        return F.relu((x @ self.weight).to_mkldnn()).to_dense()


class Jagged(Kind):
    def forward(self, x):
        rows = torch.nested.as_nested_tensor([x[:20], x[20:]], layout=torch.jagged)
        return F.gelu(rows @ self.weight).sin().values()


class Coo(Kind):
    def forward(self, x):
        return torch.sparse.mm(torch.eye(64).to_sparse(), x @ self.weight)


class Csr(Kind):
    def forward(self, x):
        return torch.eye(64).to_sparse_csr() @ (x @ self.weight)


class Wrapper(Kind):
    def forward(self, x):
        return Save.apply(x @ self.weight, TwoTensor(x.detach(), x.detach()))


class Quantized(Kind):
    def forward(self, x):
        of = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        return Save.apply(Save.apply(x @ self.weight, of), x.detach().to("meta"))


KINDS = {  # the module, and how much it saves of its kind, where a tensor of that kind tells
    "mkldnn": (Mkldnn, PART),
    "jagged": (Jagged, 2 * PART),
    "sparse": (Coo, 0),
    "compressed sparse": (Csr, 0),
    "a wrapper": (Wrapper, PART),
    "quantized, and meta": (Quantized, PART // 4 + PART),
}


def grads(model, x):
    """Run a step; return all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's: some kinds are in beta
        model(x).square().sum().backward()
    return [model.weight.grad, x.grad]


@pytest.mark.parametrize("mode", TO)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_of_an_unknown_kind_stays(kind, mode):
    """Gradients keep their bits, what is saved of the kind is counted as kept, and the printed account names it."""
    build, least = KINDS[kind]
    model = build()
    plain = grads(model, X)
    with kedge.offload(model, min_bytes=0, **TO[mode]) as account:
        offloaded = grads(model, X)

    unknown = account.total.kept["unknown"]
    assert unknown.number
    assert unknown.bytes >= least
    assert re.search(r"kept: .*unknown kind \d+\.\d MB", str(account))
    if "codec" not in TO[mode]:  # which takes the tensors of a known kind beside them
        assert all(map(torch.equal, plain, offloaded))


class Grouped(nn.Module):
    """What the convolution saves is made by a group norm and an activation."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.last = nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.last(self.act(self.norm(x)))


@pytest.mark.parametrize(
    "failure", [AttributeError("_saved_eps"), RuntimeError("no"), ZeroDivisionError(), KeyError(3)]
)
def test_a_rule_that_fails_leaves_the_tensor_where_it_is(failure, monkeypatch):
    """Whatever a rule raises where it looks for a way, gradients are the same, and the account says what was raised."""

    def fails(self, node, growth):
        raise failure

    x, model = torch.randn(2, 4, 40, 40, requires_grad=True), Grouped()
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for norm in NORMS:
        monkeypatch.setattr(type(norm), "term", fails)
    with kedge.offload(model, to=kedge.Disk(), min_bytes=1) as offloaded:
        found = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])

    assert all(map(torch.equal, plain, found))
    assert f"it raised {type(failure).__name__}" in str(offloaded)
    assert all(item.rule != "group_norm" for item in kedge.saved(model)(x).items)


def test_what_a_signal_handler_raises_in_a_rule_is_the_programs(monkeypatch):
    """A time-out that strikes while a rule looks for a way ends the program's call, and not the rule."""

    def late(number, frame):
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGUSR1, late)
    monkeypatch.setattr(type(NORMS[1]), "term", lambda *_: signal.raise_signal(signal.SIGUSR1))
    x, model = torch.randn(2, 4, 40, 40, requires_grad=True), Grouped()
    try:
        with (
            pytest.raises(TimeoutError, match="own"),
            kedge.offload(model, to=kedge.Disk(), min_bytes=1),
        ):
            model(x)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_tensors_of_zeros_without_memory_stay():
    """What forward-mode differentiation makes of constants has no memory: it stays, and derivatives are equal."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    x = torch.randn(3, 8, requires_grad=True)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(y).tangent
            (y.sum() + tangent.sum()).backward()
        return [tangent.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run()
    with kedge.offload(model, to=kedge.Disk(), min_bytes=0):
        assert all(map(torch.equal, plain, run()))
