"""Gradients: of modules, tensors, parameters and nodes, in every way that PyTorch differentiates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import NeverFiredWarning


class Chain(nn.Module):
    """Two layers and a tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def by_hand(model: Chain, x: Tensor) -> dict[str, Tensor]:
    """Every activation of a chain, with its gradient retained."""
    found = {"in": x}
    for name in ("a", "act", "b"):
        x = found[name] = getattr(model, name)(x)
        x.retain_grad()
    return found


def test_gradients_are_pytorchs_own() -> None:
    """out.grad, in.grad, in.share and param.grad are what autograd accumulates for each tensor."""
    model, x = Chain(), torch.randn(5, 3, requires_grad=True)
    with kedge.session() as s:
        outs = s.hook(model, "*:out.grad", kedge.record())
        ins = s.hook(model, "*:in.grad", kedge.record())
        shares = s.hook(model, "*:in.share", kedge.record())
        params = s.hook(model, "*.*:param.grad", kedge.record())
        acc = s.hook(model, "*.*:param.acc", kedge.record())
        model(x).square().sum().backward()

    twin, y = copy.deepcopy(model), x.detach().requires_grad_()
    twin.zero_grad()
    found = by_hand(twin, y)
    found["b"].square().sum().backward()
    for name, before in (("a", "in"), ("act", "a"), ("b", "act")):
        assert torch.equal(outs[name], found[name].grad)
        assert torch.equal(ins[name], found[before].grad)
        assert torch.equal(shares[name], found[before].grad)
    for name, param in twin.named_parameters():
        assert torch.equal(params[name], param.grad)
        assert torch.equal(acc[name], param.grad)


class Mask(nn.Module):
    """Returns a view that was written to through a slice, as LED and Longformer do: PyTorch itself crashes on hooking it."""

    def forward(self, x: Tensor) -> Tensor:
        view = (x * 1).transpose(0, 1)
        view[0] = -1.0
        return view


@pytest.mark.parametrize("action", [kedge.record, kedge.measure])
def test_the_gradient_of_a_view_that_was_written_to_is_seen(action: Callable[[], Any]) -> None:
    """At a module's output and input, and at a tensor of one's own."""
    model, x = nn.Sequential(Mask(), Mask(), nn.Tanh()), torch.randn(3, 3, requires_grad=True)
    view = Mask()(x)
    with kedge.session() as s:
        grads = s.hook(model, "1:out.grad, 1:in.grad", action())
        own = s.hook({"view": view}, "view:grad", action())
        value = model(view)
        value.sum().backward()

    written = torch.tensor([0.0, 1.0, 1.0]).unsqueeze(
        1
    )  # nothing flows through the row that was written to
    expected = 1 - value.detach() ** 2
    before = (expected * written).T
    first = (before * written).T
    for seen, wanted in (
        (grads["1:out.grad"], expected),
        (grads["1:in.grad"], before),
        (own["view:grad"], first),
    ):
        if isinstance(seen, Tensor):
            torch.testing.assert_close(seen, wanted)
        else:
            assert seen.rms == pytest.approx(wanted.square().mean().sqrt().item())


def test_a_parameter_gradient_is_this_backwards_alone() -> None:
    """param.grad is what one backward adds, param.acc what stands there after it; an edit changes what is added."""
    model, x = Chain(), torch.randn(5, 3)
    with kedge.session() as s:
        added = s.hook(model, "b.bias:param.grad", kedge.record(copy=True, keep=None))
        stands = s.hook(model, "b.bias:param.acc", kedge.record(copy=True, keep=None))
        for _ in range(2):
            model(x).sum().backward()
        s.hook(model, "b.bias:param.grad", kedge.zero())
        model(x).sum().backward()

    assert [r.value[0].item() for r in added.records("b.bias")] == [5.0, 5.0, 5.0]
    assert [r.value[0].item() for r in stands.records("b.bias")] == [5.0, 10.0, 10.0]
    assert [r.event.backward for r in added.records("b.bias")] == [0, 1, 2]


def test_a_gradient_that_is_accumulated_into_is_never_read_wrong() -> None:
    """A recorded parameter gradient is right after later backwards, or reading it is an error."""
    model, x = Chain(), torch.randn(5, 3)
    with kedge.hook(model, "b.bias:param.grad", kedge.record(keep=None)) as grads:
        for _ in range(3):
            model(x).sum().backward()
        model.b.bias.grad.zero_()

    values = []
    for kept in grads.actions[0].by_site.values().__iter__().__next__().all():
        try:
            values.append(kept.read()[0].item())
        except kedge.errors.Overwritten:
            values.append("overwritten")
    assert set(values) <= {5.0, "overwritten"}


