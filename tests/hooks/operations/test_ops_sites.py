"""Operations inside a forward as sites: what they are called, what is seen, what edits and gradients do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.errors import (
    ActionDisabled,
    EditError,
    KedgeError,
    NoSuchKind,
    NotRecorded,
    Overwritten,
    SeveralRecorded,
)
from kedge.testing import assert_hooks_restored, assert_same_bits, training_step


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Block(nn.Module):
    """A residual block with functional ReLUs, one of them after an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        y = self.b(y)
        y += x
        return F.relu(y)


class Net(nn.Module):
    """Two blocks in a list, and operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.view(-1).sum() * 2


def names_of(run: Callable[..., Any], *args: Any) -> list[str]:
    """Which operations a function makes, in order."""
    with kedge.session() as s:
        s.hook(Calls(run), "/*:out", lambda value: None)
        next(iter(s.targets.values())).held(*args)
        return [site.removeprefix("/").removesuffix(":out") for site in s.timeline().sites]


NAMES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "functional": (F.relu, "relu#0"),
    "of torch": (torch.relu, "relu#0"),
    "method": (lambda x: x.relu(), "relu#0"),
    "overload": (torch.ops.aten.relu.default, "relu#0"),
    "functional in place": (lambda x: F.relu_(x.clone()), "clone#0 relu_#0"),
    "method in place": (lambda x: x.clone().relu_(), "clone#0 relu_#0"),
    "operator": (lambda x: x + 1, "add#0"),
    "reflected": (lambda x: (1 + x, 1 - x, 2 / x, 2**x), "add#0 sub#0 div#0 pow#0"),
    "matmul": (lambda x: (x @ x.T, torch.matmul(x, x.T)), "T#0 matmul#0 T#1 matmul#1"),
    "comparison": (lambda x: x > 0, "gt#0"),
    "negation": (lambda x: ~(x > 0), "gt#0 invert#0"),
    "indexing": (lambda x: x[0], "getitem#0"),
    "view": (lambda x: x.view(-1), "view#0"),
    "several": (lambda x: x + 1 + 2 + 3, "add#0 add#1 add#2"),
    "made of nothing": (lambda x: torch.zeros(3), "zeros#0"),
    "chosen by an argument": (lambda x: F.max_pool2d(x[None], 2), "getitem#0 max_pool2d#0"),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x),
        "scaled_dot_product_attention#0",
    ),
    "conversion": (
        lambda x: (x.float(), x.to(torch.float64), x.bool(), x.int()),
        "float#0 to#0 bool#0 int#0",
    ),
    "properties": (lambda x: (x.mT, x.real), "mT#0 real#0"),
    "no tensors": (
        lambda x: (x.size(), x.dim(), x.shape, len(x), float(x.sum()), x.sum().item()),
        "sum#0 sum#1",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_an_operation_is_called_as_its_function(case: str) -> None:
    """Functions, methods and operators have the function's name and an index; what gives no tensor is none."""
    run, names = NAMES[case]
    assert names_of(run, torch.rand(2, 4)) == names.split()


def test_operators_in_place_end_in_an_underscore() -> None:
    """`x += 1` and its like are called as the methods that work in place, and an assignment to a part is setitem."""

    def run(x: Tensor) -> Tensor:
        x = x.clone()
        x += 1
        x *= 2
        x[0] = 3
        return x

    assert names_of(run, torch.rand(2, 4)) == ["clone#0", "add_#0", "mul_#0", "setitem#0"]


