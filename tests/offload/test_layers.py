"""A module in the place of a layer: `kedge.offload(layer)`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import OffloadError
from kedge.hooks.placing.stand_in import around_of
from kedge.offload.offload import Offload
from kedge.offload.outcomes import OffloadAccount
from tests.threaded import in_threads, replicas_of

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def moved(layer: nn.Module, **options: Any) -> Offload:
    """Return a layer whose saved tensors all move to a file."""
    return kedge.offload(layer, to=kedge.Disk(rebuild=False), min_bytes=1, **options)


def block() -> nn.Sequential:
    """Return a layer with layers inside."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 8))


class Net(nn.Module):
    """A model with a block in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8)
        self.middle = middle
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each row."""
        y: Tensor = self.last(self.middle(self.first(x).relu()))
        return y


def step(
    model: Callable[[Tensor], Tensor], params: Iterator[nn.Parameter] | None = None
) -> list[Tensor]:
    """Return the output and all gradients of one step."""
    owned = list(model.parameters() if params is None else params)  # type: ignore[attr-defined]
    for param in owned:
        param.grad = None
    out = model(X)
    out.pow(2).sum().backward()
    return [out.detach(), *(param.grad.clone() for param in owned if param.grad is not None)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are the same, bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def nets() -> tuple[Net, Net]:
    """The same model without and with an offloaded block."""
    return Net(block()), Net(moved(block()))


def account_of(net: Net) -> OffloadAccount:
    """Return the account of the block in the middle."""
    made: OffloadAccount = net.middle.account
    return made


def test_a_layer_stands_where_it_stood_before(nets: tuple[Net, Net]) -> None:
    """Names of modules, parameters, buffers and of the state are those without Kedge, and so are output and gradients."""
    plain, net = nets
    for of in ("named_modules", "named_parameters", "named_buffers", "named_children"):
        assert [name for name, _ in getattr(net, of)()] == [
            name for name, _ in getattr(plain, of)()
        ]
    assert list(net.state_dict()) == list(plain.state_dict())
    assert net.state_dict()._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
    assert equal(step(plain), step(net))
    assert account_of(net).total.moved
    assert [tensor.tolist() for tensor in net.buffers()] == [
        tensor.tolist() for tensor in plain.buffers()
    ]


def test_a_checkpoint_loads_both_ways(nets: tuple[Net, Net]) -> None:
    """A state dict of either model loads into the other, strictly, also with ``assign``."""
    plain, net = nets
    step(plain)
    for param in plain.parameters():
        param.data += 0.5
    for assign in (False, True):
        assert not any(net.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign))
        assert equal(list(net.state_dict().values()), list(plain.state_dict().values()))
    net.middle[0].weight.data += 1
    assert not any(plain.load_state_dict(net.state_dict()))
    assert equal(step(plain), step(net))


def test_a_container_takes_it() -> None:
    """`Sequential`, `ModuleList` and `ModuleDict` take it, and a container itself can be offloaded."""
    net = nn.Sequential(nn.Linear(8, 8), moved(nn.Linear(8, 8)))
    assert list(net.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(nn.ModuleDict({"one": moved(block())}).one) == 4
    layers = moved(nn.ModuleList([nn.Linear(8, 8)]))
    layers.append(nn.Linear(8, 8))
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Linear]
    step(net)
    assert net[1].account.total.packs


def test_it_is_of_the_layer_s_class() -> None:
    """What a program asks of a layer's class, its length or its attributes has the layer's answer."""
    layer = nn.Linear(8, 4)
    wrapped = moved(layer)
    assert isinstance(wrapped, nn.Linear)
    assert isinstance(wrapped, Offload)
    assert not isinstance(wrapped, nn.Conv2d)
    assert wrapped.weight is layer.weight
    assert (wrapped.in_features, wrapped.out_features) == (8, 4)
    assert type(layer) is nn.Linear
    assert type(wrapped).__name__ == "Linear"


