"""The gallery's modules, M1 to M15: what flows in and out of modules, and their gradients, recorded and edited."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.errors import InPlaceEdit, NeverFired, SeveralRecorded
from kedge.testing import assert_hooks_restored, assert_same_bits, assert_unhooked
from tests.gallery.models import (
    VGG16,
    Affine,
    ConvNet,
    Functional,
    Sum,
    TwoLayers,
    Witness,
    resnet18,
    resnet50,
)

LAYERS = ("fc1", "relu", "fc2")


def ones(*, grad: bool = False) -> Tensor:
    """Make the input of M1."""
    return torch.ones(1, 3, requires_grad=grad)


def test_inputs_and_outputs_of_every_layer_are_recorded() -> None:
    """M1: outputs [7, -13, 27, -29], [7, 0, 27, 0] and [89]; each layer's input is the output before it."""
    model = TwoLayers()
    with assert_hooks_restored(model), kedge.session() as s:
        acts = s.hook(model, "*:in, *:out", kedge.record())
        model(ones())
    outs = [acts[name] for name in LAYERS]
    assert [t.tolist() for t in outs] == [[[7, -13, 27, -29]], [[7, 0, 27, 0]], [[89]]]
    assert [acts[f"{name}:in"].tolist() for name in LAYERS] == [
        [[1, 1, 1]],
        *(t.tolist() for t in outs[:2]),
    ]

    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in LAYERS:
        model.get_submodule(name).register_forward_hook(
            lambda m, i, o, name=name: seen.update({name: (i[0], o)})
        )
    model(ones())
    assert_same_bits({name: (acts[f"{name}:in"], acts[name]) for name in LAYERS}, seen)


def test_gradients_of_every_layer_and_parameter_are_recorded() -> None:
    """M2: gradients at outputs, each layer's share at its input, and the parameters', as worked out by hand."""
    model, plain = TwoLayers(), TwoLayers()
    with kedge.session() as s:
        grads = s.hook(model, "*:out.grad, *:in.grad, *:in.share, **:param.grad", kedge.record())
        model(ones(grad=True)).sum().backward()
    first = [[1, 0, 3, 0]]
    assert [grads[f"{n}:out.grad"].tolist() for n in LAYERS] == [first, [[1, 2, 3, 4]], [[1]]]
    assert [grads[f"{n}:in.share"].tolist() for n in LAYERS] == [
        [[22, 26, 30]],
        first,
        [[1, 2, 3, 4]],
    ]
    assert [grads[f"{n}:in.grad"].tolist() for n in LAYERS] == [
        [[22, 26, 30]],
        first,
        [[1, 2, 3, 4]],
    ]
    rows = [[1, 1, 1], [0, 0, 0], [3, 3, 3], [0, 0, 0]]
    by_hand = {
        "fc1.weight": rows,
        "fc1.bias": first[0],
        "fc2.weight": [[7, 0, 27, 0]],
        "fc2.bias": [1],
    }
    assert {n: grads[f"{n}:param.grad"].tolist() for n in by_hand} == by_hand

    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in LAYERS:
        layer = plain.get_submodule(name)
        layer.register_full_backward_hook(
            lambda m, gi, go, name=name: seen.update({name: (gi[0], go[0])})
        )
    plain(ones(grad=True)).sum().backward()
    for name in LAYERS:
        assert_same_bits((grads[f"{name}:in.share"], grads[f"{name}:out.grad"]), seen[name], name)
    for name, param in plain.named_parameters():
        assert_same_bits(grads[f"{name}:param.grad"], param.grad, name)
        assert_same_bits(model.get_parameter(name).grad, param.grad, name)


