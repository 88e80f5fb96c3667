"""The gallery's tensors, T1 to T16: gradients recorded and edited on tensors and autograd nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import kedge
from kedge.errors import InPlaceEdit, NeverFired, NeverFiredWarning, NoSuchKind


def leaf(*values: float) -> Tensor:
    """Make a float32 leaf that requires grad; of one value, a tensor without dimensions."""
    return torch.tensor(
        values if len(values) > 1 else values[0], dtype=torch.float32, requires_grad=True
    )


def lists(*tensors: Tensor) -> list[Any]:
    """Return the numbers of some tensors."""
    return [t.tolist() for t in tensors]


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed since the last call, without the device of the tensors."""
    return re.sub(r", device='.*?'", "", capsys.readouterr().out)


class Dot(NamedTuple):
    """``z = x + y; o = w . z``."""

    x: Tensor
    y: Tensor
    w: Tensor
    z: Tensor
    o: Tensor

    @property
    def grads(self) -> list[Any]:
        """The gradients of the leaves."""
        return [t.grad.tolist() for t in (self.x, self.y, self.w)]


def dot_of_vectors() -> Dot:
    """Make the graph of T1."""
    x, y, w = leaf(0, 1, 2, 3), leaf(4, 5, 6, 7), leaf(1, 2, 3, 4)
    z = x + y
    return Dot(x, y, w, z, w @ z)


def product_of_scalars() -> Dot:
    """Make the graph of T3."""
    x, y, w = leaf(2), leaf(3), leaf(4)
    z = x + y
    return Dot(x, y, w, z, w * z)


def test_the_gradient_of_a_tensor_in_the_middle_is_recorded_without_retain_grad() -> None:
    """T1: z and o are recorded while their ``.grad`` stays None, and the leaves get what they get without Kedge."""
    t, plain = dot_of_vectors(), dot_of_vectors()
    with kedge.session() as s:
        grads = s.hook({"z": t.z, "o": t.o}, kedge.record())
        t.o.backward()
    assert t.grads == [[1, 2, 3, 4], [1, 2, 3, 4], [4, 6, 8, 10]]
    assert lists(grads["z"], grads["o"]) == [[1, 2, 3, 4], 1]
    for middle in (t.z, t.o):
        assert not middle.retains_grad
        with pytest.warns(UserWarning, match="not a leaf"):
            assert middle.grad is None

    plain.z.retain_grad()
    plain.o.retain_grad()
    plain.o.backward()
    assert t.grads == plain.grads
    assert lists(grads["z"], grads["o"]) == lists(plain.z.grad, plain.o.grad)


def test_an_edited_gradient_goes_on_to_what_lies_before_the_tensor_only() -> None:
    """T2: z's gradient scaled by 2 doubles what x and y get; w, which is not behind z, gets the same as before."""
    t, plain = dot_of_vectors(), dot_of_vectors()
    with kedge.hook(t.z, kedge.scale(2)):
        t.o.backward()
    assert t.grads == [[2, 4, 6, 8], [2, 4, 6, 8], [4, 6, 8, 10]]

    plain.z.register_hook(lambda g: g * 2)
    plain.o.backward()
    assert t.grads == plain.grads


def test_scalars_are_recorded_and_edited_as_vectors_are() -> None:
    """T3: tensors without dimensions: x 4, y 4, w 5, z 4, o 1; with z scaled by 2, x 8, y 8, w 5."""
    t, plain = product_of_scalars(), product_of_scalars()
    with kedge.session() as s:
        grads = s.hook({"z": t.z, "o": t.o}, kedge.record())
        t.o.backward()
    assert t.grads == [4, 4, 5]
    assert lists(grads["z"], grads["o"]) == [4, 1]
    plain.o.backward()
    assert t.grads == plain.grads

    t, plain = product_of_scalars(), product_of_scalars()
    with kedge.hook(t.z, kedge.scale(2)):
        t.o.backward()
    assert t.grads == [8, 8, 5]
    plain.z.register_hook(lambda g: g * 2)
    plain.o.backward()
    assert t.grads == plain.grads


def rebind(grad: Tensor) -> None:
    """Look like an edit, and return nothing."""
    grad = grad * 2


