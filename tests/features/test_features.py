"""Features: what comes back, under which names, and where a forward ends."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.errors import (
    ActionError,
    ExtractError,
    InPlaceEdit,
    NeverFiredWarning,
    NoSiteMatched,
    NoSuchKind,
    NotRecorded,
    Overwritten,
)
from kedge.features.extract import Features
from kedge.testing import assert_same_bits, assert_unhooked, hook_tables


class Counted(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Net(nn.Module):
    """Three layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Counted(3, 4), Counted(4, 4), Counted(4, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu() * scale)

    @property
    def calls(self) -> list[int]:
        return [layer.calls for layer in (self.a, self.b, self.c)]


class Pair(NamedTuple):
    """A structured value."""

    left: Tensor
    right: Tensor


class Loop(nn.Module):
    """Calls one module three times and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.split, self.head = nn.Linear(3, 3), Split(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.step(x).tanh()
        left, right = self.split(x)
        return self.head(left + right)


class Split(nn.Module):
    """Returns a named tuple."""

    def forward(self, x: Tensor) -> Pair:
        return Pair(x + 1, x - 1)


def by_hand(
    model: nn.Module, paths: list[str], *args: Any, **kwargs: Any
) -> dict[str, list[Tensor]]:
    """Copy what modules return with PyTorch's hooks."""
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda m, i, o, p=path: seen[p].append(o.detach().clone())
        )
        for path in paths
    ]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return seen


def randn(*shape: int) -> Tensor:
    """Make an input."""
    return torch.randn(*(shape or (5, 3)))


def test_values_come_back_by_name_in_the_order_asked_for() -> None:
    """A selector that stands for one value is its name, and the model is as it was."""
    model = Net()
    before = hook_tables(model)
    features = kedge.extract(model, ["c", "a", "b:in"], rename={"a": "first"})
    assert hook_tables(model) == before
    for _ in range(3):
        x = randn()
        out = features(x)
        assert list(out) == ["c", "first", "b:in"]
        seen = by_hand(model, ["a", "c"], x)
        assert_same_bits(
            out, {"c": seen["c"][0], "first": seen["a"][0], "b:in": seen["a"][0].relu()}
        )
        assert not any(value.requires_grad for value in out.values())
        assert hook_tables(model) == before


def test_one_selector_may_be_given_as_text() -> None:
    """A bare string is one selector."""
    assert list(kedge.extract(Net(), "a")(randn())) == ["a"]


def test_a_forward_ends_after_the_last_value_in_the_order_of_execution() -> None:
    """The first forward of a kind runs to its end; those after it stop, whichever order was asked for."""
    for sites in (["a", "b"], ["b", "a"]):
        model = Net()
        features = kedge.extract(model, sites)
        expected = features(randn())
        assert model.calls == [1, 1, 1]
        assert list(features(randn())) == list(expected)
        assert model.calls == [2, 2, 1]
        features(randn(2, 3))
        assert model.calls == [3, 3, 2], "another shape is another kind, which is learned anew"
        features.train(not features.training)(randn())
        assert model.calls == [4, 4, 3]
        features(randn(), scale=2.0)
        assert model.calls == [5, 5, 4]
        features(randn())
        assert model.calls == [6, 6, 4]


def test_without_early_stop_every_forward_runs_to_its_end() -> None:
    """``early_stop=False`` is a plain forward."""
    model = Net()
    features = kedge.extract(model, "a", early_stop=False)
    for _ in range(3):
        features(randn())
    assert model.calls == [3, 3, 3]


def test_several_calls_have_names_of_their_own() -> None:
    """Calls of a module and leaves of a structure go by their sites, and either name can be changed."""
    model, x = Loop(), randn()
    features = kedge.extract(
        model, ["step", "split", "head"], rename={"step#2": "last", "split:out[left]": "plus"}
    )
    seen = by_hand(model, ["step", "head"], x)["step"]
    inner = seen[2].tanh()
    expected = {
        "step#0": seen[0],
        "step#1": seen[1],
        "last": seen[2],
        "plus": inner + 1,
        "split:out[right]": inner - 1,
    }
    for _ in range(2):
        out = features(x)
        assert list(out) == [*expected, "head"]
        assert_same_bits({name: out[name] for name in expected}, expected)