def test_an_edit_of_accumulated_gradients_is_what_the_optimizer_sees() -> None:
    """A value returned at param.acc stands in .grad."""
    model = Chain()
    with kedge.hook(model, "b.bias:param.acc", kedge.clamp(max=1.0)):
        model(torch.randn(5, 3)).sum().backward()

    assert torch.equal(model.b.bias.grad, torch.ones(2))


@pytest.mark.parametrize("kind", ["in.grad", "out.grad"])
def test_an_edit_is_made_once_a_backward_however_long_the_tensor_lives(kind: str) -> None:
    """An input, or a parameter that a module returns, which lives over several passes is edited once in each backward."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.position

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learned, self.scale = Learned(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return (x * 1.0 + self.learned()) * 1.0

    model, x = Adds(), torch.ones(3, requires_grad=True)
    leaf = x if kind == "in.grad" else model.learned.position
    with kedge.session() as s:
        s.hook(model, ":in.grad" if kind == "in.grad" else "learned:out.grad", kedge.scale(10))
        for _ in range(3):
            leaf.grad = None
            model(x).sum().backward()
            assert torch.equal(leaf.grad, torch.full((3,), 10.0))


class Thrice(nn.Module):
    """Uses its input three times, one of them behind an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.f(x)) + self.g(x) * x


class Mark(torch.autograd.Function):
    """The identity that shows a gradient, as one would do it by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(grad)
        return grad, None


@pytest.mark.parametrize("uses_outside", [0, 1, 3])
def test_a_share_is_what_an_identity_before_the_module_would_see(uses_outside: int) -> None:
    """in.share of an input used three times inside, and outside too, equals the identity's gradient to the last bit."""
    block, x = Thrice(), torch.randn(16, 4, requires_grad=True)

    def loss(out: Tensor, h: Tensor) -> Tensor:
        return out.sin().sum() + sum((h * h * k).sum() for k in range(1, uses_outside + 1))

    parent = nn.Sequential(block)
    with kedge.session() as s:
        share = s.hook(parent, "0:in.share", kedge.record())
        total = s.hook(parent, "0:in.grad", kedge.record())
        h = x * 1.5
        loss(parent(h), h).backward()
    seen: list[Tensor] = []
    x.grad = None
    h = x * 1.5
    h.retain_grad()
    loss(block(Mark.apply(h, seen)), h).backward()

    assert torch.equal(share["0:in.share"], seen[0])
    assert torch.equal(share["0:in.share[x]"], seen[0])
    assert torch.allclose(total["0:in.grad"], h.grad)
    assert (uses_outside == 0) == torch.equal(seen[0], h.grad)


def test_a_share_with_a_single_use_can_be_edited() -> None:
    """Where a call uses its input once, an edit of its share changes this call's part of the gradient alone."""
    model, x = Chain(), torch.randn(5, 3)
    plain = torch.autograd.grad(sum(out_and_side(model, x)), model.a.weight)[0]
    with kedge.hook(model, "b:in.share", kedge.scale(0)):
        edited = torch.autograd.grad(sum(out_and_side(model, x)), model.a.weight)[0]
    h = model.act(model.a(x))

    assert torch.equal(edited, torch.autograd.grad((h * 3).sum(), model.a.weight)[0])
    assert not torch.equal(edited, plain)


