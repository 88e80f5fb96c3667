"""A parameter that is edited for one forward: the model works with the edited value, and is itself again after the call."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import (
    ActionDisabled,
    ActionError,
    CannotCompile,
    EditError,
    EditNotRepeated,
    InPlaceEdit,
)
from kedge.hooks.gates import edited_parameters
from tests.threaded import in_threads, replicas_of


class Tied(nn.Module):
    """An embedding whose weight is that of the head, and is read by the forward, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4)
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) @ self.words.weight + self.words(torch.arange(3))
        return self.head(h)


class Attends(nn.Module):
    """Attention, which reads the weights of a module inside it that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() / 2


def parametrized() -> nn.Module:
    """Return a model with a parametrized weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrize.register_parametrization(model[0], "weight", Halved())
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a weight": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), "0.weight"),
    "a bias": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), "2.bias"),
    "of the model itself": (lambda: nn.Linear(4, 4), "weight"),
    "of a norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "1.weight"),
    "tied": (Tied, "words.weight"),
    "of attention": (Attends, "attention.out_proj.weight"),
    "in attention": (Attends, "attention.in_proj_weight"),
    "parametrized": (parametrized, "0.parametrizations.weight.original"),
}
EDITS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "zero": (kedge.zero(), torch.zeros_like),
    "scale": (kedge.scale(0.5), lambda value: value * 0.5),
    "clamp": (kedge.clamp(-0.1, 0.1), lambda value: value.clamp(-0.1, 0.1)),
    "function": (lambda value: value.sin() * value, lambda value: value.sin() * value),
    "tensor": (kedge.replace(lambda value: value.detach() + 1), lambda value: value.detach() + 1),
}


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """No note on an edit outlives its call."""
    yield
    assert edited_parameters._standing == {}