def test_a_layer_s_class_still_makes_layers() -> None:
    """A slice of a container, and what a layer makes by ``type(self)``, is a plain layer."""

    class Growing(nn.Linear, ABC):
        def grown(self) -> Growing:
            return type(self)(self.in_features, 2 * self.out_features)

        @abstractmethod
        def name(self) -> str:
            """Return a name."""

    class Named(Growing):
        def name(self) -> str:
            return "named"

    grown = moved(Named(8, 4)).grown()
    assert (type(grown), grown.out_features) == (Named, 8)
    part = moved(block())[1:3]
    assert type(part) is nn.Sequential
    assert list(part.state_dict()) == list(block()[1:3].state_dict())
    assert type(moved(nn.ModuleList([nn.ReLU()]))[:1]) is nn.ModuleList


def test_it_shows_what_it_wraps() -> None:
    """The text is the call that makes it, with the settings that differ from the defaults."""
    assert (
        repr(kedge.offload(nn.Linear(3, 2)))
        == "kedge.offload(Linear(in_features=3, out_features=2, bias=True))"
    )
    nested = kedge.offload(kedge.offload(nn.Identity(), codec="bf16"), min_bytes="1 KB")
    assert (
        repr(nested) == "kedge.offload(kedge.offload(Identity(), codec='bf16'), min_bytes='1 KB')"
    )
    assert "(1): kedge.offload(ReLU(), to=Cpu(rebuild=True, pin=True))" in repr(
        nn.Sequential(nn.ReLU(), kedge.offload(nn.ReLU(), to=kedge.Cpu()))
    )


def test_changes_go_to_the_layer() -> None:
    """Mode, dtype, `apply`, hooks and attributes are the layer's: one state, under two objects."""
    layer = block()
    net = Net(moved(layer))
    net.eval()
    assert not any(module.training for module in layer.modules())
    net.double()
    assert {param.dtype for param in layer.parameters()} == {torch.float64}
    net.middle.requires_grad_(requires_grad=False)
    assert not any(param.requires_grad for param in layer.parameters())
    seen: list[type] = []
    net.apply(
        lambda module: seen.append(type(module)) if isinstance(module, nn.Sequential) else None
    )
    assert len(seen) == 1
    net.middle.note = "kept"
    assert layer.note == "kept"
    del net.middle.note
    assert not hasattr(layer, "note")
    net.middle[0].weight = nn.Parameter(torch.zeros(8, 8))
    assert not layer[0].weight.any()


def test_a_recurrent_layer_moves_as_a_whole() -> None:
    """A class with its own `_apply` and `__setattr__` keeps its lists of weights right."""
    lstm = nn.LSTM(8, 8)
    wrapped = moved(lstm).double()
    out = wrapped(X.double())[0]
    out.sum().backward()
    assert torch.equal(out, lstm(X.double())[0])
    assert lstm._flat_weights[0] is lstm.weight_ih_l0


def test_the_layer_itself_is_not_offloaded() -> None:
    """A call of the layer is as it was, with nothing left on it by calls of the stand-in."""
    layer = block()
    wrapped = moved(layer)
    step(wrapped)
    packs = wrapped.account.total.packs
    step(layer)
    assert packs
    assert wrapped.account.total.packs == packs
    assert all(
        not module._forward_hooks and not module._forward_pre_hooks for module in layer.modules()
    )


def test_hooks_of_the_program_fire_once() -> None:
    """A hook on the layer or on the stand-in fires once in each call of either."""
    layer = nn.Linear(8, 8)
    wrapped, calls = moved(layer), list[str]()
    layer.register_forward_hook(lambda *_: calls.append("layer"))
    wrapped.register_forward_pre_hook(lambda *_: calls.append("wrapped"))
    wrapped(X)
    assert calls == ["wrapped", "layer"]
    layer(X)
    assert calls == ["wrapped", "layer"] * 2


