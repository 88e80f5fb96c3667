"""Values of modules: several calls, keyword arguments, structures, in-place work, and ways around a module."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.errors import ActionError, NeverFiredWarning, NotRecorded, Overwritten, SeveralRecorded


class Reuse(nn.Module):
    """Calls one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.fc(x).tanh()
        return x


def test_each_call_of_a_reused_module_has_its_value_and_gradient() -> None:
    """Three calls give three values and three gradients, each under its own index and each PyTorch's own."""
    model, x = Reuse(), torch.randn(2, 3)
    with kedge.session() as s:
        outs = s.hook(model, "fc", kedge.record())
        grads = s.hook(model, "fc:out.grad", kedge.record())
        ins = s.hook(model, "fc:in", kedge.record())
        model(x).sum().backward()

    values, h = [], x
    for _ in range(3):
        values.append(model.fc(h))
        values[-1].retain_grad()
        h = values[-1].tanh()
    h.sum().backward()
    for call, value in enumerate(values):
        assert torch.equal(outs[f"fc#{call}"], value)
        assert torch.equal(grads[f"fc#{call}:out.grad"], value.grad)
        assert torch.equal(grads[f"fc#{call}"], value.grad)
    assert torch.equal(ins["fc#0:in"], x)
    assert torch.equal(ins["fc#2:in[input]"], values[1].tanh())
    assert [r.event.call for r in outs.records("fc")] == [0, 1, 2]


def test_a_name_for_several_calls_is_an_error_that_lists_them() -> None:
    """Reading three calls as one names the three."""
    model = Reuse()
    with kedge.hook(model, "fc", kedge.record()) as acts:
        model(torch.randn(2, 3))
    with pytest.raises(SeveralRecorded) as caught:
        acts["fc"]

    assert (
        str(caught.value)
        == '"fc" matches 3 recorded values; read one of "fc#0:out", "fc#1:out", "fc#2:out"'
    )


@pytest.mark.parametrize("call", [0, 1, 2])
def test_an_edit_of_one_call_leaves_the_others(call: int) -> None:
    """`fc#k` selects the call in forward and in backward, as the same edit by hand does."""
    model, x = Reuse(), torch.randn(2, 3)
    with kedge.session() as s:
        s.hook(model, f"fc#{call}", kedge.scale(2))
        s.hook(model, f"fc#{call}:out.grad", kedge.scale(3))
        out = model(x)
        out.sum().backward()

    twin, h = Reuse(), x
    twin.load_state_dict(model.state_dict())
    for i in range(3):
        h = twin.fc(h)
        if i == call:
            h = h * 2
            h.register_hook(lambda g: g * 3)
        h = h.tanh()
    h.sum().backward()
    assert torch.equal(out, h)
    assert torch.equal(model.fc.weight.grad, twin.fc.weight.grad)


class Scorer(nn.Module):
    """Takes its arguments by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, *, query: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        scored = (query * self.w * scale).sum(-1)
        return scored if mask is None else scored * mask


class Keywords(nn.Module):
    """Calls a child with keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Scorer()

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        return self.child(query=h, mask=torch.ones(2), scale=2.0) + h.sum(-1)


def test_a_child_called_with_keywords_has_inputs_gradients_and_shares() -> None:
    """Inputs given by keyword are values by name; their total gradient and the child's share are right."""
    model, x = Keywords(), torch.randn(2, 3, requires_grad=True)
    with kedge.session() as s:
        ins = s.hook(model, "child:in", kedge.record())
        grad = s.hook(model, "child:in.grad[query]", kedge.record())
        share = s.hook(model, "child:in.share[query]", kedge.record())
        model(x).sum().backward()

    expected = (model.child.w.detach() * 2.0).expand(2, 3)
    assert torch.equal(ins["child:in[query]"], x.detach() * 2)
    assert torch.equal(ins["child:in[mask]"], torch.ones(2))
    assert torch.equal(share["child:in.share"], expected)
    assert torch.equal(grad["child:in.grad"], expected + 1)


def test_an_argument_given_by_keyword_can_be_edited() -> None:
    """An edit of `in[query]` is what the child computes with."""
    model, x = Keywords(), torch.randn(2, 3)
    with kedge.hook(model, "child:in[query]", kedge.zero()):
        out = model(x)

    assert torch.equal(out, (x * 2).sum(-1))


