"""What was changed in place after it was saved: an error as autograd's, or the right gradient."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn

import kedge
from tests.offload.engines import Shelf, engaged


def error_of(run):
    """Return what a function raises."""
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value)


def param_changed():
    """A weight is changed."""
    model = nn.Linear(40, 40)
    loss = model(torch.ones(8, 40, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.add_(1)
    loss.backward()


def input_changed():
    """The input is changed."""
    x, w = torch.ones(100), torch.ones(100, requires_grad=True)
    loss = (x * w).sum()
    x.mul_(2)
    loss.backward()


def output_changed():
    """What an operation saved as its result is changed."""
    y = torch.ones(100, requires_grad=True).exp()
    y.add_(1)
    y.sum().backward()


def number_changed():
    """A number in a tensor is changed."""
    x, w = torch.tensor(3.0), torch.ones(100, requires_grad=True)
    loss = (x * w).sum()
    x.mul_(2)
    loss.backward()


def alias_changed():
    """What is changed is a view of what was saved."""
    x = torch.ones(10, 10, requires_grad=True) * 1
    loss = (x.t() * x.t()).sum()
    x.detach()[0].zero_()
    loss.backward()


@pytest.mark.parametrize("program", [input_changed, output_changed, number_changed])
def test_what_is_kept_by_reference_raises_as_autograd_does(program):
    """Saved-tensor hooks switch autograd's check off; what is kept by reference raises the same error, word for word."""
    plain = error_of(program)
    with engaged():
        assert error_of(program) == plain


@pytest.mark.parametrize("program", [param_changed, alias_changed])
def test_a_changed_alias_raises_as_autograd_does(program):
    """Of a view whose base was changed PyTorch no longer knows by which operation it was made; all else is the same."""

    def nameless(error):
        return re.sub(r"output 0 of \w+", "output 0 of it", error)

    plain = error_of(program)
    with engaged():
        assert nameless(error_of(program)) == nameless(plain)


def test_an_optimizer_step_between_forward_and_backward_raises():
    """A weight that was trained on since cannot give the gradient of the forward before."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.offload(model, to=kedge.Disk()):
        first, second = model(torch.ones(4, 300)).sum(), model(torch.ones(4, 300)).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


def test_a_change_after_it_was_moved_does_not_reach_its_gradient():
    """What was moved has the bytes of then: where autograd can only refuse, the gradient is right."""
    w = torch.ones(100, requires_grad=True)
    x = w * 2
    with engaged(shelf=Shelf()):
        loss = (x * x).sum()
        x.data.zero_()
        with torch.no_grad():
            x.add_(5)
        loss.backward()

    assert torch.equal(w.grad, torch.full((100,), 8.0))


@pytest.mark.parametrize("shelf", [Shelf(), None], ids=["moved", "kept"])
def test_what_is_saved_before_and_after_a_change_are_two(shelf):
    """One storage at two versions is two entries."""
    a, b = (torch.ones(100, requires_grad=True) for _ in range(2))
    x = a * 2

    def run():
        y = x.clone()
        first = y.detach() * b
        y.mul_(2)
        return (first + y.detach() * b).sum()

    if shelf is None:
        with engaged(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run().backward()
        return
    with engaged(shelf=shelf):
        run().backward()
    assert torch.equal(b.grad, torch.full((100,), 6.0))
    assert len(shelf.slots) == 2


def changed_data(x):
    """Change through `.data`."""
    x.data.mul_(3)


def changed_again(x):
    """Return other memory."""
    x.data = x.data * 3


def changed_numpy(x):
    """Change through NumPy."""
    x.detach().numpy()[:] *= 3


@pytest.mark.parametrize("change", [changed_data, changed_again, changed_numpy])
def test_a_change_that_autograd_does_not_count_makes_another_entry(change):
    """A storage changed behind autograd's back between two saves is not taken for what it was."""
    w = torch.ones(1000, requires_grad=True)
    x = torch.full((1000,), 2.0)
    with engaged(shelf=Shelf()):
        first = x * w
        change(x)
        (first + x * w).sum().backward()

    assert torch.equal(w.grad, torch.full((1000,), 8.0))