def test_pitfall_one_hook_on_a_container_sees_the_gradients_of_the_whole() -> None:
    """M3: on the whole model out.grad is [1] and in.share [22, 26, 30]; PyTorch's old hook gives its last operation's."""
    model = TwoLayers()
    with kedge.hook(model, ":out.grad, :in.share", kedge.record()) as grads:
        model(ones(grad=True)).sum().backward()
    assert grads[":out.grad"].tolist() == [[1]]
    assert grads[":in.share"].tolist() == [[22, 26, 30]]

    plain, seen = TwoLayers(), []
    plain.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0], go[0])))
    plain(ones(grad=True)).sum().backward()
    assert_same_bits((grads[":in.share"], grads[":out.grad"]), seen[0])

    old, grad_inputs = TwoLayers(), []
    old.register_backward_hook(lambda m, gi, go: grad_inputs.extend(gi))
    with pytest.warns(FutureWarning, match="non-full backward hook"):
        old(ones(grad=True)).sum().backward()
    of_fc2 = {"bias": [1], "input": [[1, 2, 3, 4]], "weight": [[7], [0], [27], [0]]}
    assert [g.tolist() for g in grad_inputs] == list(of_fc2.values()), (
        "the pitfall: nothing of the whole"
    )


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(3, 4), (3,)),
        (lambda: nn.Conv1d(3, 4, 1), (3, 7)),
        (lambda: nn.Conv2d(3, 4, 3), (3, 7, 7)),
    ],
    ids=["Linear", "Conv1d", "Conv2d"],
)
def test_pitfall_linear_and_convolution_give_gradients_of_one_form(
    make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int
) -> None:
    """M3: for Linear and Conv, one sample or many, out.grad has the output's shape and in.share the input's."""
    layer, x = make(), torch.randn(batch, *shape, requires_grad=True)
    with kedge.hook(layer, ":out.grad, :in.share", kedge.record()) as grads:
        out = layer(x)
        out.square().sum().backward()
    assert (grads[":out.grad"].shape, grads[":in.share"].shape) == (out.shape, x.shape)

    y = layer(x)
    plain = torch.autograd.grad(y.square().sum(), [y, x])
    assert_same_bits((grads[":out.grad"], grads[":in.share"]), tuple(plain))


def test_arguments_are_edited_and_seen_by_name_positional_or_keyword() -> None:
    """M4: with 10 added to a and 100 to the output, 2 + 3 + 4 gives 119; a's gradient is 1; the keyword c is ``:in[c]``."""
    model = Sum()
    a, b, c = (torch.tensor(v, requires_grad=True) for v in (2.0, 3.0, 4.0))
    with kedge.session() as s:
        s.hook(model, ":in[a]", kedge.add(10))
        s.hook(model, ":out", kedge.add(100))
        seen = s.hook(model, ":in", kedge.record())
        out = model(a, b, c=c)
        out.backward()
    assert out.item() == 119
    assert [t.grad.item() for t in (a, b, c)] == [1, 1, 1]
    assert [seen[f":in[{name}]"].item() for name in "abc"] == [12, 3, 4]
    with pytest.raises(SeveralRecorded, match=r"3 recorded values.*:in\[a\].*:in\[b\].*:in\[c\]"):
        seen[":in"]

    plain = Sum()
    plain.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] + 10, *args[1:]), kwargs), with_kwargs=True
    )
    plain.register_forward_hook(lambda m, args, out: out + 100)
    x = torch.tensor(2.0, requires_grad=True)
    plainly = plain(x, b, c=c)
    plainly.backward()
    assert_same_bits((out, a.grad), (plainly, x.grad))


def test_pitfall_a_position_is_the_argument_of_that_name() -> None:
    """M4: ``:in[2]`` and ``:in[c]`` are one site, whether c is given by position or by keyword; PyTorch drops keywords."""
    model, plain, three = Sum(), Sum(), [torch.tensor(v) for v in (2.0, 3.0, 4.0)]
    with kedge.session() as s:
        by_position = s.hook(model, ":in[2]", kedge.record())
        model(*three[:2], c=three[2])
        assert by_position[":in[c]"].item() == 4
        model(*three)
        assert by_position[":in[c]"].item() == 4

    seen: list[tuple[Tensor, ...]] = []
    plain.register_forward_pre_hook(lambda m, args: seen.append(args))
    plain(*three[:2], c=three[2])
    assert len(seen[0]) == 2, "PyTorch's plain pre-hook is not told of the keyword"