def test_selectors_name_the_layer_s_place(nets: tuple[Net, Net]) -> None:
    """Kedge's own sites read as without the stand-in, and hooks at them fire."""
    plain, net = nets
    assert str(kedge.sites(net)) == str(kedge.sites(plain))
    with kedge.hook(net, "middle:out, middle.*:out", kedge.record()) as records:
        step(net)
    assert records["middle.3"] is not None
    assert records["middle"].shape == (16, 8)
    assert account_of(net).total.moved


def test_a_copy_offloads_by_itself(nets: tuple[Net, Net]) -> None:
    """Deep and shallow copies and pickles have the settings, and an account of their own."""
    plain, net = nets
    expected = step(plain)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin.middle, Offload)
        assert repr(twin) == repr(net)
        assert twin.middle[0].weight is not net.middle[0].weight
        assert equal(step(twin), expected)
        assert account_of(twin).total.moved
    assert not account_of(net).total.packs
    shallow = copy.copy(net.middle)
    shallow.extra = 1
    assert shallow[0] is net.middle[0]
    assert not hasattr(net.middle, "extra")


def test_copies_of_a_hooked_layer_have_no_hooks() -> None:
    """While Kedge's hooks are on the layer or on the stand-in, copies and pickles of both are clean, and of their kind."""
    layer = block()
    wrapped = moved(layer)
    for hooked in (layer, wrapped):
        with kedge.hook(hooked, "**:out", kedge.record()):
            wrapped(X)
            for make in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
                one, other = make(wrapped), make(layer)
                assert isinstance(one, Offload)
                assert type(other) is nn.Sequential
                assert not any(m._forward_hooks for twin in (one, other) for m in twin.modules())


def test_a_copy_of_a_circle_ends() -> None:
    """A layer that leads back to its stand-in can be copied and pickled."""
    layer = nn.Linear(8, 8)
    wrapped = moved(layer)
    layer.around = [wrapped]
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert twin.around[0] is twin


def test_replicas_offload_too() -> None:
    """Replicas, as `DataParallel` makes them, run in threads, and what they save is offloaded."""
    net = nn.Sequential(nn.Linear(8, 8), moved(block()[:2]))
    replicas = replicas_of(net, 3)
    expected, outs = net(X).detach(), list[Tensor]()
    before = net[1].account.total.moved["disk"].number
    assert before
    in_threads(*(lambda twin=twin: outs.append(twin(X)) for twin in replicas))  # type: ignore[misc]
    assert all(torch.equal(out, expected) for out in outs)
    torch.stack(outs).sum().backward()
    assert net[1].account.total.moved["disk"].number >= 4 * before
    assert net[0].weight.grad is not None
    assert equal(step(nn.DataParallel(net)), step(net))


@pytest.mark.parametrize("around", [False, True])
def test_compiled_code_runs_through_it(nets: tuple[Net, Net], around: bool) -> None:
    """A compiled model with an offloaded layer, and an offloaded compiled model, have the same results."""
    plain, net = nets
    expected = step(plain)
    if around:
        compiled: Any = moved(torch.compile(Net(block()), backend="aot_eager"))  # type: ignore[arg-type]
        owned = compiled.parameters()
    else:
        compiled, owned = torch.compile(net, backend="aot_eager"), net.parameters()
    with pytest.warns(kedge.errors.SavedAside) if around else nullcontext():
        found = step(compiled, owned)
    assert all(map(torch.allclose, found, expected))
    torch.compiler.reset()


def test_stand_ins_nest_and_open_blocks() -> None:
    """A stand-in can be offloaded again, called in a block, and be a block itself."""
    layer = block()
    expected = step(layer)
    inner = kedge.offload(layer, min_bytes=1)
    outer = moved(inner)
    assert equal(step(outer), expected)
    assert inner.account.total.rebuilt
    assert outer.account.total.moved
    assert isinstance(pickle.loads(pickle.dumps(outer)), Offload)
    with moved(Net(inner)) as account:
        assert equal(step(inner), expected)
    assert account.total.packs
    with outer as account:
        assert equal(step(layer), expected)
    assert account is outer.account