def test_tensors_with_counters_of_their_own_are_not_taken_for_each_other():
    """`x.data` counts its changes apart: at the same version it may have other bytes on the same storage."""
    w = torch.ones(1000, requires_grad=True)
    x = torch.ones(1000)
    x.add_(1)
    apart = x.data
    with engaged(shelf=Shelf()):
        first = x * w
        apart[:37] = 9.0
        assert apart._version == x._version
        (first + apart * w).sum().backward()

    assert torch.equal(w.grad, torch.cat([torch.full((37,), 11.0), torch.full((963,), 4.0)]))


def test_an_address_that_is_used_again_is_another_storage():
    """In 200 random graphs, whose freed memory is given to new tensors at once, no tensor is taken for another."""
    rng = random.Random(0)
    shelf = Shelf()
    with engaged(shelf=shelf):
        for _ in range(200):
            w = torch.randn(64, requires_grad=True)
            parts, expected = [], torch.zeros(64)
            for _ in range(rng.randrange(1, 6)):
                x = torch.randn(64)
                parts.append((x * w).sum())
                expected += x
                if rng.random() < 0.5:
                    parts.pop()  # an abandoned graph: its entry goes, and its storage
                    expected -= x
                del x
            if parts:
                sum(parts).backward()
                assert torch.allclose(w.grad, expected, atol=1e-5)
            del parts, w

    assert shelf.freed == len(shelf.slots) > 200


def test_moved_bytes_tell_of_later_changes():
    """What a store is given counts the program's changes, so that one that copies late can know of them."""
    seen = []

    class Late(Shelf):
        def put(self, data):
            seen.append((data, data._version))
            return super().put(data)

    x = torch.ones(100)
    with engaged(shelf=Late()):
        kept = x * torch.ones(100, requires_grad=True)
        data, version = seen[0]
        assert data._version == version
        x.add_(1)
        assert data._version == version + 1
        kept.sum().backward()


@pytest.mark.parametrize("size", [3, 1000, 200_000])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "alone"])
def test_one_element_changed_between_two_saves_is_another_entry(size, part):
    """A tensor of which one element was changed through `.data` between two uses is stored twice."""
    w = torch.ones(size, requires_grad=True)
    x = torch.full((4 * size if part else size,), 2.0)[:size]
    with kedge.offload(nn.Identity(), to=kedge.Disk(rebuild=False), min_bytes=0):
        first = x * w
        x.data[size // 2] = 5.0
        (first + x * w).sum().backward()

    expected = torch.full((size,), 4.0)
    expected[size // 2] = 7.0
    assert torch.equal(w.grad, expected)


def detached_input():
    """An input of an operation is detached in place."""
    p = torch.linspace(-1, 1, 4096, requires_grad=True)
    y = p * 2
    z = (y.sin() * y).sum()
    y.detach_()
    z.backward()


def detached_output():
    """What an operation saved as its result is detached in place."""
    p = torch.linspace(-1, 1, 4096, requires_grad=True)
    y = (p * 2).exp()
    loss = y.sum() + y.view(-1).sum()
    y.detach_()
    loss.backward()
    return p.grad


OFFLOADS = {
    "kept": {},
    "moved": {"to": kedge.Disk(rebuild=False)},
    "rebuilt or moved": {"to": kedge.Disk()},
    "small": {"min_bytes": "1 MB"},
}


@pytest.mark.parametrize("to", OFFLOADS)
def test_an_input_detached_in_place_is_refused_as_without_kedge(to):
    """Autograd's own error, word for word; what a node saved as its result may be detached in place."""
    plain = error_of(detached_input)
    with kedge.offload(**{"min_bytes": 1} | OFFLOADS[to]):
        assert error_of(detached_input) == plain
        offloaded = detached_output()
    assert plain.startswith("Trying to use a saved tensor that has been detached in-place")
    assert torch.equal(offloaded, detached_output())