def test_edits_of_input_and_output_make_a_residual_and_leave_nothing_behind() -> None:
    """M5: the input + 1 gives m(x + 1), the output + input gives m(x + 1) + (x + 1); afterwards all is bit-equal to before."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    before, given = layer(x), {}
    with assert_hooks_restored(layer), kedge.session() as s:
        s.hook(layer, ":in", kedge.add(1))
        moved = layer(x)
        s.hook(layer, ":in", lambda value: given.update(x=value))
        s.hook(layer, ":out", lambda value: value + given["x"])
        residual = layer(x)
    assert_same_bits(
        (moved, residual), (F.linear(x + 1, layer.weight, layer.bias), moved + (x + 1))
    )
    assert_same_bits(layer(x), before)

    plain, twin = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    handles = [
        plain.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
        plain.register_forward_hook(lambda m, args, out: out + args[0]),
    ]
    plainly = plain(twin)
    for out, leaf in ((residual, x), (plainly, twin)):
        out.square().sum().backward()
        assert leaf.grad is not None
    assert_same_bits((residual, x.grad), (plainly, twin.grad))
    for handle in handles:
        handle.remove()
    assert_same_bits(plain(twin), before)


@pytest.mark.parametrize("kind", ["in.grad", "in.share"])
def test_the_gradient_of_an_input_can_be_replaced(kind: str) -> None:
    """M6: with 42s in its place x.grad is all 42, the weights get what they always get; after removal all is as before."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with kedge.hook(layer, f":{kind}", kedge.replace(42)):
        layer(x).sum().backward()
    edited, weight_grad = x.grad, layer.weight.grad
    assert edited.tolist() == [[42] * 3] * 2

    x.grad = layer.weight.grad = None
    layer(x).sum().backward()
    plain, twin = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    plain.zero_grad()
    handle = plain.register_full_backward_hook(lambda m, gi, go: (torch.full_like(gi[0], 42),))
    plain(twin).sum().backward()
    assert_same_bits((edited, weight_grad), (twin.grad, plain.weight.grad))
    handle.remove()
    plain.zero_grad()
    twin.grad = None
    plain(twin).sum().backward()
    assert_same_bits((x.grad, layer.weight.grad), (twin.grad, plain.weight.grad))


def test_what_is_recorded_is_what_forward_itself_saw() -> None:
    """M7: outputs 1.2, 3.4, 3.4 of all but the ReLU6; each input and output has the bits of those in forward's own diary."""
    model, x = Witness(), torch.full((1, 2), 0.1)
    with kedge.session() as s:
        acts = s.hook(model, "*:in, *:out, !*{ReLU6}", kedge.record())
        model(x)
        assert len(s.ledger()) == 6
    assert list(model.diary) == ["fc1", "fc2", "relu", "relu6"]
    for name, number in {"fc1": 1.2, "fc2": 3.4, "relu": 3.4}.items():
        torch.testing.assert_close(acts[name], torch.full_like(acts[name], number))
        assert_same_bits((acts[f"{name}:in"], acts[name]), model.diary[name], name)

    plain = Witness()
    plain(x)
    assert_same_bits(model.diary, plain.diary)


RESNET50 = {
    "conv1": [10, 64, 112, 112],
    "bn1": [10, 64, 112, 112],
    "relu": [10, 64, 112, 112],
    "maxpool": [10, 64, 56, 56],
    "layer1": [10, 256, 56, 56],
    "layer2": [10, 512, 28, 28],
    "layer3": [10, 1024, 14, 14],
    "layer4": [10, 2048, 7, 7],
    "avgpool": [10, 2048, 1, 1],
    "fc": [10, 1000],
}


@torch.no_grad()
def test_pitfall_each_shape_is_reported_under_the_name_of_its_own_layer() -> None:
    """M8: the shapes of the children of a ResNet-50, each under its own name: the event carries it, not a loop's variable."""
    model, lines, plainly, wrongly = resnet50(), [], [], []
    for name, child in model.named_children():
        child.register_forward_hook(
            lambda m, i, o, name=name: plainly.append((name, list(o.shape)))
        )
        child.register_forward_hook(lambda m, i, o: wrongly.append(name))  # noqa: B023 - the pitfall itself
    with kedge.session() as s:
        s.hook(model, "*", lambda value, event: lines.append((event.site.path, list(value.shape))))
        model(torch.ones(10, 3, 224, 224))
    assert lines == plainly == list(RESNET50.items())
    assert set(wrongly) == {"fc"}