def test_a_forward_ends_at_a_numbered_call_only() -> None:
    """``step#1`` ends it at the second call; without a number it never ends, because the module might run again."""
    model, x = Loop(), randn()
    ran: list[str] = []
    model.head.register_forward_hook(lambda *_: ran.append("head"))
    model.step.register_forward_hook(lambda *_: ran.append("step"))
    seen = by_hand(model, ["step"], x)["step"]
    for sites, rest in (("step#1", ["step", "step"]), ("step", ["step"] * 3 + ["head"])):
        features = kedge.extract(model, sites)
        features(x)
        ran.clear()
        out = features(x)
        assert ran == rest
        assert_same_bits(list(out.values()), [seen[1]] if sites == "step#1" else seen)


def test_a_pattern_gives_full_names_in_the_order_of_execution() -> None:
    """What a pattern matches is named by its path; a site that stays silent is reported once."""
    model = Net()
    model.unused = nn.Linear(2, 2)
    features = kedge.extract(model, "*")
    with pytest.warns(NeverFiredWarning, match="unused"):
        assert list(features(randn())) == ["a", "b", "c"]
    assert list(features(randn())) == ["a", "b", "c"]
    assert model.calls == [2, 2, 2]


def test_the_root_and_its_arguments_can_be_taken() -> None:
    """``:out`` is the model's own output, ``:in`` what it was given."""
    model, x = Net(), randn()
    out = kedge.extract(model, [":out", ":in[x]"])(x)
    assert_same_bits(out, {":out": model(x).detach(), ":in[x]": x})


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_transform_is_applied_before_a_value_is_kept(no_grad: bool) -> None:
    """Pooled, sliced, top-k: a tensor or a structure, and nothing of the whole value is kept alive by a pooled one."""
    model, x = Net(), randn()
    sites: dict[str, Any] = {
        "a": lambda v: v.mean(1),
        "b": lambda v: v[:, :2],
        "c": lambda v: v.topk(1),
        "c:in": None,
    }
    features = kedge.extract(model, sites, no_grad=no_grad)
    seen = by_hand(model, ["a", "b", "c"], x)
    for _ in range(2):
        out = features(x)
        assert_same_bits([out["a"], out["b"]], [seen["a"][0].mean(1), seen["b"][0][:, :2]])
        assert_same_bits(tuple(out["c"]), tuple(seen["c"][0].topk(1)))
        assert out["a"].requires_grad is not no_grad


def test_a_transform_may_call_the_model_itself() -> None:
    """A read-out of an early layer through the last one is not taken for a call of that layer."""
    model, x = Net(), randn()
    features = kedge.extract(model, {"a": lambda v: model.c(v), "c": None})
    for _ in range(2):
        out = features(x)
        assert_same_bits(out["a"], model.c(model.a(x)).detach())
        assert_same_bits(out["c"], model(x).detach())


def test_the_failure_of_a_transform_says_where() -> None:
    """It is raised with the site in front, a change in place is refused, and the model is bare afterwards."""
    model = Net()
    with pytest.raises(ActionError, match=r"at b:out .*ZeroDivisionError"):
        kedge.extract(model, {"b": lambda v: 1 / 0})(randn())
    with pytest.raises(InPlaceEdit, match="at b:out"):
        kedge.extract(model, {"b": lambda v: v.relu_()})(randn())
    assert_unhooked(model)


def test_device_and_dtype_say_where_and_as_what_values_are_kept() -> None:
    """Floating-point values are cast, others are not, and a move leaves the graph."""

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.argmax(1)

    x = randn().requires_grad_()
    features = kedge.extract(
        nn.Sequential(Both()), "0", dtype=torch.float64, device="cpu", no_grad=False
    )
    for _ in range(2):
        out = features(x)
        assert [value.dtype for value in out.values()] == [torch.float64, torch.int64]
        assert torch.autograd.grad(out["0:out[0]"].sum(), x)[0].eq(2).all()
    moved = kedge.extract(nn.Sequential(Both()), {"0:out[0]": None}, device="meta")(x)
    assert moved["0:out[0]"].device.type == "meta"