def out_and_side(model: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of the output and of another use of the activation."""
    h = model.act(model.a(x))
    return model.b(h).sum(), (h * 3).sum()


class Residual(nn.Module):
    """Gives two outputs, one of them around the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.f(x)
        return x + self.g(h.relu()), h * 0.3


class TwoOutputs(nn.Module):
    """Residual blocks whose second outputs are summed up, as in the report that found the bits changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            out, side = block(x)
            x = out + x * 0.7
            total = total + (side * x).sum()
        return total + x.square().sum()


def parameter_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of one training step."""
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_observing_a_two_output_residual_net_changes_no_bit() -> None:
    """Where PyTorch's own no-op module backward hooks change gradients, every kind of Kedge's observers changes none."""
    torch.manual_seed(1)
    model, x = TwoOutputs(), torch.randn(64, 8, requires_grad=True)
    plain = parameter_gradients(model, x)
    again = parameter_gradients(model, x)
    handles = [b.register_full_backward_hook(lambda m, i, o: None) for b in model.blocks]
    hooked = parameter_gradients(model, x)
    for handle in handles:
        handle.remove()
    with kedge.session() as s:
        s.hook(
            model,
            "**, **:in, **:out.grad, **:in.grad, **:in.share, **:param.grad, **:param.acc, **:param",
            kedge.record(),
        )
        observed = parameter_gradients(model, x)

    assert all(map(torch.equal, plain, again))
    assert not all(map(torch.equal, plain, hooked))
    assert all(map(torch.equal, plain, observed))


def test_each_backward_over_a_retained_graph_is_an_event() -> None:
    """`retain_graph` gives two backwards of one pass: two events, with their own numbers and equal values."""
    model = Chain()
    with kedge.session() as s:
        h = s.hook(
            model, "a:out.grad, a.bias:param.grad, a:in.share", kedge.record(copy=True, keep=None)
        )
        loss = model(torch.randn(5, 3, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for name in ("a:out.grad", "a.bias:param.grad", "a:in.share"):
        first, second = h.records(name)
        assert (first.event.backward, second.event.backward) == (0, 1)
        assert (first.event.pass_, second.event.pass_) == (0, 0)
        assert torch.equal(first.value, second.value)


def test_double_backward_goes_through_observers_and_edits() -> None:
    """A gradient of a gradient is the same under observers, and under an edit that of the edited function."""
    model, x = Chain(), torch.randn(5, 3, requires_grad=True)

    def penalty() -> tuple[Tensor, ...]:
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [model.a.weight, model.b.weight])

    plain = penalty()
    with kedge.session() as s:
        acts = s.hook(model, "**:out.grad, **:in.grad, **:in.share", kedge.record())
        observed = penalty()
        assert not acts.records("b:out.grad")[0].value.requires_grad
    with kedge.hook(model, "b:out.grad", kedge.scale(2)):
        edited = penalty()

    assert all(map(torch.equal, plain, observed))
    assert all(torch.allclose(4 * p, e) for p, e in zip(plain, edited, strict=True))


def test_autograd_grad_fires_what_lies_on_the_way() -> None:
    """`torch.autograd.grad` for an activation or an input fires the gradients in between, and accumulates nothing."""
    model, x = Chain(), torch.randn(5, 3, requires_grad=True)
    with kedge.session() as s:
        grads = s.hook(model, "*:out.grad", kedge.record())
        s.hook(model, "b:out.grad", kedge.scale(2))
        (g,) = torch.autograd.grad(model(x).sum(), x)

    (expected,) = torch.autograd.grad(2 * model(x).sum(), x)
    assert torch.equal(g, expected)
    assert torch.equal(grads["b"], torch.ones(5, 2))
    assert model.a.weight.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_are_seen_without_grad_and_gradients_have_a_cause(mode: Callable[[], Any]) -> None:
    """Under `no_grad` and `inference_mode` values are recorded and edited; a gradient site says that none was needed."""
    model, x = Chain(), torch.randn(5, 3)
    with kedge.session() as s:
        acts = s.hook(model, "*:out, *:in", kedge.record())
        grad = s.hook(model, "a:out.grad", kedge.record())
        s.hook(model, "b", kedge.scale(2))
        with mode():
            out = model(x)
        cause = s.ledger()["a:out.grad"].cause
        grad.remove()

    assert torch.equal(acts["a"], model.a(x))
    assert torch.equal(acts["act:in"], model.a(x))
    assert torch.equal(acts["b"] * 2, out)
    assert cause == (
        f"its value requires no grad: the forward ran under {mode.__name__}",
        "call the model with grad enabled",
    )


def test_an_inference_value_that_is_overwritten_is_kept() -> None:
    """Inference tensors do not count versions, so they are copied: a later in-place operation is not seen."""
    model = nn.Sequential(nn.Linear(3, 3))
    with torch.inference_mode(), kedge.hook(model, "0", kedge.record()) as acts:
        out = model(torch.ones(2, 3))
        before = out.clone()
        out.zero_()

    assert torch.equal(acts["0"], before)


def test_under_autocast_values_have_the_types_that_flow() -> None:
    """A layer takes float32 and gives bfloat16; gradients have the type of their value, and bits do not change."""
    model, x = Chain(), torch.randn(5, 3)

    def step() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        return [out, *(p.grad.clone() for p in model.parameters())]

    plain = step()
    with kedge.session() as s:
        h = s.hook(model, "*:in, *:out", kedge.record())
        g = s.hook(model, "*:out.grad", kedge.record())
        observed = step()

    assert (h["a:in"].dtype, h["a"].dtype, g["a:out.grad"].dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    assert all(map(torch.equal, plain, observed))


def test_frozen_parameters_have_a_cause_and_the_others_fire() -> None:
    """Of a pattern that finds frozen and trainable parameters, the trainable fire and the frozen say why not."""
    model = Chain()
    model.a.requires_grad_(False)
    with kedge.session() as s:
        h = s.hook(model, "**:param.grad", kedge.record())
        outs = s.hook(model, "a:out.grad, b:out.grad", kedge.record())
        model(torch.randn(5, 3)).sum().backward()
        ledger = s.ledger()
        h.remove()
        outs.remove()

    assert ledger["a.weight:param.grad"].cause == (
        "it requires no grad, or did not when it was hooked",
        "call requires_grad_() before hooking",
    )
    assert ledger["a:out.grad"].cause.why.startswith(
        "its value requires no grad, although grad was enabled: nothing"
    )
    assert ledger["b.weight:param.grad"].fired == ledger["b:out.grad"].fired == 1


def test_tensors_are_hooked_by_name() -> None:
    """Gradients of tensors of a running program: edited, recorded by name, and after accumulation for leaves."""
    x = torch.ones(3, requires_grad=True)
    with kedge.session() as s:
        z = x * 2
        y = z * 3
        acts = s.hook({"z": z, "y": y}, kedge.record())
        s.hook(z, kedge.scale(10))
        acc = s.hook({"x": x}, ":acc", kedge.record(copy=True))
        y.sum().backward()
        one = s.hook({"x": x, "z": z}, "x:grad", kedge.scale(0))
        one.remove()

    assert torch.equal(acts["y"], torch.ones(3))
    assert torch.equal(acts["z"], torch.full((3,), 3.0))
    assert torch.equal(acts["z:grad"], torch.full((3,), 3.0))
    assert torch.equal(acc["x"], torch.full((3,), 60.0))
    assert torch.equal(x.grad, torch.full((3,), 60.0))


def test_nodes_show_gradients_that_arrive_and_leave() -> None:
    """`:pre` fires with each gradient arriving at a node, `:post` with each leaving it, by position."""
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
    z = x * w
    with kedge.session() as s:
        seen: list[tuple[str, float]] = []
        for kind in (":pre", ":post"):
            s.hook(z.grad_fn, kind, lambda v, event: seen.append((str(event.site), v[0].item())))
        s.hook(z.grad_fn, ":post[1]", kedge.scale(7))
        s.hook(torch.autograd.graph.get_gradient_edge(z), kedge.scale(2))
        z.sum().backward()

    assert seen == [
        ("MulBackward0:pre[0]", 1.0),
        ("MulBackward0:post[0]", 10.0),
        ("MulBackward0:post[1]", 2.0),
    ]
    assert torch.equal(x.grad, torch.full((2,), 10.0))
    assert torch.equal(w.grad, torch.full((2,), 14.0))


def test_retain_grad_shows_the_gradient_after_all_edits() -> None:
    """`retain_grad`, whenever it was called, holds what the last edit returned."""
    model = Chain()
    outs: list[Tensor] = []
    with kedge.session() as s:
        s.hook(model, "a", lambda v: outs.append(v) or v.retain_grad())
        s.hook(model, "a:out.grad", kedge.scale(0), kedge.add(3))
        model(torch.randn(5, 3)).sum().backward()

    assert torch.equal(outs[0].grad, torch.full((5, 4), 3.0))


class SelfAttention(nn.Module):
    """Gives one tensor to its child three times, and returns one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix = nn.Linear(3, 3), Mix()

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        out = self.mix(h, h, h)
        return {"last": out, "all": (out,)}


class Mix(nn.Module):
    """Takes three inputs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * k + v


@pytest.mark.parametrize(
    ("selector", "leaves"), [("mix:in.grad", "qkv"), (":out.grad", ("last", "all.0"))]
)
def test_a_tensor_that_stands_at_several_leaves_is_edited_once(selector: str, leaves: Any) -> None:
    """It has one gradient: every leaf shows that, an edit of it is made once, and what comes after sees it edited."""
    model, x = SelfAttention(), torch.randn(2, 3)
    with kedge.session() as s:
        before = s.hook(model, selector, kedge.record())
        s.hook(model, selector, kedge.scale(2))
        after = s.hook(model, selector, kedge.record())
        model(x)["last"].sum().backward()
    edited = model.a.weight.grad.clone()
    model.zero_grad()
    model(x)["last"].sum().backward()

    assert torch.equal(edited, model.a.weight.grad * 2)
    for leaf in leaves:
        assert torch.equal(after[f"{selector}[{leaf}]"], before[f"{selector}[{leaves[0]}]"] * 2)


def test_a_parameter_that_was_replaced_is_the_cause() -> None:
    """The gradient of a parameter that the model holds no longer never comes, and the ledger says so."""
    model, x = Chain(), torch.randn(2, 3)
    with kedge.session() as s:
        s.hook(model, "a.weight:param.grad", kedge.record())
        model.load_state_dict(Chain().state_dict(), assign=True)
        model(x).sum().backward()
        cause = s.ledger()["a.weight:param.grad"].cause
        s.end(quiet=True)

    assert cause.why == "the model now holds another parameter in its place"
    assert "load_state_dict(assign=True)" in cause.remedy


def test_a_grad_that_an_earlier_hook_used_up_is_the_cause() -> None:
    """Where an optimizer steps within the backward and clears .grad, a later param.acc has nothing to see, and says why."""
    model = Chain()
    weight = model.a.weight
    handle = weight.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    with kedge.session() as s:
        s.hook(model, "a.weight:param.acc", kedge.record())
        model(torch.randn(2, 3)).sum().backward()
        cause = s.ledger()["a.weight:param.acc"].cause
        s.end(quiet=True)
    handle.remove()

    assert "another hook had used its .grad" in cause.why
    assert '"a.weight:param.grad"' in cause.remedy


class Registering(nn.Parameter):
    """A tensor whose class has a `register_hook` of its own."""

    registered = 0

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        type(self).registered += 1
        return super().register_hook(hook)


def test_a_subclass_registers_hooks_by_its_own_method() -> None:
    """It may keep hooks elsewhere than a plain tensor."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = Registering(torch.ones(2))

        def forward(self) -> Tensor:
            return self.given

    model = Gives()
    with kedge.hook(model, ":out.grad", kedge.record()) as seen:
        model().sum().backward()
    assert Registering.registered == 1
    assert torch.equal(seen[":out.grad"], torch.ones(2))


class Prompted(nn.Module):
    """A model that gives one of its parameters to a child."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.inner = nn.Parameter(torch.ones(1, 2)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.token) + self.inner(x)


@pytest.mark.parametrize("without_grad", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", ["in.share", "in.grad", "out.grad"])
def test_a_leaf_that_enters_a_module_without_grad_has_no_gradient(
    without_grad: Any, kind: str
) -> None:
    """A leaf that requires grad may enter a hooked module under inference mode: the call runs, and nothing fires."""
    model, x = Prompted(), torch.randn(3, 2, requires_grad=True)
    with without_grad():
        plain = model(x)
    with pytest.warns(NeverFiredWarning, match="never fired"), kedge.session() as s:
        s.hook(model, f"**:{kind}", kedge.measure())
        with without_grad():
            assert torch.equal(model(x), plain)


def test_a_share_without_grad_has_its_cause() -> None:
    """The cause of a missing share is the forward without grad, not the way from the input to the output."""
    model, x = Chain(), torch.randn(5, 3, requires_grad=True)
    with pytest.warns(
        NeverFiredWarning, match="a:in.share: its outputs require no grad; the forward ran without"
    ):
        with kedge.session() as s, torch.inference_mode():
            s.hook(model, "a:in.share", kedge.record())
            model(x)


def test_a_share_under_inference_mode_is_that_of_the_grad_inside() -> None:
    """A module that turns grad on again inside of inference mode has the shares of its inputs."""

    class Force(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode(mode=False), torch.enable_grad():
                return x * 3

    x = torch.ones(2, requires_grad=True)
    model = nn.Sequential(Force())
    with kedge.hook(model, "0:in.share", kedge.record()) as shares:
        with torch.inference_mode():
            out = model(x)
        with torch.inference_mode(mode=False):
            out.sum().backward()
    assert torch.equal(shares["0:in.share"], torch.full((2,), 3.0))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["sparse", "csr", "strided", "jagged"])
def test_a_share_of_a_leaf_without_views_is_followed(layout: str) -> None:
    """Sparse and nested leaves, of which PyTorch makes no views, have shares as others do."""
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    leaf = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "strided": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
    }[layout]()
    model = nn.Sequential(Doubled())
    with kedge.hook(model, "0:in.share", kedge.record()) as shares:
        (model(leaf.requires_grad_()) * 2.0).backward(leaf.detach())
    assert len(shares) == 1


class Doubled(nn.Module):
    """Twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2