def test_means_come_in_execution_order_and_gradients_in_backward_order() -> None:
    """M9: means of the children's outputs arrive first to last, those of the parameters' gradients from the last layer on."""
    model, x = ConvNet(), torch.randn(1, 3, 8, 8)
    plain = copy.deepcopy(model)
    means: list[tuple[str, float]] = []
    with kedge.session() as s:
        s.hook(
            model,
            "*:out, **:param.grad",
            lambda value, event: means.append((str(event.site), value.mean().item())),
        )
        model(x).sum().backward()
    order = [site for site, _ in means]
    assert order[:3] == ["conv:out", "relu:out", "fc:out"]
    assert {site.partition(".")[0] for site in order[3:5]} == {"fc"}
    assert {site.partition(".")[0] for site in order[5:]} == {"conv"}
    assert s.timeline().sites == order

    plainly: list[tuple[str, float]] = []
    for name, child in plain.named_children():
        child.register_forward_hook(
            lambda m, i, o, name=name: plainly.append((f"{name}:out", o.mean().item()))
        )
    for name, param in plain.named_parameters():
        param.register_hook(
            lambda g, name=name: plainly.append((f"{name}:param.grad", g.mean().item()))
        )
    plain(x).sum().backward()
    assert means == plainly


def test_statistics_of_children_and_parameters_are_measured_in_one_table() -> None:
    """M9: the means that `measure` writes on the device are those of the values themselves."""
    model, x = ConvNet(), torch.randn(1, 3, 8, 8)
    with kedge.session() as s:
        stats = s.hook(model, "*:out, **:param.grad", kedge.measure())
        out = model(x)
        out.sum().backward()
        assert stats["fc"].mean == pytest.approx(out.mean().item(), rel=1e-5)
        for name, param in model.named_parameters():
            assert stats[f"{name}:param.grad"].mean == pytest.approx(
                param.grad.mean().item(), rel=1e-4, abs=1e-6
            ), name


def test_features_are_taken_out_and_the_model_is_unchanged() -> None:
    """M10: layer4 and avgpool of a ResNet-18 on 28x28 images, batch 10: both [10, 512, 1, 1], with no trace in the model."""
    model, x = resnet18().eval(), torch.randn(10, 3, 28, 28)
    with torch.no_grad(), assert_hooks_restored(model):
        before = copy.deepcopy(model.state_dict())
        with kedge.hook(model, "layer4, avgpool", kedge.record()) as acts:
            out = model(x)
        assert_same_bits(model.state_dict(), before)
        assert_same_bits(model(x), out)
    features = {name: acts[name] for name in ("layer4", "avgpool")}
    assert [list(t.shape) for t in features.values()] == [[10, 512, 1, 1], [10, 512, 1, 1]]

    with torch.no_grad():
        value, plainly = x, {}
        for name, child in list(model.named_children())[:-1]:
            value = plainly[name] = child(value)
    assert_same_bits(features, {name: plainly[name] for name in features})


def test_a_module_between_functions_is_recorded() -> None:
    """M11: the pool's output, [1, 8, 4, 4], in a net whose forward calls F.relu and view around it."""
    model, x = Functional(), torch.randn(1, 3, 8, 8)
    with kedge.hook(model, "pool", kedge.record()) as acts:
        out = model(x)
    assert list(acts["pool"].shape) == [1, 8, 4, 4]
    assert_same_bits(acts["pool"], F.max_pool2d(F.relu(model.conv(x)), 2))
    assert_same_bits(model(x), out)


def conv_step() -> tuple[ConvNet, Tensor]:
    """Make the net and the image of M12."""
    torch.manual_seed(2)
    return ConvNet(), torch.randn(1, 3, 8, 8)


