"""What was brought back is given out again as long as nobody has changed it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.offload.codecs import Bf16, Fp8, Int8
from kedge.offload.engine.sources import encode
from kedge.offload.rebuild import find
from tests.offload.engines import Save, Shelf, engaged

EVERYWHERE = [
    pytest.param({"to": kedge.Disk(rebuild=False)}, id="disk"),
    pytest.param({"to": kedge.Disk(rebuild=False, uncached=True)}, id="uncached"),
    pytest.param({"to": kedge.Disk()}, id="disk-rebuild"),
    pytest.param({"to": kedge.Rebuild()}, id="rebuild"),
    pytest.param({"to": kedge.Rebuild(), "codec": "bf16"}, id="codec"),
    pytest.param({"to": kedge.Disk(rebuild=False), "codec": "int8"}, id="disk-codec"),
]


class Spoils(torch.autograd.Function):
    """Works in place in what it has saved, which is wrong of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return g * 0


def leaf():
    """A leaf of ones and twos, which each codec keeps as they are."""
    return (torch.arange(64.0 * 64) % 2 + 1).view(64, 64).requires_grad_()


def rebuilt(x):
    """Make what is rebuilt: an output of GELU times 1."""
    return F.gelu(x * 1.0)


@pytest.mark.parametrize("options", EVERYWHERE)
def test_what_was_changed_through_a_node_is_not_given_out_again(options):
    """A change of what a node showed, before backward asks for it, does not reach the gradient."""
    x = leaf()
    with kedge.offload(nn.Identity(), **options, min_bytes=0):
        h = rebuilt(x)
        y = h.square()
        expected = 2 * h.detach()
        shown = y.grad_fn._saved_self.detach()
        shown.mul_(10)
        (grad,) = torch.autograd.grad(y.sum(), h)

    assert torch.allclose(shown, 5 * expected, rtol=0.02)
    assert torch.allclose(grad, expected, rtol=0.02)


@pytest.mark.parametrize("options", EVERYWHERE)
@pytest.mark.parametrize("times", [1, 3])
def test_a_function_that_works_in_what_it_saved_spoils_nobody_else_s(options, times):
    """A backward that changes its saved tensor leaves to others, and to itself the next time, what was saved."""
    x = leaf()
    with kedge.offload(nn.Identity(), **options, min_bytes=0):
        h = rebuilt(x)
        y = (h * h + Spoils.apply(h)).sum()
        for _ in range(times):
            (grad,) = torch.autograd.grad(y, h, retain_graph=True)
            assert torch.allclose(grad, 2 * h.detach(), rtol=0.02)


@pytest.mark.parametrize("to", [kedge.Disk(rebuild=False), kedge.Disk()])
def test_a_changed_input_does_not_enter_what_is_rebuilt(to):
    """What a recipe reads is what was saved, though it was shown and changed; so is what is rebuilt of it."""
    x = leaf()
    with kedge.offload(nn.Identity(), to=to, min_bytes=0) as account:
        h = x.sin()
        g = F.gelu(h)
        y = (g * g).sum()
        wanted = 2 * g.detach()
        g.grad_fn._saved_self.detach().zero_()
        (grad,) = torch.autograd.grad(y, g)

    assert bool(account.total.rebuilt) is to.rebuild
    assert torch.equal(grad, wanted)