def test_a_position_and_a_name_mean_the_same_argument() -> None:
    """`in[0]` is the argument that the forward calls `input`."""
    model = Reuse()
    with kedge.session() as s:
        first = s.hook(model, "fc#0:in[0]", kedge.record())
        named = s.hook(model, "fc#0:in[input]", kedge.record())
        model(torch.randn(2, 3))

    assert torch.equal(first["fc#0:in[input]"], named["fc#0:in[input]"])


def test_a_position_is_read_back_under_the_position() -> None:
    """What was hooked as `in[0]` can be read as `in[0]`."""
    model = Reuse()
    with kedge.hook(model, "fc#0:in[0]", kedge.record()) as acts:
        model(x := torch.randn(2, 3))

    assert torch.equal(acts["fc#0:in[0]"], x)


class Pair(NamedTuple):
    """A named tuple."""

    a: Tensor
    b: Tensor


@dataclasses.dataclass
class Data:
    """A dataclass."""

    a: Tensor
    b: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    a: Tensor
    b: Tensor


STRUCTURES: dict[
    str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]], str, str]
] = {
    "tuple": (lambda a, b: (a, b), lambda o: (o[0], o[1]), "0", "1"),
    "list": (lambda a, b: [a, b], lambda o: (o[0], o[1]), "0", "1"),
    "namedtuple": (Pair, lambda o: (o.a, o.b), "a", "b"),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda o: (o["a"], o["b"]), "a", "b"),
    "OrderedDict": (lambda a, b: OrderedDict(a=a, b=b), lambda o: (o["a"], o["b"]), "a", "b"),
    "dataclass": (Data, lambda o: (o.a, o.b), "a", "b"),
    "frozen": (Frozen, lambda o: (o.a, o.b), "a", "b"),
    "nested": (
        lambda a, b: {"x": (a, [Data(b, b)])},
        lambda o: (o["x"][0], o["x"][1][0].a),
        "x.0",
        "x.1.0.a",
    ),
}