def made(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return all that comes of a forward and a backward."""
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    out = forward(x)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **grads}


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("model", MODELS)
def test_outputs_and_gradients_are_those_of_functional_call(model: str, edit: str) -> None:
    """To the bit, and the parameter is the same object with the same content, also for its optimizer."""
    make, name = MODELS[model]
    action, change = EDITS[edit]
    torch.manual_seed(0)
    net = make()
    twin = copy.deepcopy(net)
    param = net.get_parameter(name)
    before = pickle.dumps(net.state_dict())
    changed = change(twin.get_parameter(name))
    expected = made(twin, lambda x: functional_call(twin, {name: changed}, (x,)))

    with kedge.hook(net, f"{name}:param", action):
        found = made(net, net)
        assert net.get_parameter(name) is param
        assert {**dict(net.named_parameters())}.keys() == {**dict(twin.named_parameters())}.keys()

    assert alike(found, expected)
    if model != "of a norm":  # its buffers follow the input
        assert pickle.dumps(net.state_dict()) == before
    assert made(net, net).keys() == made(twin, twin).keys()


def test_a_recurrent_module_works_with_the_edit() -> None:
    """It keeps its weights in a list of its own."""
    torch.manual_seed(0)
    net, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.weight_hh_l0.mul_(0.5)
    with kedge.hook(net, "weight_hh_l0:param", kedge.scale(0.5)):
        out, _ = net(x)
        out.sum().backward()
    expected, _ = twin(x)
    expected.sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(net.weight_hh_l0.grad, twin.weight_hh_l0.grad * 0.5)
    assert any(held is net.weight_hh_l0 for held in net._flat_weights)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_a_hook_computes_follows_the_edit_or_it_is_an_error() -> None:
    """The hook runs before the forward of its module: the edit must have begun by then."""
    torch.manual_seed(0)
    layer, x = nn.utils.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    net = nn.Sequential(layer)
    plain = layer(x) - layer.bias
    with kedge.hook(net, "0.weight_g:param", kedge.scale(2)):
        torch.testing.assert_close(net(x) - layer.bias, plain * 2)
    with pytest.raises(EditError, match='has already computed "weight" from it'):
        with kedge.hook(layer, "weight_g:param", kedge.scale(2)):
            layer(x)
    torch.testing.assert_close(layer(x) - layer.bias, plain)


def test_training_moves_the_parameter_and_not_the_edit() -> None:
    """An optimizer made before holds the parameter all the time; hooks on gradients fire as ever."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, twin)]
    with kedge.session() as s:
        s.hook(net, "0.weight:param", kedge.scale(0.5))
        grads = s.hook(net, "0.weight:param.grad", kedge.record(keep=None))
        for _ in range(3):
            net(x).square().sum().backward()
            weights = {"0.weight": twin[0].weight * 0.5}
            functional_call(twin, weights, (x,)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert len(grads.records("0.weight:param.grad")) == 3
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    assert optimizers[0].param_groups[0]["params"][0] is net[0].weight


def test_actions_run_in_order_and_observers_see_what_is_there() -> None:
    """In one session and over several, before, between and after edits."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    weight, site = net[0].weight.detach().clone(), "0.weight:param"
    with kedge.session() as one, kedge.session() as two:
        seen = [one.hook(net, site, kedge.record())]
        one.hook(net, site, kedge.scale(2))
        seen += [two.hook(net, site, kedge.record()), one.hook(net, site, kedge.record())]
        two.hook(net, site, kedge.add(1), lambda value: None)
        seen += [one.hook(net, site, kedge.record()), two.hook(net, site, kedge.record())]
        net(x)
        values = [each[site] for each in seen]
    doubled = weight * 2
    for value, expected in zip(
        values, [weight, doubled, doubled, doubled + 1, doubled + 1], strict=True
    ):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["edit", "forward"])
def test_an_error_restores_the_parameter(where: str, error: type[BaseException]) -> None:
    """Also an interrupt, for which PyTorch calls no hook."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    plain, weight = net(x), net[0].weight
    session = kedge.session()

    def fails(*_: Any) -> None:
        raise error("as asked")

    session.hook(net, "0.weight:param", kedge.scale(2))
    if where == "edit":
        session.hook(net, "0.bias:param", fails)
    else:
        net[1].register_forward_hook(fails)
    with pytest.raises((error, ActionError), match="as asked"):
        net(x)
    assert net[0].weight is weight
    session.end(quiet=True)
    net[1]._forward_hooks.clear()
    assert torch.equal(net(x), plain)


def test_a_failed_edit_can_be_switched_off() -> None:
    """Where failures are warnings, the parameter is used as it is."""
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    plain = net(x)
    with pytest.warns(ActionDisabled), kedge.session(on_error="warn") as s:
        s.hook(net, "weight:param", lambda value: value[:1])
        assert torch.equal(net(x), plain)
        s.end(quiet=True)


def test_what_cannot_stand_there_is_an_error() -> None:
    """A value of another shape, unless that is asked for, and a change in place."""
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(EditError, match=re.escape("use kedge.replace(..., reshape=True)")):
        with kedge.hook(net, "weight:param", lambda value: value[:2]):
            net(x)
    with pytest.raises(ActionError, match="weight:param .*used in an in-place operation"):
        with kedge.hook(net, "weight:param", lambda value: value.mul_(1)):
            net(x)
    with torch.no_grad(), pytest.raises(InPlaceEdit):
        with kedge.hook(net, "weight:param", lambda value: value.mul_(1)):
            net(x)
    half = kedge.replace(lambda value: value[:2], reshape=True)
    with kedge.session() as s:
        s.hook(net, "weight:param", half)
        s.hook(net, "bias:param", half)
        assert net(x).shape == (3, 2)


def test_a_part_that_is_called_by_itself_has_the_edit() -> None:
    """The outermost call of a module that has the parameter inside is its pass."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh()), torch.randn(3, 4)
    weight = net[0][0].weight
    expected = nn.functional.linear(x, weight * 2, net[0][0].bias)
    with kedge.hook(net, "0.0.weight:param", kedge.scale(2)) as hooked:
        assert torch.equal(net[0][0](x), expected)
        assert torch.equal(net[0](x), expected)
        assert torch.equal(net(x), expected.tanh())
        assert [row.fired for row in hooked.session.ledger()] == [3]


def test_a_schedule_and_the_end_of_a_session_inside_a_pass() -> None:
    """Only some steps have the edit; a session that ends in a pass leaves the parameter as it was."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    plain, weight = net(x), net[0].weight
    with kedge.hook(net, "0.weight:param", kedge.zero(), when=kedge.at(1)):
        outs = [net(x) for _ in range(3)]
    assert [torch.equal(out, plain) for out in outs] == [True, False, True]

    session = kedge.session()
    session.hook(net, "0.weight:param", kedge.zero())
    handle = net[0].register_forward_hook(lambda *_: session.end())
    net(x)
    handle.remove()
    assert net[0].weight is weight
    assert torch.equal(net(x), plain)


@pytest.mark.parametrize("around", ["block", "model"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_edits_again(reentrant: bool, around: str) -> None:
    """Gradients through a checkpoint are those of a model without one."""

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            if around == "model":
                return self.block(x)
            out: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return out

    torch.manual_seed(0)
    net = Wraps()
    twin = copy.deepcopy(net)
    name = "block.0.weight"
    edited = twin.block[0].weight * 0.5
    for part in (net, twin):
        part.zero_grad()
    weights = {"0.weight": edited}
    expected = made(twin, lambda x: functional_call(twin.block, weights, (x,)))
    forward: Any = net
    if around == "model":
        forward = lambda x: checkpoint(net, x, use_reentrant=reentrant)
    with kedge.hook(net, f"{name}:param", kedge.scale(0.5)):
        assert alike(made(net, forward), expected)


def test_an_edit_that_a_recompute_will_lack_is_told() -> None:
    """It is removed between the forward of a checkpoint inside the model and its backward."""

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, x, use_reentrant=False)
            return out

    net = Wraps()
    with pytest.warns(EditNotRepeated, match="block.0.weight:param was removed between"):
        with kedge.hook(net, "block.0.weight:param", kedge.scale(2)):
            loss = net(torch.randn(3, 4)).sum()
    loss.backward()
    with kedge.hook(net, "block.0.weight:param", kedge.scale(2)):
        net(torch.randn(3, 4)).sum().backward()


def test_two_threads_at_once_are_an_error_and_one_after_the_other_are_not() -> None:
    """A model that both call has one place for the parameter."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    plain, begun, done = net(x), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        begun.set()
        assert done.wait(30)

    def second() -> None:
        assert begun.wait(30)
        try:
            with pytest.raises(EditError, match="another thread is in a forward"):
                net(x)
        finally:
            done.set()

    handle = net[1].register_forward_hook(wait)
    with kedge.hook(net, "0.weight:param", kedge.scale(0.5)):
        in_threads(lambda: net(x), second)
        handle.remove()
        in_threads(lambda: net(x))
    assert torch.equal(net(x), plain)


def test_replicas_edit_their_own() -> None:
    """What `DataParallel` makes of a model has its own parameters, whose gradients sum up."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    expected = (x @ (net[0].weight * 0.5).T + net[0].bias).tanh()
    replicas = replicas_of(net, 2)
    outs: list[Tensor] = []
    with kedge.hook(net, "0.weight:param", kedge.scale(0.5)):
        call = [lambda r=replica: outs.append(r(x)) for replica in replicas]
        in_threads(*call)
    for out in outs:
        torch.testing.assert_close(out, expected)
    sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]
    grad = net[0].weight.grad.clone()
    net.zero_grad()
    (2 * expected).sum().backward()
    torch.testing.assert_close(grad, net[0].weight.grad)


def test_models_that_are_found_are_edited_in_their_first_call() -> None:
    """A hook on everywhere attaches while that call is in progress."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with kedge.hook("**{Linear}:param", kedge.zero()):
        assert not net(x).any()
        assert not net(x).any()
    assert net(x).any()


def test_copies_and_pickles_outside_of_a_pass_are_plain() -> None:
    """The hooks are concealed, and nothing else is there."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    plain, names, out = pickle.dumps(net), [{*vars(module)} for module in net.modules()], net(x)
    with kedge.hook(net, "0.weight:param", kedge.scale(2)):
        net(x)
        assert pickle.dumps(net) == plain
        assert torch.equal(copy.deepcopy(net)(x), out)
        assert [{*vars(module)} for module in net.modules()] == names
    assert pickle.dumps(net) == plain


def test_operations_of_the_model_are_still_its_own() -> None:
    """What Kedge puts around a forward is not in the way of other sites."""
    model = Tied()
    with kedge.session() as s:
        s.hook(model, "words.weight:param", kedge.scale(2))
        acts = s.hook(model, "/matmul, /matmul:in[1]", kedge.record())
        model(torch.randn(3, 4))
    assert torch.equal(acts["/matmul:in[1]"], model.words.weight * 2)


@pytest.mark.parametrize("late", [False, True])
def test_compiled_code_has_the_edit_or_says_that_it_cannot(late: bool) -> None:
    """Where the graph may break, the call with the edit runs uncompiled, and later ones are compiled as before."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    plain = net(x)
    expected = functional_call(net, {"0.weight": net[0].weight * 0.5}, (x,))
    for fullgraph in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
        if late:
            fast(x)
        session = kedge.session()
        with pytest.warns() if late else kedge.session():
            session.hook(fast, "0.weight:param", kedge.scale(0.5))
        if fullgraph:
            with pytest.raises((CannotCompile, Unsupported), match="edited inside compiled code"):
                fast(x)
        else:
            torch.testing.assert_close(fast(x), expected)
        session.end(quiet=True)
        torch.testing.assert_close(fast(x), plain)
    torch._dynamo.reset()


class Yielding(nn.Module):
    """Its forward runs when its output is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x * self.weight


class Awaited(Yielding):
    async def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    ("kind", "returned"), [(Yielding, "a generator"), (Awaited, "a coroutine")]
)
def test_a_forward_that_runs_after_its_call_is_an_error(
    kind: type[Yielding], returned: str
) -> None:
    """The parameter would be its own again before the forward reads it."""
    model = kind()
    weight = model.weight
    with (
        kedge.hook(model, "weight:param", kedge.scale(2)),
        pytest.raises(EditError, match=f"returns {returned}, which runs after the call"),
    ):
        model(torch.ones(2))

    assert model.weight is weight