def test_values_keep_their_graph_where_gradients_are_wanted() -> None:
    """``no_grad=False`` differentiates as the plain model does, to the last bit, in every forward."""
    model, x = Net(), randn()
    twin = copy.deepcopy(model)
    features = kedge.extract(model, ["b", "c"], no_grad=False)
    assert features.training
    for _ in range(3):
        out = features(x)
        (out["b"].square().sum() + out["c"].sum()).backward()
        b = twin.b(twin.a(x).relu())
        (b.square().sum() + twin.c(b.relu()).sum()).backward()
        assert_same_bits([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("no_grad", [True, False])
def test_values_are_right_although_the_forward_goes_on_in_place(no_grad: bool) -> None:
    """A module with ``inplace``, a functional one and ``+=`` overwrite nothing that was taken, in no forward."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.a(x))
            y = F.relu(self.b(x), inplace=True)
            z = self.c(y)
            z += x
            return z.mul_(2)

    torch.manual_seed(0)
    model = InPlace()
    features = kedge.extract(model, ["a", "b", "c", "relu"], no_grad=no_grad)
    for _ in range(3):
        x = torch.randn(2, 1, 4, 4)
        seen = by_hand(model, ["a", "b", "c", "relu"], x)
        assert_same_bits(features(x), {name: values[0] for name, values in seen.items()})
    (plan,) = features.work.plans.values()
    assert sorted(key.site.path for key in plan.copied) == ["a", "b", "c"], (
        "what nobody overwrites is not copied"
    )


def test_what_is_overwritten_for_the_first_time_is_an_error_and_no_wrong_value() -> None:
    """A forward that begins to work in place, where one of its kind did not, says so; a copying transform cures it."""

    class Sometimes(nn.Module):
        now = False

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y.mul_(2) if self.now else y * 2

    model, x = Sometimes(), randn()
    features = kedge.extract(model, "a", early_stop=False)
    features(x)
    model.now = True
    with pytest.raises(Overwritten, match="clone"):
        features(x)
    assert_same_bits(kedge.extract(model, {"a": lambda v: v.clone()})(x)["a"], model.a(x).detach())


def test_values_in_a_buffer_of_the_model_are_those_of_their_forward() -> None:
    """A module that returns its own buffer overwrites it in the next forward, and the features of the first one stay."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.mean.add_(x.mean(0))

    features = kedge.extract(nn.Sequential(Running()), "0")
    first = features(torch.ones(2, 3))["0"]
    second = features(torch.ones(2, 3))["0"]
    third = features(torch.ones(2, 3))["0"]
    assert [value.tolist() for value in (first, second, third)] == [[1] * 3, [2] * 3, [3] * 3]


def test_a_program_that_swallows_the_end_gives_right_values() -> None:
    """A forward that goes on after the stop, or wraps it in an error of its own, adds nothing and hides nothing."""

    class Swallows(nn.Module):
        wraps = False

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.a(x)
            except Exception as error:
                if self.wraps:
                    raise RuntimeError("the layer failed") from error
                x = self.a(x + 1)
            return self.b(x)

    for wraps in (False, True):
        model, x = Swallows(), randn()
        model.wraps = wraps
        features = kedge.extract(model, "a")
        for _ in range(3):
            assert_same_bits(features(x)["a"], model.a(x).detach())
        assert_unhooked(model)


def test_a_forward_that_takes_another_way_says_what_is_missing() -> None:
    """A site that fired in other forwards but not in this one is an error, and so is one that never can."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    model, x = Branches(), torch.ones(2, 3)
    features = kedge.extract(model, "a")
    assert list(features(x)) == ["a"]
    with pytest.raises(NotRecorded, match="another path"):
        features(-x)
    assert list(features(x)) == ["a"]
    with pytest.raises(NotRecorded, match="never called while the hook was attached"):
        kedge.extract(model, ["a", "b"])(x)
    mha = nn.MultiheadAttention(4, 2)
    with pytest.raises(NotRecorded, match="fused path"):
        kedge.extract(mha, "out_proj")(*[torch.randn(3, 4)] * 3)
    assert_unhooked(mha)


@pytest.mark.parametrize(
    ("sites", "rename", "message"),
    [
        (["a", "a"], {}, "given twice"),
        (["a", "b"], {"a": "x", "b": "x"}, '"x"'),
        (["a", "b"], {"a": "b"}, '"b"'),
        (["a", "*"], {}, '"a"'),
        (["a"], {"c": "x"}, 'no value can have the name "c"'),
        (["a"], {"nonsense[": "x"}, "no value can have the name"),
        ([], {}, "no site given"),
    ],
)
def test_names_that_cannot_come_out_right_are_refused_at_once(
    sites: list[str], rename: dict[str, str], message: str
) -> None:
    """What is wrong with the names is said before any forward, and leaves nothing on the model."""
    model = Net()
    with pytest.raises(ExtractError, match=message.replace("[", r"\[")):
        kedge.extract(model, sites, rename=rename)
    assert_unhooked(model)


def test_a_dict_names_values_as_torchvision_does() -> None:
    """The text beside a selector is the name of its value; others have a transform or neither, in the dict's order."""
    model, x = Net(), randn()
    plain = kedge.extract(model, ["a", "b", "c"])(x)
    wishes: dict[str, Any] = {"c": "logits", "a": None, "b:in": lambda v: v.mean(1), "b": "a b"}
    named = kedge.extract(model, wishes)(x)

    assert list(named) == ["logits", "a", "b:in", "a b"]
    assert torch.equal(named["logits"], plain["c"])
    assert torch.equal(named["a b"], plain["b"])
    assert named["b:in"].shape == x.shape[:1]
    assert kedge.extract(model, wishes).names == tuple(named)
    swapped = kedge.extract(model, {"a": "b", "b": "a"})(x)
    assert torch.equal(swapped["a"], plain["b"])


@pytest.mark.parametrize("wishes", ["a", ["a"], {"a": "a"}, kedge.select("a")])
def test_return_nodes_is_another_name_of_sites(wishes: Any) -> None:
    """A call of torchvision's `create_feature_extractor` works with another function's name."""
    assert (
        list(kedge.extract(Net(), return_nodes=wishes)(randn()))
        == list(kedge.extract(Net(), wishes)(randn()))
        == ["a"]
    )
    with pytest.raises(TypeError, match="return_nodes is another name of sites"):
        kedge.extract(Net(), "a", return_nodes=wishes)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("wishes", "rename", "message"),
    [
        ({"a": "x", "b": "x"}, {}, 'two values would have one name: "x"'),
        ({"a": "b", "b": None}, {}, 'two values would have one name: "b"'),
        ({"a": "x", "b": None}, {"b": "x"}, 'two values would have one name: "x"'),
        ({"a": "x"}, {"a": "y"}, '"a" gets a name both as "x" and in rename'),
        ({"a": 3}, {}, '"a": 3 is not a name, a function'),
        ({"a": ""}, {}, '"a": the name of its value is empty'),
        ({}, {}, "no site given"),
    ],
)
def test_names_in_a_dict_that_cannot_come_out_right_are_refused_at_once(
    wishes: Any, rename: Any, message: str
) -> None:
    """What is wrong is said before any forward."""
    with pytest.raises(ExtractError, match=f"^{message}"):
        kedge.extract(Net(), wishes, rename=rename)


def test_one_name_for_several_values_is_refused_with_the_first_forward() -> None:
    """The message has the names that they have without it."""
    for model, text, there in ((Net(), "[ab]", '"a", "b"'), (Loop(), "step", '"step#0", "step#1"')):
        with pytest.raises(
            ExtractError,
            match=re.escape(
                f'no value has the name "{text}", to be called "x"; the names are {there}'
            ),
        ):
            kedge.extract(model, {text: "x"})(randn())


def test_a_new_name_for_what_does_not_come_is_refused_with_the_first_forward() -> None:
    """Whether a module runs a fourth time is known only then."""
    with pytest.raises(ExtractError, match=r"step#3.*step#0"):
        kedge.extract(Loop(), "step", rename={"step#3": "fourth"})(randn())


@pytest.mark.parametrize(
    ("site", "error"), [("z", NoSiteMatched), ("a:out.grad", NoSuchKind), ("a:saved", NoSuchKind)]
)
def test_sites_that_a_forward_does_not_have_are_refused_at_once(
    site: str, error: type[Exception]
) -> None:
    """Nothing is attached for a site that is not there, or that comes with a backward."""
    model = Net()
    with pytest.raises(error):
        kedge.extract(model, ["a", site])
    assert_unhooked(model)


def test_parameters_are_features_too() -> None:
    """``:param`` gives a copy of the parameter's value in this forward."""
    model = Net()
    features = kedge.extract(model, "a.weight:param")
    for _ in range(2):
        taken = features(randn())["a.weight:param"]
        assert_same_bits(taken, model.a.weight.detach())
        with torch.no_grad():
            model.a.weight.add_(1)
        assert not torch.equal(taken, model.a.weight)


def test_inference_mode_is_kept() -> None:
    """Tensors without a version are copied at once, so values are right there too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    features = kedge.extract(model, ["0", "1"])
    for _ in range(2):
        with torch.inference_mode():
            x = randn()
            out = features(x)
            assert_same_bits(out["0"], model[0](x))


@pytest.mark.parametrize("compile_", ["model", "features"])
def test_compiled_models_give_the_same_values(compile_: str, compiled: Callable[..., Any]) -> None:
    """Features of a compiled model are those of the plain one, in every call; compiled features work as well."""
    torch.manual_seed(0)
    model, x = Net(), randn()
    seen = by_hand(model, ["a", "b"], x)
    if compile_ == "model":
        features = kedge.extract(compiled(model, backend="eager"), ["a", "b"])
    else:
        features = compiled(kedge.extract(model, ["a", "b"]), backend="eager")
    for _ in range(3):
        assert_same_bits(features(x), {name: values[0] for name, values in seen.items()})
    assert_unhooked(model)


def test_a_graph_out_of_compiled_code_is_refused(compiled: Callable[..., Any]) -> None:
    """Compiled code hands out values without their graph, and that is said at once."""
    model = Net()
    with pytest.raises(ExtractError, match="compiled"):
        kedge.extract(compiled(model, backend="eager"), "a", no_grad=False)
    assert_unhooked(model)


def test_features_are_a_module_that_prints_its_names() -> None:
    """The model is a child, so that parameters and state are those of the model."""
    model = Net()
    features = kedge.extract(model, ["a", "b"], rename={"b": "second"})
    assert isinstance(features, Features)
    assert features.names == ("a", "second")
    assert "a, second" in repr(features)
    assert [id(p) for p in features.parameters()] == [id(p) for p in model.parameters()]
    assert list(features.state_dict()) == [f"model.{name}" for name in model.state_dict()]


def test_hooks_that_are_held_stay_up_between_calls_and_take_nothing_there() -> None:
    """In the block other calls of the model are its own; after it the model is bare, also when the block fails."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    features, x = kedge.extract(model, "1"), torch.randn(2, 3)
    bare, plain = hook_tables(model), model(x)
    expected = features(x)["1"]
    with pytest.raises(ZeroDivisionError), features.held(), features.held():
        assert torch.equal(features(x)["1"], expected)
        assert hook_tables(model) != bare
        assert torch.equal(model(x), plain)
        assert torch.equal(features(x)["1"], expected)
        raise ZeroDivisionError
    assert hook_tables(model) == bare
    assert torch.equal(features(x)["1"], expected)
    assert_unhooked(model)