class Splits(nn.Module):
    """A child that returns two tensors in a structure, of which the parent makes one."""

    def __init__(
        self, make: Callable[..., Any], take: Callable[[Any], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.child, self.take = Child(make), take

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.take(self.child(x))
        return a * 2 + b * 3


class Child(nn.Module):
    """Returns two tensors in a structure."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.make = nn.Linear(3, 3), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.fc(x), self.fc(x).tanh())


@pytest.mark.parametrize("case", STRUCTURES)
def test_outputs_of_every_structure_have_values_and_gradients(case: str) -> None:
    """Each leaf of a tuple, list, dict, named tuple or dataclass has its value and its gradient."""
    make, take, a, b = STRUCTURES[case]
    model, x = Splits(make, take), torch.randn(2, 3)
    with kedge.session() as s:
        outs = s.hook(model, f"child:out[{a}], child:out[{b}]", kedge.record())
        grads = s.hook(model, f"child:out.grad[{a}], child:out.grad[{b}]", kedge.record())
        model(x).sum().backward()

    assert torch.equal(outs[f"child:out[{a}]"], model.child.fc(x))
    assert torch.equal(outs[f"child:out[{b}]"], model.child.fc(x).tanh())
    assert torch.equal(grads[f"child:out.grad[{a}]"], torch.full((2, 3), 2.0))
    assert torch.equal(grads[f"child:out.grad[{b}]"], torch.full((2, 3), 3.0))


@pytest.mark.parametrize("case", STRUCTURES)
def test_one_leaf_of_every_structure_can_be_edited(case: str) -> None:
    """An edited leaf, and the gradient edited behind it, are what goes on; the type and the other leaf stay."""
    make, take, a, b = STRUCTURES[case]
    model, x = Splits(make, take), torch.randn(2, 3)
    types = []
    with kedge.session() as s:
        s.hook(model, f"child:out[{b}]", kedge.replace(1.0))
        s.hook(model, f"child:out.grad[{a}]", kedge.scale(0.5))
        handle = model.child.register_forward_hook(lambda m, i, o: types.append(type(o)))
        out = model(x)
        out.sum().backward()
        handle.remove()

    assert torch.equal(out, model.child.fc(x) * 2 + 3)
    assert types == [type(make(x, x))]
    assert torch.equal(model.child.fc.bias.grad, torch.full((3,), 2.0))


def test_recurrent_outputs_have_their_nested_leaves() -> None:
    """An LSTM's output and both its states are leaves by position."""
    model = nn.Sequential(OrderedDict(rnn=nn.LSTM(3, 4)))
    with kedge.hook(model, "rnn", kedge.record()) as acts:
        out, (h, c) = model(torch.randn(5, 2, 3))

    assert torch.equal(acts["rnn:out[0]"], out)
    assert torch.equal(acts["rnn:out[1.0]"], h)
    assert torch.equal(acts["rnn:out[1.1]"], c)


class InPlace(nn.Module):
    """Normalizes and then works in place, by a module or by a function."""

    def __init__(self, *, module: bool) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.relu = nn.ReLU(inplace=True)
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.fc(x))
        h = self.relu(h) if self.module else F.relu_(h)
        return h * 2


def test_a_value_that_a_module_overwrites_is_kept() -> None:
    """What `ReLU(inplace=True)` overwrites was copied before; gradients are those before and after the activation."""
    model, x = InPlace(module=True).eval(), torch.randn(8, 4)
    with kedge.session() as s:
        outs = s.hook(model, "bn, relu, relu:in", kedge.record())
        grads = s.hook(model, "bn:out.grad, relu:out.grad", kedge.record())
        model(x).sum().backward()

    normed = model.bn(model.fc(x)).detach()
    assert (normed < 0).any()
    assert torch.equal(outs["bn"], normed)
    assert torch.equal(outs["relu:in"], normed)
    assert torch.equal(outs["relu"], normed.relu())
    assert torch.equal(grads["bn:out.grad"], (normed > 0) * 2.0)
    assert torch.equal(grads["relu:out.grad"], torch.full((8, 4), 2.0))


def test_a_value_that_the_program_overwrites_is_an_error_on_reading() -> None:
    """A write outside every forward gives no chance to copy: reading says that the value is gone, and how to keep it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4)
    with kedge.session() as s:
        plain = s.hook(model, "1", kedge.record())
        copied = s.hook(model, "1", kedge.record(copy=True))
        F.relu_(model(x))
    with pytest.raises(Overwritten) as caught:
        plain["1"]

    assert str(caught.value) == (
        "1#0:out was recorded, but the program then changed the tensor in place, so its value is gone; record(copy=True) keeps a copy"
    )
    with pytest.raises(Overwritten):
        plain.records("1")
    assert torch.equal(copied["1"], model(x))


def test_a_gradient_survives_an_in_place_function_after_the_module() -> None:
    """`out.grad` of a module whose output is overwritten is the gradient of the value before."""
    model, x = InPlace(module=False).eval(), torch.randn(8, 4)
    with kedge.hook(model, "bn:out.grad", kedge.record()) as grads:
        model(x).sum().backward()

    assert torch.equal(grads["bn:out.grad"], (model.bn(model.fc(x)) > 0) * 2.0)


def test_two_views_of_an_overwritten_value_are_both_kept() -> None:
    """A value kept under several names, as a view too, is kept under all of them."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Identity(),
        nn.Flatten(),
        nn.Dropout(0.0, inplace=True),
        nn.ReLU(inplace=True),
    )
    x = torch.randn(8, 4)
    with kedge.hook(model, "*", kedge.record()) as acts:
        model(x)

    value = model[0](x)
    for name in "0123":
        assert torch.equal(acts[name], value)
    assert torch.equal(acts["4"], value.relu())


class TwoParents(nn.Module):
    """Two branches that hold the same activation."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        self.left, self.right = (
            nn.Sequential(nn.Linear(3, 3), act),
            nn.Sequential(nn.Linear(3, 3), act),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


@pytest.mark.parametrize("name", ["left.1", "right.1", "*.1", "**{ReLU}"])
def test_one_activation_in_two_parents_fires_once_a_call(name: str) -> None:
    """A module under two names is one site, hooked once, with a call for each parent."""
    model, x = TwoParents(), torch.randn(2, 3)
    with kedge.session() as s:
        acts = s.hook(model, name, kedge.record())
        model(x)
        assert len(s.ledger()) == 1
        assert s.ledger()["left.1"].fired == 2

    assert torch.equal(acts["left.1#0"], model.left(x))
    assert torch.equal(acts["left.1#1"], model.right(x))


def test_a_record_is_read_under_every_name_of_its_module() -> None:
    """What was hooked under a module's second name can be read under it."""
    model, x = TwoParents(), torch.randn(2, 3)
    with kedge.hook(model, "right.1", kedge.record()) as acts:
        model(x)

    assert torch.equal(acts["right.1#1"], model.right(x))