def test_an_action_that_only_rebinds_its_argument_changes_nothing() -> None:
    """T4: what an action does not return does not count: z stays 4, and so do the leaves."""
    t, plain = product_of_scalars(), product_of_scalars()
    with kedge.session() as s:
        grads = s.hook({"z": t.z}, rebind, kedge.record())
        t.o.backward()
    assert grads["z"].item() == 4
    assert t.grads == [4, 4, 5]

    plain.z.register_hook(rebind)
    plain.o.backward()
    assert t.grads == plain.grads


@pytest.mark.parametrize("hooks", [1, 2], ids=["in one hook", "in two hooks"])
def test_an_action_sees_what_the_one_before_it_left(
    hooks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """T5: a print behind ``100 + g`` sees [101, 102, 103, 104], whether both stand in one hook or in two."""
    t, plain = dot_of_vectors(), dot_of_vectors()
    more = lambda g: 100 + g
    with kedge.session() as s:
        if hooks == 1:
            s.hook(t.z, more, print)
        else:
            s.hook(t.z, more)
            s.hook(t.z, print)
        t.o.backward()
    printed = shown(capsys)
    assert printed == "tensor([101., 102., 103., 104.])\n"
    assert t.grads == [[101, 102, 103, 104], [101, 102, 103, 104], [4, 6, 8, 10]]

    plain.z.register_hook(more)
    plain.z.register_hook(print)
    plain.o.backward()
    assert shown(capsys) == printed
    assert t.grads == plain.grads


def test_edits_and_observers_alternate_in_the_order_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """T6: double, print, halve, print on a leaf: the prints see [4, 8, 12], then [2, 4, 6], which is accumulated."""
    v, plain = leaf(1, 2, 3), leaf(1, 2, 3)
    with kedge.hook(v, kedge.scale(2), print, kedge.scale(0.5), print):
        (v**2).sum().backward()
    printed = shown(capsys)
    assert printed == "tensor([ 4.,  8., 12.])\ntensor([2., 4., 6.])\n"
    assert v.grad.tolist() == [2, 4, 6]

    for action in (lambda g: g * 2, print, lambda g: g / 2, print):
        plain.register_hook(action)
    (plain**2).sum().backward()
    assert shown(capsys) == printed
    assert torch.equal(v.grad, plain.grad)


def test_the_vector_of_a_vector_jacobian_product_is_the_gradient_that_an_action_sees() -> None:
    """T7: ``v.backward([1, 2, 3])`` hands that vector to the action on v itself; squared, it is accumulated."""
    v, plain, vector = leaf(0, 0, 0), leaf(0, 0, 0), torch.tensor([1.0, 2, 3])
    with kedge.hook(v, torch.square):
        v.backward(vector)
    assert v.grad.tolist() == [1, 4, 9]

    plain.register_hook(torch.square)
    plain.backward(vector)
    assert torch.equal(v.grad, plain.grad)
    assert vector.tolist() == [1, 2, 3]


def test_each_backward_is_recorded_by_itself_while_grad_accumulates() -> None:
    """T8: three backwards give three equal records; ``.grad`` doubles at the second, and is the first after zeroing."""
    inp, plain = (torch.eye(4, 5).requires_grad_() for _ in range(2))
    out, plain_out = ((t + 1).pow(2).t() for t in (inp, plain))
    ones, one_backward = torch.ones(5, 4), 2 + 2 * torch.eye(4, 5)
    accumulated, plainly = [], []
    with kedge.session() as s:
        grads = s.hook({"inp": inp}, kedge.record(keep=None))
        for zeroing in (False, False, True):
            inp.grad = None if zeroing else inp.grad
            out.backward(ones, retain_graph=True)
            accumulated.append(inp.grad.clone())
        for _, value in grads.records("inp"):
            assert torch.equal(value, one_backward)
        assert [event.backward for event, _ in grads.records("inp")] == [0, 1, 2]
    assert [
        torch.equal(g, k * one_backward) for g, k in zip(accumulated, (1, 2, 1), strict=True)
    ] == [True] * 3

    for zeroing in (False, False, True):
        plain.grad = None if zeroing else plain.grad
        plain_out.backward(ones, retain_graph=True)
        plainly.append(plain.grad.clone())
    assert all(map(torch.equal, accumulated, plainly))


class Chain(NamedTuple):
    """``c = a * b; e = c * d``."""

    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    e: Tensor

    @property
    def grads(self) -> dict[str, float]:
        """The gradients of all that retain one."""
        return {name: t.grad.item() for name, t in self._asdict().items()}


def chain() -> Chain:
    """Make the graph of T9, every tensor retaining its gradient."""
    a, b, d = leaf(2), leaf(3), leaf(4)
    c = a * b
    e = c * d
    c.retain_grad()
    e.retain_grad()
    return Chain(a, b, c, d, e)


def test_edits_all_over_a_graph_compose(capsys: pytest.CaptureFixture[str]) -> None:
    """T9: edits on the root, on a middle tensor and on a leaf; retained gradients show what was left after them."""
    t, plain = chain(), chain()
    with kedge.session() as s:
        s.hook(t.c, print, kedge.add(2))
        s.hook(t.c, print)
        s.hook(t.d, kedge.add(100))
        s.hook(t.e, kedge.scale(2))
        t.e.backward()
    printed = shown(capsys)
    assert printed == "tensor(8.)\ntensor(10.)\n"
    assert t.grads == {"a": 30, "b": 20, "c": 10, "d": 112, "e": 2}

    for tensor, action in (
        (plain.c, print),
        (plain.c, lambda g: g + 2),
        (plain.c, print),
        (plain.d, lambda g: g + 100),
        (plain.e, lambda g: g * 2),
    ):
        tensor.register_hook(action)
    plain.e.backward()
    assert shown(capsys) == printed
    assert t.grads == plain.grads


@pytest.mark.parametrize("removed", ["before", "after"])
def test_a_hook_removed_before_the_backward_takes_no_part_and_after_it_changes_nothing(
    removed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """T10: removing one hook of three takes its print and its edit out of the backwards that follow, and no others."""
    t, plain = chain(), chain()
    with kedge.session() as s:
        edit = s.hook(t.c, print, kedge.add(2))
        s.hook(t.c, print)
        s.hook(t.d, kedge.add(100))
        s.hook(t.e, kedge.scale(2))
        if removed == "before":
            edit.remove()
        t.e.backward()
        if removed == "after":
            edit.remove()
    printed = shown(capsys)
    if removed == "before":
        assert printed == "tensor(8.)\n"
        assert t.grads == {"a": 24, "b": 16, "c": 8, "d": 112, "e": 2}
    else:
        assert printed == "tensor(8.)\ntensor(10.)\n"
        assert t.grads == {"a": 30, "b": 20, "c": 10, "d": 112, "e": 2}

    first = [plain.c.register_hook(action) for action in (print, lambda g: g + 2)]
    plain.c.register_hook(print)
    plain.d.register_hook(lambda g: g + 100)
    plain.e.register_hook(lambda g: g * 2)
    for handle in first if removed == "before" else []:
        handle.remove()
    plain.e.backward()
    for handle in first:
        handle.remove()
    assert shown(capsys) == printed
    assert t.grads == plain.grads


def shared() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the graph of T11, in which the gradients of c and d are one memory: ``e = a * b + d``."""
    a, b, d = leaf(2), leaf(3), leaf(4)
    return a, b, d, a * b + d


def test_pitfall_an_edit_in_place_is_an_error_that_names_the_site() -> None:
    """T11: PyTorch alone lets an in-place edit spoil the other branch's gradient; Kedge raises, and nothing is accumulated."""
    a, b, d, e = shared()
    d.register_hook(lambda g: g.mul_(100))
    e.backward()
    assert lists(a.grad, b.grad) == [300, 200], (
        "the pitfall: both are a hundredfold, without a word"
    )

    a, b, d, e = shared()
    with pytest.raises(
        InPlaceEdit,
        match=r"at d:grad .*backward 0, .*changed the value in place.*return a new tensor",
    ):
        with kedge.hook({"d": d}, lambda g: g.mul_(100)):
            e.backward()
    assert (a.grad, b.grad, d.grad) == (None, None, None)
    assert not d._backward_hooks


def test_an_edit_that_returns_a_new_value_leaves_the_other_branch_alone() -> None:
    """T11: with ``return g * 100`` on d, a gets 3, b gets 2 and d gets 100."""
    a, b, d, e = shared()
    with kedge.hook({"d": d}, lambda g: g * 100):
        e.backward()
    assert lists(a.grad, b.grad, d.grad) == [3, 2, 100]

    plain = shared()
    plain[2].register_hook(lambda g: g * 100)
    plain[3].backward()
    assert lists(a.grad, b.grad, d.grad) == lists(*(t.grad for t in plain[:3]))


def regression() -> tuple[Tensor, Tensor, Tensor]:
    """Make the graph of T12: weights, a middle tensor and the loss."""
    torch.manual_seed(2)
    w, b = torch.randn(5, requires_grad=True), torch.randn(3, requires_grad=True)
    y = torch.ones(3, 5) @ w + b
    return w, y, (y**2).sum()


@pytest.mark.parametrize(
    ("factor", "at_y", "at_w"),
    [(1, [-1.8891, 0.5235, 0.4592], -0.9064), (2, [-3.7783, 1.0471, 0.9184], -1.8128)],
)
def test_a_gradient_doubled_in_the_middle_doubles_it_for_the_weights(
    factor: int, at_y: list[float], at_w: float
) -> None:
    """T12: y's gradient is recorded as it leaves y; doubled there, w's gradient is doubled too."""
    w, y, loss = regression()
    with kedge.session() as s:
        grads = s.hook({"y": y}, kedge.scale(factor), kedge.record())
        loss.backward()
    torch.testing.assert_close(grads["y"], torch.tensor(at_y), atol=5e-5, rtol=0)
    torch.testing.assert_close(w.grad, torch.full((5,), at_w), atol=5e-5, rtol=0)

    plain_w, plain_y, plain_loss = regression()
    plain_y.register_hook(lambda g: g * factor)
    plain_y.retain_grad()
    plain_loss.backward()
    assert torch.equal(grads["y"], plain_y.grad)
    assert torch.equal(w.grad, plain_w.grad)


def test_an_edit_acts_only_during_the_backward() -> None:
    """T13: doubling what is left in y.grad and in the record after the backward changes them, and not w.grad."""
    w, y, loss = regression()
    y.retain_grad()
    with kedge.session() as s:
        grads = s.hook({"y": y}, kedge.record())
        loss.backward()
    before = grads["y"].clone()
    y.grad *= 2
    torch.testing.assert_close(y.grad, torch.tensor([-3.7783, 1.0471, 0.9184]), atol=5e-5, rtol=0)
    torch.testing.assert_close(w.grad, torch.full((5,), -0.9064), atol=5e-5, rtol=0)
    assert torch.equal(grads["y"], before)

    plain_w, plain_y, plain_loss = regression()
    plain_y.retain_grad()
    plain_loss.backward()
    plain_y.grad *= 2
    assert torch.equal(y.grad, plain_y.grad)
    assert torch.equal(w.grad, plain_w.grad)


def test_a_gradient_taken_by_autograd_grad_fires_although_its_node_does_not_run() -> None:
    """T14: ``torch.autograd.grad(loss, [z])`` stops at z: the action on z edits what is returned, its node has no part."""
    t, plain = dot_of_vectors(), dot_of_vectors()
    s = kedge.session()
    s.hook({"z": t.z}, kedge.scale(2))
    s.hook(t.z.grad_fn, ":pre", print)
    (taken,) = torch.autograd.grad(t.o, inputs=[t.z])
    assert s.timeline().sites == ["z:grad"]
    with pytest.warns(NeverFiredWarning, match=r"AddBackward0:pre.*did not reach it"):
        s.end()
    assert taken.tolist() == [2, 4, 6, 8]
    assert [t.x.grad, t.y.grad, t.w.grad] == [None, None, None]

    plain.z.register_hook(lambda g: g * 2)
    plain.z.grad_fn.register_prehook(lambda g: pytest.fail("the node runs"))
    assert torch.equal(taken, torch.autograd.grad(plain.o, inputs=[plain.z])[0])


def test_accumulated_gradients_of_a_leaf_fire_once_per_backward() -> None:
    """T15: ``:acc`` sees ``.grad`` after each backward, accumulated: [1, 2], then [2, 4]; what it returns takes its place."""
    w, plain, x = leaf(5, 6), leaf(5, 6), torch.tensor([1.0, 2])
    with kedge.session() as s:
        grads = s.hook({"w": w}, ":acc", kedge.record(copy=True, keep=None))
        for _ in range(2):
            (w * x).sum().backward()
        records = grads.records("w:acc")
        assert lists(*(r.value for r in records)) == [[1, 2], [2, 4]]
        assert [r.event.backward for r in records] == [0, 1]
        s.hook(w, ":acc", kedge.zero())
        (w * x).sum().backward()
    assert w.grad.tolist() == [0, 0]

    seen: list[Any] = []
    plain.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    for _ in range(2):
        (plain * x).sum().backward()
    assert seen == lists(*(r.value for r in records))


def test_a_recorded_accumulated_gradient_outlives_the_next_backward() -> None:
    """T15: PyTorch adds to ``.grad`` in place; what was recorded stays what it was."""
    w = leaf(5, 6)
    with kedge.session() as s:
        grads = s.hook({"w": w}, ":acc", kedge.record(keep=None))
        w.sum().backward()
        assert grads["w"].tolist() == [1, 1]
        w.sum().backward()

    assert lists(*(r.value for r in grads.records("w"))) == [[1, 1], [2, 2]]


def test_accumulated_gradients_of_a_tensor_in_the_middle_are_refused() -> None:
    """T15: ``:acc`` on a tensor that is no leaf is an error that says what it is and what to use instead."""
    t = dot_of_vectors()
    message = r'"z:acc" is \.grad after accumulation, but z is not a leaf.*use "z:grad"'
    with pytest.raises(NoSuchKind, match=message):
        kedge.hook({"z": t.z}, ":acc", kedge.record())
    assert not t.z._backward_hooks
    with pytest.raises(RuntimeError):
        t.z.register_post_accumulate_grad_hook(print)


@pytest.mark.parametrize("kind", ["grad", "acc", "pre"])
def test_targets_without_names_of_their_own_are_told_apart(kind: str) -> None:
    """T14: of two tensors or nodes that nobody named each has a line in the ledger: the one not reached is not hidden."""
    v, w = leaf(1, 2), leaf(3, 4)
    doubled, idle = v * 2, w * 2
    targets = (doubled.grad_fn, idle.grad_fn) if kind == "pre" else (v, w)
    s = kedge.session(strict=True)
    for target in targets:
        s.hook(target, f":{kind}", lambda g: None)
    doubled.sum().backward()
    with pytest.raises(NeverFired, match="1 of 2 hooked sites"):
        s.end()


class Double(torch.autograd.Function):
    """Twice its input, with a diary of its backward runs."""

    diary: list[str]

    @staticmethod
    def forward(ctx: Any, w: Tensor, diary: list[str]) -> Tensor:
        ctx.diary = diary
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.diary.append("the node runs")
        return grad * 2, None


ORDER = [
    "z:grad, z.grad is empty",
    "DoubleBackward:pre[0], z.grad is filled",
    "the node runs",
    "DoubleBackward:post[0], z.grad is filled",
    "w:grad, w.grad is empty",
    "AccumulateGrad:pre[0], w.grad is empty",
    "w:acc, w.grad is filled",
]
"""One backward through z = Double(w); `retain_grad` of z is filled between z's own action and its node's first."""


def filled(tensor: Tensor, name: str) -> str:
    """Say whether a tensor's gradient is there yet."""
    return f"{name}.grad is {'empty' if tensor.grad is None else 'filled'}"


def graph(diary: list[str]) -> tuple[Tensor, Tensor]:
    """Make a leaf, and a tensor made of it that retains its gradient."""
    w = leaf(1, 2)
    z = Double.apply(w, diary)
    z.retain_grad()
    return w, z


@pytest.mark.parametrize(
    "backwards", [False, True], ids=["attached in order", "attached in reverse"]
)
def test_gradients_fire_in_the_order_of_the_timeline(backwards: bool) -> None:
    """T16: tensor action, retain_grad, node pre-action, node, node post-action; for a leaf, post-accumulate at the end.

    The order is PyTorch's own and does not depend on the order in which different kinds are
    attached. It is the node that fills a leaf's ``.grad``; what `retain_grad` fills is there before
    the node's first action.
    """
    diary: list[str] = []
    w, z = graph(diary)

    def write(about: Tensor, name: str) -> Callable[..., None]:
        return lambda value, event: diary.append(f"{event.site}, {filled(about, name)}")

    hooks = [
        ({"z": z}, ":grad", write(z, "z")),
        (z.grad_fn, ":pre", write(z, "z")),
        (z.grad_fn, ":post", write(z, "z")),
        ({"w": w}, ":grad", write(w, "w")),
        (get_gradient_edge(w), ":pre", write(w, "w")),
        ({"w": w}, ":acc", write(w, "w")),
    ]
    with kedge.session() as s:
        for target, selector, action in reversed(hooks) if backwards else hooks:
            s.hook(target, selector, action)
        z.sum().backward()
    assert diary == ORDER
    assert s.timeline().sites == [line.partition(",")[0] for line in ORDER if ":" in line]
    assert w.grad.tolist() == [2, 2]


def test_pytorch_alone_fires_in_the_same_order() -> None:
    """T16: the order that Kedge shows is the one of PyTorch's own hooks."""
    diary: list[str] = []
    w, z = graph(diary)
    edge = get_gradient_edge(w)
    note = lambda site, about, name: lambda *_: diary.append(f"{site}, {filled(about, name)}")
    w.register_post_accumulate_grad_hook(note("w:acc", w, "w"))
    edge.node.register_prehook(note("AccumulateGrad:pre[0]", w, "w"))
    w.register_hook(note("w:grad", w, "w"))
    z.grad_fn.register_hook(note("DoubleBackward:post[0]", z, "z"))
    z.grad_fn.register_prehook(note("DoubleBackward:pre[0]", z, "z"))
    z.register_hook(note("z:grad", z, "z"))
    z.sum().backward()
    assert diary == ORDER


def test_the_node_of_a_leaf_runs_its_post_action_after_post_accumulate() -> None:
    """T16: the post-action on the node that accumulates comes last, when ``.grad`` is there and post-accumulate has run."""
    diary: list[str] = []
    w, z = graph([])
    with kedge.session() as s:
        s.hook(get_gradient_edge(w), ":post", lambda g: diary.append(filled(w, "w")))
        s.hook({"w": w}, ":acc", lambda g: None)
        z.sum().backward()
        assert s.timeline().sites == ["w:acc", "AccumulateGrad:post[0]"]
    assert diary == ["w.grad is filled"]

    order: list[str] = []
    w, z = graph([])
    edge = get_gradient_edge(w)
    edge.node.register_hook(lambda *_: order.append("post"))
    w.register_post_accumulate_grad_hook(lambda _: order.append("acc"))
    z.sum().backward()
    assert order == ["acc", "post"]


def test_a_gradient_edge_narrows_what_arrives_at_its_node_and_not_what_leaves() -> None:
    """T16: on the second output of a node, ``:pre`` sees that output's gradient alone, ``:post`` all that leaves the node."""
    w = torch.ones(2, 2, requires_grad=True)
    first, second = (w * 1).unbind()
    seen: dict[str, Any] = {}
    with kedge.session() as s:
        for kind in (":pre", ":post"):
            s.hook(
                get_gradient_edge(second),
                kind,
                lambda g, event: seen.update({str(event.site): g.tolist()}),
            )
        (first + 2 * second).sum().backward()
    assert seen == {"UnbindBackward0:pre[1]": [2, 2], "UnbindBackward0:post[0]": [[1, 1], [2, 2]]}

    plain = torch.ones(2, 2, requires_grad=True)
    first, second = (plain * 1).unbind()
    arrived: list[Any] = []
    left: list[Any] = []
    second.grad_fn.register_prehook(arrived.extend)
    second.grad_fn.register_hook(lambda grad_inputs, grad_outputs: left.extend(grad_inputs))
    (first + 2 * second).sum().backward()
    assert list(seen.values()) == [arrived[1].tolist(), left[0].tolist()]


@pytest.mark.parametrize("kind", ["grad", "pre", "post", "acc"])
def test_actions_of_one_kind_run_in_the_order_of_attachment(kind: str) -> None:
    """T16: three hooks of one kind on one place fire first, second, third, each on what the one before left.

    What z retained shows the edits of actions on z, and not those on its node.
    """
    w, z = graph([])
    target: Any = {"grad": {"z": z}, "pre": z.grad_fn, "post": z.grad_fn, "acc": {"w": w}}[kind]

    def first(value: Tensor) -> Tensor:
        return value + 1

    def second(value: Tensor) -> Tensor:
        return value * 10

    def third(value: Tensor) -> None:
        seen.append(value.tolist())

    seen: list[Any] = []
    with kedge.session() as s:
        for action in (first, second, third):
            s.hook(target, f":{kind}", action)
        z.sum().backward()
        labels = [label.rpartition(".")[2] for _, label in s.timeline()]
    assert labels == ["first", "second", "third"]
    arrives = 1 if kind in ("grad", "pre") else 2
    assert seen == [[(arrives + 1) * 10] * 2]
    assert z.grad.tolist() == ([20, 20] if kind == "grad" else [1, 1])
    assert w.grad.tolist() == [(arrives + 1) * 10 * (2 if kind in ("grad", "pre") else 1)] * 2