def test_gradients_of_an_activation_and_of_a_bias_are_edited_together() -> None:
    """M12: fc.bias.grad is -0.2 each; then it is zeroed, and the relu's output gradient, [1, 10, 4, 4], kept at 0 or above."""
    model, x = conv_step()
    (1 - model(x)).mean().backward()
    torch.testing.assert_close(model.fc.bias.grad, torch.full((5,), -0.2))

    model, x = conv_step()
    with kedge.session() as s:
        arriving = s.hook(model, "relu:out.grad", kedge.record())
        s.hook(model, "relu:out.grad", kedge.clamp(min=0))
        left = s.hook(model, "relu:out.grad", kedge.record())
        s.hook(model, "fc.bias:param.grad", kedge.zero())
        (1 - model(x)).mean().backward()
    assert model.fc.bias.grad.tolist() == [0] * 5
    assert list(left["relu"].shape) == [1, 10, 4, 4]
    assert arriving["relu"].min() < 0 <= left["relu"].min()

    plain, x = conv_step()
    plain.fc.bias.register_hook(torch.zeros_like)
    plain.relu.register_forward_hook(
        lambda m, i, o: o.register_hook(lambda g: g.clamp(min=0)) and None
    )
    (1 - plain(x)).mean().backward()
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(param.grad, twin.grad, name)


def test_every_gradient_is_clamped_before_it_is_accumulated() -> None:
    """M13: clamped to [-1, 1] with loss = sum over 4 samples, fc2.bias.grad is 1 each instead of 4, and none is beyond 1."""
    model, x = Affine(), torch.randn(4, 100)
    plain = copy.deepcopy(model)
    model(x).sum().backward()
    assert model.fc2.bias.grad.tolist() == [4] * 5
    model.zero_grad()
    with kedge.hook(model, "**:param.grad", kedge.clamp(min=-1, max=1)):
        model(x).sum().backward()
    assert model.fc2.bias.grad.tolist() == [1] * 5
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1

    for param in plain.parameters():
        param.register_hook(lambda g: g.clamp(-1, 1))
    plain(x).sum().backward()
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(param.grad, twin.grad, name)


def test_every_gradient_of_a_residual_net_is_clamped() -> None:
    """M13: clamped to [-0.1, 0.1] on a ResNet-18, none of its 62 parameters has a gradient beyond 0.1; some would have."""
    model, x = resnet18(), torch.randn(2, 3, 32, 32)
    plain = copy.deepcopy(model)
    limit = torch.tensor(0.1)
    with kedge.session() as s:
        s.hook(model, "**:param.grad", kedge.clamp(min=-0.1, max=0.1))
        model(x).sum().backward()
        assert [entry.fired for entry in s.ledger()] == [1] * 62
    assert max(p.grad.abs().max() for p in model.parameters()) == limit

    unclamped: list[Tensor] = []
    for param in plain.parameters():
        param.register_hook(lambda g: unclamped.append(g.abs().max()) or g.clamp(-0.1, 0.1))
    plain(x).sum().backward()
    assert max(unclamped) > limit
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(param.grad, twin.grad, name)


def test_pitfall_clamping_in_place_is_an_error_that_names_the_parameter() -> None:
    """M13: ``g.clamp_()``, as the tutorial has it, is raised with the site it was tried at."""
    model = Affine()
    message = r"at fc2\.bias:param\.grad .*return a new tensor"
    with assert_hooks_restored(model), pytest.raises(InPlaceEdit, match=message):
        with kedge.hook(model, "fc2.bias:param.grad", lambda g: g.clamp_(-1, 1)):
            model(torch.randn(4, 100)).sum().backward()


@torch.no_grad()
def test_a_recording_bears_the_users_name_and_outlives_its_hook() -> None:
    """M14: a VGG-16's first convolution, [n, 64, 224, 224], is read through the user's own name after the hook's removal."""
    model, x = VGG16().eval(), torch.randn(2, 3, 224, 224)
    first_convolution = kedge.hook(model, "features.0", kedge.record())
    model(x)
    first_convolution.remove()
    recorded = first_convolution["features.0"]
    assert list(recorded.shape) == [2, 64, 224, 224]
    assert_unhooked(model)
    assert_same_bits(recorded, model.features[0](x))


