"""On random graphs of views, changes in place, shared, expanded and channels_last tensors."""

from __future__ import annotations

import zlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import kedge
from kedge.offload import codecs
from kedge.offload.codecs.layout import flatten, restore
from kedge.offload.rebuild import find
from kedge.offload.stores.unnamed_file import memory_of
from tests.marks import full, sampled
from tests.offload.engines import Shelf, engaged

SHAPE = (2, 4, 3, 4)
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4)


def last(x):
    """Lay out channels last."""
    return x.contiguous(memory_format=torch.channels_last)


def square(x):
    """Bring back to the one shape that all operations take."""
    return x.reshape(SHAPE)


VIEWS = {
    "transposed and back": lambda x: x.transpose(1, 3).sin().transpose(1, 3),
    "flat": lambda x: square(x.reshape(-1).tanh()),
    "halves": lambda x: torch.cat([half.exp() * 0.1 for half in x.chunk(2, dim=1)], dim=1),
    "small part": lambda x: x + x[:, :1, :1, :1].sigmoid() * x[0, 0, 0, 0].cos(),
    "expanded": lambda x: x * x[:, :1].expand(SHAPE),
    "channels_last": lambda x: last(x).sin(),
    "interleaved": lambda x: torch.stack([p.exp() * 0.1 for p in x.unbind(-1)], -1),
    "permuted": lambda x: F.gelu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "detached": lambda x: x * x.detach().tanh(),
}
MAKES = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: F.softmax(x, -1),
    "linear": lambda x: x @ WEIGHT,
    "conv": lambda x: F.conv2d(x, WEIGHT.view(4, 4, 1, 1)),
    "pooled": lambda x: F.interpolate(F.max_pool2d(x, 2, 1), SHAPE[2:]),
    "root": lambda x: (x * x + 1).sqrt(),
    "clone": torch.clone,
}
JOINS = {
    "product": torch.mul,
    "sum": torch.add,
    "quotient": lambda x, y: x / (y * y + 1),
    "matmul": lambda x, y: x @ (y.transpose(2, 3) @ x).softmax(-1),
    "maximum": torch.maximum,
}
CHANGES = {
    "doubled": lambda x: x.mul_(2),
    "relu_": lambda x: x.relu_(),
    "part zeroed": lambda x: x[:, 1:2].zero_(),
    "exp_": lambda x: x.sigmoid_(),
    "transposed added": lambda x: x.transpose(2, 3)[:, :, :1, :1].add_(1),
    "unseen": lambda x: x.detach().add_(0.5),
}
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([*VIEWS, *MAKES, *CHANGES]), st.integers(0, 5), st.just(0)),
        st.tuples(st.sampled_from(sorted(JOINS)), st.integers(0, 5), st.integers(0, 5)),
    ),
    min_size=2,
    max_size=14,
)


def run(program, twice):
    """Run a program; return the gradients of its leaves."""
    leaves = [
        torch.linspace(-2, 2, 96).view(SHAPE).requires_grad_(),
        last(torch.linspace(1, -3, 96).view(SHAPE)).requires_grad_(),
    ]
    values = [leaf * 1 for leaf in leaves]
    for name, i, j in program:
        value = values[i % len(values)]
        if name in CHANGES:
            CHANGES[name](value)
        elif name in JOINS:
            values.append(JOINS[name](value, values[j % len(values)]))
        else:
            values.append(({**VIEWS, **MAKES})[name](value))
        del values[:-6]
    loss = sum(value.sum() for value in values)
    values.clear()
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    return [torch.zeros(SHAPE) if leaf.grad is None else leaf.grad for leaf in leaves]


def granted(program, twice):
    """Run a program; None if it is refused because of a change in place."""
    try:
        return run(program, twice)
    except RuntimeError as refused:
        if "modified by an inplace operation" not in str(refused):
            raise
    torch.ones(
        1, requires_grad=True
    ).backward()  # PyTorch holds what a failed backward had still to do until then
    return None


@pytest.mark.parametrize("mode", [full("moved"), full("rebuilt"), "both"])
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(program=steps, twice=st.booleans())
def test_gradients_of_random_graphs_are_equal(mode, program, twice):
    """Where autograd gives a gradient, the same comes with an offload, bit for bit; where it refuses, the right one may come."""
    plain = granted(program, twice)
    shelf = None if mode == "rebuilt" else Shelf()
    with engaged(shelf=shelf, find=None if mode == "moved" else find) as engine:
        offloaded = granted(program, twice)
        if plain is not None:
            assert all(
                torch.equal(a.view(torch.int32), b.view(torch.int32))
                for a, b in zip(plain, offloaded, strict=True)
            )
            assert [a.stride() for a in plain] == [b.stride() for b in offloaded]
    total = engine.account.total
    assert total.freed.number == total.sum("moved").number + total.sum("rebuilt").number
    assert shelf is None or shelf.freed == len(shelf.slots)


class Squeezed:
    """A codec without a loss: the bytes of the same weight lie side by side, and what repeats is written once."""

    name = "squeezed"
    exact = True

    def encode(self, value):
        if not value.numel() or (found := flatten(value.detach())) is None:
            return None
        flat, layout = found
        planes = flat.contiguous().view(torch.uint8).view(-1, value.itemsize).t().contiguous()
        return torch.frombuffer(
            bytearray(zlib.compress(bytes(memory_of(planes)), 1)), dtype=torch.uint8
        ), layout

    def decode(self, kept, extra):
        planes = torch.frombuffer(
            bytearray(zlib.decompress(bytes(memory_of(kept)))), dtype=torch.uint8
        )
        flat = planes.view(extra.dtype.itemsize, -1).t().contiguous().view(-1).view(extra.dtype)
        return restore(flat, extra)


PUBLIC = {
    "rebuild": {"to": kedge.Rebuild()},
    "disk": {"to": kedge.Disk(checksum=True)},
    "disk alone": {"to": kedge.Disk(rebuild=False)},
    "uncached": {"to": kedge.Disk(rebuild=False, uncached=True)},
    "codec": {"to": kedge.Rebuild(), "codec": "squeezed"},
    "codec on disk": {"to": kedge.Disk(), "codec": "squeezed"},
}
#: The others are run by `make test-all`.
ALWAYS = {"disk", "uncached", "codec on disk"}


@pytest.mark.parametrize("mode", sampled(PUBLIC, ALWAYS))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(program=steps, twice=st.booleans())
def test_gradients_of_random_graphs_are_equal_with_each_destination(mode, program, twice):
    """The same through `kedge.offload`: with a file, in memory and past it, with a codec without a loss, and without any."""
    plain = granted(program, twice)
    with (
        mock.patch.dict(codecs.CODECS, squeezed=Squeezed()),
        mock.patch("kedge.offload.stores.disk.WINDOW", 8 << 10),
    ):
        block = kedge.offload(nn.Identity(), min_bytes=0, **PUBLIC[mode])
        with block as account:
            offloaded = granted(program, twice)
    if plain is not None:
        assert all(
            torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(plain, offloaded, strict=True)
        )
        assert [a.stride() for a in plain] == [b.stride() for b in offloaded]
    total = account.total
    assert total.freed.number == total.sum("moved").number + total.sum("rebuilt").number
    assert set(total.moved) <= {"disk" if isinstance(PUBLIC[mode]["to"], kedge.Disk) else "memory"}
    assert mode not in ("disk alone", "uncached") or not total.rebuilt
