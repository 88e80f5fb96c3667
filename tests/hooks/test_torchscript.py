"""Models in TorchScript: what Python calls is hooked, and the rest is refused when the hook is attached."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge import recipes
from kedge.errors import NeverFiredWarning, NoSiteMatched, NoSuchKind
from kedge.store.recording import Recording

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

MODULE_SITES = (":out", ":in", ":out.grad", ":in.grad", ":in.share", ":saved")


class Part(nn.Module):
    """A linear layer, a ReLU as a module and another as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        return torch.relu(self.act(self.fc(x)) * 2)


class Around(nn.Module):
    """A model that calls a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.part = part
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        return self.last(torch.relu(self.part(self.first(x))))


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def positive() -> Part:
    """Return a part through which all gradients pass."""
    part = Part()
    with torch.no_grad():
        part.fc.weight.abs_()
        part.fc.bias.fill_(3.0)
    return part


def traced() -> nn.Module:
    """Return a traced part."""
    return torch.jit.trace(positive(), X)


def loaded(module: Any) -> nn.Module:
    """Return a module in TorchScript as it comes from a file."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


UNHOOKED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(positive()),
    "scripted, loaded": lambda: loaded(torch.jit.script(positive())),
    "traced, loaded": lambda: loaded(traced()),
    "scripted, frozen": lambda: torch.jit.freeze(torch.jit.script(positive().eval())),
    "traced, frozen": lambda: torch.jit.freeze(torch.jit.trace(positive().eval(), X)),
    "for inference": lambda: torch.jit.optimize_for_inference(torch.jit.script(positive().eval())),
}
FROZEN = ("scripted, frozen", "traced, frozen", "for inference")


def hooks_of(model: nn.Module) -> int:
    """Return how many hooks stand on the modules of a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def backward(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the output of a model, and the gradients of its input and its parameters."""
    x = X.clone().requires_grad_()
    output = model(x)
    weights = torch.tensor([1.0, -2.0, 3.0])
    grads = torch.autograd.grad((output * weights).sum(), (x, *model.parameters()))
    return output.detach(), *grads