def named(*layers: tuple[str, nn.Module]) -> nn.Sequential:
    """Make a chain of named layers."""
    return nn.Sequential(OrderedDict(layers))


def test_all_modules_are_hooked_at_once_and_later_ones_in_the_same_session() -> None:
    """M15: every module fires under its own name; one added later, and a model made later, once they are hooked too."""
    model = named(
        ("body", named(("lin", nn.Linear(3, 3)), ("act", nn.ReLU()))), ("head", nn.Linear(3, 2))
    )
    x = torch.randn(2, 3)
    with assert_hooks_restored(model), kedge.session() as s:
        first = s.hook(model, "**", kedge.record())
        model(x)
        assert s.timeline().sites == [
            "body.lin:out",
            "body.act:out",
            "body:out",
            "head:out",
            ":out",
        ]

        model.add_module("late", nn.Linear(2, 4))
        later = s.hook(model, "late", kedge.record())
        other = named(("own", nn.Linear(4, 1)))
        others = s.hook(other, "**", kedge.record())
        out = other(model(x))
        sites = [
            "body.lin:out",
            "body.act:out",
            "body:out",
            "head:out",
            "late:out",
            ":out",
            "own:out",
            ":out",
        ]
        assert s.timeline().sites[5:] == sites
        assert_same_bits((first[":out"], others[":out"]), (later["late"], out))
        del model.late

    order: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: order.append(m))
    model.add_module("late", nn.Linear(2, 4))
    other(model(x))
    handle.remove()
    names = {id(m): f"{name}:out" for root in (model, other) for name, m in root.named_modules()}
    assert [names[id(m)] for m in order] == sites


def test_two_models_in_one_session_are_told_apart() -> None:
    """M15: layers of two models that bear one name have each a line in the ledger: the one that never ran is not hidden."""
    ran, idle = named(("lin", nn.Linear(3, 3))), named(("lin", nn.Linear(3, 3)))
    s = kedge.session(strict=True)
    s.hook(ran, "lin", kedge.record())
    s.hook(idle, "lin", kedge.record())
    ran(torch.randn(2, 3))
    with pytest.raises(NeverFired, match="1 of 2 hooked sites"):
        s.end()


def test_a_module_created_later_is_not_hooked_by_itself() -> None:
    """M15: a selector stands for what is there when it is hooked; what comes later runs unwatched until it is hooked."""
    model, x = named(("a", nn.Linear(3, 3))), torch.randn(2, 3)
    with kedge.session() as s:
        s.hook(model, "**", kedge.record())
        model.add_module("b", nn.Linear(3, 3))
        model(x)
        assert s.timeline().sites == ["a:out", ":out"]
        s.hook(model, "b", kedge.record())
        model(x)
        assert s.timeline().sites[2:] == ["a:out", "b:out", ":out"]


def test_an_operation_inside_a_forward_is_a_site() -> None:
    """M11: F.relu itself can be seen: its input is what the convolution returned, its output that without what is below 0."""
    model, x = Functional(), torch.randn(1, 3, 8, 8)
    with kedge.hook(model, "/relu:out, /relu:in, conv", kedge.record()) as acts:
        model(x)

    assert torch.equal(acts["/relu:in[0]"], acts["conv"])
    assert torch.equal(acts["/relu"], acts["conv"].relu())
    assert_unhooked(model)


def test_gradients_at_modules_do_not_change_any_bit() -> None:
    """M2: observing every output, input and parameter gradient of a ResNet-18 leaves all its gradients' bits as they are."""
    model, x = resnet18(), torch.randn(2, 3, 32, 32, requires_grad=True)
    plain, twin = copy.deepcopy(model), x.detach().clone().requires_grad_()
    plain(twin).sum().backward()
    with kedge.session() as s:
        s.hook(model, "**:out, **:out.grad, **:in.grad, **:param.grad", kedge.record())
        model(x).sum().backward()
    assert_same_bits(x.grad, twin.grad)
    for (name, param), other in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert_same_bits(param.grad, other[1].grad, name)