def test_observing_changes_no_bit() -> None:
    """Outputs, gradients, random numbers and state are equal with every operation recorded and measured."""
    net, x = Net(), torch.randn(3, 4)

    def loss(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(x)
        return out, out

    def watched(model: nn.Module) -> tuple[Tensor, Tensor]:
        with kedge.session() as s:
            for action in (kedge.record(), kedge.measure()):
                s.hook(model, "**/*:out, **/*:in, **/*:out.grad, **/*:in.grad", action)
            out = model(x)
            torch.autograd.backward(out, retain_graph=True)
            model.zero_grad()
        return out, out

    with assert_hooks_restored(net):
        assert_same_bits(training_step(net, loss), training_step(net, watched))


def test_a_value_is_read_by_its_name() -> None:
    """One operation of a name is read without an index; several are an error that lists them."""
    net, x = Net(), torch.randn(3, 4)
    with kedge.hook(net, "layers.0/*:out, /*:out", kedge.record()) as acts:
        out = net(x)
    block = net.layers[0]
    assert torch.equal(acts["layers.0/relu#0"], F.relu(block.a(x)))
    assert torch.equal(acts["/mul"], out)
    with pytest.raises(
        SeveralRecorded, match=r'read one of "layers\.0/relu#0:out", "layers\.0/relu#1:out"'
    ):
        acts["layers.0/relu"]
    with pytest.raises(NotRecorded, match="layers.0/gelu"):
        acts["layers.0/gelu"]
    with pytest.raises(NotRecorded):
        acts["layers.0"]


def test_a_module_and_its_operation_are_read_apart() -> None:
    """Recorded together, a module's output and an operation's of the same module have names of their own."""
    net, x = Net(), torch.randn(3, 4)
    with kedge.hook(net, "layers.0, layers.0/relu#0", kedge.record()) as acts:
        net(x)
    assert torch.equal(acts["layers.0/relu"], F.relu(net.layers[0].a(x)))
    assert torch.equal(acts["layers.0"], net.layers[0](x))


def test_a_shared_module_is_read_under_each_of_its_names() -> None:
    """Operations of a module that is registered twice are found under both names, and arguments keep their positions."""
    net, x = Net(), torch.randn(3, 4)
    net.again = net.layers[0]
    with kedge.hook(net, "again/*:out, again:in, again/add_:in", kedge.record()) as acts:
        net(x)
    assert torch.equal(acts["again/add_"], acts["layers.0/add_"])
    assert torch.equal(acts["again/add_:in[1]"], x)
    assert torch.equal(acts["again:in[0]"], x)


def test_measured_operations_are_read_by_name() -> None:
    """measure() has a row for each operation."""
    net, x = Net(), torch.randn(3, 4)
    with kedge.hook(net, "**/relu:out", kedge.measure()) as stats:
        net(x)
    assert stats["layers.0/relu#0"].max == pytest.approx(F.relu(net.layers[0].a(x)).max().item())


def test_leaves_are_results_and_arguments() -> None:
    """Results are named as a module's are, arguments by position or by their keyword."""
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    model = Calls(lambda x, y: torch.cat([x, torch.add(x, other=y)], dim=1).max(1).values)
    with kedge.hook(model, "/*:in, /*:out", kedge.record()) as acts:
        model(x, y)
    assert torch.equal(acts["/add:in[0]"], x)
    assert torch.equal(acts["/add:in[other]"], y)
    assert torch.equal(acts["/cat:in[0.1]"], x + y)
    values, indices = torch.cat([x, x + y], 1).max(1)
    assert torch.equal(acts["/max:out[0]"], values)
    assert torch.equal(acts["/max:out[1]"], indices)


def test_an_edit_takes_the_place_of_the_value() -> None:
    """What an action returns at :out or :in is what the program goes on with, in the order of the hooks."""
    net, x = Net(), torch.randn(3, 4)

    def edited(block: Block, x: Tensor) -> Tensor:
        y = block.b(F.relu(block.a(x)) * 3 + 1)
        return F.relu((y + x) * 2)

    with kedge.session() as s:
        s.hook(net, "layers.*/relu#0", lambda v: v * 3)
        s.hook(net, "layers.*/relu#0", lambda v: v + 1)
        s.hook(net, "layers.*/relu#1:in[0]", kedge.scale(2))
        out = net(x)
    y = x
    for layer in net.layers:
        y = edited(layer, y)
    assert torch.equal(out, y.view(-1).sum() * 2)


def test_the_order_of_actions_is_that_of_the_hooks() -> None:
    """Actions of a pattern and of a name run in the order in which they were attached, whichever is which."""
    order: list[str] = []
    model = Calls(torch.relu)
    with kedge.session() as s:
        for n, sites in enumerate(["/relu", "/*:out", "/relu#0", "/re*"]):
            s.hook(model, sites, lambda v, n=n: order.append(str(n)))
        model(torch.ones(2))
    assert order == ["0", "1", "2", "3"]


def test_a_gradient_is_the_one_that_autograd_gives() -> None:
    """Gradients at :out.grad and :in.grad are those of the tensors, and an edit changes what is behind."""
    w = torch.randn(3, 3, requires_grad=True)
    model = Calls(lambda x: F.relu(x @ w).sin().sum())
    x = torch.randn(2, 3)
    with kedge.hook(model, "/*:out.grad, /relu:in.grad", kedge.record()) as acts:
        model(x).backward()
    h = (x @ w).detach().requires_grad_()
    r = F.relu(h)
    r.retain_grad()
    r.sin().sum().backward()
    assert torch.equal(acts["/relu:out.grad"], r.grad)
    assert torch.equal(acts["/relu:in.grad[0]"], h.grad)
    assert torch.equal(acts["/matmul:out.grad"], h.grad)
    w.grad = None
    with kedge.hook(model, "/relu:out.grad", kedge.clamp(min=0)):
        model(x).backward()
    r2 = F.relu(h)
    assert torch.equal(w.grad, x.T @ torch.autograd.grad(r2, h, r.grad.clamp(min=0))[0])


def test_a_value_that_an_operation_overwrites_is_copied_first() -> None:
    """A recorded value that `+=` or an in-place ReLU overwrites reads as it was."""

    def run(x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        return F.relu(y, inplace=True)

    model, x = Calls(run), torch.tensor([-2.0, 1.0])
    with kedge.hook(model, "/*:out, /add_:in", kedge.record()) as acts:
        model(x)
    assert acts["/mul"].tolist() == [-4, 2]
    assert acts["/add_"].tolist() == [-3, 3]
    assert acts["/add_:in[0]"].tolist() == [-4, 2]
    assert acts["/relu"].tolist() == [0, 3]


def test_an_overwriting_that_is_not_seen_is_an_error() -> None:
    """What changes a recorded value outside of the hooked forward makes reading it an error."""
    model = Calls(lambda x: x * 2)
    with kedge.hook(model, "/mul", kedge.record()) as acts:
        model(torch.ones(2)).add_(1)
    with pytest.raises(Overwritten):
        acts["/mul"]


def test_an_assignment_is_an_operation() -> None:
    """`x[i] = v` shows the tensor that it changed; what is assigned can be edited, what is changed cannot."""

    def run(x: Tensor) -> Tensor:
        y = torch.zeros(3)
        y[1:] = x
        return y

    model = Calls(run)
    with kedge.hook(model, "/setitem:out, /setitem:in", kedge.record()) as acts:
        model(torch.ones(2))
    assert acts["/setitem:out"].tolist() == [0, 1, 1]
    with kedge.hook(model, "/setitem:in[2]", kedge.scale(5)):
        assert model(torch.ones(2)).tolist() == [0, 5, 5]
    for sites in ("/setitem:out", "/setitem:in[0]"):
        with kedge.hook(model, sites, kedge.scale(5)), pytest.raises(EditError, match="setitem"):
            model(torch.ones(2))


def test_an_edit_of_what_is_changed_in_place_is_refused() -> None:
    """The program goes on with the very tensor that `add_` changes, so another in its place would be lost."""
    model = Calls(lambda x: x.clone().add_(1))
    with (
        kedge.hook(model, "/add_:in[0]", kedge.scale(2)),
        pytest.raises(EditError, match="in place"),
    ):
        model(torch.ones(2))
    with kedge.hook(model, "/add_:out", kedge.scale(2)):
        assert model(torch.ones(2)).tolist() == [4, 4]


def test_an_edit_that_nothing_would_use_is_refused() -> None:
    """What a call in place returns on a line of its own goes nowhere; used, it takes the value's place."""

    def dropped(x: Tensor) -> Tensor:
        x = x * 1
        x.relu_()
        return x

    def dropped_function(x: Tensor) -> Tensor:
        x = x * 1
        F.relu(x, inplace=True)
        return x

    def used(x: Tensor) -> Tensor:
        x = x * 1
        x += 1
        F.relu(x.mul_(2), inplace=True).add_(1)
        return x.relu_() + 0

    for run, site in ((dropped, "/relu_"), (dropped_function, "/relu")):
        model = Calls(run)
        with (
            pytest.raises(EditError, match="ignores its result"),
            kedge.hook(model, site, kedge.scale(2)),
        ):
            model(torch.ones(2))
        with kedge.hook(model, site, kedge.record()) as acts:
            model(torch.ones(2))
        assert acts[site].tolist() == [1, 1]
    for site in ("/relu_", "/mul_", "/relu", "/add_#0"):
        model = Calls(used)
        with kedge.hook(model, site, kedge.scale(2)):
            model(torch.ones(2))


def test_an_operation_fires_once_for_each_action() -> None:
    """Terms that overlap do not run an action twice, and excluded operations do not run it at all."""
    model = Calls(lambda x: (x * 2).relu().view(-1))
    for sites in ("/relu, /*:out", "/*:out, /relu", "/r*, /relu#0, /*:out"):
        with kedge.session() as s:
            acts = s.hook(model, sites, kedge.record())
            model(torch.ones(2))
            assert len(acts.records("/relu")) == len(acts.records("/mul")) == 1
    with kedge.session() as s:
        s.hook(model, "/*:out, !/view, !/mul#0", kedge.record())
        model(torch.ones(2))
        assert s.timeline().sites == ["/relu#0:out"]


def test_schedules_and_calls_hold_for_operations() -> None:
    """A hook with a schedule, or of one call of a module, runs in those steps and calls alone."""
    inner = Calls(lambda x: x * 2)
    net = nn.Sequential(inner, inner)
    with kedge.session() as s:
        one = s.hook(net, "0#1/mul", kedge.record(keep=None))
        some = s.hook(net, "0/mul", kedge.record(keep=None), when=kedge.every(2))
        for _ in range(3):
            net(torch.ones(1))
    assert [r.event.call for r in one.records("0/mul")] == [1, 1, 1]
    assert [(r.event.pass_, r.event.call) for r in some.records("0/mul")] == [
        (0, 0),
        (0, 1),
        (2, 0),
        (2, 1),
    ]
    assert some.records("0#1/mul")[0].value.tolist() == [4]


def test_a_failing_action_has_its_place_in_the_message() -> None:
    """The error names the operation; a session that only warns goes on without the action."""
    model = Calls(torch.relu)
    with (
        pytest.raises(KedgeError, match=r"at /relu#0:out"),
        kedge.hook(model, "/relu", lambda v: 1 / 0),
    ):
        model(torch.ones(2))
    with kedge.session(on_error="warn") as s:
        s.hook(model, "/relu", lambda v: None)
        s.hook(model, "/relu", lambda v: 1 / 0)
        with pytest.warns(ActionDisabled, match=r"/relu#0:out"):
            assert model(torch.ones(2)).tolist() == [1, 1]


def test_error_if_stops_at_the_operation() -> None:
    """The first operation that makes a NaN is named."""
    model = Calls(lambda x: (x - 2).log().relu())
    with (
        pytest.raises(KedgeError, match="/log#0"),
        kedge.hook(model, "/*:out", kedge.error_if(kedge.nonfinite)),
    ):
        model(torch.ones(2))


def test_other_kinds_are_refused() -> None:
    """An operation has values and gradients on both sides, and nothing else."""
    for kind in ("saved", "in.share", "param"):
        with pytest.raises(NoSuchKind, match="an operation has no"):
            kedge.hook(Net(), f"layers.0/relu:{kind}", kedge.record())


def test_nothing_stays_when_the_hook_is_removed() -> None:
    """After a handle's removal no mode is pushed, and after the session nothing is left."""
    net = Net()
    with assert_hooks_restored(net), kedge.session() as s:
        acts = s.hook(net, "**/relu", kedge.record())
        acts.remove()
        depths: list[int] = []
        net.layers[0].a.register_forward_pre_hook(
            lambda *_: depths.append(torch._C._len_torch_function_stack())
        )
        handle = net.layers[0].register_forward_pre_hook(lambda *_: None)
        net(torch.randn(3, 4))
        handle.remove()
        net.layers[0].a._forward_pre_hooks.popitem()
    assert depths == [0]


def test_a_hook_that_fails_to_attach_leaves_no_mode_behind() -> None:
    """All or nothing: operations attached before an error in the same hook are gone."""
    net = Net()

    class Unbindable:
        def bind(self, site: Any) -> Any:
            raise RuntimeError(str(site))

    with kedge.session() as s:
        with assert_hooks_restored(net), pytest.raises(RuntimeError, match="layers.0/relu"):
            s.hook(net, "layers.0/relu", Unbindable())
        acts = s.hook(net, "layers.0/relu#0", kedge.record())
        net(torch.randn(3, 4))
    assert acts["layers.0/relu"].shape == (3, 4)


def test_a_paused_session_sees_no_operation() -> None:
    """Between pause and resume nothing fires and no hook is there; after it all is as before."""
    net, x = Net(), torch.randn(3, 4)
    with kedge.session() as s:
        acts = s.hook(net, "layers.0/relu#0", kedge.record(keep=None))
        net(x)
        s.pause()
        net(x)
        s.resume()
        net(x)
    assert len(acts.records("layers.0/relu")) == 2