def test_a_projection_that_attention_never_calls_has_a_cause() -> None:
    """`MultiheadAttention.out_proj` does not fire; the ledger says that it is bypassed, and reading says so too."""
    model = nn.Sequential(OrderedDict(attn=Attends()))
    with (
        pytest.warns(NeverFiredWarning) as caught,
        kedge.hook(model, "attn.mha.out_proj", kedge.record()) as acts,
    ):
        model(torch.randn(2, 5, 4))

    text = "bypassed by a fused path: attention uses its weights without calling it"
    assert (
        str(caught[0].message)
        == f'1 of 1 hooked sites never fired\n  attn.mha.out_proj:out: {text}; hook "attn.mha" instead'
    )
    with pytest.raises(NotRecorded) as unread:
        acts["attn.mha.out_proj"]
    assert str(unread.value) == (
        f'nothing was recorded under "attn.mha.out_proj": attn.mha.out_proj:out  never fired: {text} (hook "attn.mha" instead)'
    )


class Attends(nn.Module):
    """Attention on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x, need_weights=False)[0]


class Bypass(nn.Module):
    """Calls the forward of a leaf and of a container directly."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.block, self.other = (
            nn.Linear(3, 3),
            nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
            nn.Linear(3, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block.forward(self.fc.forward(x))


def test_a_module_whose_forward_is_called_directly_has_a_cause() -> None:
    """A call of `.forward()` fires nothing: the ledger finds it in the parent's source, or in children that fired."""
    model = Bypass()
    with pytest.warns(NeverFiredWarning) as caught, kedge.session() as s:
        s.hook(model, "fc, block, block.0, other", kedge.record())
        model(torch.randn(2, 3))
        ledger = s.ledger()

    direct = "Bypass.forward calls its .forward() directly, which fires no hook"
    assert ledger["fc"].cause.why == direct
    assert ledger["block"].cause.why == direct
    assert ledger["block"].cause.remedy == "call the module itself: layer(x)"
    assert ledger["block.0"].fired == 1
    assert ledger["other"].cause.why == "never called while the hook was attached"
    assert str(caught[0].message) == (
        "3 of 4 hooked sites never fired\n"
        f"  fc:out, block:out: {direct}; call the module itself: layer(x)\n"
        "  other:out: never called while the hook was attached; this forward takes another path, or calls its "
        ".forward() directly"
    )


def test_a_structure_without_tensors_has_a_cause() -> None:
    """A module that returns nothing to see is named with what it returns."""

    class Names(nn.Module):
        def forward(self, x: Tensor) -> list[str]:
            return ["a", str(x.shape)]

    with pytest.warns(
        NeverFiredWarning,
        match=re.escape(
            "its value contains no tensor: list with no tensor; hook the module inside"
        ),
    ):
        with kedge.hook(model := nn.Sequential(Names()), "0", kedge.record()):
            model(torch.ones(2))


def test_a_leaf_that_is_not_there_has_a_cause() -> None:
    """If a selected leaf is not in the value, the error lists the leaves that are."""
    model = nn.Sequential(nn.LSTM(3, 4))
    with kedge.session() as s:
        h = s.hook(model, "0:out[2]", kedge.record())
        model(torch.randn(5, 2, 3))
        cause = s.ledger()["0:out[2]"].cause
        h.remove()

    assert cause == ("its value has no tensor [2]", "it has [0], [1.0], [1.1]")


def test_a_parameter_that_a_call_is_given_is_seen() -> None:
    """Under `functional_call`, or when another has taken its place, `:param` is the value that the forward works with."""
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    given = {"0.weight": torch.full((2, 2), 7.0), "0.bias": torch.zeros(2)}
    with kedge.hook(model, "0.weight:param", kedge.record()) as h:
        torch.func.functional_call(model, given, (x,))
        assert torch.equal(h["0.weight:param"], given["0.weight"])
        model(x)
        assert torch.equal(h["0.weight:param"], model[0].weight)
        model[0].weight = nn.Parameter(torch.full((2, 2), 3.0))
        model(x)
        assert torch.equal(h["0.weight:param"], model[0].weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_values_are_edited_and_failures_told() -> None:
    """Nested tensors, as the encoder's fast path makes of a padding mask, have no shape, and can be edited all the same."""
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
    with kedge.hook(model, "0", kedge.scale(2)):
        out = model(nested)
    for part, edited in zip(nested.unbind(), out.unbind(), strict=True):
        assert torch.allclose(edited, model[1](part.relu() * 2))

    with (
        pytest.raises(ActionError, match=re.escape("float32[(2, 4), (3, 4)]): ValueError: no")),
        kedge.hook(model, "0", failing),
    ):
        model(nested)


def failing(value: Tensor) -> None:
    """An action that fails."""
    raise ValueError("no")