def test_a_checkpointed_stand_in_is_right() -> None:
    """Under activation checkpointing, around it or inside, the gradients are those of the layer."""
    layer = block()[:2]
    expected = step(layer)
    wrapped = moved(layer)
    for reentrant in (False, True):
        inputs = X.clone().requires_grad_()
        wrapped.zero_grad()
        checkpoint(wrapped, inputs, use_reentrant=reentrant).pow(2).sum().backward()
        assert equal([param.grad for param in layer.parameters()], expected[1:])


def test_a_lazy_layer_becomes_what_it_is() -> None:
    """A lazy module's first call gives layer and stand-in the final class."""
    layer = nn.LazyLinear(4)
    wrapped = moved(layer)
    assert wrapped(X).shape == (16, 4)
    assert type(layer) is nn.Linear
    assert isinstance(wrapped, Offload)
    assert not isinstance(wrapped, nn.LazyLinear)
    assert "in_features=8" in repr(wrapped)


def test_a_layer_can_be_parametrized_before_and_after() -> None:
    """`parametrize` works on both; a stand-in that it has changed can be copied, and says why it cannot be pickled."""
    torch.manual_seed(0)
    before = moved(parametrizations.orthogonal(nn.Linear(8, 8)))
    after = moved(nn.Linear(8, 8))
    parametrizations.orthogonal(after)
    for wrapped in (before, after):
        assert list(wrapped.state_dict()) == list(
            parametrizations.orthogonal(nn.Linear(8, 8)).state_dict()
        )
        step(wrapped)
        assert wrapped.account.total.moved
        assert torch.equal(copy.deepcopy(wrapped)(X), wrapped(X))
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(before)
    with pytest.raises(
        pickle.PicklingError, match="parametrize or shard the layer before you wrap it"
    ):
        pickle.dumps(after)


def test_the_layer_s_class_hears_nothing_of_it() -> None:
    """A class that lists its subclasses, or cleans up at its end, does neither for a stand-in."""
    heard: list[str] = []

    class Listed(nn.Linear):
        def __init_subclass__(cls) -> None:
            heard.append(cls.__name__)

        def __del__(self) -> None:
            heard.append("end")

    layer = Listed(2, 2)
    wrapped = moved(layer)
    del wrapped
    gc.collect()
    assert heard == []
    del layer
    assert heard == ["end"]


def test_an_attribute_account_of_the_layer_is_its_own() -> None:
    """A layer's own attribute, parameter or module of this name comes first."""
    layer = nn.Linear(2, 2)
    wrapped = moved(layer)
    assert isinstance(wrapped.account, OffloadAccount)
    wrapped.account = nn.Linear(2, 2)
    assert wrapped.account is layer.account  # type: ignore[comparison-overlap]
    del wrapped.account
    layer.account = 3
    assert wrapped.account == 3  # type: ignore[comparison-overlap]


def test_it_is_freed_with_its_last_reference() -> None:
    """A stand-in, and the file of its offload, do not wait for the garbage collector."""
    wrapped = moved(nn.Linear(8, 8))
    step(wrapped)
    ends = [weakref.ref(wrapped), weakref.ref(around_of(wrapped))]
    gc.disable()
    try:
        del wrapped
        assert [end() for end in ends] == [None] * 2
    finally:
        gc.enable()


def test_a_class_with_slots_is_refused() -> None:
    """State outside of ``__dict__`` cannot be shared: the error names the remedy."""

    class Slotted(nn.Module):
        __slots__ = ("more",)

    with pytest.raises(OffloadError, match=r"cannot wrap a Slotted.*with kedge\.offload\(\):"):
        kedge.offload(Slotted())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_takes_the_layer_alone() -> None:
    """And leaves the model as it was."""
    model, x = (
        nn.Sequential(kedge.offload(nn.Linear(8, 8), min_bytes=0), nn.ReLU()),
        torch.randn(2, 8),
    )

    assert torch.equal(torch.jit.script(model)(x), model(x))
    assert torch.equal(torch.jit.script(model[0])(x), model[0](x))