def test_a_rebuilt_tensor_does_not_share_what_it_is_made_of():
    """A change of what was rebuilt reaches neither what it is made of nor the next rebuilding."""
    x = leaf()
    with kedge.offload(nn.Identity(), min_bytes=0) as account:
        h = x.sin()
        g = F.gelu(h)
        y = (g * g).sum()
        wanted = 2 * g.detach()
        y.grad_fn.next_functions[0][0]._saved_self.detach().zero_()
        (grad,) = torch.autograd.grad(y, g, retain_graph=True)
        y.backward()

    assert account.total.rebuilt
    assert torch.equal(grad, wanted)
    plain = leaf()
    (F.gelu(plain.sin()) ** 2).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("codec", [Bf16(), Fp8(), Int8()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_codec_keeps_in_memory_is_not_given_out(codec, kind):
    """What is decoded has memory of its own, so a change of it does not reach what was encoded."""
    value = torch.linspace(-3, 3, 1000).to(kind)
    coded = encode(None, codec, value, alone=False)
    if coded is None:
        assert kind is not torch.float32
        return
    first = coded.bring().clone()
    coded.bring().zero_()
    assert torch.equal(coded.bring(), first)


SHAPES = {
    "transposed": lambda: torch.randn(6, 8).t(),
    "a part": lambda: torch.randn(6, 8)[1:5, 2:6],
    "expanded": lambda: torch.randn(6, 1).expand(6, 8),
    "channels last": lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "bool": lambda: torch.randn(6, 8) > 0,
    "long": lambda: torch.arange(48),
    "conjugate": lambda: torch.randn(6, 8, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(6, 8, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(6, 8).bfloat16(),
    "a number": lambda: torch.randn(()),
    "nothing": lambda: torch.randn(0, 4),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_it_looks_like_a_change_is_seen(shape):
    """Dtype, strides and flags are as they were, and a change is counted, whatever the tensor looks like."""
    value = SHAPES[shape]()
    copy = value.clone()
    with engaged(shelf=Shelf()):
        y = Save.apply(torch.ones(2, requires_grad=True), value)
        first = y.grad_fn.saved_tensors[0]
        assert (first.dtype, first.stride(), first.is_conj(), first.is_neg()) == (
            value.dtype, value.stride(), value.is_conj(), value.is_neg(),
        )  # fmt: skip
        assert first._base is None
        assert torch.equal(first, copy)
        again = y.grad_fn.saved_tensors[0]
        assert again.data_ptr() == first.data_ptr()
        if value.dtype is not torch.bool or shape == "nothing":
            first.data.copy_(first.data)  # what is not counted is not seen
            assert y.grad_fn.saved_tensors[0].data_ptr() == first.data_ptr()
        (first.as_strided((1,), (1,)) if shape == "expanded" else first).zero_()
        third = y.grad_fn.saved_tensors[0]
    assert torch.equal(third, copy)
    assert third.data_ptr() != first.data_ptr() or not value.numel()


def test_memory_is_shared_as_long_as_nobody_changes_it():
    """Two views of one storage come back as one, and what was changed is let go of when it is brought anew."""
    shelf = Shelf()
    value = torch.randn(40, 40)
    with engaged(shelf=shelf):
        y = Save.apply(torch.ones(2, requires_grad=True), value)
        z = Save.apply(torch.ones(2, requires_grad=True), value.t())
        one, two = y.grad_fn.saved_tensors[0], z.grad_fn.saved_tensors[0]
        assert one.data_ptr() == two.data_ptr()
        assert shelf.gets == 1
        two[0].zero_()  # through whichever
        three, four = y.grad_fn.saved_tensors[0], z.grad_fn.saved_tensors[0]
        assert shelf.gets == 2
        assert three.data_ptr() == four.data_ptr() != one.data_ptr()
        assert torch.equal(three, value)
        assert one._version == two._version == 1
        assert three._version == four._version == 0


def test_a_change_in_inference_mode_is_seen():
    """What is unpacked under inference mode counts its changes as well."""
    value = torch.randn(40, 40)
    with engaged(shelf=Shelf()):
        y = Save.apply(torch.ones(2, requires_grad=True), value)
        with torch.inference_mode():
            y.grad_fn.saved_tensors[0].zero_()
            assert torch.equal(y.grad_fn.saved_tensors[0], value)
        assert torch.equal(y.grad_fn.saved_tensors[0], value)


def test_a_second_backward_has_gradients_to_the_last_bit():
    """Double backward, and a checkpoint that makes things again, work with what counts its changes."""
    model = nn.Sequential(nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 20), nn.Tanh())

    def grads():
        x = torch.linspace(-1, 1, 160).view(8, 20).requires_grad_()
        out = checkpoint(model, model(x), use_reentrant=False)
        (first,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), list(model.parameters()))

    plain = grads()
    with engaged(model, Shelf(), find=find):
        assert all(map(torch.equal, plain, grads()))


class Gives(torch.autograd.Function):
    """A product with a tensor, which is its gradient: it gives away what it saved."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return (x * factor).sum()

    @staticmethod
    def backward(ctx, g):
        return *ctx.saved_tensors, None


@pytest.mark.parametrize("to", [kedge.Disk(rebuild=False), kedge.Disk(), kedge.Disk(uncached=True)])
def test_gradients_that_are_a_saved_tensor_share_no_memory(to):
    """Two nodes that return what both saved give two gradients: to scale the one, as clipping does, leaves the other."""
    one, two = leaf(), leaf()
    with kedge.offload(nn.Identity(), to=to, min_bytes=0):
        factor = torch.full((64, 64), 3.0) * 1
        loss = Gives.apply(one, factor) + Gives.apply(two, factor)
        del factor
        loss.backward()
        one.grad.mul_(2)
    assert torch.equal(one.grad, torch.full((64, 64), 6.0))
    assert torch.equal(two.grad, torch.full((64, 64), 3.0))


@pytest.mark.parametrize("to", [kedge.Disk(rebuild=False), kedge.Disk()])
def test_gradients_of_two_backward_passes_share_no_memory(to):
    """What a first backward left in ``.grad`` is not what a second one brings."""
    x, found = leaf(), []
    with kedge.offload(nn.Identity(), to=to, min_bytes=0):
        loss = Gives.apply(x, torch.full((64, 64), 3.0) * 1)
        for _ in range(3):
            loss.backward(retain_graph=True)
            found.append(x.grad)
            x.grad = None
        found[0].mul_(2)
    assert [grad[0, 0].item() for grad in found] == [6, 3, 3]