@pytest.mark.parametrize("name", UNHOOKED)
@pytest.mark.parametrize("site", [*MODULE_SITES, "/relu:out"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_torchscript_runs_is_refused_at_once(name: str, site: str, inside: bool) -> None:
    """In one line, and the model works on without a hook."""
    model: nn.Module = UNHOOKED[name]()
    if inside:
        model = Around(model)
        site = f"part{site}"
    expected = model(X)
    with pytest.raises(NoSuchKind, match="TorchScript runs.*hook the model before torch.jit") as e:
        kedge.hook(model, site, kedge.record())
    assert "\n" not in str(e.value)
    assert torch.equal(model(X), expected)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("name", [name for name in UNHOOKED if name not in FROZEN])
@pytest.mark.parametrize("site", ["fc:out", "fc/relu", "fc.weight:param", "**:param", "**{Linear}"])
def test_nothing_inside_fires_either(name: str, site: str) -> None:
    """Modules and parameters inside are selected, and refused."""
    with pytest.raises(NoSuchKind, match="TorchScript runs"):
        kedge.hook(UNHOOKED[name](), site, kedge.record())


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("site", ["part.fc", "part.fc.weight:param.grad", "part.fc.weight:param"])
def test_a_frozen_module_has_nothing_inside(name: str, site: str) -> None:
    """Its modules and parameters are gone, and the message says why."""
    model = Around(UNHOOKED[name]()).eval()
    with pytest.raises(NoSiteMatched, match='torch.jit.freeze has made "part" one program'):
        kedge.hook(model, site, kedge.record())


@pytest.mark.parametrize("name", ["scripted", "scripted, loaded", "traced, loaded", "traced"])
@pytest.mark.parametrize("kind", ["param.grad", "param.acc"])
def test_gradients_of_parameters_are_hooked(name: str, kind: str) -> None:
    """They need no hook on a module; the name of a class in Python selects them, too."""
    model = traced() if name == "traced" else UNHOOKED[name]()
    plain = Part()
    plain.load_state_dict(model.state_dict())
    plain(X).sum().backward()
    with kedge.hook(model, f"fc.*{{Linear}}:{kind}", kedge.record()) as acts:
        model(X).sum().backward()
    assert torch.equal(acts[f"fc.weight:{kind}"], plain.fc.weight.grad)
    assert torch.equal(acts[f"fc.bias:{kind}"], plain.fc.bias.grad)


@pytest.mark.parametrize("inside", [False, True])
def test_a_traced_model_is_hooked_as_a_whole(inside: bool) -> None:
    """Its inputs, outputs and gradients are those of the model that was traced, with unchanged bits.

    Its executor has profiled and optimized it after the third call.
    """
    model: nn.Module = traced()
    plain = positive()
    plain.load_state_dict(model.state_dict())
    path = ""
    if inside:
        model = Around(model)
        plain = copy.deepcopy(plain)
        whole = Around(plain)
        whole.first.load_state_dict(model.first.state_dict())
        whole.last.load_state_dict(model.last.state_dict())
        plain = whole
        path = "part"
    expected = backward(model)
    for _ in range(4):
        with kedge.session() as s:
            seen = s.hook(model, [path + site for site in MODULE_SITES], kedge.record(keep=None))
            truth = s.hook(plain, [path + site for site in MODULE_SITES], kedge.record(keep=None))
            found = backward(model)
            backward(plain)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for name, theirs in (("in[0]", "in[x]"), ("out", "out"), ("out.grad", "out.grad")):
            assert torch.equal(seen[f"{path}:{name}"], truth[f"{path}:{theirs}"])
        assert torch.equal(seen[f"{path}:in.grad[0]"], truth[f"{path}:in.grad[x]"])
        assert torch.equal(seen[f"{path}:in.share[0]"], truth[f"{path}:in.share[x]"])
        assert seen[f"{path}:in.grad[0]"].any()
        assert any(name.startswith(f"{path}:saved") for name in seen)
    assert hooks_of(model) == 0


def test_edits_of_a_traced_model_take_effect() -> None:
    """On what goes in and comes out, on its gradients, and on a parameter of its own."""
    model = torch.jit.trace(nn.Linear(3, 3), X)
    before = backward(model)
    with kedge.session() as s:
        s.hook(model, ":out", kedge.scale(2))
        s.hook(model, ":out.grad", kedge.scale(4))
        edited = backward(model)
    assert torch.equal(edited[0], before[0] * 2)
    assert torch.equal(edited[1], before[1] * 8)
    with kedge.hook(model, "weight:param", kedge.zero()):
        assert torch.equal(model(X), model.bias.expand(2, 3))
    with kedge.hook(model, "weight:param", kedge.record()) as acts:
        model(X)
    assert torch.equal(acts["weight:param"], model.weight)
    assert all(torch.equal(a, b) for a, b in zip(backward(model), before, strict=True))


@pytest.mark.parametrize(
    "site", ["fc", "fc:in", "act:saved", "fc.weight:param", "/relu", "fc/linear"]
)
def test_inside_a_traced_model_nothing_fires(site: str) -> None:
    """Python calls it as a whole only, which the message says can be hooked."""
    with pytest.raises(NoSuchKind, match='TorchScript runs.*as a whole, at ":out"'):
        kedge.hook(traced(), site, kedge.record())
    with pytest.raises(NoSuchKind, match='TorchScript runs.*as a whole, at "part:out"'):
        kedge.hook(Around(traced()), f"part.{site}".replace("./", "/"), kedge.record())


@pytest.mark.parametrize("site", ["part", "part:in", "part:saved", "part.fc:out.grad", "**"])
def test_a_traced_model_inside_a_scripted_one_is_called_by_torchscript(site: str) -> None:
    """Its hooks are not called there, and nobody is told to hook it as a whole."""
    model = torch.jit.script(Around(traced()))
    with pytest.raises(NoSuchKind, match="TorchScript runs(?!.*as a whole)"):
        kedge.hook(model, site, kedge.record())


def test_a_module_that_python_calls_too_is_hooked() -> None:
    """The same traced model, inside a scripted one and beside it."""
    part = traced()
    model = nn.ModuleDict({"scripted": torch.jit.script(Around(part)), "part": part})
    with kedge.hook(model, "part", kedge.record()) as acts:
        expected = model["part"](X)
    assert torch.equal(acts["scripted.part"], expected)


@pytest.mark.parametrize("name", UNHOOKED)
@pytest.mark.parametrize("kind", ["out", "in", "out.grad", "in.grad", "in.share", "saved"])
def test_a_pattern_hooks_what_is_around(name: str, kind: str) -> None:
    """The ledger names what TorchScript runs; bits are those without a hook."""
    model = Around(UNHOOKED[name]())
    expected = backward(model)
    with (
        pytest.warns(NeverFiredWarning, match="part:.*TorchScript runs its module without Python"),
        kedge.hook(model, f"**:{kind}", kedge.record(keep=None)) as acts,
    ):
        found = backward(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert any(name.startswith("last") for name in acts)
    assert hooks_of(model) == 0


def test_what_is_named_among_others_is_refused() -> None:
    """A hook that cannot fire is no reason to attach half of them."""
    model = Around(torch.jit.script(positive()))
    with pytest.raises(NoSuchKind, match="names what TorchScript runs.*: part:out; leave it out"):
        kedge.hook(model, ["first", "part"], kedge.record())
    assert hooks_of(model) == 0
    with kedge.hook(model, "**{Linear}, !part.**", kedge.record()) as acts:
        model(X)
    assert list(acts) == ["first", "last"]


def test_the_table_of_sites_shows_what_can_be_hooked() -> None:
    """Classes are those of Python."""
    table = kedge.sites(Around(torch.jit.script(positive())))
    assert table["part"].type == "Part"
    assert table["part.fc"].kinds == ()
    assert table["part.fc.weight"].kinds == ("param.grad", "param.acc", "state")
    assert "none: TorchScript runs it" in str(table)
    assert kedge.sites(traced())[""].kinds == kedge.sites(Part())[""].kinds


@pytest.mark.parametrize("name", [*UNHOOKED, "traced"])
def test_a_program_with_torchscript_is_watched(name: str, tmp_path: Any, capsys: Any) -> None:
    """Nothing of it is given up, and a traced part has its sites."""
    part = traced() if name == "traced" else UNHOOKED[name]()
    model = Around(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with kedge.watch(tmp_path / "run.kedge"):
        for _ in range(4):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
    assert "not watched" not in capsys.readouterr().err
    sites = {info.site for info in Recording.open(tmp_path / "run.kedge").sites}
    assert {"first:out", ":out", "last:out.grad"} <= sites
    assert ("part:out" in sites) == (name == "traced")
    assert ("part.fc.weight:param.grad" in sites) == (name not in FROZEN)


def test_a_traced_model_is_found_by_a_hook_on_every_model() -> None:
    """It is named as its class in Python."""
    model = torch.jit.trace(nn.Linear(3, 3), X)
    with kedge.hook("**:out", kedge.record()) as acts:
        expected = model(X)
    assert torch.equal(acts["Linear"], expected)


@pytest.mark.parametrize("name", UNHOOKED)
def test_what_runs_models_takes_one_with_a_part_in_torchscript(name: str) -> None:
    """Features, gradients and costs of what is around; the model stays in its modes."""
    model = Around(UNHOOKED[name]())
    (expected,) = torch.autograd.grad(model(x := X.clone().requires_grad_())[:, 0].sum(), x)
    assert torch.equal(recipes.gradient(model, 0)(X), expected)
    assert torch.equal(kedge.extract(model, ["last"])(X)["last"], model(X))
    assert kedge.sites(model, X)["first"].calls == 1
    assert len(kedge.audit(model)) == 0
    with kedge.offload(model):
        output = model(x)
    assert torch.equal(torch.autograd.grad(output[:, 0].sum(), x)[0], expected)
    assert model.training


def test_a_model_with_a_frozen_part_is_examined() -> None:
    """Its modes are put back."""
    model = Around(UNHOOKED["scripted, frozen"]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kedge.examine(model, X, loss=lambda output: output.square().mean())
    assert len(found.results) > 3
    assert model.training
